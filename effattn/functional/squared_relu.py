"""Squared-ReLU attention: each weight is the square of its logit, if the logit is positive."""

from typing import Any, Unpack

import jax

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Elementwise, declared


def naive(query, key, value, pairs, *, scale, divisor):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`."""
    n = max(len(key), 1) if divisor is None else divisor
    weights = jax.nn.relu(pairs.logits(scale * dot(query, key.T))) ** 2 / n
    return dot(pairs.weights(weights), value)


@with_naive(over_pairs(naive))
@declared
def squared_relu_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    divisor: float | None = None,
    **options: Unpack[Elementwise],
) -> Any:
    r"""Squared-ReLU attention (Hua et al. 2022, "Transformer Quality in Linear Time").

        out_t = sum_s relu(scale * q_t . k_s)^2 / n  v_s

    A weight depends only on its query and key, and most weights can be zero; n keeps the sum of
    many weights small. Time is O(T S (H + Hv)), memory O(T + S), forward and backward.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      bias: added to the logits, broadcastable to `(*B, N, T, S)`.
      mask: bool, broadcastable to `(*B, N, T, S)`, True where a pair may attend.
      divisor: n; default S. Pass a number if calls of different lengths must agree, as in decoding.
      **options: direction, offset, window, padding, packing, scale, soft cap, `score_mod`, dropout,
        tiles and execution: see `effattn.options`. The soft cap and `score_mod` apply before
        the ReLU.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = attention.check(
        "squared_relu_attention", query, key, value, bias=bias, mask=mask, **options
    )
    n = checks.positive("divisor", max(key.shape[-3], 1) if divisor is None else divisor)
    return attention.attend_elementwise("squared_relu", query, key, value, given, multiply=n**-0.5)


registry.register(
    registry.Mechanism(
        name="squared_relu",
        family="exact",
        paper="Hua et al. 2022, Transformer Quality in Linear Time",
        function=squared_relu_attention,
        capabilities=frozenset({"cross"}),
        # Fixed, so that calls of all lengths agree with decoding.
        options={"divisor": 1024},
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
