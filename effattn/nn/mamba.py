"""Mamba mixer."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.mamba import selective_scan
from effattn.nn import initializers
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.recurrent import FunctionMixer
from effattn.nn.short_convolution import convolved


class Mamba(FunctionMixer):
    """Mixer with a selective state space (Gu and Dao 2023, "Mamba", section 3.4).

        x, z = u W_in;   x = silu(convolution(x))
        d, B, C = x W_x;   dt = softplus(d W_dt + b)
        y = (selective_scan(C, B, x, dt, A, skip) * silu(z)) W_out,   A = -exp(log_rate)

    Each inner feature has a state and a step size dt. In the paper all inner features share one B
    and one C; here `num_kv_heads` groups of features may have one B and C each, as in Mamba-2. The
    parameters `log_rate`, `step_bias` and `skip` are log(-A), b and the skip vector.

    Args:
      num_heads: N; only sets the number of inner features, N times `head_dim`.
      head_dim: default 2 D / N, which gives 2 D inner features.
      state_size: F, state size, the size of B and C.
      step_rank: size of d; default D / 16, rounded up.
      num_kv_heads: K, number of B and C groups, a divisor of the inner features; default 1.
      convolution_width: width of the short convolution, in tokens.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "mamba"

    def __init__(
        self,
        in_features: int,
        num_heads: int = 1,
        *,
        head_dim: int | None = None,
        state_size: int = 16,
        step_rank: int | None = None,
        num_kv_heads: int | None = None,
        convolution_width: int = 4,
        **options: Unpack[Recurrent],
    ):
        super().__init__(in_features, **options)
        inner = num_heads * head_size(in_features, num_heads, head_dim, times=2)
        self.num_kv_heads = (
            1
            if num_kv_heads is None
            else checks.at_least("num_kv_heads", num_kv_heads, 1, "heads, or None")
        )
        if inner % self.num_kv_heads:
            raise ValueError(
                f"the inner features ({inner}, num_heads times head_dim) must be a positive "
                f"multiple of num_kv_heads ({self.num_kv_heads})"
            )
        self.state_size = checks.at_least("state_size", state_size, 1, "features")
        rank = -(-in_features // 16) if step_rank is None else step_rank
        self.step_rank = checks.at_least("step_rank", rank, 1, "features")
        make, shared = Layers(**options), self.num_kv_heads * self.state_size
        self.project = make.linear(in_features, 2 * inner)
        self.convolution = make.convolution(inner, convolution_width, use_bias=True)
        self.select = make.linear(inner, self.step_rank + 2 * shared)
        # Uniform in +-rank^-1/2, as in the paper's code: initially dt is close to softplus(b).
        of_steps = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.step_projection = make.linear(self.step_rank, inner, kernel_init=of_steps)
        self.step_bias = make.drawn(initializers.step_bias_init, inner)
        rates = np.broadcast_to(np.arange(1, self.state_size + 1), (inner, self.state_size))
        self.log_rate = nnx.Param(jnp.log(jnp.asarray(rates, make.param_dtype)))
        self.skip = make.constant(np.ones(inner))
        self.out = make.out(inner, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        read, gate = jnp.split(self.project(x), 2, -1)
        sums, last = (None, self.convolution.init_state(batch, x.dtype)) if state is None else state
        read, last = convolved(self.convolution, read, last, lengths, segment_ids)
        shared = self.num_kv_heads * self.state_size
        sizes = self.step_rank, self.step_rank + shared
        step, key, query = jnp.split(self.select(read), sizes, -1)
        wide = dtypes.wide(x.dtype)
        step = self.step_projection(step).astype(wide) + lead(self.step_bias[...], 3).astype(wide)

        def of_groups(array):
            features = array.shape[-1] // self.num_kv_heads
            return array.reshape(batch, time, self.num_kv_heads, features)

        rate = -jnp.exp(self.log_rate[...].astype(wide))
        out, sums = selective_scan(
            of_groups(query),
            of_groups(key),
            of_groups(read),
            step_size=of_groups(jax.nn.softplus(step)),
            rate=rate.reshape(self.num_kv_heads, -1, self.state_size),
            skip=self.skip[...].reshape(self.num_kv_heads, -1),
            **self._options(sums, lengths, segment_ids),
        )
        return self.out(out.reshape(gate.shape) * jax.nn.silu(gate)), (sums, last)
