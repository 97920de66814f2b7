"""Self-attention of Hedgehog, with learned feature maps."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import SelfAttention


class HedgehogSelfAttention(SelfAttention):
    """Mixer with learned feature maps (Zhang et al. 2024, "The Hedgehog & the Porcupine").

        q, k, v = x Wq, x Wk, x Wv
        y = hedgehog_attention(q, k, v, query_projection=W, key_projection=W') Wo

    W and W', `(K, F, H)`, start as the identity. To convert a softmax attention, the paper first
    trains only W and W', so that the attention weights approach the softmax weights. A model
    trained from scratch trains W and W' with all other parameters.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      num_features: F; the feature map has 2 F features. Default H.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `rotary`, ...).

    Raises:
      ValueError: as `SelfAttention`, and for `num_features` below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_features: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        given = sorted({"query_projection", "key_projection"} & options.keys())
        if given:
            raise ValueError(
                f"HedgehogSelfAttention has no option {', '.join(given)}; it learns its own, of "
                "num_features"
            )
        super().__init__(in_features, num_heads, "hedgehog", rngs=rngs, **options)
        features = checks.at_least(
            "num_features", self.head_dim if num_features is None else num_features, 1
        )
        identity = jnp.eye(features, self.head_dim, dtype=self.param_dtype)
        identity = jnp.broadcast_to(identity, (self.num_kv_heads, *identity.shape))
        self.query_projection = nnx.Param(identity)
        self.key_projection = nnx.Param(identity)

    def _options(self) -> dict[str, Any]:
        projections = {
            "query_projection": self.query_projection[...],
            "key_projection": self.key_projection[...],
        }
        return {**super()._options(), **projections}
