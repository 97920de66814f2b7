"""Sizes of language models from the literature."""

from collections.abc import Mapping
from types import MappingProxyType

from effattn.nn import TransformerConfig


def _gpt(layers: int, features: int, heads: int) -> TransformerConfig:
    # Brown et al. 2020, table 2.1: feed-forward layers of 4 D, tied embeddings. Positions are
    # rotary, not learned, so that any context can be planned.
    return TransformerConfig(
        vocab_size=50257,
        num_layers=layers,
        features=features,
        num_heads=heads,
        feed_forward="gelu",
        norm="layer",
    )


def _llama(
    layers: int, features: int, heads: int, key_heads: int, hidden: int
) -> TransformerConfig:
    # Touvron et al. 2023, Llama 2.
    return TransformerConfig(
        vocab_size=32000,
        num_layers=layers,
        features=features,
        num_heads=heads,
        num_kv_heads=key_heads,
        hidden_features=hidden,
        tie_embeddings=False,
    )


MODELS: Mapping[str, TransformerConfig] = MappingProxyType(
    {
        "1.3B": _gpt(24, 2048, 16),  # the paper states 24 heads of 128, which are not 2048 features
        "7B": _llama(32, 4096, 32, 32, 11008),
        "70B": _llama(80, 8192, 64, 8, 28672),
        "175B": _gpt(96, 12288, 96),
    }
)
