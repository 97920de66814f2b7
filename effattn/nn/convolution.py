"""Mixer with a dilated causal convolution."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import sequence_parts
from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import bounded, check_bound, new_lengths
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.tokens import last_tokens


class DilatedConvolution(RecurrentMixer):
    """Mixer with a gated dilated causal convolution (Dauphin et al. 2017).

        a_t, g_t = sum_(j < W) x_(t - j d) K_j + b;   y_t = (a_t sigmoid(g_t)) W_out

    In a `Transformer` the dilation d doubles from layer to layer, as in WaveNet (van den Oord et
    al. 2016). Time is O(T W D^2); the decode state holds the last (W - 1) d tokens.

    Args:
      width: W, number of taps, including the current token.
      dilation: d, distance between taps.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "convolution"

    def __init__(
        self,
        in_features: int,
        *,
        width: int = 4,
        dilation: int = 1,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.width = checks.at_least("width", width, 1, "tokens")
        self.dilation = checks.at_least("dilation", dilation, 1, "tokens")
        make = Layers(**options)
        self.kernel = make.drawn(make.kernel_init, width, in_features, 2 * in_features)
        self.bias = make.constant(jnp.zeros(2 * in_features))
        self.out = make.out(in_features, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        dtype = self._computed_in(x)
        # On one device the taps that reach before the first token are left out.
        missing = 0 if sequence_parts.current() is None else self._reach
        if state is None:
            read = sequence_parts.with_tokens_before(x, missing)
        else:
            missing = state.shape[1]
            read = jnp.concatenate([state.astype(x.dtype), x], 1)
        y = jnp.zeros((), dtypes.wide(dtype))
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        if ids is not None:
            ids_read = sequence_parts.with_tokens_before(ids, missing)
        for j, kernel in enumerate(self.kernel[...].astype(dtype)):
            tokens = _before(read, j * self.dilation, time).astype(dtype)
            if ids is not None:
                same = _before(ids_read, j * self.dilation, time) == ids
                tokens = jnp.where(same[..., None], tokens, 0)
            y = y + jnp.matmul(tokens, kernel, preferred_element_type=y.dtype)
        value, gate = jnp.split((y + lead(self.bias[...], 3).astype(y.dtype)).astype(dtype), 2, -1)
        last = last_tokens(read, missing, lengths)
        last = last if state is None else last.astype(state.dtype)
        return self.out(value * jax.nn.sigmoid(gate)), last

    @property
    def _reach(self) -> int:
        """Number of earlier tokens in the receptive field, (W - 1) d."""
        return (self.width - 1) * self.dilation

    def _empty(self, batch, max_length, dtype):
        slots, bound = bounded(self._reach, max_length)
        last = jnp.zeros((batch, slots, self.in_features), dtype)
        return RecurrentState(last, jnp.zeros((batch,), jnp.int32), bound)

    def _extend(self, x, state, lengths):
        check_bound(state, new_lengths(lengths, *x.shape[:2]), state.state.shape[1], self._reach)
        return super()._extend(x, state, lengths)


def _before(read: jax.Array, steps: int, time: Any) -> jax.Array:
    """The last `time` tokens of `read (B, S, ...)`, delayed by `steps`; zeros before token 0."""
    if not isinstance(time, int):  # symbolic length in an exported program
        padded = jnp.pad(read, ((0, 0), (steps, 0), *[(0, 0)] * (read.ndim - 2)))
        return jax.lax.slice_in_dim(padded, read.shape[1] - time, read.shape[1], axis=1)
    missing = min(max(steps + time - read.shape[1], 0), time)
    start = max(read.shape[1] - time - steps, 0)
    found = jax.lax.slice_in_dim(read, start, start + time - missing, axis=1)
    return jnp.pad(found, ((0, 0), (missing, 0), *[(0, 0)] * (read.ndim - 2)))
