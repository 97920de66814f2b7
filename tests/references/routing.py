"""Routing attention: who is in which cluster, written out for every pair."""

import math

import jax
import jax.numpy as jnp

from tests.references.reference import Reference
from tests.references.softmax import scaled, weighted


def routing(arrays, pairs, keep, *, cluster_size, **_):
    """Logits of normalised queries and keys, with the log of how many clusters hold both."""
    heads = arrays["query"].shape[-2]
    query, key = (
        unit(jnp.where(present[..., None, None], arrays[name], 0))
        for name, present in (("query", pairs.valid), ("key", pairs.present))
    )
    of_query, of_key = (
        jnp.einsum(
            "...tnh,nch->...nct",
            jnp.repeat(x, heads // x.shape[-2], -2),
            arrays["centroids"],
            precision="highest",
        )
        for x in (query, key)
    )
    number = jnp.where(
        pairs.is_causal,
        last_of_cluster(of_query, of_key, cluster_size),
        both_in_cluster(of_query, of_key, pairs.allowed, cluster_size),
    )
    number = jnp.where(pairs.allowed[..., None, :, :], number, 0)
    dtype = arrays["query"].dtype
    logits = scaled({**arrays, "query": query.astype(dtype), "key": key.astype(dtype)})
    logits = jnp.where(number > 0, logits + jnp.log(jnp.maximum(number, 1)), -jnp.inf)
    return weighted(logits, arrays, pairs, keep, 0.0)


def unit(x):
    """Without mean, of variance 1."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def last_of_cluster(of_query, of_key, size):
    """`(*B, N, T, T)`: a key is of the query's cluster, with fewer than `size` after it there."""
    cluster = jax.nn.one_hot(jnp.argmax(of_query + of_key, -2), of_query.shape[-2], dtype=int)
    same = jnp.einsum("...tc,...sc->...ts", cluster, cluster)
    place = jnp.cumsum(cluster, -2)
    place = jnp.take_along_axis(place, jnp.argmax(cluster, -1)[..., None], -1)[..., 0]
    return same * (place[..., :, None] - place[..., None, :] < size)


def both_in_cluster(of_query, of_key, allowed, size):
    """`(*B, N, T, S)`: in how many clusters a query and a key are among the `size` best."""
    allowed = allowed.astype(int)
    alike = jnp.einsum("...ts,...us->...tu", allowed, allowed) > 0
    queries = best(of_query, alike, size)
    alike = jnp.einsum("...ts,...tu->...su", allowed, allowed) > 0
    keys = best(of_key, alike, size)
    return jnp.einsum("...nct,...ncs->...nts", queries, keys)


def best(products, alike, size):
    """`(*B, N, C, T)`: tokens with fewer than `size` before them among those of their document."""
    this, other = products[..., :, None], products[..., None, :]
    earlier = jnp.tri(products.shape[-1], k=-1, dtype=bool)
    before = (other > this) | ((other == this) & earlier)
    before = (before & alike[..., None, None, :, :]).sum(-1)
    return (before < size).astype(int)


ROUTING = Reference(
    attend=routing,
    variants={"": {"cluster_size": 5}},
    tuning={"tile": (5, 4)},
    module={"num_clusters": 3, "cluster_size": 4, "local_window_size": 2},
    arguments=lambda rng, sizes: {
        "centroids": rng.normal(size=(sizes.heads, max(math.isqrt(sizes.queries), 2), sizes.size))
    },
    per_head=frozenset({"centroids"}),
)
