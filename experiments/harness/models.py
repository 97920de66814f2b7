"""Models of the experiments, equal except for the mechanism."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.nn import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Experts,
    RoutingStats,
    TransformerConfig,
    TransformerLM,
)
from experiments.harness import mechanisms
from experiments.harness.classifier import Classifier, Convolutional
from experiments.harness.naming import REFERENCE, options_of
from experiments.harness.options import Options
from experiments.tasks.task import Task

CONVOLUTIONAL = "convolutional_classifier"  # Kim 2014, a whole classifier

Build = Callable[[nnx.Rngs], nnx.Module]


def builder(mechanism: str, options: Options, task: Task) -> Build:
    """Returns a function that builds the model with this mechanism.

    Args:
      mechanism: text for `experiments.harness.mechanisms.parse`.
      options: sizes of the model.
      task: task, which names the kind of model. In a translator, `options.side` has the mechanism.

    With `equal_parameters`, the width of the feed-forward layers gives all models the same number
    of parameters, to within half of the parameters of one hidden feature.

    Raises:
      ValueError: as in `experiments.harness.mechanisms.parse`, or the mechanism has so many
        parameters that none are left for the feed-forward layers.
    """

    def of(mechanism: str, hidden: int | None = None) -> Build:
        return _KINDS[task.model](mechanism, options, task, hidden)

    if not options.equal_parameters:
        return of(mechanism)
    needed = count_parameters(of(REFERENCE))
    least, more = (count_parameters(of(mechanism, hidden)) for hidden in (1, 2))
    hidden = 1 + round((needed - least) / (more - least))
    if hidden < 1:
        raise ValueError(
            f"the model of {mechanism!r} has {2 * least - more:,} parameters without feed-forward "
            f"layers, too many to equal the {needed:,} of the model of {REFERENCE!r}; give the "
            "mechanism options that make it smaller, or pass --no-equal-parameters"
        )
    return of(mechanism, hidden)


def count_parameters(build: Build) -> int:
    """Returns the number of trained parameters, without building the model."""
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def check_call(mechanism: str, build: Build, task: Task, thorough: bool = False) -> None:
    """Raises the error of building the model, or of calling it with a batch of the task.

    Args:
      mechanism: text that names the mechanism.
      build: builds the model.
      task: task of the model.
      thorough: also take gradients, and call with batches of all held-out sets: of a mechanism of
        the user's own, no test has shown that it has gradients, or that it takes all lengths.
    """

    def call(*inputs: jax.Array) -> Any:
        model = build(nnx.Rngs(0))
        return nnx.grad(lambda model: model(*inputs).sum())(model) if thorough else model(*inputs)

    validation, *others = task.held_out().values()
    for batch in (validation, *others) if thorough else (validation,):
        shapes = [jax.ShapeDtypeStruct((1, *x.shape[1:]), jnp.int32) for x in batch.inputs]
        traced = jax.jit(call).trace(*shapes)
        if "implementation" in mechanism:
            # A named implementation checks the platform when the call is lowered.
            traced.lower()


def _config(
    mechanism: str, options: Options, task: Task, hidden: int | None, is_causal: bool
) -> TransformerConfig:

    def parse(text: str, layers: int) -> tuple[Any, ...]:
        sizes = (layers, options.heads, options.window, task.trained_length)
        return mechanisms.parse(text, *sizes, is_causal=is_causal, longest=task.length)

    mixer = parse(mechanism, options.layers)
    if options.first_layer:
        mixer = (*parse(options.first_layer, 1), *mixer[1:])
    experts = None
    if options.experts:
        experts = Experts(
            options.experts,
            options.experts_per_token,
            options.expert_capacity,
            options.shared_experts,
        )
    return TransformerConfig(
        vocab_size=max(task.vocab_size, task.num_classes),
        num_layers=options.layers,
        features=options.width,
        num_heads=options.heads,
        num_kv_heads=options.key_heads,
        mixer=mixer,
        hidden_features=hidden,
        positions=options.positions,
        norm=options.norm,
        feed_forward=options.feed_forward,
        experts=experts,
        dtype=options.precision,
        max_length=task.length,
        remat=options.remat,
        is_causal=is_causal,
    )


def _language_model(mechanism: str, options: Options, task: Task, hidden: int | None) -> Build:
    config = _config(mechanism, options, task, hidden, task.is_causal)
    return lambda rngs: TransformerLM(config, rngs=rngs)


def _classifier(mechanism: str, options: Options, task: Task, hidden: int | None) -> Build:
    if mechanism.partition(",")[0] == CONVOLUTIONAL:
        _, own = options_of(mechanism)
        sizes = {"features": options.width, "filters": hidden or options.width} | own
        vocab_size = max(task.vocab_size, task.num_classes)
        return lambda rngs: Convolutional(
            vocab_size, task.num_classes, **sizes, dtype=options.precision, rngs=rngs
        )
    config = _config(mechanism, options, task, hidden, task.is_causal)
    return lambda rngs: Classifier(config, task.num_classes, rngs=rngs)


def _translator(mechanism: str, options: Options, task: Task, hidden: int | None) -> Build:
    sides = {**options.sides(), options.side: mechanism}  # type: ignore[attr-defined]
    encoder = _config(sides["encoder"], options, task, hidden, is_causal=False)
    decoder = _config(sides["decoder"], options, task, hidden, is_causal=True)
    sizes = (1, options.heads, options.window, task.length)
    (cross,) = mechanisms.parse(sides["cross_attention"], *sizes, is_causal=False)
    config = EncoderDecoderConfig(encoder=encoder, decoder=decoder, cross_attention=cross)
    return lambda rngs: Translator(config, rngs=rngs)


class Translator(EncoderDecoder):
    """Encoder-decoder that is called with the inputs of a task."""

    def __call__(  # type: ignore[override]
        self,
        source: jax.Array,
        target: jax.Array,
        source_lengths: jax.Array,
        target_lengths: jax.Array,
    ) -> jax.Array:
        return self.with_routing(source, target, source_lengths, target_lengths)[0]

    def with_routing(  # type: ignore[override]
        self,
        source: jax.Array,
        target: jax.Array,
        source_lengths: jax.Array,
        target_lengths: jax.Array,
    ) -> tuple[jax.Array, tuple[RoutingStats, ...]]:
        """Returns logits and statistics as `EncoderDecoder.with_routing`."""
        return super().with_routing(
            source, target, source_lengths=source_lengths, target_lengths=target_lengths
        )

    def update_centroids(
        self,
        source: jax.Array,
        target: jax.Array,
        source_lengths: jax.Array,
        target_lengths: jax.Array,
    ) -> None:
        """Updates the encoder's centroids; those of the decoder stay as they were drawn."""
        self.encoder.update_centroids(source, lengths=source_lengths)


_KINDS: dict[str, Callable[[str, Options, Task, int | None], Any]] = {
    "language_model": _language_model,
    "classifier": _classifier,
    "translator": _translator,
}
