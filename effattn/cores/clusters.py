"""Clusters of tokens by their products with centroids: nearest cluster, sums and members."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.gathers import inverse_of
from effattn.arrays.segments import positions_from_segment_ids

# Clusters whose scores are in memory at a time.
_AT_ONCE = 16


def nearest(tokens: jax.Array, centroids: jax.Array) -> jax.Array:
    """The cluster whose centroid `(N, C, H)` has the largest product with each token.

    Tokens are `(*B, N, T, H)`, clusters int32 `(*B, N, T)`.
    """

    def step(best, some):
        largest, cluster = best
        products = _products(tokens, some, centroids.shape[1])
        at = jnp.argmax(products, -2).astype(jnp.int32)
        here = products.max(-2)
        return (jnp.maximum(largest, here), jnp.where(here > largest, some[0] + at, cluster)), None

    shape = tokens.shape[:-1]
    wide = dtypes.common(tokens, centroids)
    empty = jnp.full(shape, dtypes.lowest(wide), wide), jnp.zeros(shape, jnp.int32)
    start = tuple(mesh_axes.vary_like(tokens, x) for x in empty)
    (_, cluster), _ = lax.scan(step, start, _in_parts(centroids))
    return cluster


def summed_by_cluster(
    tokens: jax.Array, centroids: jax.Array, present: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sum `(N, C, H)` and number `(N, C)` of the tokens `(B, N, T, H)` of each cluster.

    Only tokens that are `present (B, T)` count.
    """
    cluster = jnp.where(present[:, None], nearest(tokens, centroids), -1)

    def of_some(some):
        first, centroids = some
        number = first + jnp.arange(centroids.shape[1], dtype=jnp.int32)
        is_of = (cluster[:, :, None] == number[:, None]).astype(tokens.dtype)
        return jnp.einsum("bnct,bnth->nch", is_of, tokens, precision="highest"), is_of.sum((0, 3))

    sums, counts = lax.map(of_some, _in_parts(centroids))
    heads, number = centroids.shape[:2]
    sums, counts = jnp.moveaxis(sums, 0, 1), jnp.moveaxis(counts, 0, 1)
    padded = counts.shape[1] * counts.shape[2]
    sums, counts = sums.reshape(heads, padded, sums.shape[-1]), counts.reshape(heads, padded)
    return sums[:, :number], counts[:, :number]


class Members(NamedTuple):
    """Member tokens of each cluster.

    Attributes:
      at: int32 `(*B, N, C, M)`, positions of the members, distinct in each cluster.
      counts: bool `(*B, N, C, M)`, True for members, False for padding.
    """

    at: jax.Array
    counts: jax.Array


def members(tokens, centroids, size, present) -> Members:
    """The `size` tokens of `(*B, N, T, H)` with the largest products for each centroid.

    Only tokens that are `present (*B, T)` can be members; None means all tokens.
    """

    def of_some(some):
        products = _products(tokens, some, centroids.shape[1])
        if present is not None:
            products = jnp.where(present[..., None, None, :], products, -jnp.inf)
        products, at = lax.top_k(products, size)
        return at.astype(jnp.int32), products > -jnp.inf

    def joined(parts):
        """`(parts, *B, N, some, M)` to `(*B, N, C, M)`."""
        parts = jnp.moveaxis(parts, 0, -3)
        *outer, number, some, members = parts.shape
        parts = parts.reshape(*outer, number * some, members)
        return parts[..., : centroids.shape[1], :]

    return Members(*map(joined, lax.map(of_some, _in_parts(centroids))))


class Ranked(NamedTuple):
    """Tokens sorted by document, and in each document by decreasing product with a centroid.

    Attributes:
      order: int32 `(*B, N, T)`, the sorting permutation.
      inverse: int32 `(*B, N, T)`, the inverse permutation.
      counts: bool `(*B, N, T)`, in sorted order, whether a token is a member of the cluster.
    """

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array


def ranked(tokens, centroid, size, present, documents) -> Ranked:
    """Ranks tokens `(*B, N, T, H)` for `centroid (N, H)`; `present`, `documents` are `(*B, T)`."""
    products = jnp.einsum("...nth,nh->...nt", tokens, centroid, precision="highest")
    farthest = jnp.finfo(products.dtype).max
    far = jnp.where(present[..., None, :], -products, farthest)
    ids = jnp.broadcast_to(documents[..., None, :], far.shape)
    ids, far, order = stable_sort((ids, far, indices_like(far)), num_keys=2)
    counts = (positions_from_segment_ids(ids) < size) & (far < farthest)
    return Ranked(order, inverse_of(order), counts)


def _in_parts(centroids):
    """Splits centroids in parts: first cluster of each part, and `(parts, N, some, H)`, padded."""
    number = centroids.shape[1]
    some = min(_AT_ONCE, number)
    padded = jnp.pad(centroids, ((0, 0), (0, -number % some), (0, 0)))
    parts = padded.reshape(len(padded), -1, some, padded.shape[-1])
    first = jnp.arange(parts.shape[1], dtype=jnp.int32) * some
    return first, jnp.moveaxis(parts, 1, 0)


def _products(tokens, some, number):
    """Products `(*B, N, some, T)`; -inf for padding clusters from `number` on."""
    first, centroids = some
    products = jnp.einsum("...nth,nch->...nct", tokens, centroids, precision="highest")
    is_one = first + jnp.arange(centroids.shape[1], dtype=jnp.int32) < number
    return jnp.where(is_one[:, None], products, -jnp.inf)


def stable_sort(arrays, num_keys):
    """Stable sort along the last axis."""
    return lax.sort(arrays, dimension=-1, is_stable=True, num_keys=num_keys)


def indices_like(like):
    """Int32 indices along the last axis."""
    return lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)
