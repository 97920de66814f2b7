"""Long convolution mixer."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.long_convolution import (
    check_regularization,
    long_convolution,
    regularized,
)
from effattn.nn import activations
from effattn.nn.cached import CachedMixer
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.xla.long_convolution import long_convolution_at


class LongConvolution(CachedMixer):
    """Long convolution with regularised taps (Fu et al. 2023, "Simple ... Long Convolutions").

        y = glu(gelu_tanh(long_convolution(x, K, d)) W)

    The taps K `(max_length, D)` are parameters; with `is_causal=False` there are two filters. They
    start as normal numbers times 0.02 exp(-t / max_length (D / 2)^(i / D)) for feature i, so that
    some filters reach over all tokens and others over few. The decode state caches the inputs; a
    step costs O(S D).

    Args:
      max_length: maximum number of tokens per row, the number of taps.
      threshold: lambda of `effattn.long_convolution`.
      smoothing: w of `effattn.long_convolution`.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: in calls, more tokens than `max_length`.
    """

    _mechanism = "long_convolution"
    _of_known_length = True
    _limited = True

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        threshold: float = 0.001,
        smoothing: int = 0,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        check_regularization(threshold, smoothing)
        self.threshold, self.smoothing = threshold, smoothing
        make, filters = Layers(**options), () if self.is_causal else (2,)
        rates = (in_features / 2) ** (np.arange(in_features) / in_features)
        sizes = 0.02 * np.exp(-np.outer(np.arange(max_length) / max_length, rates))
        self.filter = make.drawn(nnx.initializers.normal(1.0), *filters, *sizes.shape)
        self.filter[...] = self.filter[...] * jnp.asarray(sizes, self.param_dtype)
        self.skip = make.drawn(jax.random.normal, in_features)
        self.out = make.out(in_features, 2 * in_features)

    def _mix_all(self, x, lengths, segment_ids):
        y = long_convolution(
            x.astype(self._computed_in(x)),
            self.filter[...],
            skip=self.skip[...],
            threshold=self.threshold,
            smoothing=self.smoothing,
            is_causal=self.is_causal,
            lengths=lengths,
            segment_ids=segment_ids,
        )
        return self._finish(y)

    def _prepare(self, x, positions):
        x = x.astype(self._computed_in(x))
        return x, x

    def _mix_at(self, tokens, own, positions):
        taps = regularized(self.filter[...], self.threshold, self.smoothing)
        y = long_convolution_at(tokens, taps, positions)
        y = y + dtypes.product(lead(self.skip[...].astype(y.dtype), 3), own)
        return self._finish(y.astype(own.dtype))

    def _finish(self, y):
        return jax.nn.glu(self.out(activations.gelu_tanh(y)))
