"""S4 mixer: one state space per feature, diagonal plus low rank."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import within
from effattn.cores import sequence_parts
from effattn.decode.recurrent import RecurrentState
from effattn.functional.s4 import hippo, low_rank_kernel
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.state_space import StateSpace, complex_of
from effattn.xla.long_convolution import long_convolution

_convolution = sequence_parts.over_channels(("x",), {"filter": -1}, "S4")(long_convolution)


class S4(StateSpace):
    """Mixer with normal plus low-rank state spaces (Gu et al. 2022, "Efficiently Modeling").

        y = glu(gelu(K * x + skip * x) W),   K = low_rank_kernel(L, P, B, C~, dt)

    L is the diagonal of A = diag(L) - P P^*, and K is a convolution kernel of `max_length` taps. As
    in the paper, the learned output matrix is C~ = C (I - Abar^max_length), and the parameters
    start as HiPPO-LegS. Decoding runs the recurrence in O(D M) per step; `init_state` computes C
    with matrix powers of Abar for all features.

    Sequences longer than `max_length`, whole or decoded, use the same C. For a longer whole
    sequence, the layer computes C and then C~ for a kernel of T taps, in O(D M^3 log T) extra time.

    Args:
      max_length: number of kernel taps for C~, such as the row length in training.
      state_size: number of modes per feature, conjugates included; even.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "s4"

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        state_size: int = 64,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, state_size=state_size, **options)
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        _, P, B = hippo(state_size)
        self.low_rank, self.input = self._pairs(P), self._pairs(B)
        normal = nnx.initializers.normal(0.5**0.5)
        self.output = Layers(**options).drawn(normal, *self.input.shape)

    def _arrays(self, wide):
        """Returns L, P, B, C~ and dt."""
        parts = (complex_of(p, wide) for p in (self.low_rank, self.input, self.output))
        return self._A(wide), *parts, self._dt(wide)

    def _mix_all(self, x, lengths, segment_ids):
        x = x.astype(self._computed_in(x))
        wide = dtypes.wide(x.dtype)
        L, P, B, output, dt = self._arrays(wide)
        length = max(sequence_parts.all_tokens(x.shape[1]), self.max_length)
        if length > self.max_length:
            output = self._truncated(length, wide)
        kernel = low_rank_kernel(L, P, B, output, dt, length)
        y = _convolution(x, kernel, segment_ids=segment_ids) + dtypes.product(
            lead(self.skip[...].astype(wide), 3), x
        )
        return self._finish(y.astype(x.dtype))

    def _empty(self, batch, max_length, dtype):
        wide = dtypes.wide(dtype)
        output = _complex_of_row(self._row(self._matrix(wide), wide))
        states = jnp.zeros((batch, *output.shape), output.dtype)
        # Every state array has the batch axis first, so that rows can be reordered and dropped.
        output = jnp.broadcast_to(output, states.shape)
        return RecurrentState(state=(states, output), length=jnp.zeros((batch,), jnp.int32))

    def _matrix(self, wide: Any) -> jax.Array:
        """Abar of all features as real matrices, `(D, 2 M, 2 M)`."""
        L, P, _, _, dt = self._arrays(wide)
        modes = L.shape[1]
        # Columns of Abar: one step of the recurrence from each real and imaginary unit vector.
        unit = jnp.eye(modes, dtype=L.dtype)
        units = jnp.concatenate([unit, 1j * unit])
        turned = _advance(units[:, None], L, P, dt)
        return jnp.moveaxis(jnp.concatenate([turned.real, turned.imag], -1), 0, -1)

    def _row(self, matrix: jax.Array, wide: Any) -> jax.Array:
        """C = C~ (I - Abar^max_length)^-1 as real row vectors, `(D, 2 M)`."""
        output = complex_of(self.output, wide)
        rest = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None]
        rest = rest - jnp.linalg.matrix_power(matrix, self.max_length)
        # For s = a + i b, 2 Re(C . s) is the row (2 Re C, -2 Im C) times (a, b).
        row = jnp.concatenate([output.real, -output.imag], -1)
        return jnp.linalg.solve(jnp.swapaxes(rest, -1, -2), row[..., None])[..., 0]

    def _truncated(self, length: int, wide: Any) -> jax.Array:
        """C~ = C (I - Abar^length), for a kernel of `length` taps."""
        matrix = self._matrix(wide)
        row = self._row(matrix, wide)
        power = jnp.linalg.matrix_power(matrix, length)
        return _complex_of_row(row - jnp.einsum("dm,dmn->dn", row, power, precision="highest"))

    def _extend(self, x, state, lengths):
        batch, time = x.shape[:2]
        x = x.astype(self._computed_in(x))
        states, output = state.state
        wide = states.real.dtype
        L, P, B, _, dt = self._arrays(wide)
        count = jnp.full((batch,), time, jnp.int32) if lengths is None else lengths

        def recur(before, of_token):
            token, valid = of_token
            added = 2 * dtypes.product(B[None], token[..., None])
            after = _advance(before, L, P, dt, added)
            after = jnp.where(valid[:, None, None], after, before)
            return after, 2 * (after * output).sum(-1).real

        valid = within(count, time).T
        states, y = lax.scan(recur, states, (jnp.moveaxis(x.astype(wide), 1, 0), valid))
        y = jnp.moveaxis(y, 0, 1) + dtypes.product(lead(self.skip[...].astype(wide), 3), x)
        length = state.length + count
        after = dataclasses.replace(state, state=(states, output), length=length)
        return self._finish(y.astype(x.dtype)), after


def _complex_of_row(row: jax.Array) -> jax.Array:
    real, imaginary = jnp.split(row, 2, -1)
    return lax.complex(real, -imaginary)


def _advance(state, L, P, dt, added=0.0):
    """One step: (2/dt - A)^-1 ((2/dt + A) s + added); s `(..., D, M)`, A = diag(L) - P P^*."""
    L, P, twice = (lead(x, state.ndim) for x in (L, P, (2 / dt)[:, None]))
    twice = twice.astype(L.dtype)

    def over_low_rank(array):
        """P^* a, summed over modes and their conjugates."""
        return 2 * (P.conj() * array).sum(-1, keepdims=True).real

    moved = (twice + L) * state - dtypes.product(P, over_low_rank(state)) + added
    inverse = 1 / (twice - L)
    scaled = inverse * moved
    share = over_low_rank(scaled) / (1 + over_low_rank(inverse * P))
    return scaled - dtypes.product(inverse, P, share)
