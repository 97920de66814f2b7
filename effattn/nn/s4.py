"""S4 mixers: one state space per feature, diagonal (S4D) or diagonal plus low rank (S4)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import within
from effattn.decode.recurrent import RecurrentState
from effattn.functional.s4 import hippo, low_rank_kernel
from effattn.functional.s4d import s4_convolution
from effattn.nn import initializers
from effattn.nn.recurrent import RecurrentMixer
from effattn.xla.long_convolution import long_convolution


class _StateSpace(RecurrentMixer):
    """Base class of the S4 mixers: y = glu(gelu(state_space(x)) W), and the common parameters.

    `log_rate` is log(-A_real), `turn` is A_imag, `log_step` is log(dt), `output` is C (S4D) or C~
    (S4), and `skip` is D of the papers. A complex parameter is stored as a real array whose first
    axis has the real and the imaginary part.
    """

    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        mechanism: str,
        *,
        state_size: int,
        is_causal: bool,
        dropout_rate: float,
        dtype: Any,
        param_dtype: Any,
        kernel_init: Callable[..., Any],
        out_kernel_init: Callable[..., Any] | None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            mechanism,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        if checks.at_least("state_size", state_size, 2, "modes") % 2:
            raise ValueError(f"state_size must be even, as modes come in pairs, got {state_size}")
        L, _, _ = hippo(state_size)
        shape = (in_features, state_size // 2)
        self.log_rate = nnx.Param(jnp.full(shape, np.log(-L.real), param_dtype))
        self.turn = nnx.Param(jnp.broadcast_to(jnp.asarray(L.imag, param_dtype), shape))
        # dt is log-uniform in [0.001, 0.1].
        self.log_step = nnx.Param(
            jax.random.uniform(
                rngs.params(), (in_features,), param_dtype, np.log(0.001), np.log(0.1)
            )
        )
        self.skip = nnx.Param(jax.random.normal(rngs.params(), (in_features,), param_dtype))
        self.out = nnx.Linear(
            in_features,
            2 * in_features,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            rngs=rngs,
        )

    def _pairs(self, array: np.ndarray) -> nnx.Param:
        """Parameter from a complex array `(M,)`, repeated for all features."""
        both = np.stack([array.real, array.imag])[:, None]
        shape = (2, self.in_features, len(array))
        return nnx.Param(jnp.broadcast_to(jnp.asarray(both, self.param_dtype), shape))

    def _A(self, wide: Any) -> jax.Array:
        return lax.complex(-jnp.exp(self.log_rate[...].astype(wide)), self.turn[...].astype(wide))

    def _dt(self, wide: Any) -> jax.Array:
        return jnp.exp(self.log_step[...].astype(wide))

    def _finish(self, y: jax.Array) -> jax.Array:
        return jax.nn.glu(self.out(jax.nn.gelu(y)))


def _complex(pairs: Any, wide: Any) -> jax.Array:
    real, imaginary = pairs[...].astype(wide)
    return lax.complex(real, imaginary)


class S4D(_StateSpace):
    """Mixer with diagonal state spaces (Gu et al. 2022, "On the Parameterization of S4D").

        y = glu(gelu(s4_convolution(x, A, C, dt, D)) W)

    A starts as the modes of HiPPO-LegS (S4D-LegS). Whole sequences are computed as a convolution;
    packed sequences and decoding are computed as a recurrence. The decode state has `state_size`
    numbers per feature.

    Args:
      in_features: D, number of features per token.
      state_size: number of modes per feature, conjugates included; even.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes. States
        and convolution kernels are at least float32.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projection.
      out_kernel_init: initializer of the projection; overrides `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    def __init__(
        self,
        in_features: int,
        *,
        state_size: int = 64,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            "s4d",
            state_size=state_size,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        self.output = self._pairs(hippo(state_size)[2])
        noise = nnx.initializers.normal(0.5**0.5)(rngs.params(), self.output.shape, param_dtype)
        self.output[...] = self.output[...] * noise

    def _mix(self, x, state, lengths, segment_ids):
        x = x.astype(self._computed_in(x))
        wide = dtypes.wide(x.dtype)
        y, state = s4_convolution(
            x,
            rate=self._A(wide),
            output=_complex(self.output, wide),
            step_size=self._dt(wide),
            skip=self.skip[...].astype(wide),
            lengths=lengths,
            segment_ids=segment_ids,
            initial_state=state,
            return_state=True,
        )
        return self._finish(y), state


class S4(_StateSpace):
    """Mixer with normal plus low-rank state spaces (Gu et al. 2022, "Efficiently Modeling").

        y = glu(gelu(K * x + D x) W),   K = low_rank_kernel(L, P, B, C~, dt)

    L is the diagonal of A = diag(L) - P P^*, and K is a convolution kernel of `max_length` taps. As
    in the paper, the learned output matrix is C~ = C (I - Abar^max_length), and the parameters
    start as HiPPO-LegS. Decoding runs the recurrence in O(D M) per step; `init_state` computes C
    with matrix powers of Abar for all features.

    Sequences longer than `max_length`, whole or decoded, use the same C. For a longer whole
    sequence, the layer computes C and then C~ for a kernel of T taps, in O(D M^3 log T) extra time.

    Args:
      in_features: D, number of features per token.
      max_length: number of kernel taps for C~, such as the row length in training.
      state_size: number of modes per feature, conjugates included; even.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes. States
        and convolution kernels are at least float32.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projection.
      out_kernel_init: initializer of the projection; overrides `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        state_size: int = 64,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            "s4",
            state_size=state_size,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        _, P, B = hippo(state_size)
        self.low_rank, self.input = self._pairs(P), self._pairs(B)
        self.output = nnx.Param(
            nnx.initializers.normal(0.5**0.5)(rngs.params(), self.input.shape, param_dtype)
        )

    def _arrays(self, wide):
        """Returns L, P, B, C~ and dt."""
        parts = (_complex(p, wide) for p in (self.low_rank, self.input, self.output))
        return self._A(wide), *parts, self._dt(wide)

    def _mix_all(self, x, lengths, segment_ids):
        x = x.astype(self._computed_in(x))
        wide = dtypes.wide(x.dtype)
        L, P, B, output, dt = self._arrays(wide)
        length = max(x.shape[1], self.max_length)
        if length > self.max_length:
            output = self._truncated(length, wide)
        kernel = low_rank_kernel(L, P, B, output, dt, length)
        y = long_convolution(x, kernel) + dtypes.product(lead(self.skip[...].astype(wide), 3), x)
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
        output = _complex(self.output, wide)
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
        return self._finish(y.astype(x.dtype)), RecurrentState(
            state=(states, output), length=state.length + count
        )


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
