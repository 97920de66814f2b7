"""Compiled programs of converted models, which start from trained originals."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.parallel.mixers import divided
from experiments.harness.models import Build
from experiments.harness.programs import Params, Programs
from experiments.tasks.task import NOTHING, Batch, Scores

# `(original, rngs) -> converted`
Convert = Callable[[Any, nnx.Rngs], Any]


class FineTuning(Programs):
    """Programs of a converted model, which starts from the trained original of its seed.

    Args:
      build: builds the original, a `TransformerLM`.
      convert: converts the original.
      trained: parameters of the original after training, by seed.
      *options: arguments of `Programs` after the first.
    """

    def __init__(
        self, build: Build, convert: Convert, trained: Mapping[int, Params], *options: Any
    ):
        self._original = Programs(build, *options)
        super().__init__(lambda rngs: convert(build(rngs), rngs), *options)
        self._convert, self._trained, self._options = convert, trained, options
        self.init = self._start  # type: ignore[assignment]

    def _start(self, seed: int) -> tuple[Params, Any]:
        original, convert = self._original.model(self._trained[seed]), self._converter(seed)
        return Programs(lambda rngs: convert(original, rngs), *self._options).init(seed)

    def _converter(self, seed: int) -> Convert:
        """The conversion of the original of a seed."""
        return self._convert


class Distillation(FineTuning):
    """Programs of a converted model that learns from its original.

    The loss of the first steps is the mean squared error between the outputs of each converted
    mixer and of the original mixer, both on the original's input of that mixer. Only parameters of
    mixers change in these steps. The loss of later steps is the Kullback-Leibler divergence of the
    converted model's prediction from that of the original. `evaluate` measures predictions of the
    targets.

    `params` also holds the parameters of the original and the number of steps taken.

    Args:
      transfer: number of steps on outputs of mixers.
      *arguments: the arguments of `FineTuning`.
    """

    def __init__(self, transfer: int, *arguments: Any):
        super().__init__(*arguments)
        self._transfer = transfer

    def _with_further(self, shardings: tuple[Any, Any]) -> tuple[Any, Any]:
        of_params, of_state = shardings
        if of_params is None:
            return shardings
        further = {"original": self._original.shardings, "step": self.devices.everywhere()}
        return of_params | further, of_state

    def _start(self, seed: int) -> tuple[Params, Any]:
        params, state = super()._start(seed)
        # A training step reuses the memory of its arguments.
        own = jax.tree.map(jnp.array, self._trained[seed])
        step = jax.device_put(jnp.int32(0), self.devices.everywhere())
        return {**params, "original": own, "step": step}, state

    def one_step(self, params: Params, state: Any, learning_rate: jax.Array, batch: Batch) -> Any:
        updated, state, loss = super().one_step(params, state, learning_rate, batch)
        transfers = params["step"] < self._transfer

        def trained(path: tuple[Any, ...], new: jax.Array, old: jax.Array) -> jax.Array:
            # Weight decay would also change parameters without a gradient.
            of_mixer = jax.tree_util.DictKey("mixer") in path
            return new if of_mixer else jnp.where(transfers, old, new)

        updated["trained"] = jax.tree_util.tree_map_with_path(
            trained, updated["trained"], params["trained"]
        )
        return {**updated, "step": params["step"] + 1}, state, loss

    def _scores(self, params: Params, batch: Batch) -> tuple[Scores, Any]:
        """Returns the losses of the present step in place of those of the targets.

        The further losses of experts are added where the losses are those of logits.
        """
        converted, original = self.model(params), self._original.model(params["original"])
        # Without gradients, nothing is recomputed.
        original.config = dataclasses.replace(original.config, remat=False)
        seen: list[tuple[jax.Array, jax.Array]] = []
        for block in original.blocks:
            block.mixer = _recording(block.mixer, seen)
        logits = original(*batch.inputs)

        def of_outputs() -> tuple[jax.Array, jax.Array]:
            errors = [
                jnp.square(divided(block.mixer, x)(x).astype(jnp.float32) - y).mean(-1)
                for block, (x, y) in zip(converted.blocks, seen, strict=True)
            ]
            return jnp.stack(errors).mean(0), jnp.zeros(())

        def of_logits() -> tuple[jax.Array, jax.Array]:
            found, others = self._logits(converted, batch)
            wanted, found = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (logits, found))
            return jnp.sum(jnp.exp(wanted) * (wanted - found), -1), others

        losses, others = jax.lax.cond(params["step"] < self._transfer, of_outputs, of_logits)
        counts = batch.targets != NOTHING
        return Scores(jnp.where(counts, losses, 0), jnp.zeros_like(counts)), others

    def _evaluate(self, params: Params, batch: Batch) -> Scores:
        of_targets = super()._scores
        return jax.lax.map(lambda part: of_targets(params, part)[0], batch)


def _recording(mixer: Any, seen: list[tuple[jax.Array, jax.Array]]) -> Callable[..., jax.Array]:
    """Returns a function that calls the mixer, and appends its input and output to a list."""

    def mix(x: jax.Array, **options: Any) -> jax.Array:
        y = divided(mixer, x)(x, **options)
        seen.append((x, y))
        return y

    return mix
