"""Routing attention: tokens attend within clusters that online k-means finds."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.combine import combine_at, combine_one_by_one
from effattn.arrays.gathers import inverse_of, permute, pick
from effattn.arrays.norms import layer_norm
from effattn.arrays.segments import first_of_runs, valid
from effattn.cores import attention
from effattn.cores.clusters import indices_like, members, nearest, ranked, stable_sort
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Direction, Execution, Packing, Padding, Residual, Scale, Tile, declared


class Options(Direction, Padding, Packing, Scale, Residual, Tile, Execution, total=False):
    """The shared options of `routing_attention`."""


def naive(query, key, value, pairs, *, scale, centroids, cluster_size):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, centroids `(C, H)`.

    Returns output and log-sum-exp.
    """
    q, k = _on_sphere(query), _on_sphere(key)
    of_query, of_key = (jnp.matmul(centroids, x.T, precision="highest") for x in (q, k))  # (C, T)

    nearest = jnp.argmax(of_query + of_key, 0)
    same = nearest[:, None] == nearest
    place = (same & (pairs.j <= pairs.j[:, None])).sum(1)
    among_last = same & (place[:, None] - place < cluster_size)

    asks = _largest(of_query, pairs.valid, pairs.query_ids, cluster_size)
    answers = _largest(of_key, pairs.present, pairs.key_ids, cluster_size)
    shared = asks.astype(int).T @ answers.astype(int)  # clusters that hold both

    count = jnp.where(pairs.is_causal, among_last, shared)
    products = scale * dot(q.astype(query.dtype), k.astype(key.dtype).T)
    log_counts = jnp.log(jnp.maximum(count, 1).astype(products.dtype))
    weights, lse = pairs.where(count > 0).softmax(products, log_counts)
    return dot(weights, value), lse


