"""Shared arguments and call path of feature-map attention, causal or bidirectional."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms


def check(
    query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False, **options: Any
) -> recurrence.Arguments:
    """Checks the shared arguments, as `recurrence.check` does; bidirectional by default."""
    return recurrence.check(query, key, value, is_causal=is_causal, **options)


def attend(
    name: str,
    terms: Callable[[Any, Any, Any], Terms],
    given: recurrence.Arguments,
    parameters: Any = None,
    *more: jax.Array,
) -> Any:
    """The result of a mechanism whose weights are normalised.

    `terms` gets the query, and the tuple (key, value, *more).
    """
    keys = given.key, given.value, *more
    out, state = recurrence.run(name, terms, given, given.query, keys, parameters, normalized=True)
    return recurrence.results(out, state, given)


def positive_scale(value: Any, query: jax.Array) -> jax.Array:
    """Checks a scale `()` above 0; its square root multiplies both queries and keys."""
    array = recurrence.check_scale(value, query)
    known = None if value is None else checks.known(value)
    if known is not None and not known > 0:
        raise ValueError(
            f"scale must be above 0, got {value!r}, because queries and keys are multiplied by its "
            "square root"
        )
    return array


def check_projection(name: str, projection: Any, key: jax.Array) -> jax.Array:
    """Checks projection vectors `(1, m, H)`, or `(K, m, H)` for each key head."""
    projection = jnp.asarray(projection)
    heads, size = key.shape[-2:]
    if (
        projection.ndim != 3
        or projection.shape[0] not in (1, heads)
        or projection.shape[1] == 0
        or projection.shape[2] != size
        or not jnp.issubdtype(projection.dtype, jnp.floating)
    ):
        raise ValueError(
            f"{name} must be floating point of shape (1, m, {size}), or ({heads}, m, {size}) with "
            f"m vectors for each key head, got {projection.dtype} of shape {projection.shape}"
        )
    return projection


def products(x: jax.Array, projection: jax.Array, precision: Any = None) -> jax.Array:
    """Products w . x `(*B, L, N, m)` of `x (*B, L, N, H)` and `projection (1 or K, m, H)`."""
    heads, features, _ = projection.shape
    grouped = x.reshape(*x.shape[:-2], heads, x.shape[-2] // heads, x.shape[-1])
    grouped, projection = dtypes.alike(grouped, projection)
    projected = jnp.einsum("...kgh,kmh->...kgm", grouped, projection, precision=precision)
    return projected.reshape(*x.shape[:-1], features)
