"""Mixer with Kimi delta attention, and the base class of delta rules with feature-wise decays."""

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.arrays.axes import lead
from effattn.arrays.dtypes import widen
from effattn.nn import initializers
from effattn.nn.delta_rule import DeltaRule
from effattn.nn.layers import Layers, Sizes
from effattn.nn.options import SelfAttentionOptions


class DecayingFeatures(DeltaRule):
    """Base of mixers with a delta rule in which every feature of the state has its own decay.

    log alpha = -exp(log_rate) * softplus((x W1) W2 + step_bias)
    y = (sigmoid((x W3) W4 + b) * norm(o)) Wo
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        gate_rank: int | None = None,
        convolution_width: int = 4,
        **options: SelfAttentionOptions,
    ):
        super().__init__(in_features, num_heads, convolution_width=convolution_width, **options)
        make, of_keys = Layers(**options), (self.num_kv_heads, self.head_dim)
        rank = self.value_dim if gate_rank is None else gate_rank
        rank = checks.at_least("gate_rank", rank, 1, "features, or None")

        def projection(heads: Sizes, use_bias: bool) -> nnx.Sequential:
            return nnx.Sequential(
                make.linear(in_features, rank), make.heads(rank, heads, use_bias=use_bias)
            )

        self.decay = projection(of_keys, use_bias=False)
        self.log_rate = make.drawn(initializers.log_rate_init, self.num_kv_heads)
        self.step_bias = make.drawn(initializers.step_bias_init, *of_keys)
        self.gate = projection((num_heads, self.value_dim), use_bias=True)

    def _log_decay(self, x: jax.Array) -> jax.Array:
        """Log decays `(B, T, K, H)`, at least float32."""
        steps = jax.nn.softplus(widen(self.decay(x)) + lead(widen(self.step_bias[...]), 4))
        rate = jnp.exp(widen(self.log_rate[...]))[:, None]
        return -lead(rate, 4) * steps

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.sigmoid(self.gate(x)) * self.norm(out))


class KimiDeltaAttention(DecayingFeatures):
    """Mixer with Kimi delta attention (Kimi Team 2025, "Kimi Linear").

    DeltaNet with a decay of each feature, and a sigmoid output gate, both projected through a few
    features:

        log alpha = -exp(log_rate) * softplus((x W1) W2 + step_bias)
        o = delta_rule_attention(q / |q|, k / |k|, v, beta, log alpha)
        y = (sigmoid((x W3) W4 + b) * norm(o)) Wo

    Args:
      gate_rank: features between W1 and W2, and between W3 and W4; default Hv, as in the paper.
      convolution_width: as in `DeltaNet`.
      allow_negative_eigenvalues: as in `DeltaNet`.
      **options: as in `DeltaNet`.
    """

    _mechanism = "kimi_delta"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        gate_rank: int | None = None,
        convolution_width: int = 4,
        allow_negative_eigenvalues: bool = False,
        **options: SelfAttentionOptions,
    ):
        super().__init__(
            in_features,
            num_heads,
            gate_rank=gate_rank,
            convolution_width=convolution_width,
            **options,
        )
        self.strength = Layers(**options).linear(in_features, self.num_kv_heads)
        self.max_strength = 2 if allow_negative_eigenvalues else 1

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        beta = self.max_strength * jax.nn.sigmoid(widen(self.strength(x)))
        return {"beta": beta, "log_decay": self._log_decay(x)}
