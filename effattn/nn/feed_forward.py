"""Feed-forward layers, and evaluation of token-wise modules in chunks."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.nn import activations, initializers
from effattn.nn.dropout import dropout_key
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Parameters
from effattn.nn.placement import axes
from effattn.nn.tokens import features_of

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": activations.silu,
    "gelu": activations.gelu,
    "relu": activations.relu,
}


def activation_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation function of this name; raises `ValueError` for unknown names."""
    return ACTIVATIONS[checks.one_of("activation", name, ACTIVATIONS)]


class FeedForward(Module):
    """Feed-forward layer, with or without a gate.

        act(x Wu) Wd                   Vaswani et al. 2017, "Attention Is All You Need"
        (act(x Wg) * (x Wu)) Wd        Shazeer 2020, "GLU Variants Improve Transformer"

    Args:
      in_features: D, number of input and output features.
      hidden_features: F, number of hidden features.
      activation: "gelu" (exact), "relu" or "silu".
      gated: whether the layer has a gate, Wg.
      use_bias: whether each projection has a bias.
      kernel_init: initializer of the gate and up projections.
      out_kernel_init: initializer of the down projection.
      **options: see `effattn.nn.options.Parameters`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        use_bias: bool = False,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[Parameters],
    ):
        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        checks.at_least("hidden_features", hidden_features, 1, "features")
        self.activation = activation_of(activation)
        make = Layers(kernel_init=kernel_init, out_kernel_init=out_kernel_init, **options)
        bias = {"use_bias": use_bias}
        self.gate = make.hidden(in_features, hidden_features, **bias) if gated else None
        self.up = make.hidden(in_features, hidden_features, **bias)
        placed = axes("hidden", "features")
        self.down = make.out(hidden_features, in_features, kernel_metadata=placed, **bias)

    @mesh_axes.on_mesh_of_input
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x `(..., D)` to `(..., D)`."""
        x = features_of("x", x, self.in_features)
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class SwiGLU(FeedForward):
    """`(silu(x Wg) * (x Wu)) Wd`, without biases. Shazeer 2020, "GLU Variants Improve Transformer".

    The arguments are those of `FeedForward`, without `activation` and `gated`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[Parameters],
    ):
        super().__init__(
            in_features,
            hidden_features,
            activation="silu",
            gated=True,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            **options,
        )


class ChunkedFeedForward(Module):
    """Evaluates a token-wise module in chunks of tokens. Kitaev et al. 2020, "Reformer", section 3.

    Intermediate values, such as the hidden features of a feed-forward layer, are in memory for one
    chunk at a time, and the backward pass recomputes them. The outputs equal those of the module.

    Args:
      module: token-wise module from `(B, T, D)` to `(B, T, E)`, which must not write Variables. The
        module is not copied, so its parameters are shared with other users of the module.
      chunk_size: tokens per chunk. The length need not be a multiple of `chunk_size`.

    Raises:
      ValueError: `chunk_size` below 1, or a module that is not callable.
    """

    def __init__(self, module: Callable[..., jax.Array], *, chunk_size: int):
        if not callable(module):
            raise ValueError(
                f"module must be a token-wise module or function of x (B, T, D), got {module!r}"
            )
        self.module = module
        self.chunk_size = checks.at_least("chunk_size", chunk_size, 1, "tokens")

    @mesh_axes.on_mesh_of_input
    def __call__(
        self, x: jax.Array, *, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None
    ) -> jax.Array:
        """Maps x `(..., T, D)` to `(..., T, E)`.

        Args:
          x: `(..., T, D)`.
          rngs: `nnx.Rngs` or a key for dropout, if the module takes `rngs`; each chunk gets a
            separate key.
        """
        if x.ndim < 2:
            raise ValueError(f"x must have shape (..., length, features), got {x.shape}")
        return in_chunks(self.module, x, self.chunk_size, dropout_key(rngs))


def in_chunks(
    module: Callable[..., jax.Array],
    x: jax.Array,
    chunk_size: int | None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Evaluates a token-wise module on x `(..., T, D)`, as `ChunkedFeedForward` does.

    Args:
      module: module from `(..., T, D)` to `(..., T, E)`.
      x: `(..., T, D)`.
      chunk_size: tokens per chunk; None evaluates all tokens at once.
      key: key for dropout, folded with the number of each chunk; None gives the module no key.
    """
    if chunk_size is None:
        return module(x) if key is None else module(x, rngs=key)
    checks.known_length("a feed-forward layer in chunks", x, axis=-2)
    axis = x.ndim - 2
    chunks, rest = divmod(x.shape[axis], chunk_size)

    @jax.checkpoint
    def call(module, chunk, number):
        if key is None:
            return module(chunk)
        return module(chunk, rngs=jax.random.fold_in(key, number))

    if chunks == 0:
        return call(module, x, 0)
    whole = jax.lax.slice_in_dim(x, 0, chunks * chunk_size, axis=axis)
    whole = whole.reshape(*x.shape[:axis], chunks, chunk_size, x.shape[-1])
    each = jnp.moveaxis(whole, axis, 0), jnp.arange(chunks)
    out = jax.lax.map(lambda chunk: call(module, *chunk), each)
    out = jnp.moveaxis(out, 0, axis)
    out = out.reshape(*out.shape[:axis], chunks * chunk_size, out.shape[-1])
    if rest == 0:
        return out
    last = jax.lax.slice_in_dim(x, chunks * chunk_size, x.shape[axis], axis=axis)
    return jnp.concatenate([out, call(module, last, chunks)], axis)
