"""Long-short self-attention module, with the slot projection and the two layer norms."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.nn.attention import SelfAttention


class LongShortSelfAttention(SelfAttention):
    """Mixer with a window and dynamic projections (Zhu et al. 2021, "Long-Short Transformer").

        q, k, v, z = x Wq, x Wk, x Wv, x Wp;   y = long_short_attention(q, k, v, slot_scores=z) Wo

    z has r = `num_projected` scores per token and key head. DualLN of the paper is one layer norm
    for keys and values in windows, and one for keys and values in slots, here over the features of
    each head. For the formula and the cost see `effattn.long_short_attention`. `rotary` is applied
    to keys before the norms.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      num_projected: r, number of slots per sequence, or per segment in a causal mixer.
      dual_norm: whether the two layer norms are present.
      param_dtype: dtype of the parameters.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`is_causal`, `num_kv_heads`, ...) and
        options of `effattn.long_short_attention`: `window_size`, default 64, and `segment_size`.

    Raises:
      ValueError: as `SelfAttention`; also for inconsistent sizes.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_projected: int = 8,
        dual_norm: bool = True,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        made = {"projection", "slot_scores", "window_norm", "slot_norm"}
        given = sorted(made & options.keys())
        if given:
            raise ValueError(
                f"LongShortSelfAttention has no option {', '.join(given)}; it makes them, as "
                "num_projected and dual_norm say"
            )
        super().__init__(
            in_features, num_heads, "long_short", param_dtype=param_dtype, rngs=rngs, **options
        )
        self.num_projected = checks.at_least("num_projected", num_projected, 1, "slots")
        # No bias: the softmax over tokens cancels a constant added to all scores.
        self.projection = nnx.LinearGeneral(
            in_features,
            (self.num_kv_heads, self.num_projected),
            use_bias=False,
            dtype=self.dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        shape = (self.num_kv_heads, self.head_dim)

        def norm() -> nnx.Dict | None:
            if not dual_norm:
                return None
            scale, bias = jnp.ones(shape, param_dtype), jnp.zeros(shape, param_dtype)
            return nnx.Dict({"scale": nnx.Param(scale), "bias": nnx.Param(bias)})

        self.window_norm = norm()
        self.slot_norm = norm()

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences; arguments as in `SelfAttention`."""
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        keywords["slot_scores"] = self.projection(x)
        heads = self._heads(x, positions)
        return self.out(self.attention(*heads, **keywords, **self._dropout(rngs)))

    def _extend(self, x, state, lengths):
        decoder = self._decoder()
        x, positions, lengths = self._new(x, state, lengths)
        heads = self._heads(x, positions)
        out, state = decoder.extend(*heads, state, lengths, slot_scores=self.projection(x))
        return self.out(out), state

    def _options(self) -> dict[str, Any]:
        norms = {
            name: (norm["scale"][...], norm["bias"][...])
            for name, norm in (("window_norm", self.window_norm), ("slot_norm", self.slot_norm))
            if norm is not None
        }
        return {**super()._options(), **norms}

    def _decoder(self) -> Any:
        decoder = super()._decoder()
        options = {**decoder.options, "num_slots": self.num_projected}
        return type(decoder)(decoder.function, options)
