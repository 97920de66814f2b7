"""Sigmoid attention: each weight is the sigmoid of its logit."""

import math
from typing import Any, Unpack

import jax

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Elementwise, declared


def naive(query, key, value, pairs, *, scale, logit_bias):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`."""
    b = -math.log(max(len(key), 1)) if logit_bias is None else logit_bias
    weights = jax.nn.sigmoid(pairs.logits(scale * dot(query, key.T)) + b)
    return dot(pairs.weights(weights), value)


@with_naive(over_pairs(naive))
@declared
def sigmoid_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    logit_bias: float | None = None,
    **options: Unpack[Elementwise],
) -> Any:
    r"""Sigmoid attention.

    Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention".

        out_t = sum_s sigmoid(scale * q_t . k_s + b) v_s

    A weight depends only on its query and key; the bias b keeps the sum of many weights small.
    Time is O(T S (H + Hv)), memory O(T + S), forward and backward.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      bias: added to the logits, broadcastable to `(*B, N, T, S)`.
      mask: bool, broadcastable to `(*B, N, T, S)`, True where a pair may attend.
      logit_bias: b; default -log S, as in the paper. Pass a number if calls of different lengths
        must agree, as in decoding.
      **options: direction, offset, window, padding, packing, scale, soft cap, `score_mod`, dropout,
        tiles and execution: see `effattn.options`. The soft cap and `score_mod` apply before
        b is added.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = attention.check("sigmoid_attention", query, key, value, bias=bias, mask=mask, **options)
    if logit_bias is None:
        logit_bias = -math.log(max(key.shape[-3], 1))
    added = checks.finite("logit_bias", checks.real("logit_bias", logit_bias, "a finite number"))
    return attention.attend_elementwise("sigmoid", query, key, value, given, add=added)


registry.register(
    registry.Mechanism(
        name="sigmoid",
        family="exact",
        paper="Ramapuram et al. 2024, Theory, Analysis, and Best Practices for Sigmoid "
        "Self-Attention",
        function=sigmoid_attention,
        capabilities=frozenset({"cross"}),
        # Bias for 1024 tokens, fixed so that calls of all lengths agree with decoding.
        options={"logit_bias": -math.log(1024)},
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
