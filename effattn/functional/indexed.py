"""Indexed attention: a small index scores all earlier tokens; a token attends to the best."""

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.gathers import pick
from effattn.arrays.products import widened
from effattn.arrays.segments import valid
from effattn.cores import attention, sequence_parts
from effattn.cores.chosen_blocks import ranked
from effattn.cores.folding import in_tiles_of_queries
from effattn.functional import softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Packing, Padding, Precision, Residual, Scale, declared

# Queries whose index scores are in memory at a time.
_QUERIES = 64
# Keys that queries have gathered in memory at a time.
_GATHERED = 2**13


class Options(Padding, Packing, Scale, Residual, Precision, total=False):
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

    Time O(T^2 J E) for the scores, O(T^2 log T) to sort them and O(T top_k (H + Hv)) for the
    attention; memory O(T top_k), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      index_query: p, `(*B, T, J, E)`.
      index_key: c, `(*B, T, E)`.
      index_weights: w, `(*B, T, J)`.
      top_k: keys of a query, 1 or more.
      **options: padding, packing, scale, log-sum-exp and precision: see `effattn.options`.
        `segment_ids` are one array `(*B, T)`. `precision` applies to the products of the attention;
        scores have the highest.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
    """
    name = "indexed_attention"
    if checks.is_pair(options.get("segment_ids"), query.shape[:-2]):
        raise ValueError(
            "segment_ids must be one array (*B, T), because each token is both query and key, got "
            "a pair"
        )
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
    segments, held = given.segments, sequence_parts.taken(name, "share_keys")
    if held is not None:
        axis = query.ndim - 3
        key, value, of_index = (held.gather(x, axis) for x in (key, value, index.key))
        index, limits = index._replace(key=of_index), held.sum(limits)
        positions = positions + held.index.astype(jnp.int32) * length
        segments = segments and (segments[0], held.gather(segments[1], axis))
    places = Places(positions, limits, segments)
    with jax.named_scope(name):
        chosen = choose(index, places, top_k)
        out, lse = attend((query, key, value), chosen, given.scale, given.precision)
    out, lse = attention.clear_rows(out, lse, valid(given.query_lengths, ids, length))
    return attention.results(out, lse, given)


class Index(NamedTuple):
    """Arrays of the index.

    Attributes:
      query: p, `(*B, T, J, E)`.
      key: c, `(*B, S, E)`.
      weights: w, `(*B, T, J)`.
    """

    query: jax.Array
    key: jax.Array
    weights: jax.Array

    @classmethod
    def of(cls, query: Any, key: Any, weights: Any, tokens: tuple[int, ...]) -> "Index":
        """Checks the arrays, for `tokens (*B, T)`."""
        query = checks.as_array("index_query", query)
        if query.ndim != len(tokens) + 2:
            raise ValueError(
                f"index_query must have shape {(*tokens, 'heads', 'features')}, got {query.shape}"
            )
        heads, size = query.shape[-2:]
        return cls(
            checks.shaped("index_query", query, (*tokens, heads, size)),
            checks.shaped("index_key", key, (*tokens, size)),
            checks.shaped("index_weights", weights, (*tokens, heads)),
        )


class Places(NamedTuple):
    """Positions of queries, and keys that they may see.

    Attributes:
      positions: int32 `(*B, T)`, position of each query among the keys.
      limits: int32 `(*B)`, valid keys.
      segments: segment ids of queries, int `(*B, T)`, and of keys, `(*B, S)`; or None.
    """

    positions: jax.Array
    limits: jax.Array
    segments: tuple[jax.Array, jax.Array] | None = None


class Chosen(NamedTuple):
    """Keys that each query has chosen.

    Attributes:
      at: int32 `(*B, T, k)`, different keys for each query.
      counts: bool `(*B, T, k)`, False where a query may see fewer than k keys.
    """

    at: jax.Array
    counts: jax.Array


def choose(index: Index, places: Places, top_k: int) -> Chosen:
    """Chooses the keys with the largest index scores; no gradient."""
    index, keys = lax.stop_gradient(index), index.key.shape[-2]
    if 0 in index.query.shape[:-2] or keys == 0:
        shape = (*index.query.shape[:-2], min(top_k, keys))
        return Chosen(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))

    def example(query, key, weights, positions, limit, segments):
        wide = dtypes.wide(query, key, weights)
        at, key = jnp.arange(keys, dtype=jnp.int32), key.astype(wide)

        def tile(x):
            query, weights, positions, *own = x
            scores = scored(query.astype(wide), weights.astype(wide), key, "se")
            sees = at[None] <= jnp.minimum(positions, limit - 1)[:, None]
            if segments is not None:
                sees = sees & (own[0][:, None] == segments[1][None])
            return Chosen(*ranked(jnp.where(sees, scores, dtypes.lowest(wide)), top_k))

        own = () if segments is None else segments[:1]
        return in_tiles_of_queries(tile, (query, weights, positions, *own), _QUERIES)

    arrays = (index.query, index.key, index.weights, *places)
    for _ in index.query.shape[:-3]:
        example = jax.vmap(example)
    return example(*arrays)


def scored(query: jax.Array, weights: jax.Array, key: jax.Array, of_key: str) -> jax.Array:
    """Index scores `(T, keys)` of keys `(S, E)`, "se", or of keys `(T, k, E)` by query, "tse"."""
    product = functools.partial(jnp.einsum, precision="highest")
    products = jax.nn.relu(product(f"tae,{of_key}->tas", query, key))
    return product("ta,tas->ts", weights, products)


def attend(
    heads: tuple[jax.Array, jax.Array, jax.Array],
    chosen: Chosen,
    scale: float | jax.Array,
    precision: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each query to its chosen keys.

    Args:
      heads: query `(*B, T, N, H)`, key `(*B, S, K, H)` and value `(*B, S, K, Hv)`.
      chosen: the keys of each query.
      scale: multiplies the logits.
      precision: of the products.

    Returns:
      Output `(*B, T, N, Hv)` in the dtype of `value`, and log-sum-exp `(*B, T, N)`.
    """
    query, key, value = heads
    wide = dtypes.wide(query, key, value)
    if 0 in (*query.shape[:-2], key.shape[-3]):
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
        return out, jnp.full(query.shape[:-1], dtypes.lowest(wide), wide)
    scale = jnp.asarray(scale, wide)

    def example(query, key, value, chosen):
        @jax.checkpoint
        def tile(x):
            query, chosen = x
            weights, lse = weights_of(query, key, chosen, scale, precision)
            mix = functools.partial(jnp.einsum, "tkgs,tskv->tkgv", precision=precision)
            values = pick(value, chosen.at)
            out = widened(mix, weights.astype(value.dtype), values, wide)
            shape = query.shape[:2]
            out = out.reshape(*shape, value.shape[-1]).astype(value.dtype)
            return out, lse.reshape(shape)

        return in_tiles_of_queries(tile, (query, chosen), tile_of(chosen))

    for _ in query.shape[:-3]:
        example = jax.vmap(example)
    return example(*mesh_axes.vary_alike((query, key, value, chosen)))


