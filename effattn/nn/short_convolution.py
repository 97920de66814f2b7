"""Short convolution over time, which recurrent mechanisms apply before the recurrence."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes, mesh_axes, segments
from effattn.cores import sequence_parts
from effattn.cores.sequence_parts import with_neighbours, with_tokens_before
from effattn.decode.state import row_lengths, state_dtype
from effattn.nn.activations import silu
from effattn.nn.module import Module
from effattn.nn.options import Parameters
from effattn.nn.tokens import last_tokens, zero_padding

# Uniform in +-1 / sqrt(width); the width is the fan-in of a depthwise convolution.
taps_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class ShortConvolution(Module):
    """Depthwise convolution over `width` tokens, the last ones or those around each token.

        y_t = activation(bias + sum_(j < width) tap_j * x_(t - r + j))

    r is `width - 1` if causal, and else `width // 2`. Tokens past the ends count as zeros. Time is
    O(T D width). Products are summed in at least float32.

    Args:
      features: D, number of features per token.
      width: number of taps, including the current token.
      activation: elementwise activation; None applies no activation.
      use_bias: whether each feature has a learned bias.
      is_causal: whether token t reads no later tokens. A bidirectional module cannot decode.
      taps_init: initializer of the taps `(width, D)`; the first tap is for the oldest token.
      **options: see `effattn.nn.options.Parameters`.

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
        is_causal: bool = True,
        taps_init: Callable[..., Any] = taps_init,
        **options: Unpack[Parameters],
    ):
        self.features = checks.at_least("features", features, 1, "features")
        self.width = checks.at_least("width", width, 1, "tokens")
        self.activation, self.is_causal = activation, is_causal
        self.dtype = options.get("dtype")
        self.param_dtype = param_dtype = options.get("param_dtype", jnp.float32)
        # Not named `kernel`, since optimisers recognise matrices by that name.
        self.taps = nnx.Param(taps_init(options["rngs"].params(), (width, features), param_dtype))
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
        pair = checks.segment_ids(segment_ids, (batch,), time, time)
        ids = None if pair is None else pair[0]
        valid = self._valid(lengths, batch, time, ids)
        return self._convolve(self._around(zero_padding(x, valid)), valid, ids)

    def init_state(self, batch: int, dtype: Any = None) -> jax.Array:
        """Returns the empty decode state of `batch` rows, zeros `(B, width - 1, D)`.

        Args:
          batch: B, number of rows.
          dtype: dtype of the state; default the module's `dtype`, or `param_dtype` if `dtype` is
            None.
        """
        self._check_causal()
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
        self._check_causal()
        self._check(x)
        batch, time = x.shape[:2]
        checks.shaped("state", state, (batch, self.width - 1, self.features))
        valid = self._valid(lengths, batch, time)
        read = jnp.concatenate([state.astype(x.dtype), zero_padding(x, valid)], 1)
        last = last_tokens(read, self.width - 1, lengths)
        return self._convolve(read, valid, None), last.astype(state.dtype)

    def _valid(self, lengths, batch, time, ids=None):
        lengths = None if lengths is None else row_lengths(lengths, batch, time)
        return segments.valid(lengths, ids, time)

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
        ids_read = None if ids is None else self._around(ids)
        y = jnp.zeros((), wide) if bias is None else bias.astype(dtype).astype(wide)[None, None]
        for token, tap in enumerate(taps):
            x = read[:, token : token + time]
            if ids is not None and ids_read is not None:
                x = zero_padding(x, jnp.equal(ids_read[:, token : token + time], ids))
            y = y + tap[None, None] * x
        y = y if self.activation is None else self.activation(y)
        return zero_padding(y, valid).astype(dtype)

    def _around(self, x: jax.Array) -> jax.Array:
        """All tokens that the outputs read, `(B, width - 1 + T, ...)`, with zeros past the ends."""
        if self.is_causal:
            return with_tokens_before(x, self.width - 1)
        reach = self.width // 2
        read = with_neighbours(x, reach, 1)
        # The taps of an even width reach one token less on the right.
        return read[:, : read.shape[1] - 1] if self.width % 2 == 0 else read

    def _check_causal(self) -> None:
        if not self.is_causal:
            raise ValueError(
                "a bidirectional ShortConvolution cannot decode; make it with is_causal=True"
            )

    def _check(self, x: jax.Array) -> None:
        if x.ndim != 3 or x.shape[-1] != self.features:
            raise ValueError(f"x must have shape (batch, length, {self.features}), got {x.shape}")


def convolved(
    convolution: ShortConvolution,
    x: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves tokens that follow `state`; returns `(y, state)`.

    `segment_ids`, and a sequence that devices hold in parts, need the state before the first token,
    and then the new state has no meaning.
    """
    if segment_ids is None and sequence_parts.current() is None:
        return convolution.extend(x, state, lengths)
    return convolution(x, lengths=lengths, segment_ids=segment_ids), state
