"""Mixer with random feature attention: random vectors, a learned scale and an optional gate."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import dtypes, mesh_axes
from effattn.functional.performer import performer_features
from effattn.nn.attention import SelfAttention


class RandomFeatureSelfAttention(SelfAttention):
    """Mixer with sine and cosine features (Peng et al. 2021, "Random Feature Attention").

        q, k, v = x Wq, x Wk, x Wv
        y = random_feature_attention(q, k, v, projection=sigma * w, gate=sigmoid(x Wg + bg)) Wo

    The random vectors w are drawn from N(0, I) at construction and are not trained: an
    `nnx.Variable`, not an `nnx.Param`. The scale sigma `(K, 1, H)`, initially 1, and the gate are
    trained. The paper redraws w at each training step: call `redraw` between steps.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      num_features: m, number of random vectors per key head; the feature map has 2 m features.
      gated: whether a gate per key head and token decays the state; needs `is_causal=True`.
      rngs: random streams for parameter initialisation. The random vectors are drawn from the
        stream `features` if there is one, otherwise from the default stream.
      **options: all other arguments of `SelfAttention`: `num_kv_heads`, `rotary`, `is_causal`, ...

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
        **options: Any,
    ):
        given = sorted({"projection", "gate"} & options.keys())
        if given:
            raise ValueError(
                f"RandomFeatureSelfAttention has no option {', '.join(given)}; it makes them, as "
                "num_features and gated say"
            )
        super().__init__(in_features, num_heads, "random_features", rngs=rngs, **options)
        if gated and not self.is_causal:
            raise ValueError(
                "gated=True needs is_causal=True: a gate says how the past is forgotten"
            )
        self.num_features = num_features
        self.vectors = nnx.Variable(self._draw(rngs))
        self.sigma = nnx.Param(jnp.ones((self.num_kv_heads, 1, self.head_dim), self.param_dtype))
        self.gate = (
            nnx.Linear(
                in_features,
                self.num_kv_heads,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                rngs=rngs,
            )
            if gated
            else None
        )

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences; arguments as in `SelfAttention`. `rngs` is unused."""
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        heads = self._heads(x, positions)
        return self.out(self.attention(*heads, **keywords, **self._gates(x)))

    def _extend(self, x, state, lengths):
        decoder = self._decoder()
        x, positions, lengths = self._new(x, state, lengths)
        heads = self._heads(x, positions)
        out, state = decoder.extend(*heads, state, lengths, **self._gates(x))
        return self.out(out), state

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

    def _gates(self, x: jax.Array) -> dict[str, jax.Array]:
        return {} if self.gate is None else {"gate": jax.nn.sigmoid(self.gate(x))}

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "projection": self.sigma[...] * self.vectors[...]}
