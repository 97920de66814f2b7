"""Mixer with random feature attention: random vectors, a learned scale and an optional gate."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import dtypes
from effattn.functional.performer import performer_features
from effattn.nn import initializers
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class RandomFeatureSelfAttention(SelfAttention):
    """Mixer with sine and cosine features (Peng et al. 2021, "Random Feature Attention").

        q, k, v = x Wq, x Wk, x Wv
        y = random_feature_attention(q, k, v, projection=sigma * w, gate=sigmoid(x Wg + bg)) Wo

    The random vectors w are drawn from N(0, I) at construction and are not trained: an
    `nnx.Variable`, not an `nnx.Param`. The scale sigma `(K, 1, H)`, initially 1, and the gate are
    trained. The paper redraws w at each training step: call `redraw` between steps.

    Args:
      num_features: m, number of random vectors per key head; the feature map has 2 m features.
      gated: whether a gate per key head and token decays the state; needs `is_causal=True`.
      rngs: random streams for parameter initialisation. The random vectors are drawn from the
        stream `features` if there is one, otherwise from the default stream.
      **options: as in `SelfAttention`.

    Raises:
      ValueError: as `SelfAttention`; a gate in a bidirectional mixer.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_features: int = 64,
        gated: bool = False,
        rngs: nnx.Rngs,
        **options: SelfAttentionOptions,
    ):
        advice = "it makes the projection and the gate from num_features and gated"
        refuse(type(self), options, ("projection", "gate"), advice)
        super().__init__(in_features, num_heads, "random_features", rngs=rngs, **options)
        if gated and not self.is_causal:
            raise ValueError("gated=True needs is_causal=True, as gates decay earlier tokens")
        self.num_features = num_features
        self.vectors = nnx.Variable(self._draw(rngs))
        make = Layers(**{**options, "rngs": rngs, "kernel_init": initializers.kernel_init})
        self.sigma = make.constant(jnp.ones((self.num_kv_heads, 1, self.head_dim)))
        self.gate = make.linear(in_features, self.num_kv_heads, use_bias=True) if gated else None

    def redraw(self, rngs: nnx.Rngs) -> None:
        """Draws new random vectors; earlier decode states become invalid."""
        self.vectors[...] = self._draw(rngs)

    def _draw(self, rngs: nnx.Rngs) -> jax.Array:
        return performer_features(
            rngs.features(),
            self.num_features,
            self.head_dim,
            num_heads=self.num_kv_heads,
            orthogonal=False,
            dtype=dtypes.wide(self.param_dtype),
        )

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {} if self.gate is None else {"gate": jax.nn.sigmoid(self.gate(x))}

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "projection": self.sigma[...] * self.vectors[...]}
