"""Pairs of texts: three generated tasks, and files of pairs."""

import calendar
import dataclasses
import datetime
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.task import NOTHING, Batch, Task, generator

# Tokens are the 256 bytes, and these two.
START, END = 256, 257
VOCABULARY = 258

# The pairs of every tenth source of a file are held out, up to the requested number.
HELD_OUT_EVERY = 10

SHOWN = 3  # held-out pairs in reports

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTHS = (4, 12)
FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)


class Rows(NamedTuple):
    """Pairs as right-padded arrays of NumPy or JAX.

    Attributes:
      source: int32 `(n, S)`.
      source_lengths: int32 `(n,)`.
      target: int32 `(n, T)`, input of the decoder: `START` and the text.
      wanted: int32 `(n, T)`, target output of the decoder: the text and `END`.
      target_lengths: int32 `(n,)`.
    """

    source: Any
    source_lengths: Any
    target: Any
    wanted: Any
    target_lengths: Any

    def take(self, at: np.ndarray) -> "Rows":
        """Returns the pairs at these indices."""
        return Rows(*(array[at] for array in self))


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Training pairs, held-out pairs, and a hash of all texts."""

    train: Rows
    held_out: Rows
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Translation(Task):
    """Writing the target of a source, byte by byte.

    A decoder predicts each byte of the target, and its end, from the source and the bytes before.

    Attributes:
      pairs: training and held-out pairs.
    """

    pairs: Pairs

    reference: ClassVar[str] = "Sutskever et al. 2014; Bahdanau et al. 2015; Vaswani et al. 2017"
    model: ClassVar[Literal["translator"]] = "translator"
    columns: ClassVar[Mapping[str, str]] = {
        "tokens": "accuracy",
        "exact matches": "exact",
        "BLEU": "bleu",
        "chrF": "chrf",
    }
    title: ClassVar[str] = "Encoder-decoders compared"
    explained: ClassVar[str] = (
        "A token is right if it is the likeliest one after the tokens before it. A match is exact "
        "if all tokens of a pair and its end are right: then the model, given the source alone, "
        "writes the target. BLEU (of characters) and chrF are those of sacrebleu."
    )
    prompted: ClassVar[str] = "Given these held-out sources, with their targets"
    answered: ClassVar[str] = "writes"

    vocab_size = VOCABULARY

    @property
    def length(self) -> int:
        return max(self.pairs.train.source.shape[1], self.pairs.train.target.shape[1])

    def training(self, size: int, seed: int, step: int) -> Batch:
        rows = self.pairs.train
        return _batch(rows.take(generator(seed, step).integers(len(rows.source), size=size)))

    def held_out(self) -> Mapping[str, Batch]:
        return {"validation": _batch(self.pairs.held_out)}

    def sample(self, model: Any, seed: int) -> dict[str, Any]:
        """Returns BLEU and chrF of greedy outputs for all held-out sources, and a few outputs."""
        import sacrebleu

        rows = self.pairs.held_out
        written = [text_of(tokens) for tokens in write(model, rows)]
        wanted = [text_of(tokens) for tokens in rows.wanted]
        sources = [text_of(tokens) for tokens in rows.source[:SHOWN]]
        return {
            "bleu": sacrebleu.corpus_bleu(written, [wanted], tokenize="char").score,
            "chrf": sacrebleu.corpus_chrf(written, [wanted]).score,
            "prompt": "\n".join(f"{s!r}, {t!r}" for s, t in zip(sources, wanted, strict=False)),
            "sample": "\n".join(map(repr, written[:SHOWN])),
        }


def write(model: Any, rows: Rows) -> np.ndarray:
    """Returns the greedy output of an encoder-decoder for each source: int `(n, T)`."""
    import jax.numpy as jnp

    from effattn.nn import generate

    start = jnp.full((len(rows.source), 1), START, jnp.int32)
    given = model.given(jnp.asarray(rows.source), lengths=jnp.asarray(rows.source_lengths))
    tokens = generate(
        given, start, max_new_tokens=rows.wanted.shape[1], temperature=0.0, eos_id=END
    )
    return np.asarray(tokens)


def _batch(rows: Rows) -> Batch:
    is_wanted = np.arange(rows.wanted.shape[1]) < rows.target_lengths[:, None]
    inputs = (rows.source, rows.target, rows.source_lengths, rows.target_lengths)
    return Batch(inputs, np.where(is_wanted, rows.wanted, NOTHING))


def load(task: str, examples: int, held_out: int) -> Pairs:
    """Returns the pairs of a task; deterministic.

    No source is both trained on and held out. A pair that a file repeats is trained on as often, or
    held out once.

    Args:
      task: a name in `TASKS`, or the path of a file with a source, a tab and a target in each line.
      examples: number of pairs to generate, with different sources; for a file, the maximum number
        of pairs to read.
      held_out: number of held-out pairs; for a file, at most the different pairs of every tenth
        source. Further pairs of a held-out source are not used.

    Raises:
      UserError: the task or file does not exist, a line is no pair, or there are too few pairs.
    """
    texts = _made(task, examples) if task in TASKS else _read(task, examples)
    every = 1 if task in TASKS else HELD_OUT_EVERY
    train, kept = _split(texts, held_out, every)
    if not train or not kept:
        sources = len({source for source, _ in texts})
        raise UserError(
            f"--task {task} has {len(texts)} pairs of {sources} different sources, too few to "
            f"train on and hold out {held_out}; give more sources, or a smaller --held-out"
        )
    rows = _rows(texts)
    # Texts contain no tabs and no ends of lines.
    lines = "\n".join(map("\t".join, texts))
    sha256 = hashlib.sha256(lines.encode()).hexdigest()
    return Pairs(rows.take(np.array(train)), rows.take(np.array(kept)), sha256)


def _split(
    texts: Sequence[tuple[str, str]], held_out: int, every: int
) -> tuple[list[int], list[int]]:
    """Returns the indices of training pairs, and of distinct held-out pairs with other sources."""
    of_source: dict[str, dict[tuple[str, str], int]] = {}
    for index, pair in enumerate(texts):
        of_source.setdefault(pair[0], {}).setdefault(pair, index)
    kept: list[int] = []
    apart = set()
    for source in list(of_source)[::every]:
        if len(kept) < held_out:
            apart.add(source)
            kept += of_source[source].values()
    train = [index for index, (source, _) in enumerate(texts) if source not in apart]
    return train, kept[:held_out]


def text_of(tokens: np.ndarray) -> str:
    """Returns the text of tokens up to the first `START` or `END`."""
    ends = np.flatnonzero(tokens >= START)
    said = tokens[: ends[0]] if len(ends) else tokens
    return bytes(said.astype(np.uint8)).decode(errors="replace")


def _letters(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(LETTERS), rng.integers(LENGTHS[0], LENGTHS[1] + 1)))


def _sort(rng: np.random.Generator) -> tuple[str, str]:
    text = _letters(rng)
    return text, "".join(sorted(text))


def _reverse(rng: np.random.Generator) -> tuple[str, str]:
    text = _letters(rng)
    return text, text[::-1]


def date_formats(date: datetime.date) -> tuple[str, ...]:
    """Returns a date in several formats that people use."""
    day, year = date.day, date.year
    month, short = calendar.month_name[date.month], calendar.month_abbr[date.month]
    return (
        f"{month} {day}, {year}",
        f"{day} {month} {year}",
        f"{day} {short} {year}",
        f"{date.month}/{day}/{year}",
        f"{day}.{date.month}.{year}",
        f"{calendar.day_abbr[date.weekday()]}, {short} {day} {year}",
    )


def _dates(rng: np.random.Generator) -> tuple[str, str]:
    """Returns a random date in a format that people use, and in the format of ISO 8601."""
    date = FIRST + datetime.timedelta(days=int(rng.integers((LAST - FIRST).days + 1)))
    formats = date_formats(date)
    return formats[rng.integers(len(formats))], date.isoformat()


TASKS: Mapping[str, Callable[[np.random.Generator], tuple[str, str]]] = {
    "sort": _sort,
    "reverse": _reverse,
    "dates": _dates,
}


# Number of different sources of the task `dates`: six formats, two of which are equal in May.
DAYS, DAYS_IN_MAY = (LAST - FIRST).days + 1, 31 * (LAST.year - FIRST.year + 1)
MOST: Mapping[str, int] = {"dates": 6 * DAYS - DAYS_IN_MAY}


def _made(task: str, examples: int) -> list[tuple[str, str]]:
    most = MOST.get(task, examples)
    if examples > most:
        raise UserError(
            f"--examples must be at most {most}, the number of different sources of --task {task}, "
            f"got {examples}"
        )
    make = TASKS[task]
    rng = np.random.default_rng(0)
    pairs: dict[str, str] = {}
    while len(pairs) < examples:
        source, target = make(rng)
        pairs[source] = target
    return list(pairs.items())


def _read(path: str, examples: int) -> list[tuple[str, str]]:
    try:
        # Shells leave the ~ of --task=~/pairs to the program.
        lines = Path(os.path.expanduser(path)).read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"--task must be one of {', '.join(TASKS)} or a file of pairs; cannot read {path}: "
            f"{reason}"
        ) from None
    if not lines[-1]:
        del lines[-1]  # the file ends with the end of its last line
    pairs = []
    for number, line in enumerate(lines[:examples], 1):
        parts = line.removesuffix("\r").split("\t")
        if len(parts) != 2 or not all(parts):
            raise UserError(
                f"{path}, line {number} must be a source, a tab and a target, got {line[:60]!r}"
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def _rows(texts: list[tuple[str, str]]) -> Rows:
    sources, targets = ([text.encode() for text in side] for side in zip(*texts, strict=True))
    source, source_lengths = _padded([list(text) for text in sources])
    target, target_lengths = _padded([[START, *text] for text in targets])
    wanted, _ = _padded([[*text, END] for text in targets])
    return Rows(source, source_lengths, target, wanted, target_lengths)


def _padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.full((len(rows), lengths.max(initial=1)), END, np.int32)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded, lengths
