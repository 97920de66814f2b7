"""The gated feed-forward layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.nn import initializers


class SwiGLU(nnx.Module):
    """`(silu(x Wg) * (x Wu)) Wd`, without biases. Shazeer 2020, "GLU Variants Improve Transformer".

    Args:
      in_features: D, of input and output.
      hidden_features: F, of the gate.
      dtype: of the computation; default that of the input and the parameters together.
      param_dtype: of the parameters.
      kernel_init: of the gate and up projections.
      out_kernel_init: of the down projection.
      rngs: for the initial parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] = initializers.kernel_init,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.gate = linear(in_features, hidden_features, kernel_init=kernel_init)
        self.up = linear(in_features, hidden_features, kernel_init=kernel_init)
        self.down = linear(hidden_features, in_features, kernel_init=out_kernel_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., D)` to `(..., D)`."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
