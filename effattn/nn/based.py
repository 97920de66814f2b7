"""Mixer with the linear attention of Based."""

import functools
from typing import Any

from flax import nnx

from effattn.arrays import checks
from effattn.decode.state import check_init
from effattn.nn import initializers
from effattn.nn.attention import SelfAttention


class BasedSelfAttention(SelfAttention):
    """Mixer with a second-order Taylor feature map (Arora et al. 2024, "Simple linear ...").

        q, k, v = x Wq, x Wk, x Wv;   y = based_attention(q, k, v) Wo

    Queries and keys have the dimension `feature_dim`, values `head_dim`. A Based model alternates
    such layers with small sliding windows (and, in the paper, gated convolutions), for example

        TransformerConfig(..., mixer=["based", {"name": "sliding_window",
                                                "local_window_size": (63, 0)}] * 6)

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      feature_dim: F', dimension of queries and keys; the state is about F'^2 / 2 by `head_dim`.
      use_bias: whether the projections to and from heads have biases.
      kernel_init: initializer of the projections.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `rotary`, `head_dim`, ...)
        and `scale`.

    Raises:
      ValueError: as `SelfAttention`; also for `feature_dim` below 1, or odd with `rotary`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        feature_dim: int = 16,
        use_bias: bool = False,
        kernel_init: Any = initializers.kernel_init,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(
            in_features,
            num_heads,
            "based",
            use_bias=use_bias,
            kernel_init=kernel_init,
            rngs=rngs,
            **options,
        )
        self.feature_dim = checks.at_least("feature_dim", feature_dim, 1)
        if self.rotary is not None and feature_dim % 2:
            raise ValueError(f"rotary embedding needs an even feature_dim, got {feature_dim}")
        project = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            kernel_init=kernel_init,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )
        self.query = project(in_features, (self.num_heads, feature_dim))
        self.key = project(in_features, (self.num_kv_heads, feature_dim))
        if self.query_norm is not None:
            norm = functools.partial(
                nnx.RMSNorm, feature_dim, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs
            )
            self.query_norm, self.key_norm = norm(), norm()

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> Any:
        """Returns the empty decode state; arguments as in `SelfAttention.init_state`."""
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        dtype = check_init(batch, max_length, dtype)
        sizes = self.num_kv_heads, self.feature_dim, self.value_dim
        return self._decoder().init(batch, max_length, *sizes, dtype)
