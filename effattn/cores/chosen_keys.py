"""Attention to the keys with the best index scores, which each token chooses for all its heads."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import over_batch
from effattn.arrays.combine import exponentials
from effattn.arrays.gathers import pick
from effattn.arrays.products import widened
from effattn.cores.chosen_blocks import ranked
from effattn.cores.folding import in_tiles_of_queries

# Queries whose index scores are in memory at a time.
_QUERIES = 64
# Keys that queries have gathered in memory at a time.
_GATHERED = 2**13


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
        heads, size = (max(n, 1) for n in query.shape[-2:])  # 0 is refused below
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
      at: int32 `(*B, T, k)`; the keys of a query are distinct.
      counts: bool `(*B, T, k)`, False where a query may see fewer than k keys.
    """

    at: jax.Array
    counts: jax.Array


def choose(
    mechanism: str, index: Index, places: Places, top_k: int, implementation: Any = None
) -> Chosen:
    """Chooses the keys with the largest index scores; no gradient.

    Args:
      mechanism: name of the mechanism, for messages.
      index: the arrays of the index.
      places: positions of the queries, and the keys that they may see.
      top_k: keys of a query.
      implementation: as in `effattn.options`.
    """
    index, keys = lax.stop_gradient(index), index.key.shape[-2]
    count = min(top_k, keys)
    if 0 in index.query.shape[:-2] or keys == 0:
        shape = (*index.query.shape[:-2], count)
        return Chosen(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    chosen = dispatch.choose(implementation, _call(mechanism, *index))

    def by_kernel(index, places):
        from effattn.llvm import key_choice  # imported on first use, as it imports llvmlite

        last = jnp.minimum(places.positions, jnp.minimum(places.limits[..., None], keys) - 1)
        form = _positions_by_xla(places.segments is not None)
        query, key, weights = index
        at = key_choice.choose(form, query, key, weights, last, places.segments, count)
        is_other = at >= key_choice.OTHER
        return Chosen(jnp.where(is_other, at - key_choice.OTHER, at), ~is_other)

    def by_xla(index, places):
        return _choose_by_xla(index, places, count)

    forms = {name: {"llvm": by_kernel, "xla": by_xla}[name] for name in chosen.names}
    return dispatch.on_platform(chosen, mechanism, forms, index, places)


def _call(mechanism: str, *arrays: jax.Array) -> dispatch.Call:
    """Description of a call, for `dispatch.choose`; the first array has queries, `(*B, T, ...)`."""

    def refusal():
        from effattn.llvm import chosen_keys  # imported on first use, as it imports llvmlite

        return chosen_keys.refusal(*arrays)

    def limits(name):
        from effattn.llvm import chosen_keys  # imported on first use, as it imports llvmlite

        return chosen_keys.LIMITS if name == "llvm" else dispatch.Limits()

    suited = dispatch.suited(dtypes.common(*arrays), arrays[0].shape[-3])
    refusals = {"llvm": refusal, "xla": lambda: None}
    return dispatch.Call(mechanism, refusals, suited=suited, limits=limits)


def _choose_by_xla(index: Index, places: Places, count: int) -> Chosen:
    keys = index.key.shape[-2]

    def example(query, key, weights, positions, limit, segments):
        wide = dtypes.wide(query, key, weights)
        at, key = jnp.arange(keys, dtype=jnp.int32), key.astype(wide)

        def tile(x):
            query, weights, positions, *own = x
            scores = scored(query.astype(wide), weights.astype(wide), key, "se")
            sees = at[None] <= jnp.minimum(positions, limit - 1)[:, None]
            if segments is not None:
                sees = sees & (own[0][:, None] == segments[1][None])
            return Chosen(*ranked(jnp.where(sees, scores, dtypes.lowest(wide)), count))

        own = () if segments is None else segments[:1]
        return in_tiles_of_queries(tile, (query, weights, positions, *own), _QUERIES)

    arrays = (*index, *places)
    example = over_batch(example, index.query.ndim - 3)
    return example(*arrays)


@functools.cache  # so that equal calls reuse one compiled program
def _positions_by_xla(is_packed: bool) -> Callable[..., jax.Array]:
    """The form of `key_choice.choose` in XLA, for one example."""

    def run(query, key, weights, last, query_ids, key_ids, count):
        from effattn.llvm import key_choice  # imported on first use, as it imports llvmlite

        segments = (query_ids, key_ids) if is_packed else None
        places = Places(last, jnp.int32(key.shape[-2]), segments)
        found = _choose_by_xla(Index(query, key, weights), places, count)
        return jnp.where(found.counts, found.at, found.at + key_choice.OTHER)

    return run


def scored(query: jax.Array, weights: jax.Array, key: jax.Array, of_key: str) -> jax.Array:
    """Index scores of keys.

    With `of_key` "se", all queries share keys `(S, E)`, and the scores are `(T, S)`. With "tse",
    each query has its own keys `(T, k, E)`, and the scores are `(T, k)`.
    """
    product = functools.partial(jnp.einsum, precision="highest")
    products = jax.nn.relu(product(f"tae,{of_key}->tas", query, key))
    return product("ta,tas->ts", weights, products)


def attend(
    mechanism: str,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    chosen: Chosen,
    scale: float | jax.Array,
    precision: Any = None,
    implementation: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each query to its chosen keys.

    Args:
      mechanism: name of the mechanism, for messages.
      heads: query `(*B, T, N, H)`, key `(*B, S, K, H)` and value `(*B, S, K, Hv)`.
      chosen: the keys of each query.
      scale: multiplies the logits.
      precision: of the products, in XLA.
      implementation: as in `effattn.options`.

    Returns:
      Output `(*B, T, N, Hv)` in the dtype of `value`, and log-sum-exp `(*B, T, N)`.
    """
    query, key, value = heads
    if 0 in (*query.shape[:-2], key.shape[-3]):
        wide = dtypes.wide(query, key, value)
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
        return out, jnp.full(query.shape[:-1], dtypes.lowest(wide), wide)
    taken = dispatch.choose(implementation, _call(mechanism, *heads))

    def by_xla(heads, chosen):
        return _attend_by_xla(heads, chosen, scale, precision)

    def by_kernel(heads, chosen):
        from effattn.llvm import chosen_keys  # imported on first use, as it imports llvmlite

        query, key, value = heads
        factor = scale
        if not isinstance(factor, float):  # the kernel needs a static scale
            query, factor = (query * factor).astype(query.dtype), 1.0
        config = chosen_keys.Config(factor, _of_key_head(factor, precision))
        head: Callable[..., Any] = functools.partial(chosen_keys.attend, config)
        head = jax.vmap(head, (-3, -2, -2, None), (-3, -2))
        head = over_batch(head, query.ndim - 3)
        groups = query.reshape(*query.shape[:-2], key.shape[-2], -1, query.shape[-1])
        out, lse = head(groups, key, value, jnp.where(chosen.counts, chosen.at, -1))
        return out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])

    forms = {name: {"llvm": by_kernel, "xla": by_xla}[name] for name in taken.names}
    return dispatch.on_platform(taken, mechanism, forms, heads, chosen)


@functools.cache  # so that equal calls reuse one compiled program
def _of_key_head(scale: float, precision: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The form in XLA of the kernel's call, for a key head."""

    def run(query, key, value, at):
        places = jnp.arange(at.shape[-1], dtype=jnp.int32)
        chosen = Chosen(jnp.where(at < 0, places, at), at >= 0)
        return _attend_by_xla((query, key[:, None], value[:, None]), chosen, scale, precision)

    return run


def _attend_by_xla(heads, chosen, scale, precision):
    query, key, value = heads
    wide = dtypes.wide(query, key, value)
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

    example = over_batch(example, query.ndim - 3)
    return example(*mesh_axes.vary_alike((query, key, value, chosen)))


def tile_of(chosen: Chosen) -> int:
    """Number of queries that gather their keys at a time."""
    return max(_GATHERED // chosen.at.shape[-1], 1)


def weights_of(query, key, chosen: Chosen, scale, precision) -> tuple[jax.Array, jax.Array]:
    """Attention weights `(T, K, G, k)` of queries `(T, N, H)`, and log-sum-exp `(T, K, G)`."""
    tokens, heads, size = query.shape
    query = query.reshape(tokens, key.shape[-2], heads // key.shape[-2], size)
    product = functools.partial(jnp.einsum, "tkgh,tskh->tkgs", precision=precision)
    logits = scale * widened(product, query, pick(key, chosen.at), scale.dtype)
    weights, total, lse = exponentials(logits, chosen.counts[:, None, None])
    return weights / total, lse