def tile_of(chosen: Chosen) -> int:
    """Number of queries that gather their keys at a time."""
    return max(_GATHERED // chosen.at.shape[-1], 1)


def weights_of(query, key, chosen: Chosen, scale, precision) -> tuple[jax.Array, jax.Array]:
    """Attention weights `(T, K, G, k)` of queries `(T, N, H)`, and log-sum-exp `(T, K, G)`."""
    tokens, heads, size = query.shape
    wide, lowest = scale.dtype, dtypes.lowest(scale.dtype)
    query = query.reshape(tokens, key.shape[-2], heads // key.shape[-2], size)
    product = functools.partial(jnp.einsum, "tkgh,tskh->tkgs", precision=precision)
    logits = scale * widened(product, query, pick(key, chosen.at), wide)
    counts = chosen.counts[:, None, None]
    logits = jnp.where(counts, logits, lowest)
    largest = lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.where(counts, jnp.exp(logits - largest), 0)
    total = weights.sum(-1, keepdims=True)
    is_empty, total = total == 0, jnp.where(total == 0, 1, total)
    lse = jnp.where(is_empty, lowest, largest + jnp.log(total))[..., 0]
    return weights / total, lse


registry.register(
    registry.Mechanism(
        name="indexed",
        family="sparse",
        paper="DeepSeek-AI 2025, DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency ...",
        function=indexed_attention,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "residual", "grouped", "decode"}),
        builder="effattn.nn.indexed:IndexedSelfAttention",
        options={"top_k": 64},
        complexity="O(N^2 J E + N k)",
        time_exponent=2.0,
    )
)
