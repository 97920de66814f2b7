"""Attention with an adaptive span: a soft window whose width each head learns."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Offset, Packing, Score, Sink, Softmax, Tile, declared


class Options(Offset, Packing, Score, Sink, Tile, Softmax, total=False):
    """The shared options of `adaptive_span_attention`."""


def naive(query, key, value, pairs, *, scale, span, max_span, ramp):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, span `()`."""
    distance = pairs.i[:, None] - pairs.j
    factors = jnp.clip((ramp + span - distance) / ramp, 0, 1)
    is_seen = (factors > 0) & (distance < max_span)
    logs = jnp.log(jnp.where(is_seen, factors, 1))
    weights, lse = pairs.where(is_seen).softmax(scale * dot(query, key.T), logs)
    return dot(weights, value), lse


@with_naive(over_pairs(naive, per_head={"span": 0}))
@declared
def adaptive_span_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    span: jax.Array,
    max_span: int,
    ramp: float = 32.0,
    **options: Unpack[Options],
) -> Any:
    r"""Attention with an adaptive span (Sukhbaatar et al. 2019, "Adaptive Attention Span").

    Causal softmax attention in which a soft mask of the distance multiplies the exponentials:

        out_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = m(i - j) exp(scale * q_i . k_j)
        m(x) = min(max((R + z - x) / R, 0), 1)

    over the last M tokens, the token itself included. m is 1 up to the span z and falls to 0 over
    the next R tokens, so that z has a gradient. log m is added to the logits, after `score_mod`.

    Time O(T M (H + Hv)), memory O(T), forward and backward. With z of M or more this is a causal
    `effattn.sliding_window_attention`.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`, N a multiple of K.
      value: `(*B, S, K, Hv)`.
      span: z, in tokens, of each query head, `(N,)`; 0 or more, checked if concrete.
      max_span: M, last tokens that any token sees, itself included; 1 or more. It bounds the cost,
        and cuts off longer spans and ramps.
      ramp: R, tokens over which the mask falls from 1 to 0; above 0.
      **options: offset, padding, packing, scale, soft cap, `score_mod`, sink, dropout, log-sum-exp,
        tiles and execution: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also the log-sum-exp of the
      logits with log m, `(*B, T, N)`, at least float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: a span that is negative or NaN, sizes out of range; and the errors of
        `effattn.options`.
    """
    name = "adaptive_span_attention"
    max_span = checks.at_least("max_span", max_span, 1, "tokens, the own token included")
    ramp = checks.positive("ramp", ramp)
    given = attention.check(
        name, query, key, value, is_causal=True, local_window_size=(max_span - 1, 0), **options
    )
    span = checks.shaped("span", span, query.shape[-2:-1])
    checks.not_negative("span", span)
    span, before = span.astype(dtypes.wide(query, key, value, span)), given.score_mod

    def with_mask(logit, b, h, i, j):
        logit = logit if before is None else before(logit, b, h, i, j)
        factor = jnp.clip((ramp + span[h] - (i - j).astype(span.dtype)) / ramp, 0, 1)
        is_seen = factor > 0
        logs = jnp.log(jnp.where(is_seen, factor, 1)).astype(logit.dtype)
        return jnp.where(is_seen, logit + logs, -jnp.inf)

    with jax.named_scope(name):
        given = dataclasses.replace(given, score_mod=with_mask)
        out, lse = attention.attend(query, key, value, given)
    return attention.results(out, lse, given)


registry.register(
    registry.Mechanism(
        name="adaptive_span",
        family="sparse",
        paper="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers",
        function=adaptive_span_attention,
        capabilities=frozenset({"causal", "cross"}),
        options={"max_span": 256, "ramp": 32.0},
        builder="effattn.nn.adaptive_span:AdaptiveSpanSelfAttention",
        decoder="effattn.decode.adaptive_span:AdaptiveSpanDecoder",
        complexity="O(N M)",
        time_exponent=1.0,
    )
)
