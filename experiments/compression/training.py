"""Training of a model and of its compressed forms."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import nn
from experiments.compression.forms import ORIGINAL, forms_of
from experiments.harness import models
from experiments.harness.programs import Params, Programs, arguments_of
from experiments.harness.schedules import Schedule
from experiments.harness.training import evaluate
from experiments.recovery.programs import Convert, FineTuning
from experiments.recovery.training import Kind, Record, Trainer
from experiments.tasks.task import Batch, Task

if TYPE_CHECKING:
    from experiments.compress import Config


class Rounded(FineTuning):
    """Programs of a model whose kernels are rounded to fewer bits wherever it is called.

    Args:
      bits: bits of a weight.
      length: number of tokens in a batch.
      *arguments: the arguments of `FineTuning`.
    """

    def __init__(self, bits: int, length: int, *arguments: Any):
        self._bits, self._length = bits, length
        super().__init__(*arguments)

    def model(self, params: Params) -> Any:
        import qwix

        provider = qwix.QtProvider(rules(self._bits))
        return qwix.quantize_model(super().model(params), provider, tokens(self._length))


class Pruned(FineTuning):
    """Programs of a model with fewer heads, which differ by seed.

    Args:
      keep: function from a seed to the heads to keep, by layer.
      *arguments: the arguments of `FineTuning`, with any conversion that keeps as many heads.
    """

    def __init__(self, keep: Callable[[int], list[list[int]]], *arguments: Any):
        super().__init__(*arguments)
        self._keep = keep

    def _converter(self, seed: int) -> Convert:
        kept = self._keep(seed)
        return lambda model, rngs: nn.prune_heads(model, kept)


def rules(bits: int) -> list[Any]:
    """Returns the rules of qwix for kernels of so many bits."""
    import qwix

    return [qwix.QuantizationRule(module_path=".*", weight_qtype=f"int{bits}")]


def tokens(length: int) -> jax.Array:
    """Returns tokens to call a model with."""
    return jnp.zeros((1, length), jnp.int32)


def sizes(config: "Config", task: Task, forms: Sequence[str]) -> dict[str, int]:
    """Returns the bytes of the parameters of the original and of each form."""
    build = models.builder(config.mechanisms[0], config, task)

    def of(form: str) -> Any:
        model: Any = build(nnx.Rngs(0))
        if form.startswith("int"):
            import qwix

            provider = qwix.PtqProvider(rules(int(form[3:])))
            return qwix.quantize_model(model, provider, tokens(task.trained_length))
        if form.startswith("heads-"):
            return nn.prune_heads(model, first_heads(config, int(form[6:])))
        return model

    return {form: _bytes_of(functools.partial(of, form)) for form in ("original", *forms)}


def _bytes_of(build: Callable[[], nnx.Module]) -> int:
    params = nnx.state(nnx.eval_shape(build), nnx.Param)

    def bits(dtype: Any) -> int:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return jnp.finfo(dtype).bits if is_float else jnp.iinfo(dtype).bits

    return sum(x.size * bits(x.dtype) for x in jax.tree.leaves(params)) // 8


def first_heads(config: "Config", fewer: int) -> list[list[int]]:
    """Returns heads to keep, the first of each layer."""
    return [list(range((config.key_heads or config.heads) - fewer))] * config.layers


@dataclasses.dataclass(frozen=True)
class Compression(Trainer):
    """Training of the original and of the compressed forms, for each seed.

    Attributes:
      costs_in_training: costs of the heads on the training batch after the last step, by seed. All
        forms with fewer heads share them.
    """

    config: "Config"  # type: ignore[assignment]
    costs_in_training: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def train_all(self) -> list[Record]:
        """Returns the results of the originals, and of the forms that start from them."""
        config = self.config
        (mechanism,) = config.mechanisms
        rate = config.original_rate
        print("Originals:", flush=True)
        originals = self.train([(ORIGINAL, mechanism)], config.steps, (rate,))
        print("Forms:", flush=True)
        forms = [(form, mechanism) for form in forms_of(config.bits, config.fewer_heads)]
        rate = config.recovery_rate or rate
        return [*originals, *self.train(forms, config.steps_of_recovery, (rate,))]

    def costs_of_heads(self) -> list[list[list[float]]]:
        """Returns the increase of the headline on the validation set without each head alone.

        By seed, layer and head; empty if no heads are removed.
        """
        if not self.config.fewer_heads:
            return []
        (name, validation), *_ = self.task.held_out().items()
        return [self._costs(seed, name, validation).tolist() for seed in self.config.seeds]

    def _programs(self, kind: Kind, schedule: Schedule) -> Programs:
        config, (form, mechanism) = self.config, kind
        build = models.builder(mechanism, config, self.task)
        options = arguments_of(config, schedule, self.task)
        if form == "original":
            return Programs(build, *options)

        def same(model: Any, rngs: nnx.Rngs) -> Any:
            return model

        if form.startswith("int"):
            length = self.task.trained_length
            return Rounded(int(form[3:]), length, build, same, self.trained, *options)
        if not form.startswith("heads-"):
            return FineTuning(build, same, self.trained, *options)
        fewer = int(form[6:])
        kept = first_heads(config, fewer)

        def keep(seed: int) -> list[list[int]]:
            if seed not in self.costs_in_training:
                # In the first epoch, text that the model was not trained on.
                batch = self.task.training(config.batch, seed, config.steps)
                self.costs_in_training[seed] = self._costs(seed, "training", batch)
            costs = self.costs_in_training[seed]
            return [sorted(np.argsort(layer)[fewer:].tolist()) for layer in costs]

        def prune(model: Any, rngs: nnx.Rngs) -> Any:
            return nn.prune_heads(model, kept)

        return Pruned(keep, build, prune, self.trained, *options)

    def _costs(self, seed: int, name: str, batch: Batch) -> np.ndarray:
        """Increase of the headline without each key head, `(layers, heads)`."""
        config, task = self.config, self.task
        schedule = Schedule(1, config.batch, config.accumulate, 1)
        programs = self._programs(("original", config.mechanisms[0]), schedule)
        heads = config.key_heads or config.heads

        def measure(params: Params) -> float:
            scores = evaluate(programs, params, batch, schedule, batch)
            return task.measure(name, batch, scores)[task.headline]

        def without(layer: int, head: int) -> float:
            return measure(silenced(self.trained[seed], layer, head, heads))

        costs = [[without(layer, head) for head in range(heads)] for layer in range(config.layers)]
        return np.array(costs) - measure(self.trained[seed])


def silenced(params: Params, layer: int, head: int, heads: int) -> Params:
    """Returns the parameters without the outputs of one key head of a layer."""

    def silent(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        names = [getattr(key, "key", None) for key in path]
        if names != ["blocks", layer, "mixer", "out", "kernel"]:
            return x
        by_head = x.reshape(heads, -1, *x.shape[1:])
        return by_head.at[head].set(0).reshape(x.shape)

    trained = jax.tree_util.tree_map_with_path(silent, params["trained"])
    return {**params, "trained": trained}
