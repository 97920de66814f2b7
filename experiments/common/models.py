"""The models that experiments compare: equal but for the mechanism."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from effattn import registry
from effattn.nn import TransformerConfig, TransformerLM


def language_model(
    mechanism: str,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    window: int,
    precision: str,
) -> Callable[[nnx.Rngs], TransformerLM]:
    """A function that makes the decoder with this mechanism in every layer.

    Args:
      mechanism: a registered name.
      vocab_size: V.
      layers: how many.
      width: D.
      heads: N.
      window: tokens that a windowed mechanism sees, the present one included.
      precision: of the computation; the parameters are float32.
    """
    mixer: dict[str, Any] = {"name": mechanism}
    if "local_window_size" in registry.get(mechanism).options:
        mixer["local_window_size"] = (window - 1, 0)
    config = TransformerConfig(
        vocab_size=vocab_size,
        num_layers=layers,
        features=width,
        num_heads=heads,
        mixer=mixer,
        dtype=precision,
    )
    return lambda rngs: TransformerLM(config, rngs=rngs)
