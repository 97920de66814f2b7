"""The gated feed-forward layer, and feed-forward layers in chunks of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.nn import initializers
from effattn.nn.dropout import dropout_key
from effattn.nn.module import Module


class SwiGLU(Module):
    """`(silu(x Wg) * (x Wu)) Wd`, without biases. Shazeer 2020, "GLU Variants Improve Transformer".

    Args:
      in_features: D, of input and output.
      hidden_features: F, of the gate.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: of the gate and up projections.
      out_kernel_init: of the down projection.
      rngs: random streams for parameter initialisation.
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
        checks.at_least("in_features", in_features, 1, "features")
        checks.at_least("hidden_features", hidden_features, 1, "features")
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.gate = linear(in_features, hidden_features, kernel_init=kernel_init)
        self.up = linear(in_features, hidden_features, kernel_init=kernel_init)
        self.down = linear(hidden_features, in_features, kernel_init=out_kernel_init)

    @mesh_axes.on_mesh_of_input
    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., D)` to `(..., D)`."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class ChunkedFeedForward(Module):
    """A token-wise module in chunks of tokens. Kitaev et al. 2020, "Reformer", section 3.

    What the module computes on the way, such as the hidden features of a feed-forward layer, is in
    memory for one chunk at a time, and computed once more in the backward pass; the numbers are
    those of the module itself.

    Args:
      module: from `(B, T, D)` to `(B, T, E)`, each token by itself; it may write no Variables. It
        is kept, not copied, and so shared with whatever else it is given to.
      chunk_size: tokens of a row at a time. The length need not be a multiple of it.

    Raises:
      ValueError: a chunk of less than 1 token.
    """

    def __init__(self, module: Callable[..., jax.Array], *, chunk_size: int):
        self.module = module
        self.chunk_size = checks.at_least("chunk_size", chunk_size, 1, "tokens")

    @mesh_axes.on_mesh_of_input
    def __call__(
        self, x: jax.Array, *, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None
    ) -> jax.Array:
        """`(..., T, D)` to `(..., T, E)`.

        Args:
          x: the tokens.
          rngs: for dropout, if the module takes `rngs`: each chunk gets a key of its own.
        """
        if x.ndim < 2:
            raise ValueError(f"x must have shape (..., length, features), got {x.shape}")
        key, axis = dropout_key(rngs), x.ndim - 2
        chunks, rest = divmod(x.shape[axis], self.chunk_size)

        @jax.checkpoint
        def call(module, chunk, number):
            if key is None:
                return module(chunk)
            return module(chunk, rngs=jax.random.fold_in(key, number))

        if chunks == 0:
            return call(self.module, x, 0)
        whole = jax.lax.slice_in_dim(x, 0, chunks * self.chunk_size, axis=axis)
        whole = whole.reshape(*x.shape[:axis], chunks, self.chunk_size, x.shape[-1])
        each = jnp.moveaxis(whole, axis, 0), jnp.arange(chunks)
        out = jax.lax.map(lambda chunk: call(self.module, *chunk), each)
        out = jnp.moveaxis(out, 0, axis)
        out = out.reshape(*out.shape[:axis], chunks * self.chunk_size, out.shape[-1])
        if rest == 0:
            return out
        last = jax.lax.slice_in_dim(x, chunks * self.chunk_size, x.shape[axis], axis=axis)
        return jnp.concatenate([out, call(self.module, last, chunks)], axis)
