"""The models that experiments compare: equal but for the mechanism."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
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
    context: int,
    is_causal: bool = True,
) -> Callable[[nnx.Rngs], TransformerLM]:
    """A function that makes the model with this mechanism.

    Args:
      mechanism: as `experiments.common.mixers` reads it.
      vocab_size: V.
      layers: how many.
      width: D.
      heads: N.
      window: tokens that a windowed mechanism sees, the present one included.
      precision: of the computation; the parameters are float32.
      context: T, for mechanisms with parameters by position.
      is_causal: whether a token sees those before it alone.

    Raises:
      ValueError: as `experiments.common.mixers.parse`.
    """
    config = TransformerConfig(
        vocab_size=vocab_size,
        num_layers=layers,
        features=width,
        num_heads=heads,
        mixer=mixers.parse(mechanism, layers, heads, window, is_causal),
        dtype=precision,
        max_length=context,
        is_causal=is_causal,
    )
    return lambda rngs: TransformerLM(config, rngs=rngs)


def check(build: Callable[[nnx.Rngs], TransformerLM], context: int) -> None:
    """Raises the `ValueError` of a model that cannot be made, or not be called with T tokens.

    Nothing is computed.
    """
    tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)
    jax.eval_shape(lambda tokens: build(nnx.Rngs(0))(tokens), tokens)
