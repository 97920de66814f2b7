"""Mamba-2 mixer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.mamba2 import state_space_duality
from effattn.nn import initializers
from effattn.nn.heads import key_heads
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.short_convolution import ShortConvolution


class Mamba2(RecurrentMixer):
    """Mixer with selective state spaces (Dao and Gu 2024, "Transformers are SSMs").

        z, x, B, C, dt = u W_in;   x, B, C = silu(convolution(x, B, C))
        o = state_space_duality(C, B, x, softplus(dt + b), A, D),   A = -exp(log_rate)
        y = norm(o * silu(z)) W_out

    `norm` is an RMS norm over the features of each group of heads, with a learned scale. The
    parameters `log_rate`, `step_bias` and `skip` are log(-A), b and D.

    Args:
      in_features: D, number of features per token u.
      num_heads: N, number of heads of x; each head has one A.
      head_dim: P, head dimension; default 2 D / N, which gives x 2 D features.
      state_size: F, state size, the size of B and C.
      num_kv_heads: number of B and C groups; N / num_kv_heads heads share a group. Default 1.
      convolution_width: width of the short convolution, in tokens.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      chunk_size: see `effattn.state_space_duality`.
      implementation: see `effattn.state_space_duality`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        state_size: int = 64,
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
            "mamba2",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.num_heads = checks.at_least("num_heads", num_heads, 1, "heads")
        if head_dim is None:
            if 2 * in_features % num_heads:
                raise ValueError(
                    f"twice in_features ({2 * in_features}) must be a multiple of num_heads "
                    f"({num_heads}) when head_dim is not given"
                )
            head_dim = 2 * in_features // num_heads
        self.num_kv_heads = key_heads(num_heads, 1 if num_kv_heads is None else num_kv_heads)
        self.head_dim = checks.at_least("head_dim", head_dim, 1, "features")
        self.state_size = checks.at_least("state_size", state_size, 1, "features")
        self.chunk_size = chunk_size
        self.implementation = implementation
        inner, shared = num_heads * self.head_dim, self.num_kv_heads * self.state_size
        self.sizes = (inner, inner, shared, shared, num_heads)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.project = nnx.Linear(
            in_features,
            sum(self.sizes),
            use_bias=False,
            kernel_init=kernel_init,
            rngs=rngs,
            **dtypes,
        )
        self.convolution = ShortConvolution(
            inner + 2 * shared, convolution_width, use_bias=True, rngs=rngs, **dtypes
        )
        shape = (num_heads,)
        self.log_rate = nnx.Param(initializers.log_rate_init(rngs.params(), shape, param_dtype))
        self.step_bias = nnx.Param(initializers.step_bias_init(rngs.params(), shape, param_dtype))
        self.skip = nnx.Param(jnp.ones(num_heads, param_dtype))
        self.norm = nnx.RMSNorm(
            inner // self.num_kv_heads, epsilon=1e-5, use_scale=False, rngs=rngs, **dtypes
        )
        self.norm_scale = nnx.Param(jnp.ones(inner, param_dtype))
        self.out = nnx.Linear(
            inner,
            in_features,
            use_bias=False,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            rngs=rngs,
            **dtypes,
        )

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        inner, _, shared, _, heads = self.sizes
        gate, read, steps = jnp.split(self.project(x), [inner, 2 * inner + 2 * shared], -1)
        sums, last = (None, self.convolution.init_state(batch, x.dtype)) if state is None else state
        if segment_ids is None:
            read, last = self.convolution.extend(read, last, lengths)
        else:
            read = self.convolution(read, lengths=lengths, segment_ids=segment_ids)
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
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            segment_ids=segment_ids,
            initial_state=sums,
            return_state=True,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        out = out.reshape(batch, time, inner) * jax.nn.silu(gate)
        of_norm = self.num_kv_heads, inner // self.num_kv_heads
        out = self.norm(out.reshape(batch, time, *of_norm)).reshape(out.shape)
        return self.out(out * lead(self.norm_scale[...], 3).astype(out.dtype)), (sums, last)
