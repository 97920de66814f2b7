"""Trials of a comparison: models are trained, measured and sampled, or read from their files."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.common.data import Data
from experiments.common.metrics import read_json, write_atomically
from experiments.common.mixers import folder_name
from experiments.common.programs import Programs
from experiments.common.progress import Progress
from experiments.common.schedules import Schedule
from experiments.common.tokenizers import Tokenizer
from experiments.common.training import Run, train


@dataclasses.dataclass(frozen=True)
class Trials:
    """Settings that are equal for all models of a comparison.

    Attributes:
      folder: folder of the comparison; every run has a folder in it.
      identity: text that identifies the configuration.
      schedule: number and size of the training steps.
      data: training and validation windows.
      tokenizer: tokenizer of the text.
      bytes_per_word: mean word length in the validation text, if the corpus defines words.
      compile: function from a mechanism's name to the compiled programs.
      progress: progress display.
    """

    folder: Path
    identity: str
    schedule: Schedule
    data: Data
    tokenizer: Tokenizer
    bytes_per_word: float | None
    compile: Callable[[str], Programs]
    progress: Progress

    def run(self, mechanism: str, learning_rate: float, seed: int) -> dict[str, Any]:
        """Returns the measurements of one model, which is trained if it was not trained before.

        Perplexities are exp(nats per token), and per word if the corpus defines words. A perplexity
        that overflows a float is None.
        """
        name = f"{folder_name(mechanism)}-rate{learning_rate}-seed{seed}"
        run = Run(name, self.folder / name, f"{self.identity} {name}", seed, learning_rate)
        path = run.folder / "result.json"
        if path.is_file():
            with self.progress.begin(name, self.schedule.steps):
                remedy = f"delete {path} to measure that run again"
                return read_json(path, ("mechanism", "valid_loss", "sample"), remedy)
        programs = self.compile(mechanism)
        window, objective = self.data.valid[0], self.data.objective
        params, record = train(run, self.schedule, programs, self.data, self.progress)
        result = {
            "mechanism": mechanism,
            "seed": seed,
            "learning_rate": learning_rate,
            "folder": name,
            **record,
            "perplexity": _power(math.exp, record["valid_loss"]),
            "word_perplexity": self._word_perplexity(record["bits_per_byte"]),
            "tokens_per_second": record["tokens"] / record["seconds"],
            "parameters": programs.parameters,
            "temporary_bytes": programs.temporary_bytes,
            "state_bytes": programs.state_bytes,
            "prompt": objective.prompt(window, self.tokenizer),
            "sample": objective.sample(programs.model(params), window, self.tokenizer, seed),
        }
        write_atomically(path, json.dumps(result, indent=2) + "\n")
        return result

    def _word_perplexity(self, bits_per_byte: float) -> float | None:
        if self.bytes_per_word is None:
            return None
        return _power(math.exp2, bits_per_byte * self.bytes_per_word)


def _power(of: Callable[[float], float], exponent: float) -> float | None:
    try:
        return of(exponent)
    except OverflowError:
        return None  # JSON has no infinity
