"""Layers and parameters of a module, all with the dtypes, initialisers and rngs of its options."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from effattn.nn import initializers
from effattn.nn.placement import axes
from effattn.nn.projection import dot_general
from effattn.nn.short_convolution import ShortConvolution

Sizes = int | tuple[int, int]  # features, or (heads, head dimension)


class Layers:
    """Makes the layers of a module from its constructor's options (see `effattn.nn.options`).

    Projections have no bias by default. Options of other parts of the module are not used here.
    """

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        **_: Any,
    ):
        self.rngs, self.param_dtype = rngs, param_dtype
        self.numbers = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.kernel_init = kernel_init
        self.out_kernel_init = kernel_init if out_kernel_init is None else out_kernel_init

    def linear(self, features_in: int, features_out: int, **options: Any) -> nnx.Linear:
        """A projection of features."""
        options = {"kernel_metadata": axes("features", None), **options}
        return nnx.Linear(features_in, features_out, **self._of_projection(options))

    def hidden(self, features_in: int, features_out: int, **options: Any) -> nnx.Linear:
        """A projection of features to hidden features of a feed-forward layer."""
        placed = axes("features", "hidden")
        return self.linear(features_in, features_out, kernel_metadata=placed, **options)

    def heads(self, features: int, heads: Sizes, **options: Any) -> nnx.LinearGeneral:
        """A projection of features to heads."""
        names = ("heads",) if isinstance(heads, int) else ("heads", None)
        options = {"kernel_metadata": axes("features", *names), **options}
        return nnx.LinearGeneral(features, heads, **self._of_projection(options))

    def out(self, sizes: Sizes, features: int, **options: Any) -> Any:
        """The output projection, of features or of heads."""
        options = {"kernel_init": self.out_kernel_init, **options}
        if isinstance(sizes, int):
            options = {"kernel_metadata": axes(None, "features"), **options}
            return self.linear(sizes, features, **options)
        options = {"kernel_metadata": axes("heads", None, "features"), **options}
        return nnx.LinearGeneral(sizes, features, axis=(-2, -1), **self._of_projection(options))

    def rms_norm(self, features: int, **options: Any) -> nnx.RMSNorm:
        """An RMS norm of the last axis."""
        return nnx.RMSNorm(features, **self.numbers, **options)

    def layer_norm(self, features: int, **options: Any) -> nnx.LayerNorm:
        """A layer norm of the last axis."""
        return nnx.LayerNorm(features, **self.numbers, **options)

    def convolution(self, features: int, width: int, **options: Any) -> ShortConvolution:
        """A short convolution of each feature."""
        return ShortConvolution(features, width, **self.numbers, **options)

    def drawn(self, init: Callable[..., Any], *shape: int, **metadata: Any) -> nnx.Param:
        """A parameter with random initial values, and with metadata such as `placement.axes`."""
        return nnx.Param(init(self.rngs.params(), shape, self.param_dtype), **metadata)

    def constant(self, values: Any) -> nnx.Param:
        """A parameter with these initial values."""
        return nnx.Param(jnp.asarray(values, self.param_dtype))

    def _of_projection(self, options):
        usual = {"use_bias": False, "kernel_init": self.kernel_init, "dot_general": dot_general}
        return {**usual, **self.numbers, **options}
