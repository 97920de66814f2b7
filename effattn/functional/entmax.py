"""Entmax attention: sparse weights by 1.5-entmax or sparsemax in place of the softmax."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import ByRows, Direction, declared


class Options(Direction, ByRows, total=False):
    """The shared options of `entmax_attention`."""


def naive(query, key, value, pairs, *, scale, alpha):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`; thresholds by sorted logits."""
    z = (alpha - 1) * jnp.where(pairs.allowed, pairs.logits(scale * dot(query, key.T)), -jnp.inf)
    z = z - jax.lax.stop_gradient(jnp.maximum(z.max(1, initial=-jnp.inf), -1e30))[:, None]
    # Entries of -1 or less have no weight, and absent pairs are at -1 with a gradient of zero.
    z = jnp.where(z > -1, z, -1)
    falling, k = -jnp.sort(-z, 1), jnp.arange(1, len(key) + 1)
    mean = jnp.cumsum(falling, 1) / k
    if alpha == 2:
        threshold = mean - 1 / k
    else:
        spread = jnp.cumsum(falling**2, 1) - k * mean**2
        inside = (1 - spread) / k
        root = jnp.sqrt(jnp.where(inside > 0, inside, 1))
        threshold = mean - jnp.where(inside > 0, root, 0)
    size = (falling > threshold).sum(1, keepdims=True)
    last = jnp.take_along_axis(threshold, jnp.maximum(size - 1, 0), 1) if len(key) else 0
    weights = jax.nn.relu(z - last) ** (1 / (alpha - 1))
    return dot(pairs.weights(weights), value)


@with_naive(over_pairs(naive))
@declared
def entmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    alpha: float = 1.5,
    **options: Unpack[Options],
) -> Any:
    r"""Attention by 1.5-entmax (Peters et al. 2019) or sparsemax (Martins and Astudillo 2016).

        out_t = sum_s a_ts v_s
        a_t = relu((alpha - 1) z_t - tau_t)^(1 / (alpha - 1)),    z_ts = scale * q_t . k_s

    with the threshold tau_t at which the weights of a row sum to 1. Keys whose logit is far below
    the largest one get a weight of exactly zero: 1 / (alpha - 1) below, or more.

    The threshold is exact: bisection to the last bit finds the keys above it, and a closed form
    gives the threshold of these keys. Time is O(T S (H + Hv + b)), causal or not, for b bits of a
    number, and memory O(t S + T) for a tile of t queries, forward and backward, in addition to
    `mask`. Derivatives in forward mode and of any order work.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      mask: bool, broadcasts to `(*B, N, T, S)`; True attends.
      alpha: 1.5, or 2 for sparsemax.
      **options: direction, offset, window, padding, packing, scale, soft cap, `score_mod`, dropout,
        tiles and precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys.

    Raises:
      ValueError: also for another alpha; and the errors of `effattn.options`.
      NotImplementedError: see `effattn.options`.
    """
    if checks.real("alpha", alpha, "1.5 or 2") not in (1.5, 2):
        raise ValueError(
            f"alpha must be 1.5 or 2, got {alpha!r}; for alpha = 1 use dot_product_attention"
        )
    given = attention.check_by_rows("entmax_attention", query, key, value, mask=mask, **options)
    return attention.attend_by_rows(_Entmax(float(alpha)), query, key, value, given)


@dataclasses.dataclass(frozen=True)
class _Entmax:
    """Weights of rows of logits, `(..., S)`."""

    alpha: float

    def __call__(self, logits: jax.Array, allowed: jax.Array) -> jax.Array:
        return _weights(self.alpha, logits, allowed)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weights(alpha, logits, allowed):
    z = jnp.where(allowed, (alpha - 1) * logits, jnp.finfo(logits.dtype).min)
    largest = z.max(-1, keepdims=True)
    # Entries of -1 or less have no weight, since the threshold is -1 or more.
    z = jnp.maximum(jnp.where(allowed, z, largest - 1) - largest, -1)
    # A compiler may round an entry and the largest one differently, so that the largest is not
    # exactly 0. The threshold would then be below -1, and keys at -1 would get weight.
    threshold = jnp.maximum(_threshold(alpha, z), -1)
    weights = jax.nn.relu(z - threshold)
    return jnp.where(allowed, weights if alpha == 2 else jnp.square(weights), 0)


@_weights.defjvp
def _tangent(alpha, primals, tangents):
    """d a = g (d z - sum(g d z) / sum(g)) with g = a^(2 - alpha) where a > 0, else 0."""
    weights, (d_logits, _) = _weights(alpha, *primals), tangents
    is_positive = weights > 0
    slope = jnp.where(is_positive, weights, 1)
    slope = jnp.where(is_positive, jnp.ones_like(slope) if alpha == 2 else jnp.sqrt(slope), 0)
    total = slope.sum(-1, keepdims=True)
    mean = (slope * d_logits).sum(-1, keepdims=True) / jnp.where(total > 0, total, 1)
    return weights, slope * (d_logits - mean)


def _threshold(alpha, z):
    """The threshold `(..., 1)` of z `(..., S)`, whose largest entry is 0, and whose least -1."""

    def excess(threshold):
        over = jax.nn.relu(z - threshold)
        return (over if alpha == 2 else jnp.square(over)).sum(-1, keepdims=True) - 1

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        is_low = excess(middle) > 0
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    low = jnp.full_like(z, -1, shape=(*z.shape[:-1], 1))
    low, _ = jax.lax.fori_loop(0, jnp.finfo(z.dtype).nmant + 1, halve, (low, jnp.zeros_like(low)))
    # The keys above the threshold are known now, and give it by a closed form.
    is_above = z > low
    count = is_above.sum(-1, keepdims=True, dtype=z.dtype)
    mean = jnp.where(is_above, z, 0).sum(-1, keepdims=True) / count
    if alpha == 2:
        return mean - 1 / count
    spread = jnp.where(is_above, jnp.square(z - mean), 0).sum(-1, keepdims=True)
    return mean - jnp.sqrt(jax.nn.relu(1 - spread) / count)


registry.register(
    registry.Mechanism(
        name="entmax",
        family="exact",
        paper="Peters et al. 2019, Sparse Sequence-to-Sequence Models",
        function=entmax_attention,
        capabilities=frozenset({"cross"}),
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 (H + bits))",
        time_exponent=2.0,
    )
)
