"""Feature maps of linear attention, applied to queries and keys in place of the exponential."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from effattn.arrays import checks

FeatureMap = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """Identity: x."""
    return x


def relu(x: jax.Array) -> jax.Array:
    """ReLU: max(x, 0)."""
    return jax.nn.relu(x)


def elu(x: jax.Array) -> jax.Array:
    """elu(x) + 1 (Katharopoulos et al. 2020): x + 1 above zero, exp(x) below."""
    positive = x > 0
    return jnp.where(positive, x + 1, jnp.exp(jnp.where(positive, 0, x)))


def exp(x: jax.Array) -> jax.Array:
    """Exponential: exp(x). In float32 it overflows for x above about 88."""
    return jnp.exp(x)


def squared_relu(x: jax.Array) -> jax.Array:
    """Squared ReLU: max(x, 0)^2."""
    return jnp.square(jax.nn.relu(x))


def taylor(x: jax.Array) -> jax.Array:
    """Second-order Taylor features: phi(x) . phi(y) = 1 + s + s^2 / 2 with s = x . y.

    The `(1 + H) (2 + H) / 2` features are 1, the entries of x, and each product of two entries
    once. Their product approximates exp(s) to second order, and is never below 1/2.
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
    """Returns the feature map of that name, or the callable itself; else raises `ValueError`."""
    if callable(feature_map):
        checks.accepts("feature_map", feature_map, ("x",))
        return feature_map
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        raise ValueError(
            f"unknown feature_map {feature_map!r}; give a callable from (..., H) to (..., F), "
            f"or one of {', '.join(FEATURE_MAPS)}"
        )
    return FEATURE_MAPS[feature_map]
