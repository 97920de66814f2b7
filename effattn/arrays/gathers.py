"""Gathers and scatters with deterministic gradients.

Each scatter writes an index at most once, so no result depends on the order of atomic additions.
"""

import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.axes import over_batch
from effattn.arrays.linear_map import with_derivatives


def permute(x, order, inverse):
    """Permutes the tokens of `x (*B, T, ...)` by `order (*B, T)`; `inverse` undoes it."""
    return _permuted(None, x, order, inverse)


_permuted = with_derivatives(
    lambda _, x, order, inverse: _at(x, order),
    lambda _, x, order, inverse: (_at(x, order), inverse),
    lambda _, inverse, d_out: (_at(d_out, inverse), None, None),
)


def inverse_of(order):
    """Inverse permutation of `order (..., T)`."""

    def of_one(order):
        token = jnp.arange(order.shape[0], dtype=order.dtype)
        return jnp.zeros_like(order).at[order].set(token, unique_indices=True)

    return over_batch(of_one, order.ndim - 1)(order)


def scatter(x, where, length):
    """Puts `x (*B, C, ...)` at different indices `where (*B, C)` of zeros `(*B, length, ...)`."""

    def of_one(x, where):
        return jnp.zeros((length, *x.shape[1:]), x.dtype).at[where].set(x, unique_indices=True)

    of_rows = over_batch(of_one, where.ndim - 1)
    return mesh_axes.placed_like(x, of_rows, x, where)


def rows_at(x, at):
    """Gathers `x (*B, L, ...)` at indices `(*B, g)`; rows may be read several times."""
    return mesh_axes.placed_like(x, _at, x, at)  # the indices may have another sharding


def _at(x, at):
    return over_batch(lambda x, at: x.at[at].get(mode="clip"), at.ndim - 1)(x, at)


def take(x, indices, readers):
    """Gathers `x[indices]` from `x (L, ...)`; rows may be read several times, or never.

    `readers (L, p)` holds the flat positions of each row in `indices`, or -1. The backward pass
    gathers by `readers` in place of a scatter, and sums in a fixed order.
    """
    return _taken(indices.ndim, x, indices, readers)


def _take(axes, x, indices, readers):
    return jnp.take(x, indices, 0, mode="clip")


def _take_fwd(axes, *operands):
    return _take(axes, *operands), operands[-1]


def _take_bwd(axes, readers, cotangent):
    cotangent = cotangent.reshape(-1, *cotangent.shape[axes:])
    found = jnp.take(cotangent, jnp.maximum(readers, 0), 0, mode="clip")
    is_read = readers.reshape(*readers.shape, *[1] * (found.ndim - 2)) >= 0
    return jnp.where(is_read, found, 0).sum(1), None, None


_taken = with_derivatives(_take, _take_fwd, _take_bwd)


def pick(x, at):
    """Gathers the members of each cluster: `x (*B, N, T, ...)` at indices `at (*B, N, C, M)`."""
    return _picked_by(x.shape[at.ndim - 2], x, at)


def spread(x, at, length: int):
    """Scatter-add, the transpose of `pick`: sums `x (*B, N, C, M, ...)` to `(*B, N, T, ...)`.

    T is `length`. A token is at most once in each cluster. Sums are accumulated in
    at least float32, and the result has the dtype of x.
    """
    return _summed_by(length, x, at)


def _picked(length, x, at):
    return over_batch(lambda x, at: x.at[at].get(mode="clip"), at.ndim - 2)(x, at)


def _summed(length, x, at):
    start = jnp.zeros(length, dtypes.wide(x.dtype))
    return _by_cluster(jnp.add, start, x, at).astype(x.dtype)


_picked_by = with_derivatives(
    _picked,
    lambda length, x, at: (_picked(length, x, at), at),
    lambda length, at, d_out: (_summed(length, d_out, at), None),
)
_summed_by = with_derivatives(
    _summed,
    lambda length, x, at: (_summed(length, x, at), at),
    lambda length, at, d_out: (_picked(length, d_out, at), None),
)


def largest_of(x, at, length: int):
    """Scatter-max, like `spread`; `dtypes.lowest` for a token in no cluster."""
    start = jnp.full(length, dtypes.lowest(x.dtype), x.dtype)
    return _by_cluster(jnp.maximum, start, x, at)


def _by_cluster(operation, start, x, at):
    """Scatters one cluster after the other, from `start (T)`; a cluster has each token once."""

    def of_one(x, at):
        def step(carry, members):
            x, at = members
            new = operation(carry[at], x.astype(carry.dtype))
            return carry.at[at].set(new, unique_indices=True), None

        first = start.reshape(-1, *(1,) * (x.ndim - 2))
        first = jnp.broadcast_to(first, (len(start), *x.shape[2:]))
        return lax.scan(step, mesh_axes.vary_like(x, first), (x, at))[0]

    return over_batch(of_one, at.ndim - 2)(x, at)
