"""Talking-heads attention: linear mixes across heads before and after the softmax."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import attention, sequence_parts
from effattn.naive import masked_softmax, over_pairs, with_naive
from effattn.options import (
    Direction,
    Offset,
    Packing,
    Padding,
    Precision,
    QueryTile,
    Scale,
    Window,
    declared,
)


class Options(
    Direction, Offset, Window, Padding, Packing, Scale, QueryTile, Precision, total=False
):
    """The shared options of `talking_heads_attention`."""


def naive(query, key, value, pairs, *, logits_mix, weights_mix, scale):
    """All heads: query `(T, N, H)`, key `(S, K, H)`, value `(S, K, Hv)`; l, m, n count heads."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[1] // key.shape[1]
    key, value = jnp.repeat(key, group, 1), jnp.repeat(value, group, 1)
    logits = scale * jnp.einsum("tnh,snh->nts", query, key, preferred_element_type=wide)
    logits = jnp.einsum("nts,nm->mts", logits, logits_mix)
    weights = jax.vmap(masked_softmax, (0, None))(logits, pairs.allowed)
    weights = jnp.einsum("mts,ml->lts", weights, weights_mix)
    return jnp.einsum("nts,snv->tnv", weights.astype(value.dtype), value)


@with_naive(over_pairs(naive, together=True))
@declared
def talking_heads_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    logits_mix: jax.Array,
    weights_mix: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""Talking-heads attention (Shazeer et al. 2020, "Talking-Heads Attention").

        z_nts = scale * q_nt . k_ns;    p_mts = softmax_s(sum_n z_nts P_nm)
        a_nts = sum_m p_mts U_mn;       out_nt = sum_s a_nts v_ns

    for query t and key s: M softmaxes of mixes P of the logits of N heads, and weights that are
    mixes U of these.
    Time is O(T S (N (H + Hv) + N M)), causal or not, memory O(t S (N + M) + T) for a tile of t
    queries, forward and backward. Derivatives in forward mode and of any order work. If heads are
    on several devices, their logits are exchanged.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      logits_mix: P, `(N, M)`.
      weights_mix: U, `(M, N)`.
      **options: direction, offset, window, padding, packing, scale, tiles and precision: see
        `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys.

    Raises:
      ValueError, NotImplementedError: see `effattn.options`.
    """
    mechanism = "talking_heads_attention"
    given = attention.check_by_rows(mechanism, query, key, value, **options)
    heads, key_heads = query.shape[-2], key.shape[-2]
    count = max(jnp.shape(logits_mix)[-1], 1) if jnp.ndim(logits_mix) else 1
    logits_mix = checks.shaped("logits_mix", logits_mix, (heads, count))
    weights_mix = checks.shaped("weights_mix", weights_mix, (count, heads))
    by_group = (key_heads, heads // key_heads)
    mixes = logits_mix.reshape(*by_group, count), weights_mix.reshape(count, *by_group)
    key, value, given = _of_all_parts(mechanism, key, value, given)
    with sequence_parts.alone():
        weigh = _Mixed(given.precision)
        return attention.attend_by_rows(weigh, query, key, value, given, *mixes)


def _of_all_parts(mechanism, key, value, given: attention.Arguments):
    """Keys and values of the whole sequence where devices hold it in parts, and its arguments."""
    parts = sequence_parts.parts_for(mechanism, "share_keys")
    if parts is None:
        return key, value, given
    changes: dict[str, Any] = {"query_offset": given.query_offset + parts.index * key.shape[-3]}
    if given.key_lengths is not None:
        changes["key_lengths"] = parts.sum(given.key_lengths)
    if given.segments is not None:
        of_query, of_key = given.segments
        changes["segments"] = of_query, parts.gather(of_key, of_key.ndim - 1)
    key, value = (parts.gather(x, x.ndim - 3) for x in (key, value))
    return key, value, dataclasses.replace(given, **changes)


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """Weights of rows of logits `(*B, K, G, t, S)`, by mixes P `(K, G, M)` and U `(M, K, G)`."""

    precision: Any

    def __call__(self, logits, allowed, logits_mix, weights_mix):
        def mixed(form, x, mix):
            return jnp.einsum(form, x, mix.astype(x.dtype), precision=self.precision)

        logits = mixed("...kgts,kgm->...mts", logits, logits_mix)
        # All heads attend to the same keys.
        allowed = jnp.broadcast_to(allowed[..., 0, :1, :, :], logits.shape)
        lowest = dtypes.lowest(logits.dtype)
        logits = jnp.where(allowed, logits, lowest)
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        weights = jnp.where(allowed, jnp.exp(logits - largest), 0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        return mixed("...mts,mkg->...kgts", weights, weights_mix)


registry.register(
    registry.Mechanism(
        name="talking_heads",
        family="exact",
        paper="Shazeer et al. 2020, Talking-Heads Attention",
        function=talking_heads_attention,
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.talking_heads:TalkingHeadsAttention",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
