"""gMLP mixer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.arrays.segments import within
from effattn.functional.gmlp import gated, spatial_gating
from effattn.nn import initializers
from effattn.nn.cached import CachedMixer


class GatedMLP(CachedMixer):
    """gMLP block without the residual (Liu et al. 2021, "Pay Attention to MLPs", section 2).

        z_1, z_2 = gelu(x U);   y = spatial_gating(z_1, layer_norm(z_2), W, b) V

    Initially W is near 0 and b is 1, so tokens hardly mix. Time is O(T^2 F), and W has L^2
    parameters. The decode state caches layer_norm(z_2) of all tokens; a step costs O(S F).

    Args:
      in_features: D, number of features per token.
      max_length: L, number of positions with weights; maximum number of tokens per row.
      hidden_features: 2 F, size of z_1 and z_2 together; default 4 D.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support; in calls,
        more tokens than `max_length`.
    """

    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        hidden_features: int | None = None,
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
            "gmlp",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        hidden = 4 * in_features if hidden_features is None else hidden_features
        if checks.at_least("hidden_features", hidden, 2, "features") % 2:
            raise ValueError(f"hidden_features must be even, z_1 and z_2 alike, got {hidden}")
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.project = nnx.Linear(
            in_features, hidden, use_bias=False, kernel_init=kernel_init, rngs=rngs, **dtypes
        )
        self.norm = nnx.LayerNorm(hidden // 2, rngs=rngs, **dtypes)
        small = nnx.initializers.normal(1e-3 / max_length)
        self.weights = nnx.Param(small(rngs.params(), (max_length, max_length), param_dtype))
        self.bias = nnx.Param(jnp.ones((max_length,), param_dtype))
        out_init = kernel_init if out_kernel_init is None else out_kernel_init
        self.out = nnx.Linear(
            hidden // 2, in_features, use_bias=False, kernel_init=out_init, rngs=rngs, **dtypes
        )

    def _prepare(self, x, positions):
        gate, value = jnp.split(jax.nn.gelu(self.project(x)), 2, -1)
        return self.norm(value), gate

    def _mix_all(self, x, lengths, segment_ids):
        self._check_length("x has", x.shape[1])
        value, gate = self._prepare(x, None)
        y = spatial_gating(
            gate,
            value,
            self.weights[...],
            self.bias[...],
            is_causal=self.is_causal,
            lengths=lengths,
        )
        return self.out(y)

    def _mix_at(self, tokens, own, positions):
        slots = tokens.shape[1]
        weights = jnp.take(self.weights[...], positions, 0, mode="clip")[..., :slots]
        weights = jnp.where(within(positions + 1, slots), weights, 0)
        bias = jnp.take(self.bias[...], positions, 0, mode="clip")
        return self.out(gated(own, tokens, weights, bias))

    def _empty(self, batch, max_length, dtype):
        self._check_length("max_length asks for", max_length)
        return super()._empty(batch, max_length, dtype)

    def _check_length(self, what, length):
        if length > self.max_length:
            raise ValueError(
                f"{what} {length} tokens, and there are weights for {self.max_length} (max_length)"
            )
