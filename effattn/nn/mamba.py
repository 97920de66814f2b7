"""Mamba mixer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.mamba import selective_scan
from effattn.nn import initializers
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.short_convolution import ShortConvolution


class Mamba(RecurrentMixer):
    """Mixer with a selective state space (Gu and Dao 2023, "Mamba", section 3.4).

        x, z = u W_in;   x = silu(convolution(x))
        d, B, C = x W_x;   dt = softplus(d W_dt + b)
        y = (selective_scan(C, B, x, dt, A, D) * silu(z)) W_out,   A = -exp(log_rate)

    Each inner feature has a state and a step size dt. In the paper all inner features share one B
    and one C; here `num_kv_heads` groups of features may have one B and C each, as in Mamba-2. The
    parameters `log_rate`, `step_bias` and `skip` are log(-A), b and D.

    Args:
      in_features: D, number of features per token u.
      num_heads: N; only sets the number of inner features, N times `head_dim`.
      head_dim: default 2 D / N, which gives 2 D inner features.
      state_size: F, state size, the size of B and C.
      step_rank: size of d; default D / 16, rounded up.
      num_kv_heads: K, number of B and C groups, a divisor of the inner features; default 1.
      convolution_width: width of the short convolution, in tokens.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      chunk_size: see `effattn.selective_scan`.
      implementation: see `effattn.selective_scan`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

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
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        implementation: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            "mamba",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        checks.at_least("num_heads", num_heads, 1, "heads")
        if head_dim is None:
            if 2 * in_features % num_heads:
                raise ValueError(
                    f"twice in_features ({2 * in_features}) must be a multiple of num_heads "
                    f"({num_heads}) when head_dim is not given"
                )
            head_dim = 2 * in_features // num_heads
        inner = num_heads * checks.at_least("head_dim", head_dim, 1, "features")
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
        self.chunk_size = chunk_size
        self.implementation = implementation
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}

        def linear(features_in, features_out, init):
            return nnx.Linear(
                features_in, features_out, use_bias=False, kernel_init=init, rngs=rngs, **dtypes
            )

        self.project = linear(in_features, 2 * inner, kernel_init)
        self.convolution = ShortConvolution(
            inner, convolution_width, use_bias=True, rngs=rngs, **dtypes
        )
        shared = self.num_kv_heads * self.state_size
        self.select = linear(inner, self.step_rank + 2 * shared, kernel_init)
        # Uniform in +-rank^-1/2, as in the paper's code: initially dt is close to softplus(b).
        of_steps = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.step_projection = linear(self.step_rank, inner, of_steps)
        self.step_bias = nnx.Param(
            initializers.step_bias_init(rngs.params(), (inner,), param_dtype)
        )
        rates = np.broadcast_to(np.arange(1, self.state_size + 1), (inner, self.state_size))
        self.log_rate = nnx.Param(jnp.log(jnp.asarray(rates, param_dtype)))
        self.skip = nnx.Param(jnp.ones(inner, param_dtype))
        self.out = linear(
            inner, in_features, kernel_init if out_kernel_init is None else out_kernel_init
        )

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        read, gate = jnp.split(self.project(x), 2, -1)
        sums, last = (None, self.convolution.init_state(batch, x.dtype)) if state is None else state
        if segment_ids is None:
            read, last = self.convolution.extend(read, last, lengths)
        else:
            read = self.convolution(read, lengths=lengths, segment_ids=segment_ids)
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
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            segment_ids=segment_ids,
            initial_state=sums,
            return_state=True,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        return self.out(out.reshape(gate.shape) * jax.nn.silu(gate)), (sums, last)
