"""Differential attention: the difference of two softmax attentions."""

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import (
    Direction,
    Dropout,
    Execution,
    Offset,
    Packing,
    Padding,
    Scale,
    Score,
    SoftCap,
    Tile,
    Window,
    declared,
)


class Options(
    Direction, Offset, Window, Padding, Packing, Scale, SoftCap, Score, Dropout, Tile, Execution,
    total=False,
):  # fmt: skip
    """The shared options of `differential_attention`."""


def naive(query, key, value, pairs, *, scale, lambda_):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, lambda `()`."""
    (q1, q2), (k1, k2) = jnp.split(query, 2, 1), jnp.split(key, 2, 1)
    first, _ = pairs.softmax(scale * dot(q1, k1.T))
    second, _ = pairs.softmax(scale * dot(q2, k2.T))
    return dot(first - lambda_ * second, value)


def _scale_of_half(*, query, scale, **_):
    return {"scale": (query.shape[-1] // 2) ** -0.5 if scale is None else scale}


@with_naive(over_pairs(naive, per_head={"lambda_": 0}, derived=_scale_of_half))
@declared
def differential_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    lambda_: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""Differential attention (Ye et al. 2024, "Differential Transformer").

        out_t = sum_s (softmax_s(scale * q1_t . k1_s) - lambda softmax_s(scale * q2_t . k2_s)) v_s

    where q1, k1 are the first halves of query and key, and q2, k2 the second halves. Both softmaxes
    attend to the same keys. Time is O(T S (H + 2 Hv)), memory O(T + S), forward and backward, in
    addition to `bias` and `mask`.

    Args:
      query: `(*B, T, N, H)`, H even.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      bias: broadcasts to `(*B, N, T, S)`; added to the logits of both softmaxes.
      mask: bool, broadcasts to `(*B, N, T, S)`; True attends.
      lambda_: `(N,)`, or `()` for all heads.
      **options: direction, offset, window, padding, packing, scale, soft cap, `score_mod`, dropout,
        tiles and execution: see `effattn.options`. The default scale is (H / 2)**-0.5. Dropout
        drops weights of the difference.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys.

    Raises:
      ValueError: also for an odd H; and the errors of `effattn.options`.
    """
    mechanism = "differential_attention"
    given = attention.check(mechanism, query, key, value, bias=bias, mask=mask, **options)
    heads, size = query.shape[-2:]
    if size % 2:
        raise ValueError(
            f"query must have an even head size, two halves for two softmaxes, got {size}"
        )
    lambda_ = checks.shaped("lambda_", lambda_, (heads,) if jnp.ndim(lambda_) else ())
    if options.get("scale") is None:
        given = dataclasses.replace(given, scale=(size // 2) ** -0.5)
    with jax.named_scope(mechanism):
        halves = zip(jnp.split(query, 2, -1), jnp.split(key, 2, -1), strict=True)
        first, second = (attention.attend(q, k, value, given)[0] for q, k in halves)
        wide = dtypes.wide(value.dtype)
        lambda_ = jnp.broadcast_to(lambda_.astype(wide), (heads,))
        # As a product, so that the sum over tokens in the gradient of lambda rounds less.
        second = jnp.einsum("...nh,n->...nh", second.astype(wide), lambda_, precision="highest")
        return (first.astype(wide) - second).astype(value.dtype)


def lambda_init_of_layer(layer: int, _: int) -> dict[str, float]:
    """The initial lambda of the paper for a layer of a model, counted from 0."""
    return {"lambda_init": 0.8 - 0.6 * math.exp(-0.3 * layer)}


registry.register(
    registry.Mechanism(
        name="differential",
        family="exact",
        paper="Ye et al. 2024, Differential Transformer",
        function=differential_attention,
        capabilities=frozenset({"cross"}),
        builder="effattn.nn.differential:DifferentialSelfAttention",
        by_layer=lambda_init_of_layer,
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
