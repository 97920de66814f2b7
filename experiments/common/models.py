"""Language models of the experiments, equal except for the mechanism."""

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

REFERENCE = "softmax"  # all models get as many parameters as the model of this mechanism


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
    """Returns a function that builds the model with this mechanism.

    Args:
      mechanism: text for `experiments.common.mixers.parse`.
      vocab_size: V.
      layers: number of layers.
      width: D.
      heads: N.
      window: tokens in the window of a windowed mechanism, the present token included.
      precision: computation dtype; parameters are float32.
      context: T, for mechanisms with parameters by position.
      equal_parameters: adapt the width of the feed-forward layers so that all models have the same
        number of parameters, to within half of the parameters of one hidden feature.
      is_causal: whether the model is causal.

    Raises:
      ValueError: as in `experiments.common.mixers.parse`, or the mechanism has so many parameters
        that none are left for the feed-forward layers.
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
    """Returns the number of trained parameters, without building the model."""
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _with_parameters(config: TransformerConfig, needed: int, mechanism: str) -> TransformerConfig:
    """Returns the configuration with `needed` parameters, by the feed-forward layers' width."""
    without = count_parameters(dataclasses.replace(config, hidden_features=1))
    each = 3 * config.features * config.num_layers  # parameters per hidden feature: gate, up, down
    hidden = 1 + round((needed - without) / each)
    if hidden < 1:
        raise ValueError(
            f"the model of {mechanism!r} has {without - each:,} parameters without feed-forward "
            f"layers, too many to equal the {needed:,} of the model of {REFERENCE!r}; give the "
            "mechanism options that make it smaller, or pass --no-equal-parameters"
        )
    return dataclasses.replace(config, hidden_features=hidden)


def check(mechanism: str, build: Callable[[nnx.Rngs], TransformerLM], context: int) -> None:
    """Raises the error of building the model, or of calling the model with T tokens."""
    tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)
    check_call(mechanism, lambda tokens: build(nnx.Rngs(0))(tokens), tokens)


def check_call(mechanism: str, call: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> None:
    """Raises the error of a call with this mechanism, without computing the call."""
    traced = jax.jit(call).trace(*shapes)
    if "implementation" in mechanism:
        # A named implementation checks the platform when the call is lowered.
        traced.lower()
