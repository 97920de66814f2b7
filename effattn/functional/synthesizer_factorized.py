"""Factorised dense Synthesizer: logits of a token as products of two short vectors."""

from typing import Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from, within
from effattn.functional.synthesizer import CAPABILITIES, entry
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Lengths, Offset, declared

# Queries in a tile.
_TILE = 128


class Options(Direction, Offset, Lengths, total=False):
    """The shared options of `factorized_synthesizer_attention`."""


def naive(coarse, fine, value, pairs):
    """One head: coarse `(T, l)`, fine `(T, m)`, value `(S, Hv)`."""
    logits = jax.vmap(lambda a, b: jnp.outer(a, b).ravel())(coarse, fine)  # (T, l m)
    weights, _ = pairs.softmax(logits[:, : len(value)])
    return weights @ value


@with_naive(over_pairs(naive, queries=2, wide=True))
@jax.named_scope("factorized_synthesizer_attention")
@declared
def factorized_synthesizer_attention(
    coarse: jax.Array,
    fine: jax.Array,
    value: jax.Array,
    **options: Unpack[Options],
) -> jax.Array:
    r"""Factorised dense synthetic attention (Tay et al. 2020, "Synthesizer", section 3.1.1).

        y_t = sum_s softmax_s(a_t[s // m] b_t[s % m]) v_s

    The l m logits of a token are products of l + m factors, computed for one block of m keys at a
    time. Time is O(T S Hv), memory O(T (l + m + Hv)), forward and backward.

    Args:
      coarse: a, `(B, T, N, l)`.
      fine: b, `(B, T, N, m)`, with l m at least S.
      value: `(B, S, N, Hv)`.
      **options: direction, offset and lengths: see `effattn.options`. `lengths` are those of the
        keys, and of the queries if T is S.

    Returns:
      `(B, T, N, Hv)` in the dtype of `value`; logits and sums are in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    is_causal = options.get("is_causal", False)
    if not coarse.ndim == fine.ndim == value.ndim == 4:
        raise ValueError(
            "coarse must have shape (B, T, N, l), fine (B, T, N, m) and value (B, S, N, Hv), got "
            f"{coarse.shape}, {fine.shape} and {value.shape}"
        )
    checks.known_length("factorized_synthesizer_attention", coarse, value)
    batch, time, heads, blocks = coarse.shape
    checks.shaped("coarse", coarse, coarse.shape)
    size, keys = fine.shape[-1], value.shape[1]
    checks.shaped("fine", fine, (batch, time, heads, size))
    checks.shaped("value", value, (batch, keys, heads, value.shape[-1]))
    if blocks * size < keys:
        raise ValueError(
            f"coarse and fine must give at least {keys} logits, one for each key, got {blocks} x "
            f"{size}; make coarse or fine larger"
        )
    lengths = checks.lengths("lengths", options.get("lengths"), (batch,))
    offset = checks.offset(options.get("query_offset", 0), (batch,))
    offset = jnp.broadcast_to(jnp.asarray(offset), (batch,))
    if lengths is not None:
        value = jnp.where(within(lengths, keys)[..., None, None], value, 0)
        if time == keys:
            valid = within(lengths, time)[..., None, None]
            coarse, fine = jnp.where(valid, coarse, 0), jnp.where(valid, fine, 0)
    wide = dtypes.wide(value.dtype)
    blocks = -(-keys // size)
    padded = jnp.pad(value, ((0, 0), (0, blocks * size - keys), (0, 0), (0, 0)))
    values = jnp.moveaxis(padded.reshape(batch, blocks, size, *value.shape[2:]), 1, 0)
    seen_keys = jnp.full((batch,), keys) if lengths is None else lengths

    @jax.checkpoint
    def of_tile(first, a, b):
        """Returns the output of the queries from `first` on, `(B, C, N, Hv)`."""
        positions = positions_from(offset + first, a.shape[1])

        def add(sums, of_block):
            out, total, largest = sums
            block, value, coarse = of_block
            key = lead(block * size + jnp.arange(size), 3)
            seen = jnp.broadcast_to(key < seen_keys[:, None, None], (batch, a.shape[1], size))
            if is_causal:
                seen = seen & (key <= positions[..., None])
            logit = coarse[..., None].astype(wide) * b.astype(wide)
            logit = jnp.where(seen[:, :, None], logit, dtypes.lowest(wide))
            # At least the initial value, so that differences are finite.
            new = jax.lax.stop_gradient(jnp.maximum(largest, logit.max(-1)))
            share, weight = jnp.exp(largest - new), jnp.exp(logit - new[..., None])
            added = jnp.einsum("bcnm,bmnh->bcnh", weight, value.astype(wide))
            return (out * share[..., None] + added, total * share + weight.sum(-1), new), None

        empty = jnp.zeros(a.shape[:3], wide)
        start = jnp.zeros((*a.shape[:3], value.shape[-1]), wide), empty, empty - 1e30
        per_block = jnp.arange(blocks), values, jnp.moveaxis(a, -1, 0)[:blocks]
        start, _ = mesh_axes.vary_alike((start, (a, b, values, seen_keys)))
        (out, total, _), _ = jax.lax.scan(add, start, per_block)
        return out / jnp.where(total > 0, total, 1)[..., None]

    tile = max(1, min(_TILE, time))
    firsts = jnp.arange(0, time, tile)

    def tiles(array):
        array = jnp.pad(array, ((0, 0), (0, -time % tile), (0, 0), (0, 0)))
        array = array.reshape(batch, firsts.size, tile, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    out = jax.lax.map(lambda of: of_tile(*of), (firsts, tiles(coarse), tiles(fine)))
    out = jax.lax.collapse(jnp.moveaxis(out, 0, 1), 1, 3)[:, :time]
    if lengths is not None and time == keys:
        out = jnp.where(valid, out, 0)
    return out.astype(value.dtype)


registry.register(
    entry(
        name="synthesizer_factorized",
        function=factorized_synthesizer_attention,
        capabilities=CAPABILITIES - {"segments"},
        reasons={"segments": "its logits belong to positions in a row, not in a document"},
        options={"kind": "factorized"},
        complexity="O(N^2 H), O(N H) a step",
        memory_exponent=1.5,
    )
)
