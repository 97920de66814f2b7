"""Mixer with the linear attention of Based."""

from effattn.arrays import checks
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class BasedSelfAttention(SelfAttention):
    """Mixer with a second-order Taylor feature map (Arora et al. 2024, "Simple linear ...").

        q, k, v = x Wq, x Wk, x Wv;   y = based_attention(q, k, v) Wo

    Queries and keys have the dimension `feature_dim`, values `head_dim`. A Based model alternates
    such layers with small sliding windows (and, in the paper, gated convolutions), for example

        TransformerConfig(..., mixer=["based", {"name": "sliding_window",
                                                "local_window_size": (63, 0)}] * 6)

    Args:
      feature_dim: F', dimension of queries and keys; the state is about F'^2 / 2 by `head_dim`.
      **options: as in `SelfAttention`, and `scale`; values have the dimension `head_dim`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        feature_dim: int = 16,
        **options: SelfAttentionOptions,
    ):
        super().__init__(in_features, num_heads, "based", **options)
        self.feature_dim = checks.at_least("feature_dim", feature_dim, 1)
        if self.rotary is not None and feature_dim % 2:
            raise ValueError(f"rotary needs an even feature_dim, got {feature_dim}")
        make, bias = Layers(**options), {"use_bias": options.get("use_bias", False)}
        self.query = make.heads(in_features, (self.num_heads, feature_dim), **bias)
        self.key = make.heads(in_features, (self.num_kv_heads, feature_dim), **bias)
        if self.query_norm is not None:
            self.query_norm, self.key_norm = (make.rms_norm(feature_dim) for _ in range(2))

    def _cached_sizes(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.feature_dim, self.value_dim
