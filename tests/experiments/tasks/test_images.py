"""Images as pixels: the formats of the released files, and prediction of pixels."""

import dataclasses
import gzip
import json
import math

import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.classification import Examples
from experiments.tasks.images import CIFAR, MNIST, Digits, Images, MNISTPixels, NextPixel
from experiments.tasks.task import Scores


def test_digits_are_those_of_the_package():
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    sets = Digits().sets.values()
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in sets]), digits.data)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in sets]), digits.target)


PIXELS = MNISTPixels()


def idx(values, *shape):
    """An idx file of bytes: a magic number, the sizes, and the values."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    return header + values.astype(np.uint8).tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_released_digits(tmp_path, packed):
    rng = np.random.default_rng(0)
    wanted = {}
    for part, count in (("train", 20), ("t10k", 3)):
        images, labels = rng.integers(256, size=(count, 28, 28)), rng.integers(10, size=count)
        wanted[part] = images.reshape(count, -1), labels
        files = {"images-idx3": idx(images, count, 28, 28), "labels-idx1": idx(labels, count)}
        for name, content in files.items():
            file = tmp_path / f"{part}-{name}-ubyte{'.gz' * packed}"
            file.write_bytes(gzip.compress(content) if packed else content)
    sets = MNIST(path=str(tmp_path)).sets
    assert {name: len(part.labels) for name, part in sets.items()} == {
        "train": 18,
        "validation": 2,
        "test": 3,
    }
    np.testing.assert_array_equal(sets["test"].tokens, wanted["t10k"][0])
    np.testing.assert_array_equal(sets["test"].labels, wanted["t10k"][1])
    np.testing.assert_array_equal(sets["validation"].tokens, wanted["train"][0][18:])


def test_released_digits_that_are_not_complete_are_one_sentence(tmp_path):
    images, labels = idx(np.zeros(20 * 784), 20, 28, 28), idx(np.arange(20) % 10, 20)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    task = MNIST(path=str(tmp_path))
    assert len(task.load()["test"].labels) == 20
    for content, found in (
        (labels[:-1], "not complete: its header says 20 items, but it has 19"),
        (labels[:5], "must be an IDX file of labels"),
        (idx(np.arange(19) % 10, 19), "have 19 labels and 20 images"),
        (b"?" + labels[1:], "must be an IDX file of labels"),
    ):
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)
        with pytest.raises(UserError, match=found):
            task.load()
    for content, found in (
        (images[:-392], "not complete: its header says 20 items, but it has 19.5"),
        (idx(np.zeros(20 * 784), 80, 14, 14), "must be an IDX file of images of 28 by 28 pixels"),
    ):
        (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(UserError, match=found):
            task.load()
    packed = gzip.compress(images)
    for content in (packed[:-9], packed[:30] + b"?" + packed[31:]):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
        with pytest.raises(UserError, match="cannot read"):
            task.load()


def test_pixels_are_those_of_the_images_at_the_path(tmp_path):
    for digit in range(10):
        (tmp_path / f"{digit}.json").write_text(json.dumps({"data": [digit / 10] * 3136}))
    task = dataclasses.replace(PIXELS, path=str(tmp_path))
    batch = task.held_out()["validation"]
    np.testing.assert_array_equal(
        batch.targets, MNIST(path=str(tmp_path)).sets["validation"].tokens
    )
    assert (batch.inputs[0][:, 0] == 256).all() and task.vocab_size == 257


def test_digits_in_json(tmp_path):
    for digit in range(10):
        pixels = np.full((4, 784), digit / 10).ravel().tolist()
        (tmp_path / f"{digit}.json").write_text(json.dumps({"data": pixels}))
    sets = MNIST(path=str(tmp_path)).sets
    assert [len(part.labels) for part in sets.values()] == [32, 4, 4]
    for part in sets.values():
        np.testing.assert_array_equal(part.tokens[:, 0], np.round(25.5 * part.labels))


def test_photographs_in_grey(tmp_path):
    colours = {"red": (255, 0, 0), "green": (0, 255, 0), "white": (255, 255, 255)}
    rows = [[label, *np.repeat(colour, 1024)] for label, colour in enumerate(colours.values())]
    content = np.array(rows, np.uint8).tobytes()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / f"{name}.bin").write_bytes(content)
    sets = CIFAR(path=str(tmp_path)).sets
    assert [len(part.labels) for part in sets.values()] == [14, 1, 3]
    assert sets["test"].labels.tolist() == [0, 1, 2]
    assert sets["test"].tokens[:, [0, -1]].tolist() == [[76, 76], [149, 149], [255, 255]]


@pytest.mark.parametrize("task", [MNIST, CIFAR])
def test_missing_files(task, tmp_path):
    with pytest.raises(UserError, match="needs the path of a folder"):
        task().load()
    with pytest.raises(UserError, match="cannot read"):
        task(path=str(tmp_path)).load()


def test_files_in_the_wrong_form(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="cannot read images from .*data_batch_1.bin"):
        CIFAR(path=str(tmp_path)).load()
    (tmp_path / "0.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read digits from .*0.json"):
        MNIST(path=str(tmp_path)).load()


@pytest.mark.parametrize("value", ["2", "-1", "NaN", '"a"'])
def test_pixels_of_another_form(value, tmp_path):
    (tmp_path / "0.json").write_text(f'{{"data": [{", ".join([value] * 784)}]}}')
    with pytest.raises(UserError, match="cannot read digits from .*0.json: "):
        MNIST(path=str(tmp_path)).load()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(Images):
    """Images of two by two pixels."""

    side = 2
    vocab_size = 5

    def load(self):
        pixels = np.random.default_rng(0).integers(5, size=(6, 4), dtype=np.uint8)
        examples = Examples(pixels, np.full(6, 4, np.int32), np.zeros(6, np.int32))
        return {"train": examples, "validation": examples}


def test_each_pixel_is_predicted_from_those_before_it():
    task = NextPixel(images=Noise())
    for batch in (task.training(3, 0, 0), task.held_out()["validation"]):
        (inputs,), targets = batch
        assert (inputs[:, 0] == 5).all()
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert (task.length, task.vocab_size) == (4, 6)


def test_bits_per_dimension_of_the_uniform_model():
    task = NextPixel(images=Noise())
    batch = task.held_out()["validation"]
    scores = Scores(np.full(batch.targets.shape, math.log(5)), np.zeros(batch.targets.shape, bool))
    assert task.measure("validation", batch, scores)[task.headline] == pytest.approx(math.log2(5))


def test_settings_tell_what_was_read(tmp_path):
    """A run must not go on with other files at the same path."""
    found = []
    for shade in (0, 1):
        for digit in range(10):
            (tmp_path / f"{digit}.json").write_text(json.dumps({"data": [shade] * 3136}))
        tasks = MNIST(path=str(tmp_path)), dataclasses.replace(PIXELS, path=str(tmp_path))
        found.append([task.settings() for task in tasks])
        assert found[-1][1]["images"] == found[-1][0]
    first, second = (settings["data_sha256"] for settings, _ in found)
    assert first != second and found[0][0] == {**found[1][0], "data_sha256": first}
    assert "data_sha256" not in MNIST().settings()
