"""Stick-breaking attention: each key takes a share of what nearer keys have left."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import ByRows, declared
from effattn.xla import tiling

_BLOCK = 128  # keys, in cumulative sums and products


def naive(query, key, value, pairs, *, scale, attend_current):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`."""
    allowed = pairs.allowed & ((pairs.j < pairs.i[:, None]) | attend_current)
    logits = pairs.logits(scale * dot(query, key.T))
    share = jnp.where(allowed, jax.nn.sigmoid(logits), 0)
    rest = jnp.pad(jnp.where(allowed, jax.nn.sigmoid(-logits), 1), ((0, 0), (0, 1)))
    left = jnp.cumprod(rest.at[:, -1].set(1)[:, ::-1], 1)[:, ::-1]  # by key j and all after j
    return dot(pairs.weights(share * left[:, 1:]), value)


@with_naive(over_pairs(naive))
@declared
def stick_breaking_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    attend_current: bool = False,
    **options: Unpack[ByRows],
) -> Any:
    r"""Stick-breaking attention (Tan et al. 2024, "Scaling Stick-Breaking Attention").

        out_t = sum_(s < t) a_ts v_s
        a_ts = b_ts prod_(s < r < t) (1 - b_tr),    b_ts = sigmoid(scale * q_t . k_s)

    From the nearest key on, each key takes the share b of the weight that nearer keys have left, so
    near keys win among keys with equal logits. A row sums to at most 1, and to 0 without keys.
    Always causal. The products of shares are taken over present keys that the query may attend to.

    Time is O(T S (H + Hv)), causal or not, and memory O(t S + T) for a tile of t queries, forward
    and backward, in addition to `mask`. Derivatives in forward mode and of any order work.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      mask: bool, broadcasts to `(*B, N, T, S)`; True attends.
      attend_current: whether a query also attends to the key at its own position, as the nearest
        one. Default False, as in the paper: the first token of a sequence gives zeros.
      **options: offset, window, padding, packing, scale, soft cap, `score_mod`, dropout, tiles and
        precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys.

    Raises:
      ValueError, NotImplementedError: see `effattn.options`.
    """
    mechanism = "stick_breaking_attention"
    given = attention.check_by_rows(mechanism, query, key, value, mask=mask, **options)
    left, _ = given.window or (None, None)
    given = dataclasses.replace(given, window=(left, 0 if attend_current else -1))
    return attention.attend_by_rows(_weights, query, key, value, given)


@jax.custom_jvp
def _weights(logits, allowed):
    """Weights of rows of logits `(..., S)`, from the last key to the first."""
    rest = jnp.where(allowed, jax.nn.sigmoid(-logits), 1)
    # The key itself takes its share of what the keys after it leave.
    rest = jnp.concatenate([rest[..., 1:], jnp.ones_like(rest[..., :1])], -1)
    return _shares(logits, allowed) * _from_the_end(jax.lax.cumprod, jnp.multiply, rest, 1)


def _shares(logits, allowed):
    return jnp.where(allowed, jax.nn.sigmoid(logits), 0)


@_weights.defjvp
def _tangent(primals, tangents):
    """The derivative of log a_s is dz_s - sum_(r >= s) b_r dz_r."""
    weights, (d_logits, _) = _weights(*primals), tangents
    taken = _shares(*primals) * d_logits
    taken = _from_the_end(jax.lax.cumsum, jnp.add, taken, 0)
    return weights, weights * (d_logits - taken)


def _from_the_end(cumulative, combine, x, neutral):
    """Cumulative sums or products along the last axis, each over its entry and all after it.

    In blocks, because XLA's own form over n entries takes O(n^2) operations on GPUs.
    """
    *rows, length = x.shape
    if tiling.is_open(length):
        return cumulative(x, x.ndim - 1, reverse=True)
    block = min(_BLOCK, length)
    x = jnp.pad(x, [*[(0, 0)] * len(rows), (0, -length % block)], constant_values=neutral)
    x = x.reshape(*rows, -1, block)
    within = cumulative(x, x.ndim - 1, reverse=True)
    after = cumulative(within[..., 0], x.ndim - 2, reverse=True)
    after = jnp.concatenate([after[..., 1:], jnp.full_like(after[..., :1], neutral)], -1)
    return combine(within, after[..., None]).reshape(*rows, -1)[..., :length]


registry.register(
    registry.Mechanism(
        name="stick_breaking",
        family="exact",
        paper="Tan et al. 2024, Scaling Stick-Breaking Attention: An Efficient Implementation and "
        "In-depth Study",
        function=stick_breaking_attention,
        capabilities=frozenset({"causal"}),
        reasons={"bidirectional": "each query breaks its stick from the nearest key to the past"},
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
        knows_order=True,
    )
)
