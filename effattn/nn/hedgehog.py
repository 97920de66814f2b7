"""Hedgehog: linear attention with a learned feature map."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn import _checks
from effattn.functional import kernels
from effattn.nn.attention import SelfAttention


class HedgehogFeatureMap(nnx.Module):
    """A learned map for `linear_attention` (Zhang et al. 2024, "The Hedgehog and the Porcupine").

        phi(x) = [softmax(W x), softmax(-W x)]

    which is exp of W x and of -W x, each divided by its sum. W, `(K, F, H)`, starts as the
    identity. Query heads of one key head share its W. The paper trains it so that the weights
    resemble those of a softmax attention; in a model from scratch it is trained with the rest.

    Args:
      num_kv_heads: K.
      head_dim: H.
      num_features: F; there are 2 F features. Default H.
      param_dtype: of W.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        param_dtype: Any = jnp.float32,
    ):
        features = _checks.at_least(
            "num_features", head_dim if num_features is None else num_features, 1
        )
        identity = jnp.eye(features, head_dim, dtype=param_dtype)
        self.kernel = nnx.Param(jnp.broadcast_to(identity, (num_kv_heads, features, head_dim)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Queries or keys `(..., heads, H)` to features `(..., heads, 2 F)`, at least float32."""
        kernel = self.kernel[...]
        dtype = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
        logits = kernels.products(x.astype(dtype), kernel.astype(dtype))
        return jnp.concatenate([jax.nn.softmax(logits, -1), jax.nn.softmax(-logits, -1)], -1)


class HedgehogSelfAttention(SelfAttention):
    """A mixer of linear attention with a learned feature map (`HedgehogFeatureMap`).

        q, k, v = x Wq, x Wk, x Wv;   y = linear_attention(q, k, v, feature_map=phi) Wo

    The features of all tokens are held at once, 2 F numbers a token and head.

    Args:
      in_features: D.
      num_heads: N query heads.
      num_features: F; default the head size.
      rngs: for the initial parameters.
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
        if "feature_map" in options:
            raise ValueError("HedgehogSelfAttention has no option feature_map; it learns its own")
        super().__init__(in_features, num_heads, "linear", rngs=rngs, **options)
        self.feature_map = HedgehogFeatureMap(
            self.num_kv_heads,
            self.head_dim,
            num_features=num_features,
            param_dtype=self.param_dtype,
        )

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "feature_map": self.feature_map}
