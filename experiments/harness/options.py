"""Options that all experiments share."""

import abc
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import tyro

from experiments.harness import checks, user_modules

if TYPE_CHECKING:
    from experiments.tasks.task import Task

# Options that choose which models of a comparison are trained and how they are shown. A run
# folder may be used with any values of them; all other options are the same for all its runs.
OF_RUNS = frozenset(
    {
        "mechanisms",
        "seeds",
        "learning_rate",
        "sweep",
        "imports",
        "mesh",
        "processes",
        "at_once",
        "output",
        "costs",
    }
)

Mechanisms = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="NAME; NAME,OPTION=8; A/B by layer; A+B by head; all for every mechanism that fits "
        "the task"
    ),
]

OF_EXPERTS = frozenset({"experts", "experts_per_token", "expert_capacity", "shared_experts"})


@dataclasses.dataclass(frozen=True)
class Options(abc.ABC):
    """Options of an experiment; each experiment has its own defaults."""

    mechanisms: Mechanisms = ("softmax",)
    # Python modules that register mechanisms of their own. Finished runs are not trained again: a
    # mechanism whose code has changed needs another name, or the command another --output.
    imports: user_modules.Modules = ()
    window: int | None = None  # tokens in windows, the present one included; default length / 4
    layers: int = 2  # Transformer layers
    first_layer: str = ""  # mechanism of the first layer, if not the compared one
    width: int = 64  # features per token
    heads: int = 4  # query heads, a divisor of width
    key_heads: int | None = None  # key heads, a divisor of heads; 1 is multi-query attention
    positions: Literal["rotary", "learned", "sinusoidal", "alibi", "none"] | None = (
        None  # default by mechanism
    )
    norm: Literal["rms", "layer"] = "rms"  # normalisation before each sublayer
    feed_forward: Literal["swiglu", "geglu", "gelu", "relu", "rwkv4", "rwkv6", "rwkv7"] = (
        "swiglu"  # feed-forward layer
    )
    experts: int | None = None  # number of experts in place of each feed-forward layer
    experts_per_token: int = 2  # experts that each token chooses; 1 is Switch Transformers
    # Slots of an expert, as a multiple of its share of a row's tokens; default no limit.
    expert_capacity: float | None = None
    shared_experts: int = 0  # further experts that process every token
    # Give all models equally many parameters, by the width of their feed-forward layers.
    equal_parameters: bool = True
    batch: int = 16  # examples per step
    accumulate: int = 1  # microbatches whose gradients are accumulated, to save memory
    remat: bool = False  # recompute activations in the backward pass, to save memory
    steps: int = 1000  # training steps
    seeds: tuple[int, ...] = (0, 1, 2)  # seeds of parameters and order of the data
    optimiser: Literal["muon", "adamw"] = "muon"  # muon is for kernels, with Adam for others
    learning_rate: float | None = None  # peak learning rate; default 0.03 for muon, 0.003 for adamw
    sweep: tuple[float, ...] = ()  # learning rates to try; the best is used, by mechanism
    warmup: float = 0.1  # fraction of the steps in which the learning rate rises; then it decays
    weight_decay: float = 0.0  # decoupled weight decay of matrices
    clip: float = 1.0  # largest gradient norm
    redraw: int = 0  # steps between new random features of Performer and others; 0 for never
    # Dtype of the computation; parameters stay float32. With float16 the loss is scaled.
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    # Steps between evaluations, each of which writes a checkpoint; default steps / 8.
    evaluate_every: int | None = None
    # Devices by axis, such as data=2,tensor=4: data, fsdp and expert divide the batch, fsdp the
    # parameters, expert the experts, tensor heads and hidden features, sequence the tokens, and
    # stage the layers, which the --accumulate microbatches pass; -1 is all that are left. Default:
    # one.
    mesh: str = ""
    # Processes of the run, with --mesh: auto on Slurm, Kubernetes and others, or
    # ADDRESS:PORT,INDEX,COUNT with the address of the first process.
    processes: str = ""
    at_once: int | None = None  # simultaneous runs; default 3 on several CPU cores, else 1
    output: Path | None = None  # run folder; default runs/EXPERIMENT-HASH, by the options

    # True if training adds the costs that mixtures of mechanisms report to the loss.
    with_costs: ClassVar[bool] = False
    default_rates: ClassVar[Mapping[str, float]] = {"muon": 0.03, "adamw": 0.003}

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Words for the name of the run folder, such as task and preset."""

    @property
    @abc.abstractmethod
    def is_causal(self) -> bool:
        """True if the compared mechanisms are causal."""

    def fits(self, capabilities: frozenset[str]) -> bool:
        """Returns whether a mechanism with these capabilities can be compared."""
        return ("causal" if self.is_causal else "bidirectional") in capabilities

    def with_all(self) -> Self:
        """Returns the options with "all" replaced by the names of all mechanisms that fit."""
        if "all" not in self.mechanisms:
            return self
        from effattn import registry

        names = [name for name in registry.names() if self.fits(registry.get(name).capabilities)]
        named = [name for m in self.mechanisms for name in (names if m == "all" else (m,))]
        return dataclasses.replace(self, mechanisms=tuple(dict.fromkeys(named)))

    def fixed_mechanisms(self) -> dict[str, str]:
        """Returns the mechanisms that are not compared, by the names of their options."""
        return {"first_layer": self.first_layer} if self.first_layer else {}

    def prepare(self) -> dict[str, Any]:
        """Reads what the task needs, and returns further settings that the results depend on."""
        return {}

    @abc.abstractmethod
    def make_task(self, folder: Path) -> "Task":
        """Returns the task, after `prepare`; reads the run folder, but does not write there."""

    def save(self, task: "Task", folder: Path) -> None:
        """Writes what `make_task` would otherwise make again, such as a trained tokenizer."""
        return

    def finish(self, folder: Path, settings: dict[str, Any]) -> None:
        """Adds files to the folder of a finished report; `settings` are those of the folder."""
        return

    def check(self) -> None:
        """Raises `UserError` if the options do not fit together."""
        checks.check_training(self)

    def check_output(self, folder: Path) -> None:
        """Raises `UserError` if the task reads files of this run folder."""
        return

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates to train with; each mechanism gets the best of them."""
        return self.sweep or (self.learning_rate or self.default_rates[self.optimiser],)

    @property
    def steps_between_evaluations(self) -> int:
        return self.evaluate_every or max(1, self.steps // 8)

    def of_folder(self) -> dict[str, Any]:
        """Returns the options that are the same for all runs of a folder."""
        given = dataclasses.asdict(self)
        # Without experts, folders from before there were such options stay valid.
        others = OF_RUNS if self.experts else OF_RUNS | OF_EXPERTS
        return {k: v for k, v in given.items() if k not in others} | {
            "evaluate_every": self.steps_between_evaluations
        }

    def of_runs(self) -> dict[str, Any]:
        """Returns the options that choose the runs of a report."""
        chosen = {"mechanisms": self.mechanisms, "seeds": self.seeds, "learning_rate": self.rates}
        return chosen | ({"imports": self.imports} if self.imports else {})


def command_of(experiment: str, options: Any, default: Any) -> str:
    """Returns the command line that gives these options.

    Args:
      experiment: name of the experiment.
      options: its options.
      default: the options without arguments, but for those that choose the preset and the task.
    """
    parts = [f"python -m experiments.{experiment}"]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = "import" if field.name == "imports" else field.name.replace("_", "-")
        chooses = field.name in ("preset", "task") and value != field.default
        if field.name in ("output", "at_once", "processes") or not (
            chooses or value != getattr(default, field.name)
        ):
            continue
        if field.name == "learning_rate" and options.sweep:  # a sweep replaces it
            continue
        if isinstance(value, bool):
            parts.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            parts += [f"--{name}", *map(shlex.quote, map(str, values))]
    return " ".join(parts)
