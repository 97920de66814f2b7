"""Spatial gating of gMLP: tokens are gated by a learned mixture of all tokens."""

from typing import Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import fold, lead
from effattn.arrays.segments import positions_from_segment_ids
from effattn.cores import sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Direction, Lengths, Packing, declared

# Queries in a tile of packed documents.
_TILE = 128


class Options(Direction, Lengths, Packing, total=False):
    """The shared options of `spatial_gating`."""


def naive(gate, value, pairs, *, weights, bias):
    """Gate and value `(T, F)`, weights `(L, L)`, bias `(L,)`."""
    places = pairs.places
    weights = jnp.where(pairs.allowed, weights[places[:, None], places], 0)
    return gate * (dot(weights, value) + bias[places, None])


@with_naive(over_pairs(naive, heads=False))
@sequence_parts.over_channels(("gate", "value"))
@jax.named_scope("spatial_gating")
@declared
def spatial_gating(
    gate: jax.Array,
    value: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    **options: Unpack[Options],
) -> jax.Array:
    r"""Spatial gating unit of gMLP (Liu et al. 2021, "Pay Attention to MLPs", section 2.1).

        y_t = gate_t * (sum_s W_ts value_s + b_t)

    The weights are learned and the same for all features. In packed documents, t and s count from
    the start of the document. Time is O(T^2 F), memory O(T F) in addition to the weights.

    Args:
      gate: `(B, T, F)`, z_1 in the paper.
      value: `(B, T, F)`, the normalised z_2 in the paper.
      weights: W, `(L, L)`, with L at least T.
      bias: b, `(L,)`.
      **options: direction, lengths and packing: see `effattn.options`. In a causal call, the
        entries of W above the diagonal count as zeros.

    Returns:
      `(B, T, F)` in the dtype of `value`; summed in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    is_causal = options.get("is_causal", False)
    value, valid, _ = token_mixing.check("spatial_gating", {"value": value}, **options)
    gate, time = cleared(checks.shaped("gate", gate, value.shape), valid), value.shape[1]
    size = weights.shape[0] if weights.ndim else 0
    weights = checks.shaped("weights", weights, (size, size))
    bias = checks.shaped("bias", bias, (size,))
    if size < time:
        raise ValueError(
            f"weights of shape {weights.shape} are for at most {size} tokens, got {time} in value; "
            "make weights for more, or shorten the input"
        )
    weights = weights[:time, :time]
    ids = checks.segment_ids(options.get("segment_ids"), value.shape[:1], time, time)
    if ids is not None and time:
        return _packed(gate, value, jnp.tril(weights) if is_causal else weights, bias, ids[0])
    return gated(gate, value, jnp.tril(weights) if is_causal else weights, bias[:time])


def gated(gate: jax.Array, value: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the gated mixture; weights `(T, S)` or `(B, T, S)`, biases `(T,)` or `(B, T)`."""
    wide = dtypes.wide(value.dtype)
    weights = weights.astype(value.dtype)
    mixed = jnp.matmul(weights, value, preferred_element_type=wide)
    return (gate.astype(wide) * (mixed + lead(bias.astype(wide)[..., None], 3))).astype(value.dtype)


def _packed(gate, value, weights, bias, ids):
    """Gates packed documents, one tile of tokens at a time."""
    places, time = positions_from_segment_ids(ids), value.shape[1]
    tile = min(_TILE, time)

    def tiles(x):
        return jnp.moveaxis(fold(x, tile, 1), 1, 0)

    @jax.checkpoint
    def of_tile(one):
        gate, places_of_tile, ids_of_tile = one
        rows = jnp.take(weights, places_of_tile, 0)
        own = jnp.take_along_axis(rows, places[:, None], 2)
        own = jnp.where(ids_of_tile[..., None] == ids[:, None], own, 0)
        return gated(gate, value, own, jnp.take(bias, places_of_tile, 0))

    y = jax.lax.map(of_tile, tuple(map(tiles, (gate, places, ids))))
    return jax.lax.collapse(jnp.moveaxis(y, 0, 1), 1, 3)[:, :time]


registry.register(
    registry.Mechanism(
        name="gmlp",
        family="attention-free",
        paper="Liu et al. 2021, Pay Attention to MLPs",
        function=spatial_gating,
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        builder="effattn.nn.gmlp:GatedMLP",
        complexity="O(N^2 D), O(N D) a step; weights of N^2",
        time_exponent=2.0,
        memory_exponent=2.0,
        knows_order=True,
    )
)
