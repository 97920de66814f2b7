"""The models that experiments compare: equal but for the mechanism."""

from collections.abc import Callable

from flax import nnx

from effattn.nn import TransformerConfig, TransformerLM
from experiments.common import mixers


def language_model(
    mechanism: str,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    window: int,
    precision: str,
) -> Callable[[nnx.Rngs], TransformerLM]:
    """A function that makes the decoder with this mechanism.

    Args:
      mechanism: as `experiments.common.mixers` reads it.
      vocab_size: V.
      layers: how many.
      width: D.
      heads: N.
      window: tokens that a windowed mechanism sees, the present one included.
      precision: of the computation; the parameters are float32.
    """
    config = TransformerConfig(
        vocab_size=vocab_size,
        num_layers=layers,
        features=width,
        num_heads=heads,
        mixer=mixers.parse(mechanism, layers, heads, window),
        dtype=precision,
    )
    return lambda rngs: TransformerLM(config, rngs=rngs)
