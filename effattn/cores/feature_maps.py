"""Feature maps: what linear attention applies to queries and keys in place of the exponential."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from effattn.arrays import checks

FeatureMap = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """x."""
    return x


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0)."""
    return jax.nn.relu(x)


def elu(x: jax.Array) -> jax.Array:
    """elu(x) + 1, of Katharopoulos et al. 2020: x + 1 above zero, exp(x) below."""
    positive = x > 0
    return jnp.where(positive, x + 1, jnp.exp(jnp.where(positive, 0, x)))


def exp(x: jax.Array) -> jax.Array:
    """exp(x). It overflows: the largest x that float32 holds is 88."""
    return jnp.exp(x)


def squared_relu(x: jax.Array) -> jax.Array:
    """max(x, 0)^2."""
    return jnp.square(jax.nn.relu(x))


def taylor(x: jax.Array) -> jax.Array:
    """Features whose products are 1 + s + s^2 / 2 of s = x . y, `(1 + H) (2 + H) / 2` of them.

    That is exp(s) up to second order, and never below 1/2: 1, x, and the products of all pairs of
    entries, once each.
    """
    squares = [x[..., i : i + 1] * x[..., i + 1 :] for i in range(x.shape[-1] - 1)]
    ones = jnp.ones_like(x[..., :1])
    return jnp.concatenate([ones, x, jnp.square(x) * 0.5**0.5, *squares], -1)


FEATURE_MAPS: Mapping[str, FeatureMap] = MappingProxyType(
    {
        "identity": identity,
        "relu": relu,
        "elu": elu,
        "exp": exp,
        "squared_relu": squared_relu,
        "taylor": taylor,
    }
)


def resolve(feature_map: str | FeatureMap) -> FeatureMap:
    """The map of that name, or the callable itself; `ValueError` for anything else."""
    if callable(feature_map):
        checks.accepts("feature_map", feature_map, ("x",))
        return feature_map
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        raise ValueError(
            f"unknown feature_map {feature_map!r}; give a callable from (..., H) to (..., F), "
            f"or one of {', '.join(FEATURE_MAPS)}"
        )
    return FEATURE_MAPS[feature_map]
