"""Indexed attention: a small index scores all earlier tokens; a token attends to the best."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.arrays.segments import valid
from effattn.cores import attention, sequence_parts
from effattn.cores.chosen_keys import Index, Places, attend, choose
from effattn.dispatch.partition import by_device
from effattn.functional import softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Execution, Packing, Padding, Residual, Scale, declared


class Options(Padding, Packing, Scale, Residual, Execution, total=False):
    """The shared options of `indexed_attention`."""


def naive(query, key, value, pairs, *, scale, selected):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, selected keys `(T, T)`.

    Returns output and log-sum-exp.
    """
    return softmax.naive(query, key, value, pairs.where(selected != 0), scale=scale)


def _selection(
    query,
    *,
    index_query,
    index_key,
    index_weights,
    top_k,
    key_value_seq_lengths=None,
    segment_ids=None,
    **_,
):
    """The selected keys of each query, int `(*B, T, N, T)`, the same for all heads."""
    length = query.shape[-3]
    wide = jnp.promote_types(index_query.dtype, jnp.float32)
    t = jnp.arange(length)
    given = length if key_value_seq_lengths is None else key_value_seq_lengths
    present = t < jnp.broadcast_to(jnp.asarray(given), query.shape[:-3])[..., None]
    ids = jnp.ones(query.shape[:-2], int) if segment_ids is None else jnp.asarray(segment_ids)
    present = present & (ids != 0)
    sees = (t <= t[:, None]) & present[..., None, :] & (ids[..., None] == ids[..., None, :])
    index_key = jnp.where(present[..., None], index_key, 0)
    product = functools.partial(jnp.einsum, precision="highest")
    products = product("...tae,...se->...tas", index_query.astype(wide), index_key.astype(wide))
    scores = product("...ta,...tas->...ts", index_weights.astype(wide), jax.nn.relu(products))
    this, other = scores[..., :, None], scores[..., None, :]
    is_before = (other > this) | ((other == this) & (t < t[:, None]))
    rank = (is_before & sees[..., None, :]).sum(-1)
    selected = (sees & (rank < top_k)).astype(jnp.int32)[..., None, :]
    return {"selected": jnp.broadcast_to(selected, (*query.shape[:-1], length))}


@with_naive(over_pairs(naive, per_query=("selected",), derived=_selection))
@declared
def indexed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    index_query: jax.Array,
    index_key: jax.Array,
    index_weights: jax.Array,
    top_k: int,
    **options: Unpack[Options],
) -> Any:
    r"""Indexed attention (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"), with a token selector.

    An index of J small heads scores each earlier token s and the present one for the query t,

        I_ts = sum_j w_tj relu(p_tj . c_s),

    and all heads of t attend, by softmax, to the top_k tokens with the largest scores; equal scores
    go to the earlier token. Always causal. The selection has no gradient: `index_loss` of
    `effattn.nn.IndexedSelfAttention` trains the index. With top_k of T or more, the result is
    causal `effattn.dot_product_attention`.

    Time O(T^2 J E) for the scores, at most O(T^2 log T) for the choice and O(T top_k (H + Hv)) for
    the attention; memory O(T top_k), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      index_query: p, `(*B, T, J, E)`.
      index_key: c, `(*B, T, E)`.
      index_weights: w, `(*B, T, J)`.
      top_k: keys of a query, 1 or more.
      **options: padding, packing, scale, log-sum-exp and execution: see `effattn.options`.
        `segment_ids` are one array `(*B, T)`. `precision` applies to the products of the attention;
        scores have the highest.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
    """
    name = "indexed_attention"
    reason = "each token is both query and key"
    checks.one_segment_array(options.get("segment_ids"), query.shape[:-2], reason)
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    index = Index.of(index_query, index_key, index_weights, query.shape[:-2])
    top_k = checks.at_least("top_k", top_k, 1, "keys of a query")
    length, ids = query.shape[-3], given.segments and given.segments[0]
    query, key, value = attention.without_padding(query, key, value, given)
    present = valid(given.key_lengths, ids, length)
    if present is not None:
        index = index._replace(key=jnp.where(present[..., None], index.key, 0))
    limits = jnp.full(query.shape[:-3], length, jnp.int32)
    if given.key_lengths is not None:
        limits = jnp.minimum(given.key_lengths, limits)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), query.shape[:-2])
    segments, held = given.segments, sequence_parts.parts_for(name, "share_keys")
    if held is not None:
        axis = query.ndim - 3
        key, value, of_index = (held.gather(x, axis) for x in (key, value, index.key))
        index, limits = index._replace(key=of_index), held.sum(limits)
        positions = positions + held.index.astype(jnp.int32) * length
        segments = segments and (segments[0], held.gather(segments[1], axis))
    traced = () if isinstance(given.scale, float) else (given.scale,)

    def run(heads, index, places, scale=given.scale):
        chosen = choose(name, index, places, top_k, given.implementation)
        return attend(name, heads, chosen, scale, given.precision, given.implementation)

    with jax.named_scope(name):
        run = by_device(run, query, (-2, 0, 0, *[0] * len(traced)), results=2)
        heads, places = (query, key, value), Places(positions, limits, segments)
        out, lse = run(heads, index, places, *traced)
    out, lse = attention.clear_rows(out, lse, valid(given.query_lengths, ids, length))
    return attention.results(out, lse, given)


registry.register(
    registry.Mechanism(
        name="indexed",
        family="sparse",
        paper="DeepSeek-AI 2025, DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with "
        "DeepSeek Sparse Attention",
        function=indexed_attention,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "residual", "grouped", "decode"}),
        builder="effattn.nn.indexed:IndexedSelfAttention",
        options={"top_k": 64},
        complexity="O(N^2 J E + N k)",
        time_exponent=2.0,
    )
)
