"""Mamba-2 mixer."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.mamba2 import state_space_duality
from effattn.nn import initializers
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.recurrent import FunctionMixer
from effattn.nn.short_convolution import convolved


class Mamba2(FunctionMixer):
    """Mixer with selective state spaces (Dao and Gu 2024, "Transformers are SSMs").

        z, x, B, C, dt = u W_in;   x, B, C = silu(convolution(x, B, C))
        o = state_space_duality(C, B, x, softplus(dt + b), A, skip),   A = -exp(log_rate)
        y = norm(o * silu(z)) W_out

    `norm` is an RMS norm over the features of each group of heads, with a learned scale. The
    parameters `log_rate`, `step_bias` and `skip` are log(-A), b and the skip vector.

    Args:
      num_heads: N, number of heads of x; each head has one A.
      head_dim: P, head dimension; default 2 D / N, which gives x 2 D features.
      state_size: F, state size, the size of B and C.
      num_kv_heads: number of B and C groups; N / num_kv_heads heads share a group. Default 1.
      convolution_width: width of the short convolution, in tokens.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "mamba2"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        state_size: int = 64,
        num_kv_heads: int | None = None,
        convolution_width: int = 4,
        **options: Unpack[Recurrent],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim, times=2)
        self.num_heads = num_heads
        self.num_kv_heads = key_heads(num_heads, 1 if num_kv_heads is None else num_kv_heads)
        self.state_size = checks.at_least("state_size", state_size, 1, "features")
        inner, shared = num_heads * self.head_dim, self.num_kv_heads * self.state_size
        self.sizes = (inner, inner, shared, shared, num_heads)
        make = Layers(**options)
        self.project = make.linear(in_features, sum(self.sizes))
        self.convolution = make.convolution(inner + 2 * shared, convolution_width, use_bias=True)
        self.log_rate = make.drawn(initializers.log_rate_init, num_heads)
        self.step_bias = make.drawn(initializers.step_bias_init, num_heads)
        self.skip = make.constant(np.ones(num_heads))
        self.norm = make.rms_norm(inner // self.num_kv_heads, epsilon=1e-5, use_scale=False)
        self.norm_scale = make.constant(np.ones(inner))
        self.out = make.out(inner, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        inner, _, shared, _, heads = self.sizes
        gate, read, steps = jnp.split(self.project(x), [inner, 2 * inner + 2 * shared], -1)
        sums, last = (None, self.convolution.init_state(batch, x.dtype)) if state is None else state
        read, last = convolved(self.convolution, read, last, lengths, segment_ids)
        value, key, query = jnp.split(read, [inner, inner + shared], -1)
        wide = dtypes.wide(x.dtype)
        steps = jax.nn.softplus(steps.astype(wide) + lead(self.step_bias[...], 3).astype(wide))
        of_groups = (batch, time, self.num_kv_heads, self.state_size)
        out, sums = state_space_duality(
            query.reshape(of_groups),
            key.reshape(of_groups),
            value.reshape(batch, time, heads, self.head_dim),
            step_size=steps,
            rate=-jnp.exp(self.log_rate[...].astype(wide)),
            skip=self.skip[...],
            **self._options(sums, lengths, segment_ids),
        )
        out = out.reshape(batch, time, inner) * jax.nn.silu(gate)
        of_norm = self.num_kv_heads, inner // self.num_kv_heads
        out = self.norm(out.reshape(batch, time, *of_norm)).reshape(out.shape)
        return self.out(out * lead(self.norm_scale[...], 3).astype(out.dtype)), (sums, last)