def _on_sphere(x):
    """Layer norm of each row without scale and bias."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def _largest(products, present, ids, size):
    """Bool `(C, T)`: the tokens with the `size` largest products of each cluster and document."""
    this, other, t = products[:, :, None], products[:, None], jnp.arange(len(ids))
    is_before = (other > this) | ((other == this) & (t < t[:, None]))
    rivals = present & (ids[:, None] == ids)
    return (is_before & rivals).sum(-1) < size


@with_naive(over_pairs(naive, per_head={"centroids": 2}))
@declared
def routing_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    centroids: jax.Array,
    cluster_size: int,
    **options: Unpack[Options],
) -> Any:
    r"""Routing attention (Roy et al. 2020, "... Sparse Attention with Routing Transformers").

    A layer norm without scale and bias projects queries and keys to the sphere of radius sqrt(H),

        q' = (q - mean(q)) / std(q),   k' = (k - mean(k)) / std(k),   logit = scale q' . k',

    and each head has C centroids m_c. A token attends to tokens of its clusters:

        bidirectional   the w queries with the largest m_c . q' attend to the w keys with the
                        largest m_c . k'; ties go to the earlier token
        causal          each token is in the cluster c with the largest m_c . (q' + k'), and attends
                        to the last w tokens of that cluster, including itself

    In bidirectional calls, a query may be in several clusters or in none. The paper only says that
    outputs are scattered back. Here, a query attends to all of its clusters in one softmax; a key
    that shares m clusters with the query counts m times; a query in no cluster gives zeros. In
    causal calls, the w largest products would depend on later tokens. Causal calls therefore use
    the assignment of the paper, where keys equal queries and c is the nearest centroid to both.
    With one cluster of all tokens, the result is `effattn.dot_product_attention` of q', k' and v.

    The centroids have no gradient; `effattn.nn.RoutingSelfAttention.update_centroids` moves the
    centroids by online k-means.

    Time O(T C H + T w (H + Hv)) causal and O(T C H + C w^2 (H + Hv)) bidirectional, that is
    O(T sqrt(T)) for C and w near sqrt(T); memory O(T) causal and O(T + C w) bidirectional, forward
    and backward. In bidirectional calls with `segment_ids`, a cluster has w tokens of each document
    and may hold all tokens; clusters are then computed one by one in time O(C T w) and memory O(T),
    so padding is faster than packing.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`. Each query head routes keys by its own centroids.
      value: `(*B, T, K, Hv)`.
      centroids: `(N, C, H)`; C is at most T in bidirectional calls.
      cluster_size: w, in tokens; at most T in bidirectional calls.
      **options: direction, padding, packing, scale, log-sum-exp, tiles and execution: see
        `effattn.options`. Padded queries are in no cluster, and padded keys are seen by no query.
        `segment_ids` are one array `(*B, T)`, and each document has the clusters for itself.
        `precision` applies to the products of the attention. In causal calls, a valid query whose
        key is padded is routed by the query alone.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: C or w above T in a bidirectional call; and the errors of `effattn.options`.
    """
    reason = "each token is both query and key"
    checks.one_segment_array(options.get("segment_ids"), query.shape[:-2], reason)
    given = attention.check("routing_attention", query, key, value, **options)
    checks.self_attention("routing_attention", query, key)
    checks.known_length("routing_attention", query)
    centroids = check_centroids(centroids, query)
    size = checks.at_least("cluster_size", cluster_size, 1, "tokens")
    for name, number in (("number of centroids", centroids.shape[1]), ("cluster_size", size)):
        # A causal input may be a prefix of a longer sequence.
        if number > query.shape[-3] > 0 and not given.is_causal:
            raise ValueError(
                f"{name} must be at most {query.shape[-3]}, the number of tokens, got {number}; "
                "pass fewer, or longer inputs"
            )
    with jax.named_scope("routing_attention"):
        *axes, _ = mesh_axes.spec(query)
        specs = PartitionSpec(*axes, None), PartitionSpec(*axes)
        traced = {name: getattr(given, name) for name in _TRACED}
        traced = {name: x for name, x in traced.items() if not isinstance(x, float)}

        def attend(query, key, value, centroids, traced):
            with_arrays = dataclasses.replace(given, **traced)
            return _attend(query, key, value, centroids, size, given.is_causal, with_arrays)

        attend = mesh_axes.placed(attend, query, *specs)
        out, lse = attend(query, key, value, centroids, traced)
    return attention.results(out, lse, given)


# Names of checked arguments that may be arrays.
_TRACED = ("scale", "query_lengths", "key_lengths", "segments")


def _attend(query, key, value, centroids, size, is_causal, given: attention.Arguments):
    query, key, value = attention.without_padding(query, key, value, given)
    tokens = Tokens.of(query, key, value)
    # A cluster holds at most all tokens, also for an empty sequence.
    size = min(size, query.shape[-3])
    if is_causal:
        by_cluster = _attend_causal
    else:
        by_cluster = _attend_clusters if given.segments is None else _attend_packed
    out, lse = by_cluster(tokens, centroids, size, given)
    out, lse = jnp.swapaxes(out, -3, -2), jnp.swapaxes(lse, -2, -1)
    ids = given.segments and given.segments[0]
    return attention.clear_rows(out, lse, valid(given.query_lengths, ids, query.shape[-3]))


class Tokens(NamedTuple):
    """Queries, keys and values for each query head.

    Attributes:
      query: `(*B, N, T, H)`, normalised, in the dtype of the queries.
      key: `(*B, N, T, H)`, normalised, in the dtype of the keys.
      value: `(*B, N, T, Hv)`.
      query_route: `(*B, N, T, H)`, normalised queries for routing, at least float32, no gradient.
      key_route: `(*B, N, T, H)`, the keys for routing, likewise.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_route: jax.Array
    key_route: jax.Array

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array) -> "Tokens":
        """Makes tokens from `(*B, T, N, H)`, `(*B, T, K, H)` and `(*B, T, K, Hv)`."""
        heads = query.shape[-2]
        wide_query, wide_key = (layer_norm(x, 1e-6) for x in (query, key))

        def by_head(x):
            return jnp.swapaxes(jnp.repeat(x, heads // x.shape[-2], -2), -3, -2)

        return cls(
            by_head(wide_query.astype(query.dtype)),
            by_head(wide_key.astype(key.dtype)),
            by_head(value),
            lax.stop_gradient(by_head(wide_query)),
            lax.stop_gradient(by_head(wide_key)),
        )


def check_centroids(centroids: Any, query: jax.Array) -> jax.Array:
    """Returns the checked centroids `(N, C, H)`, at least float32, without a gradient."""
    centroids = jnp.asarray(centroids)
    heads, size = query.shape[-2:]
    if (
        centroids.ndim != 3
        or centroids.shape[::2] != (heads, size)
        or centroids.shape[1] < 1
        or not jnp.issubdtype(centroids.dtype, jnp.floating)
    ):
        raise ValueError(
            f"centroids must be floating point of shape ({heads}, clusters, {size}), for "
            f"{heads} query heads of size {size}, got {centroids.dtype} of shape {centroids.shape}"
        )
    wide = dtypes.wide(centroids, query)
    return lax.stop_gradient(centroids.astype(wide))


def _attend_causal(tokens: Tokens, centroids, size: int, given: attention.Arguments):
    """Attends in causal windows of tokens that are sorted by cluster; clusters are segments."""
    cluster = nearest(tokens.query_route + tokens.key_route, centroids)
    by: tuple[jax.Array, ...] = (cluster,)
    if given.segments is not None:
        by = (jnp.broadcast_to(given.segments[0][..., None, :], cluster.shape), cluster)
    *by, order = stable_sort((*by, indices_like(cluster)), num_keys=len(by))
    inverse = inverse_of(order)
    starts = functools.reduce(jnp.logical_or, map(first_of_runs, by))
    runs = jnp.cumsum(starts, -1, dtype=jnp.int32)
    if given.segments is not None:
        runs = jnp.where(by[0] == 0, 0, runs)
    present = None
    if given.key_lengths is not None:
        present = (order < given.key_lengths[..., None, None])[..., None, None, :]

    query, key, value = (permute(x, order, inverse) for x in tokens[:3])
    out, lse = _attend_examples(
        query,
        key,
        value,
        given,
        mask=present,
        is_causal=True,
        window=(size - 1, 0),
        segments=(runs, runs),
    )
    return permute(out, inverse, order), permute(lse, inverse, order)


def _attend_clusters(tokens: Tokens, centroids, size: int, given: attention.Arguments):
    """Attends in each cluster, then combines the clusters of a query in one softmax."""
    length = tokens.query.shape[-2]
    queries, keys = (
        members(route, centroids, size, valid(lengths, None, length))
        for route, lengths in (
            (tokens.query_route, given.query_lengths),
            (tokens.key_route, given.key_lengths),
        )
    )
    out, lse = _attend_examples(
        pick(tokens.query, queries.at),
        pick(tokens.key, keys.at),
        pick(tokens.value, keys.at),
        given,
        mask=keys.counts[..., None, None, :],
    )

    lse = jnp.where(queries.counts, lse, dtypes.lowest(lse.dtype))
    return combine_at(out, lse, queries.at, length)


def _attend_packed(tokens: Tokens, centroids, size: int, given: attention.Arguments):
    """Bidirectional attention of packed documents, one cluster after the other."""
    assert given.segments is not None
    length, (documents, _) = tokens.query.shape[-2], given.segments
    present = tuple(
        valid(lengths, documents, length) for lengths in (given.query_lengths, given.key_lengths)
    )
    learnt: dict[str, Any] = {n: getattr(tokens, n) for n in ("query", "key", "value")}
    if isinstance(given.scale, jax.Array):
        learnt["scale"] = given.scale
    routes = tokens.query_route, tokens.key_route
    # Sorting puts the members of a document at its start, for queries and keys alike.
    (ids,) = stable_sort((documents,), num_keys=1)
    arrays = learnt, (routes, present, documents, ids), jnp.moveaxis(centroids, -2, 0)

    def attend(learnt, fixed, centroid):
        routes, present, documents, ids = fixed
        queries, keys = (
            ranked(route, centroid, size, one, documents)
            for route, one in zip(routes, present, strict=True)
        )
        ids = jnp.broadcast_to(ids[..., None, :], keys.order.shape)
        out, lse = _attend_examples(
            permute(learnt["query"], queries.order, queries.inverse),
            permute(learnt["key"], keys.order, keys.inverse),
            permute(learnt["value"], keys.order, keys.inverse),
            dataclasses.replace(given, scale=learnt.get("scale", given.scale)),
            mask=keys.counts[..., None, None, :],
            segments=(ids, ids),
            window=(size - 1, size - 1),
        )
        lse = jnp.where(queries.counts, lse, dtypes.lowest(lse.dtype))
        out = out.astype(lse.dtype)
        return tuple(permute(x, queries.inverse, queries.order) for x in (out, lse))

    out, lse = combine_one_by_one(attend, *mesh_axes.vary_alike(arrays))
    return out.astype(tokens.value.dtype), lse


def _attend_examples(query, key, value, given: attention.Arguments, **within):
    """Attends for `(..., T, H)`, with one head an example; returns `(..., T, Hv)`, `(..., T)`."""
    given = dataclasses.replace(
        given, **{"query_lengths": None, "key_lengths": None, "segments": None, **within}
    )
    query, key, value = (x[..., None, :] for x in (query, key, value))
    out, lse = attention.attend(query, key, value, given)
    return out[..., 0, :], lse[..., 0]


registry.register(
    registry.Mechanism(
        name="routing",
        family="clustered",
        paper="Roy et al. 2020, Efficient Content-Based Sparse Attention with Routing Transformers",
        function=routing_attention,
        options_at=lambda length: {"cluster_size": math.isqrt(length)},
        builder="effattn.nn.routing:RoutingSelfAttention",
        decoder="effattn.decode.routing:RoutingDecoder",
        complexity="O(N (C + w)), O(N sqrt N) at best",
        time_exponent=1.5,
        causality="rounding",
    )
)
