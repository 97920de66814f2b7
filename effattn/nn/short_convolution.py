"""Short causal convolution over time, which recurrent mechanisms apply before the recurrence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import positions_from, within
from effattn.decode.state import row_lengths, state_dtype
from effattn.nn.activations import silu
from effattn.nn.module import Module

# Uniform in +-1 / sqrt(width); the width is the fan-in of a depthwise convolution.
taps_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class ShortConvolution(Module):
    """Depthwise causal convolution over the last `width` tokens.

        y_t = activation(bias + sum_(j < width) tap_j * x_(t - width + 1 + j))

    Tokens before the first one count as zeros. Time is O(T D width). Products are summed in at
    least float32.

    Args:
      features: D, number of features per token.
      width: number of taps, including the current token.
      activation: elementwise activation; None applies no activation.
      use_bias: whether each feature has a learned bias.
      dtype: output dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      taps_init: initializer of the taps `(width, D)`; the first tap is for the oldest token.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: `features` or `width` below 1; in calls, inconsistent shapes.
    """

    def __init__(
        self,
        features: int,
        width: int = 4,
        *,
        activation: Callable[[jax.Array], jax.Array] | None = silu,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        taps_init: Callable[..., Any] = taps_init,
        rngs: nnx.Rngs,
    ):
        self.features = checks.at_least("features", features, 1, "features")
        self.width = checks.at_least("width", width, 1, "tokens")
        self.activation = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        # Not named `kernel`, since optimisers recognise matrices by that name.
        self.taps = nnx.Param(taps_init(rngs.params(), (width, features), param_dtype))
        self.bias = nnx.Param(jnp.zeros(features, param_dtype)) if use_bias else None

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Convolves whole sequences.

        Args:
          x: `(B, T, D)`.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences: outputs read tokens with equal ids, 0 is
            padding.

        Returns:
          `(B, T, D)`, zero in the padding. Valid tokens do not depend on the padding.
        """
        self._check(x)
        batch, time = x.shape[:2]
        valid = self._valid(lengths, batch, time)
        pair = checks.segment_ids(segment_ids, (batch,), time, time)
        ids = None if pair is None else pair[0]
        if ids is not None:
            in_document = jnp.not_equal(ids, 0)
            valid = in_document if valid is None else in_document & valid
        return self._convolve(self._before(_clear(x, valid)), valid, ids)

    def init_state(self, batch: int, dtype: Any = None) -> jax.Array:
        """Returns the empty decode state of `batch` rows, zeros `(B, width - 1, D)`.

        Args:
          batch: B, number of rows.
          dtype: dtype of the state; default the module's `dtype`, or `param_dtype` if `dtype` is
            None.
        """
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        return jnp.zeros((batch, self.width - 1, self.features), state_dtype(dtype))

    def extend(
        self, x: jax.Array, state: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Convolves T >= 1 new tokens that follow the tokens in `state`.

        Args:
          x: `(B, T, D)`.
          state: decode state, from `init_state` or an earlier call.
          lengths: `(B,)` int, valid tokens among the T of each right-padded row; default T.

        Returns:
          `(y (B, T, D), state)`; y is zero in the padding, which does not change the state.
        """
        self._check(x)
        batch, time = x.shape[:2]
        checks.shaped("state", state, (batch, self.width - 1, self.features))
        valid = self._valid(lengths, batch, time)
        read = jnp.concatenate([state.astype(x.dtype), _clear(x, valid)], 1)
        if lengths is None:
            last = read[:, time:]
        else:
            kept = positions_from(row_lengths(lengths, batch, time), self.width - 1)
            last = jnp.take_along_axis(read, kept[..., None], 1, mode="clip")
        return self._convolve(read, valid, None), last.astype(state.dtype)

    def _valid(self, lengths: jax.Array | None, batch: int, time: int) -> jax.Array | None:
        """Mask of valid tokens, bool `(B, T)`; None if all are valid."""
        if lengths is None:
            return None
        return within(row_lengths(lengths, batch, time), time)

    def _before(self, x: jax.Array) -> jax.Array:
        """Pads x with `width - 1` zeros before the first token."""
        return jnp.pad(x, ((0, 0), (self.width - 1, 0), *[(0, 0)] * (x.ndim - 2)))

    def _convolve(
        self, read: jax.Array, valid: jax.Array | None, ids: jax.Array | None
    ) -> jax.Array:
        """Outputs of the last T tokens of `read (B, width - 1 + T, D)`."""
        taps, bias = self.taps[...], None if self.bias is None else self.bias[...]
        dtype = dtypes.common(read, taps) if self.dtype is None else self.dtype
        wide = dtypes.wide(dtype)
        # Round parameters to the computation dtype, as other layers do.
        taps, read = taps.astype(dtype).astype(wide), read.astype(dtype).astype(wide)
        time = read.shape[1] - self.width + 1
        ids_read = None if ids is None else self._before(ids)
        y = jnp.zeros((), wide) if bias is None else bias.astype(dtype).astype(wide)[None, None]
        for token, tap in enumerate(taps):
            x = read[:, token : token + time]
            if ids is not None and ids_read is not None:
                x = _clear(x, jnp.equal(ids_read[:, token : token + time], ids))
            y = y + tap[None, None] * x
        y = y if self.activation is None else self.activation(y)
        return _clear(y, valid).astype(dtype)

    def _check(self, x: jax.Array) -> None:
        if x.ndim != 3 or x.shape[-1] != self.features:
            raise ValueError(f"x must have shape (batch, length, {self.features}), got {x.shape}")


def _clear(x: jax.Array, valid: Any) -> jax.Array:
    """x with zeros where `valid (B, T)` is False."""
    return x if valid is None else jnp.where(valid[..., None], x, 0)
