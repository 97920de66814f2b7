"""The models that experiments compare: equal but for the mechanism."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.nn import TransformerConfig, TransformerLM
from experiments.common import mixers

REFERENCE = "softmax"  # whose number of parameters the others get


def language_model(
    mechanism: str,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    window: int,
    precision: str,
    context: int,
    equal_parameters: bool,
    is_causal: bool,
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
      equal_parameters: make the feed-forward layers wider or narrower where the mechanism's own
        parameters are fewer or more than softmax attention's, so that the models have equally many,
        to within half of those of a hidden feature. If not, the layers are as wide in all models.
      is_causal: whether a token sees those before it alone.

    Raises:
      ValueError: as `experiments.common.mixers.parse`, and for a mechanism with so many parameters
        that no feed-forward layer is left.
    """
    config = TransformerConfig(
        vocab_size=vocab_size,
        num_layers=layers,
        features=width,
        num_heads=heads,
        mixer=mixers.parse(mechanism, layers, heads, window, context, is_causal),
        dtype=precision,
        max_length=context,
        is_causal=is_causal,
    )
    if equal_parameters:
        reference = mixers.parse(REFERENCE, layers, heads, window, context, is_causal)
        needed = count_parameters(dataclasses.replace(config, mixer=reference))
        config = _with_parameters(config, needed, mechanism)
    return lambda rngs: TransformerLM(config, rngs=rngs)


@functools.lru_cache(maxsize=8)
def count_parameters(config: TransformerConfig) -> int:
    """How many numbers the model trains. Nothing is computed."""
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _with_parameters(config: TransformerConfig, needed: int, mechanism: str) -> TransformerConfig:
    """The configuration with as many parameters, by the width of its feed-forward layers."""
    without = count_parameters(dataclasses.replace(config, hidden_features=1))
    each = 3 * config.features * config.num_layers  # of a hidden feature: gate, up and down
    hidden = 1 + round((needed - without) / each)
    if hidden < 1:
        raise ValueError(
            f"the model of {mechanism!r} has {without - each:,} parameters before its feed-forward "
            f"layers, and that of {REFERENCE!r} has {needed:,} in all: give the mechanism options "
            "that make it smaller, or all models the same layers by --no-equal-parameters"
        )
    return dataclasses.replace(config, hidden_features=hidden)


def check(mechanism: str, build: Callable[[nnx.Rngs], TransformerLM], context: int) -> None:
    """Raises the error of a model that cannot be made, or not be called with T tokens."""
    tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)
    check_call(mechanism, lambda tokens: build(nnx.Rngs(0))(tokens), tokens)


def check_call(mechanism: str, call: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> None:
    """Raises the error of a call that cannot be made with this mechanism; nothing is computed."""
    traced = jax.jit(call).trace(*shapes)
    if "implementation" in mechanism:
        # Only then does one that is named find out that it is not for this platform.
        traced.lower()
