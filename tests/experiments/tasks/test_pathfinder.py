"""Pathfinder: geometry and pixels, by checks that the generator does not use."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.pathfinder import TASKS, Pathfinder
from experiments.tasks.task import generator

SIZES = {
    f"{name}-{size}": (task, {10: 40, 32: 20, 48: 6, 64: 4, 128: 6}[task.size])
    for name, sizes in TASKS.items()
    for size, task in sizes.items()
}


@pytest.fixture(scope="module", params=SIZES)
def drawn(request):
    """Task, geometry and images."""
    task, count = SIZES[request.param]
    drawings = task.draw(generator(5), count)
    return task, drawings, task.render(drawings)


def distance(a, b):
    """Smallest distance between two segments, from points along both."""
    along = np.linspace(0, 1, 21)[:, None]
    first, second = (start + along * (end - start) for start, end in (a, b))
    return np.linalg.norm(first[:, None] - second, axis=-1).min()


def path_of(point, paths):
    """Number of the path that has an end here, and whether that end is its first."""
    (found,) = [
        (number, first)
        for number, path in enumerate(paths)
        for first, end in ((True, path[0, 0]), (False, path[-1, 1]))
        if np.allclose(point, end)
    ]
    return found


def test_circles_are_on_one_path_exactly_if_the_label_says_so(drawn):
    _, drawings, _ = drawn
    for paths, (first, last), label in zip(
        drawings.paths, drawings.circles, drawings.labels, strict=True
    ):
        (start, is_first), (end, is_last) = path_of(first, paths), path_of(last, paths)
        assert (is_first, is_last) == (True, False)
        assert (start == end) == label


def test_half_of_the_examples_are_positive(drawn):
    _, drawings, _ = drawn
    assert 2 * drawings.labels.sum() == len(drawings.labels)


def test_dashes_follow_each_other(drawn):
    task, drawings, _ = drawn
    for paths, distractors in zip(drawings.paths, drawings.distractors, strict=True):
        found = [path for path in distractors if not np.isnan(path).any()]
        margins = []
        for path in (*paths, *found):
            along = path[:, 1] - path[:, 0]
            np.testing.assert_allclose(np.linalg.norm(along, axis=-1), task.dash, rtol=1e-4)
            cosine = (along[1:] * along[:-1]).sum(-1) / task.dash**2
            assert cosine.min() >= math.cos(math.pi / 2 / task.continuity) - 1e-4
            # Half of the gap is in each of both directions.
            gaps = np.linalg.norm(path[1:, 0] - path[:-1, 1], axis=-1)
            margins += list(gaps / np.sqrt(2 + 2 * np.clip(cosine, -1, 1)))
        assert np.ptp(margins) < 1e-2
        assert np.isclose(task.margins, np.mean(margins), atol=1e-2).any()


def test_paths_are_farther_apart_than_dashes_of_a_path(drawn):
    _, drawings, _ = drawn
    for paths, distractors in zip(drawings.paths[:3], drawings.distractors[:3], strict=True):
        every = [path for path in (*paths, *distractors) if not np.isnan(path).any()]
        dashes = [
            (number, at, dash) for number, path in enumerate(every) for at, dash in enumerate(path)
        ]
        gap = max(np.linalg.norm(path[1:, 0] - path[:-1, 1], axis=-1).max() for path in paths)
        for (path, i, one), (other, j, two) in itertools.combinations(dashes, 2):
            if path != other or abs(i - j) > 1:
                assert distance(one, two) > 0.95 * gap


def test_paths_are_in_the_image_and_begin_near_each_other(drawn):
    task, drawings, _ = drawn
    for part in (drawings.paths, drawings.distractors):
        found = part[~np.isnan(part)]
        assert found.min(initial=1) >= 1
        assert found.max(initial=1) <= task.size - 2
    apart = drawings.paths[:, 0, 0, 0] - drawings.paths[:, 1, 0, 0]
    np.testing.assert_allclose(np.linalg.norm(apart, axis=-1), task.seed_distance, rtol=1e-4)


def test_images_show_the_circles_and_the_dashes(drawn):
    task, drawings, images = drawn
    assert images.shape == (len(drawings.labels), task.size, task.size)
    assert images.dtype == np.uint8
    assert images.min() == 0
    assert images.max() == task.levels - 1
    # The pixel nearest to a centre is at most 0.71 away.
    least = round((task.levels - 1) * min(1, task.radius + 0.5 - 0.71))
    for image, paths, circles in zip(images, drawings.paths, drawings.circles, strict=True):
        for y, x in np.round(circles).astype(int):
            assert image[y, x] >= least
        # Few levels show a dash only in the pixels that it covers well.
        near = 0 if task.levels == 256 else 1
        for y, x in np.round(paths.mean(-2).reshape(-1, 2)).astype(int):
            assert image[y - near : y + near + 1, x - near : x + near + 1].max() > 0


def test_no_pixel_is_bright_far_from_all_strokes(drawn):
    task, drawings, images = drawn
    for image, paths, distractors, circles in zip(images, *drawings[:3], strict=True):
        dashes = np.concatenate([paths.reshape(-1, 2, 2), distractors.reshape(-1, 2, 2)])
        centres = np.concatenate([dashes[~np.isnan(dashes[:, 0, 0])].mean(1), circles])
        y, x = np.nonzero(image)
        far = np.linalg.norm(np.stack([y, x], -1)[:, None] - centres, axis=-1).min(1)
        assert far.max() < max(task.dash / 2 + task.thickness, task.radius) + 1


def test_the_published_sizes():
    sizes = {name: presets["published"] for name, presets in TASKS.items()}
    assert {name: task.size for name, task in sizes.items()} == {
        "pathfinder": 32,
        "pathfinder64": 64,
        "pathx": 128,
    }
    for task in sizes.values():
        assert task.dashes == 14
        assert (task.train, task.held) == (160_000, 20_000)
        assert task.length == task.size**2
        assert (task.num_classes, task.vocab_size) == (2, 256)


@pytest.mark.parametrize("dashes", [6, 9])
def test_published_difficulties(dashes):
    """The contours of 6 and 9 dashes of Linsley et al."""
    drawings = Pathfinder(dashes=dashes).draw(generator(0), 10)
    assert drawings.paths.shape == (10, 2, dashes, 2, 2)
    assert drawings.distractors.shape[1:3] == (20 // (dashes // 3), dashes // 3)


def test_sets_are_balanced_and_differ():
    sets = dataclasses.replace(TASKS["pathfinder"]["small"], train=20, held=10).sets
    images = [row.tobytes() for part in sets.values() for row in part.tokens]
    assert len(set(images)) == 40
    assert [part.labels.mean() for part in sets.values()] == [0.5] * 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"dashes": 2}, "dashes must be at least 3"),
        ({"distracting": -1}, "distracting must be at least 0"),
        ({"dash": 0}, "dash must be above 0"),
        ({"margins": ()}, "margins must be one or more numbers above 0"),
        ({"continuity": 0}, "continuity must be above 0.5"),
        ({"levels": 1}, "levels must be at least 2"),
        ({"levels": 257}, "levels must be at most 256"),
        ({"held": 0}, "train and held must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Pathfinder(**sizes)


@pytest.mark.parametrize("train", [1, 1000])
def test_images_that_are_too_small_are_one_sentence(train):
    task = dataclasses.replace(TASKS["pathfinder"]["small"], size=6, train=train, held=1)
    with pytest.raises(UserError, match="no two paths of 3 dashes fit in an image of 6 by 6"):
        task.load()
