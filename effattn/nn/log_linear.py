"""Mixer with log-linear attention."""

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.arrays.axes import lead
from effattn.arrays.dtypes import widen
from effattn.nn import initializers
from effattn.nn.attention import refuse
from effattn.nn.gated_output import GatedOutput
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class LogLinearAttention(GatedOutput):
    """Mixer with log-linear attention (Guo et al. 2025, "Log-Linear Attention").

        q, k, v = x Wq, x Wk, x Wv;   log alpha = -exp(log_rate) * softplus(x Wa + step_bias)
        lambda = softplus(x Wl + level_bias)
        y = (silu(x Wg) * norm(log_linear_attention(q, k, v, log alpha, lambda))) Wo

    The decays are those of Mamba-2. All levels start with weights near 1, which is linear attention
    with decays. `norm` is an RMS norm of each head with a learned scale.

    Args:
      num_levels: L, number of levels, at least 2. Tokens that are 2^(L - 2) tokens or more away
        may share the last level.
      **options: as in `SelfAttention` (`use_bias` is also for Wg), and options of
        `effattn.log_linear_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_levels: int = 16,
        **options: SelfAttentionOptions,
    ):
        advice = "it computes decays and levels from the tokens"
        refuse(type(self), options, ("log_decay", "levels"), advice)
        super().__init__(in_features, num_heads, "log_linear", **options)
        self.num_levels = checks.at_least("num_levels", num_levels, 2, "levels")
        make, of_keys = Layers(**options), self.num_kv_heads
        self.step_size = make.linear(in_features, of_keys)
        self.log_rate = make.drawn(initializers.log_rate_init, of_keys)
        self.step_bias = make.drawn(initializers.step_bias_init, of_keys)
        of_levels = num_heads, self.num_levels
        self.level = make.heads(in_features, of_levels)
        self.level_bias = make.constant(np.full(of_levels, np.log(np.e - 1)))
        sizes = num_heads, self.value_dim
        self.gate = make.heads(in_features, sizes, use_bias=options.get("use_bias", False))
        self.norm = make.rms_norm(self.value_dim)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        steps = jax.nn.softplus(widen(self.step_size(x)) + lead(widen(self.step_bias[...]), 3))
        levels = widen(self.level(x)) + lead(widen(self.level_bias[...]), 4)
        log_decay = -jnp.exp(lead(widen(self.log_rate[...]), 3)) * steps
        return {"log_decay": log_decay, "levels": jax.nn.softplus(levels)}
