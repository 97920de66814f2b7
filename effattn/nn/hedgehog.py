"""Self-attention of Hedgehog, with learned feature maps."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import refuse
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

_OWN = ("key_projection", "query_projection")


class HedgehogSelfAttention(SelfAttention):
    """Mixer with learned feature maps (Zhang et al. 2024, "The Hedgehog & the Porcupine").

        q, k, v = x Wq, x Wk, x Wv
        y = hedgehog_attention(q, k, v, query_projection=W, key_projection=W') Wo

    W and W', `(K, F, H)`, start as the identity. To convert a softmax attention, the paper first
    trains only W and W', so that the attention weights approach the softmax weights. A model
    trained from scratch trains W and W' with all other parameters.

    Args:
      num_features: F; the feature map has 2 F features. Default H.
      **options: as in `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_features: int | None = None,
        **options: SelfAttentionOptions,
    ):
        refuse(type(self), options, _OWN, "it learns the projections, of num_features features")
        super().__init__(in_features, num_heads, "hedgehog", **options)
        features = checks.at_least(
            "num_features", self.head_dim if num_features is None else num_features, 1
        )
        identity = jnp.eye(features, self.head_dim, dtype=self.param_dtype)
        identity = jnp.broadcast_to(identity, (self.num_kv_heads, *identity.shape))
        self.query_projection = nnx.Param(identity)
        self.key_projection = nnx.Param(identity)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), **{name: getattr(self, name)[...] for name in _OWN}}
