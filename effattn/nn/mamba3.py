"""Mamba-3 mixer."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.mamba3 import trapezoidal_scan
from effattn.nn import initializers
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.recurrent import FunctionMixer


class Mamba3(FunctionMixer):
    """Mixer with trapezoidal state spaces (Lahoti et al. 2026, "Mamba-3").

        z, x, B, C, d, a, l, theta = u W_in
        dt = softplus(d + b);   A = -softplus(a);   B, C = norm(B) + b_B, norm(C) + b_C
        o = trapezoidal_scan(C, B, x, dt, dt A, sigmoid(l), pi tanh(theta) dt) + skip * x
        y = (o * silu(z)) W_out

    The layer has the trapezoidal rule, the complex state by rotation, and normalised B and C with a
    bias of each head that starts at 1. It has no short convolution, as in the paper. With a
    `mimo_rank` of R, a head has R inputs and outputs (MIMO), each with its own B and C, which share
    one state. Learned vectors m_x, m_z and m_o of each head and rank scale the features:

        x_r = m_x * x;   o_r = trapezoidal_scan(...)_r + skip * x_r
        y = (sum_r m_o * o_r * silu(m_z * z)) W_out

    Args:
      num_heads: N, number of heads of x; each head has separate dt, A and l.
      head_dim: P, head dimension; default 2 D / N, which gives x 2 D features.
      state_size: F, state size, the size of B and C.
      num_angles: number of pairs of features of B and C that are rotated, at most F / 2; default
        F / 4. All heads have the same theta.
      mimo_rank: R, number of inputs and outputs of a head; default 1. The decode state holds
        R (F + P) numbers for the last token of a head, and its F x P sums do not depend on R.
      num_kv_heads: number of B and C groups; N / num_kv_heads heads share a group. Default 1.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "mamba3"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        state_size: int = 64,
        num_angles: int | None = None,
        mimo_rank: int = 1,
        num_kv_heads: int | None = None,
        **options: Unpack[Recurrent],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim, times=2)
        self.num_heads = num_heads
        self.num_kv_heads = key_heads(num_heads, 1 if num_kv_heads is None else num_kv_heads)
        self.state_size = checks.at_least("state_size", state_size, 1, "features")
        angles = state_size // 4 if num_angles is None else num_angles
        if checks.at_least("num_angles", angles, 0, "pairs of features") > state_size // 2:
            raise ValueError(
                f"num_angles must be at most {state_size // 2}, half of state_size ({state_size}), "
                f"got {num_angles}"
            )
        rank = self.mimo_rank = checks.at_least("mimo_rank", mimo_rank, 1, "inputs")
        inner, shared = num_heads * self.head_dim, rank * self.num_kv_heads * self.state_size
        self.sizes = (inner, inner, shared, shared, num_heads, num_heads, num_heads, angles)
        make = Layers(**options)
        self.project = make.linear(in_features, sum(self.sizes))
        self.step_bias = make.drawn(initializers.step_bias_init, num_heads)
        self.key_norm, self.query_norm = (
            make.rms_norm(self.state_size, epsilon=1e-5) for _ in range(2)
        )
        # The ranks of a head are next to each other.
        ones = np.ones((num_heads * rank, self.state_size))
        self.key_bias, self.query_bias = make.constant(ones), make.constant(ones)
        self.skip = make.constant(np.ones(num_heads))
        maps = np.ones((num_heads, rank, self.head_dim))
        self.mimo_x, self.mimo_z, self.mimo_o = (
            make.constant(maps / divisor) if rank > 1 else None for divisor in (rank, 1, rank)
        )
        self.out = make.out(inner, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        parts = jnp.split(self.project(x), np.cumsum(self.sizes)[:-1], -1)
        gate, value, key, query, *numbers, angle = parts
        wide = dtypes.wide(x.dtype)
        steps, rate, trapezoid = (number.astype(wide) for number in numbers)
        steps = jax.nn.softplus(steps + lead(self.step_bias[...], 3).astype(wide))
        # The floor of the authors' code: no head remembers for ever.
        rate = -jnp.maximum(jax.nn.softplus(rate), 1e-4)
        value, gate = (
            self._of_ranks(x.reshape(batch, time, self.num_heads, self.head_dim), maps)
            for x, maps in ((value, self.mimo_x), (gate, self.mimo_z))
        )
        out, state = trapezoidal_scan(
            self._of_heads(query, self.query_norm, self.query_bias),
            self._of_heads(key, self.key_norm, self.key_bias),
            value,
            step_size=steps,
            log_decay=steps * rate,
            trapezoid=jax.nn.sigmoid(trapezoid),
            angle=jnp.pi * jnp.tanh(angle.astype(wide))[:, :, None] * steps[..., None],
            rank=self.mimo_rank,
            **self._options(state, lengths, segment_ids),
        )
        skip = jnp.repeat(self.skip[...], self.mimo_rank)[:, None]
        out = (out + lead(skip, 4).astype(out.dtype) * value) * jax.nn.silu(gate)
        if self.mimo_o is not None:
            out = out.reshape(batch, time, self.num_heads, self.mimo_rank, self.head_dim)
            out = (out * lead(self.mimo_o[...], 5).astype(out.dtype)).sum(3)
        return self.out(jax.lax.collapse(out, 2)), state

    def _of_ranks(self, x, maps):
        """The R inputs of each head `(B, T, N R, P)`, from x `(B, T, N, P)`."""
        if maps is None:
            return x
        x = x[..., None, :] * lead(maps[...], 5).astype(x.dtype)
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _of_heads(self, x, norm, bias):
        """B or C of each head and rank, `(B, T, N R, F)`."""
        rank, groups = self.mimo_rank, self.num_kv_heads
        heads = norm(x.reshape(*x.shape[:2], rank, groups, self.state_size))
        heads = jnp.repeat(jnp.moveaxis(heads, 2, 3), self.num_heads // groups, 2)
        heads = heads.reshape(*x.shape[:2], self.num_heads * rank, self.state_size)
        return heads + lead(bias[...], 4).astype(heads.dtype)
