"""Parameter initializers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import dtypes

kernel_init = nnx.initializers.lecun_normal()

embedding_init = nnx.initializers.normal(0.02)


def residual_init(num_layers: int) -> Callable[..., Any]:
    """Initializer of the last projection in a residual branch: 1 / (2 L) of the usual variance.

    Each of L layers adds two branches to the residual stream; the scale keeps the initial variance
    of the sum independent of L. Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners".
    """
    return nnx.initializers.variance_scaling(1 / (2 * num_layers), "fan_in", "truncated_normal")


def orthogonal_init(
    key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, scale: float = 1.0
) -> jax.Array:
    """Orthogonal matrices times `scale`; computed in float32 or wider, as JAX has no 16-bit QR."""
    wide = dtypes.wide(dtype)
    return nnx.initializers.orthogonal(scale)(key, shape, wide).astype(dtype)


def log_rate_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Logarithms of rates uniform in [1, 16). Dao and Gu 2024, "Transformers are SSMs"."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1, 16))


def forget_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Biases of forget gates from 3 to 6, one a head. Beck et al. 2024, "xLSTM"."""
    return jnp.linspace(3, 6, shape[0], dtype=dtype)


def log_step_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Logarithms of step sizes that are log-uniform in [0.001, 0.1], as in S4."""
    return jax.random.uniform(key, shape, dtype, np.log(0.001), np.log(0.1))


def step_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Inverse softplus of step sizes that are log-uniform in [0.001, 0.1].

    Gu and Dao 2023, "Mamba".
    """
    low, high = np.log(0.001), np.log(0.1)
    steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return jnp.log(jnp.expm1(steps)).astype(dtype)
