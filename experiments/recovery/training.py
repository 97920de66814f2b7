"""Training of originals, of models converted from them, and of the same models from scratch."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax import nnx

from effattn import nn
from experiments.harness import checks, machine, mechanisms, metrics, models
from experiments.harness.comparison import compare, planned_runs
from experiments.harness.models import REFERENCE
from experiments.harness.naming import folder_name
from experiments.harness.programs import Params, ProgramCache, Programs, arguments_of
from experiments.harness.progress import Progress
from experiments.harness.schedules import Schedule
from experiments.harness.training import Run, evaluate, train
from experiments.harness.trials import better
from experiments.recovery.programs import Convert, Distillation, FineTuning
from experiments.tasks.task import Task

if TYPE_CHECKING:
    from experiments.finetune import Config

Record = dict[str, Any]
# Way of training ("original", "scratch", "finetune" or "distill"), or the form of a compressed
# model; and mechanism.
Kind = tuple[str, str]


def converter(config: "Config", task: Task, mechanism: str) -> Convert:
    """Returns the conversion of originals to a mechanism; a `first_layer` stays as it is."""
    sizes = (config.layers, config.heads, config.window, task.trained_length)
    mixers = mechanisms.parse(mechanism, *sizes, longest=task.length)

    def convert(model: Any, rngs: nnx.Rngs) -> Any:
        for layer in range(bool(config.first_layer), config.layers):
            model = nn.convert(model, mixers[layer], layers=layer, rngs=rngs)
        return model

    return convert


def conversion(config: "Config", task: Task, mechanism: str) -> dict[str, dict[str, int]]:
    """Returns the numbers of values that a conversion keeps, adds and drops, by name in a layer.

    Raises:
      UserError: originals cannot be converted to the mechanism.
    """
    build = models.builder(REFERENCE, config, task)

    def converted(rngs: nnx.Rngs) -> Any:
        return converter(config, task, mechanism)(build(rngs), rngs)

    def trial() -> None:
        models.check_call(mechanism, converted, task, bool(config.imports))

    checks.check_mechanism("--mechanisms", mechanism, trial)
    before, after = (nnx.eval_shape(lambda of=of: of(nnx.Rngs(0))) for of in (build, converted))
    found: dict[str, dict[str, int]] = {}
    for part, paths in nn.conversion(before, after)._asdict().items():
        values = dict(nnx.to_flat_state(nnx.state(before if part == "dropped" else after)))
        found[part] = {}
        for path in paths:
            name = "/".join(map(str, path[2:] if path[0] == "blocks" else path))
            found[part][name] = found[part].get(name, 0) + math.prod(values[path].shape)
    return found


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Training of all models of one command.

    Attributes:
      config: options.
      task: task to learn.
      folder: run folder; every model has a folder in it.
      identity: text that identifies the configuration.
      trained: parameters of the originals, by seed; their training adds them.
    """

    config: "Config"
    task: Task
    folder: Path
    identity: str
    trained: dict[int, Params] = dataclasses.field(default_factory=dict)

    def train_all(self) -> list[Record]:
        """Returns the results of originals, of converted models, and of models from scratch."""
        config, recovery = self.config, self.config.steps_of_recovery
        ways = [(way, mechanism) for mechanism in config.mechanisms for way in config.ways]
        scratch = [("scratch", each) for each in dict.fromkeys((REFERENCE, *config.mechanisms))]
        rate = config.original_rate
        print("Originals:", flush=True)
        originals = self.train([("original", REFERENCE)], config.steps, (rate,))
        print("Recovery of converted models:", flush=True)
        rates = config.sweep or (config.recovery_rate or rate,)
        recovered = self.train(ways, recovery, rates)
        print("The same models from scratch:", flush=True)
        others = self.train(scratch, config.steps + recovery, config.sweep or (rate,))
        return [*originals, *recovered, *others]

    def train(self, kinds: Sequence[Kind], steps: int, rates: Sequence[float]) -> list[Record]:
        """Trains models of each kind with each seed, at the best of the rates for the kind."""
        config, task = self.config, self.task
        every = config.evaluate_every or math.ceil(steps / 8)
        schedule = Schedule(steps, config.batch, config.accumulate, every)
        named = {f"{way}-{folder_name(mechanism)}": (way, mechanism) for way, mechanism in kinds}
        compiled = ProgramCache(lambda name: self._programs(named[name], schedule))

        def run(name: str, rate: float, seed: int) -> Record:
            return self._run(named[name], name, rate, seed, schedule, compiled(name), shown)

        runs = planned_runs(len(named), len(rates), len(config.seeds))
        at_once = machine.runs_at_once(config, runs)
        with Progress(runs, steps) as shown:
            planned = (list(named), rates, config.seeds)
            return compare(*planned, run, better(task), shown, at_once).runs

    def _programs(self, kind: Kind, schedule: Schedule) -> Programs:
        config, (way, mechanism) = self.config, kind
        options = arguments_of(config, schedule, self.task)
        build = models.builder(REFERENCE, config, self.task)
        if way == "original":
            return Programs(build, *options)
        convert = converter(config, self.task, mechanism)
        if way == "scratch":
            return Programs(lambda rngs: convert(build(rngs), rngs), *options)
        if way == "finetune":
            return FineTuning(build, convert, self.trained, *options)
        transfer = round(config.fraction_of_transfer * schedule.steps)
        return Distillation(transfer, build, convert, self.trained, *options)

    def _run(
        self,
        kind: Kind,
        name: str,
        rate: float,
        seed: int,
        schedule: Schedule,
        programs: Programs,
        shown: Progress,
    ) -> Record:
        (way, mechanism), task = kind, self.task
        name = f"{name}-rate{rate}-seed{seed}"
        run = Run(name, self.folder / name, f"{self.identity} {name}", seed, rate)
        params, record = train(run, schedule, programs, task, shown)
        curve = metrics.evaluations(run.folder / "metrics.jsonl", schedule, record["step"])
        if way == "original":
            self.trained[seed] = params
        elif way != "scratch":
            start, _ = programs.init(seed)
            (held_out, validation), *_ = task.held_out().items()
            scores = evaluate(programs, start, validation, schedule, validation)
            measured = task.measure(held_out, validation, scores)
            curve = [{"step": 0, "tokens": 0, **measured}, *curve]
        return {
            "way": way,
            "mechanism": mechanism,
            "seed": seed,
            "learning_rate": rate,
            **record,
            "parameters": programs.parameters,
            "state_bytes": programs.state_bytes,
            "curve": curve,
        }
