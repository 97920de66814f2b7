"""Pathfinder: whether two circles lie on one dashed path."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.classification import Examples, Generated, joined
from experiments.tasks.task import Task, generator, require

# A dash that fits in none of so many directions is given up, with some dashes before it. A path is
# given up after TRIALS directions per dash.
DIRECTIONS, TRIALS = 6, 12

# Points per pixel of the grid that says where there are paths.
GRID = 2

# Images that are drawn together, and images without two long paths that are enough to give up.
CHUNK, GIVEN_UP = 1000, 10_000

# Width of the empty edge of an image, in pixels.
EDGE = 1

# Cumulative distribution of a density in proportion to cos(angle)^2.
ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 1001)
BELOW = 0.5 + (ANGLES + np.sin(2 * ANGLES) / 2) / np.pi


class Drawings(NamedTuple):
    """Geometry of n images, in pixels `(y, x)`; the centre of the first pixel is (0, 0).

    Attributes:
      paths: float32 `(n, 2, L, 2, 2)`, start and end of each dash of both long paths.
      distractors: float32 `(n, D, L // 3, 2, 2)`, NaN for distractors that did not fit.
      circles: float32 `(n, 2, 2)`, the centres of both circles.
      labels: int32 `(n,)`, 1 if both circles lie on the same path.
    """

    paths: np.ndarray
    distractors: np.ndarray
    circles: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pathfinder(Generated):
    """Classification of an image, one token per pixel, by whether its circles share a dashed path.

    Each image has two long paths and shorter ones that distract. One circle marks the start of a
    long path; the other marks its end, or the end of the other long path. The published numbers of
    images take from a quarter of an hour to an hour to draw, on one core.

    Attributes:
      size: pixels along each side.
      dashes: L, number of dashes of a long path; distractors have L // 3.
      distracting: most dashes of all distractors together. Not all fit: at 32 by 32 pixels about 6
        of 20 do, here and in the program of the publication.
      dash: length of a dash.
      thickness: thickness of a dash.
      margins: each image has one of these; dashes are two margins apart.
      continuity: c; a path turns at each dash by an angle with density cos(c angle)^2, below
        90 / c degrees.
      seed_distance: distance between the starts of the long paths.
      radius: radius of the circles.
      contrast: brightness of the dashes, where 1 is that of the circles.
      levels: number of levels of brightness, which are the tokens.
    """

    size: int = 32
    dashes: int = 14
    distracting: int = 20
    dash: float = 2
    thickness: float = 0.5
    margins: tuple[float, ...] = (1,)
    continuity: float = 1
    seed_distance: float = 7
    radius: float = 1.5
    contrast: float = 1.5
    levels: int = 256
    train: int = 160_000
    held: int = 20_000

    reference: ClassVar[str] = (
        "Linsley et al. 2018; Kim et al. 2020; sizes as in Long-Range Arena (Tay et al. 2021). "
        "Unlike there, exactly half of the examples are positive, distractors are as bright as the "
        "long paths, and a path without a way on is shortened and goes another way"
    )
    title: ClassVar[str] = "Pathfinder compared"

    is_padded = False
    num_classes = 2

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("dashes", 3), ("distracting", 0), ("levels", 2)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}")
        for name in ("dash", "thickness", "seed_distance", "radius", "contrast"):
            require(getattr(self, name) > 0, f"{name} must be above 0")
        positive = len(self.margins) > 0 and min(self.margins) > 0
        require(positive, "margins must be one or more numbers above 0")
        require(self.levels <= 256, "levels must be at most 256")
        # Paths turn by less than 180 degrees.
        require(self.continuity > 0.5, "continuity must be above 0.5")
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        return self.levels

    @property
    def length(self) -> int:
        return self.size**2

    def load(self) -> Mapping[str, Examples]:
        return {
            name: joined(
                [
                    self._examples(generator(number, at), min(CHUNK, count - at))
                    for at in range(0, count, CHUNK)
                ]
            )
            for number, (name, count) in enumerate(self.counts.items())
        }

    def _examples(self, rng: np.random.Generator, count: int) -> Examples:
        drawings = self.draw(rng, count)
        return Examples(self.render(drawings).reshape(count, -1), None, drawings.labels)

    def draw(self, rng: np.random.Generator, count: int) -> Drawings:
        """Draws `count` images, every second of them positive, in random order.

        Raises:
          UserError: the images are too small for two long paths.
        """
        drawn: list[tuple[np.ndarray, np.ndarray]] = []
        found = in_vain = 0
        while found < count:
            drawn.append(self._paths(rng, CHUNK if in_vain else count))
            more = len(drawn[-1][0])
            found, in_vain = found + more, 0 if more else in_vain + CHUNK
            if in_vain >= GIVEN_UP:
                raise UserError(
                    f"no two paths of {self.dashes} dashes fit in an image of {self.size} by "
                    f"{self.size} pixels; choose a larger size, or fewer or shorter dashes"
                )
        paths, distractors = (np.concatenate(part)[:count] for part in zip(*drawn, strict=True))
        labels = rng.permutation(np.arange(count, dtype=np.int32) % 2)
        first, images = rng.integers(0, 2, count), np.arange(count)
        last = np.where(labels, first, 1 - first)
        circles = np.stack([paths[images, first, 0, 0], paths[images, last, -1, 1]], 1)
        return Drawings(paths, distractors, circles, labels)

    def _paths(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws the paths of `count` images, and leaves out those without two long paths."""
        margin = rng.choice(np.array(self.margins, np.float32), count)
        taken = np.zeros((count, GRID * self.size, GRID * self.size), bool)

        def central(rows: np.ndarray) -> np.ndarray:
            edge = min(2 * self.seed_distance, 0.45 * self.size)
            return rng.uniform(edge, self.size - edge, (len(rows), 2))

        def beside(rows: np.ndarray) -> np.ndarray:
            return first[rows, 0, 0] + self.seed_distance * _unit(_any_angle(rng, rows))

        def anywhere(rows: np.ndarray) -> np.ndarray:
            return rng.uniform(0, self.size, (len(rows), 2))

        first = self._path(rng, self.dashes, central, margin, taken)
        first, margin, taken = _complete(first, first, margin, taken)
        self._take(taken, first, margin)
        second = self._path(rng, self.dashes, beside, margin, taken)
        first, second, margin, taken = _complete(second, first, second, margin, taken)
        self._take(taken, second, margin)
        short = self.dashes // 3
        distractors = np.zeros((len(margin), self.distracting // short, short, 2, 2), np.float32)
        for path in distractors.swapaxes(0, 1):
            path[:] = self._path(rng, short, anywhere, margin, taken)
            self._take(taken, path, margin)
        return np.stack([first, second], 1), distractors

    def _path(
        self,
        rng: np.random.Generator,
        dashes: int,
        start: Callable[[np.ndarray], np.ndarray],
        margin: np.ndarray,
        taken: np.ndarray,
    ) -> np.ndarray:
        """Draws one path in each of n images, dash by dash, each in a direction that fits.

        Args:
          rng: random numbers.
          dashes: number of dashes of the path.
          start: draws the start of a path for each of k images, `(k, 2)`.
          margin: `(n,)`.
          taken: `(n, GRID * size, GRID * size)`, True near other paths.

        Returns:
          `(n, dashes, 2, 2)`, NaN in images where no path was found.
        """
        path = np.full((len(margin), dashes, 2, 2), np.nan, np.float32)
        heading = np.zeros((len(margin), dashes))
        drawn, failures = np.zeros((2, len(margin)), int)
        for _ in range(TRIALS * dashes):
            rows = np.flatnonzero(drawn < dashes)
            if not len(rows):
                break
            at, near = drawn[rows], margin[rows]
            # The first dash has no previous one; what is read in its place is not used.
            before = heading[rows, at - 1]
            turn = np.interp(rng.random(len(rows)), BELOW, ANGLES) / self.continuity
            angle = np.where(at > 0, before + turn, _any_angle(rng, rows))
            gap = near[:, None] * (_unit(before) + _unit(angle))
            tail = np.where(at[:, None] > 0, path[rows, at - 1, 1] + gap, start(rows))
            dash = np.stack([tail, tail + self.dash * _unit(angle)], 1).astype(np.float32)
            # The previous dash is nearer than others may be.
            own = path[rows]
            own[np.arange(len(rows)), at - 1] = np.nan
            fits = self._fits(dash, own, near) & ~_any_taken(taken, rows, _points(dash[:, None]))
            fits &= (at >= dashes - 2) | self._can_turn(dash[:, 1], angle, near, taken, rows)
            path[rows, at], heading[rows, at] = dash, angle
            drawn[rows] += fits
            failures[rows] = np.where(fits, 0, failures[rows] + 1)
            stuck = rows[failures[rows] == DIRECTIONS]
            drawn[stuck] -= (drawn[stuck] * rng.random(len(stuck)) ** 2).astype(int)
            failures[stuck] = 0
            undone = rows[~fits]
            kept = np.arange(dashes) < drawn[undone, None]
            path[undone] = np.where(kept[..., None, None], path[undone], np.nan)
        path[drawn < dashes] = np.nan
        return path

    def _fits(self, dash: np.ndarray, others: np.ndarray, margin: np.ndarray) -> np.ndarray:
        """Returns whether dashes `(k, 2, 2)` are in the image, and clear of `(k, m, 2, 2)`."""
        corners = dash.reshape(len(dash), 4)
        inside = (corners.min(1) >= EDGE) & (corners.max(1) <= self.size - 1 - EDGE)
        # Sums over an axis of two are slow.
        (y, x), (other_y, other_x) = (
            np.moveaxis(_points(dashes), -1, 0) for dashes in (dash[:, None], others)
        )
        square = (y[:, :, None] - other_y[:, None]) ** 2 + (x[:, :, None] - other_x[:, None]) ** 2
        near = square.reshape(len(dash), -1) < self._clearance(margin)[:, None] ** 2
        return inside & ~near.any(1)

    def _clearance(self, margin: np.ndarray) -> np.ndarray:
        """Returns the distance that dashes keep from all others but their neighbours in a path."""
        return 2 * margin + self.thickness

    def _can_turn(
        self,
        end: np.ndarray,
        angle: np.ndarray,
        margin: np.ndarray,
        taken: np.ndarray,
        rows: np.ndarray,
    ) -> np.ndarray:
        """Returns whether a path has room for a narrow turn to the left or right after its end."""
        radius = (self.dash + 2 * margin) / (2 * math.sin(math.pi / 4 / self.continuity))
        sides = _unit(angle[:, None] + [-np.pi / 2, np.pi / 2])
        centre = end[:, None] + radius[:, None, None] * sides
        room = (radius + EDGE)[:, None, None]
        inside = ((centre >= room) & (centre <= self.size - 1 - room)).all(-1)
        return (inside & ~_any_taken(taken, rows[:, None], centre[:, :, None])).any(1)

    def _take(self, taken: np.ndarray, path: np.ndarray, margin: np.ndarray) -> None:
        """Marks the surroundings of paths `(n, m, 2, 2)` as taken."""
        clearance = GRID * self._clearance(margin)
        around = np.arange(math.ceil(clearance.max(initial=0)) + 1)
        around = np.concatenate([-around[:0:-1], around])
        points = GRID * _points(path)
        image, point = np.nonzero(~np.isnan(points[:, :, 0]))
        centre = points[image, point]
        cell = np.round(centre).astype(int)[:, :, None] + around
        square = (cell - centre[:, :, None]) ** 2
        near = square[:, 0, :, None] + square[:, 1, None] < clearance[image, None, None] ** 2
        at, i, j = np.nonzero(near)
        y, x = cell[at, 0, i], cell[at, 1, j]
        inner = (np.minimum(y, x) >= 0) & (np.maximum(y, x) < taken.shape[1])
        taken[image[at[inner]], y[inner], x[inner]] = True

    def render(self, drawings: Drawings) -> np.ndarray:
        """Returns the images, uint8 `(n, size, size)`, with levels from 0."""
        count = len(drawings.labels)
        edge = math.ceil(max(self.dash + self.thickness, 2 * self.radius) / 2) + 1
        side = self.size + 2 * edge
        images = np.zeros((count, side, side), np.float32)
        dashes = [part.reshape(count, -1, 2, 2) for part in drawings[:2]]
        points = np.repeat(drawings.circles[:, :, None], 2, 2)
        for strokes, radius, contrast in (
            (np.concatenate(dashes, 1), self.thickness / 2, self.contrast),
            (points, self.radius, 1),
        ):
            image, stroke = np.nonzero(~np.isnan(strokes[:, :, 0, 0]))
            _draw(images, image, strokes[image, stroke] + edge, radius, contrast, edge)
        inner = images[:, edge:-edge, edge:-edge]
        return np.round((self.levels - 1) * np.minimum(inner, 1)).astype(np.uint8)


def _draw(
    images: np.ndarray,
    image: np.ndarray,
    strokes: np.ndarray,
    radius: float,
    contrast: float,
    reach: int,
) -> None:
    """Draws antialiased strokes `(k, 2, 2)` with round ends into the images of these numbers."""
    around = np.arange(-reach, reach + 1)
    centre = np.round(strokes.mean(1)).astype(int)
    y, x = (centre[:, axis, None] + around for axis in (0, 1))
    pixel = np.stack(np.broadcast_arrays(y[:, :, None], x[:, None]), -1)
    start, along = strokes[:, None, None, 0], (strokes[:, 1] - strokes[:, 0])[:, None, None]
    length = np.maximum((along**2).sum(-1), 1e-6)
    nearest = np.clip(((pixel - start) * along).sum(-1) / length, 0, 1)
    distance = np.linalg.norm(pixel - start - nearest[..., None] * along, axis=-1)
    covered = np.clip(radius + 0.5 - distance, 0, min(2 * radius, 1))
    np.maximum.at(images, (image[:, None, None], y[:, :, None], x[:, None]), contrast * covered)


def _complete(path: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of arrays where `path` is not NaN."""
    rows = ~np.isnan(path[:, -1, 0, 0])
    return [array[rows] for array in arrays]


def _points(dashes: np.ndarray) -> np.ndarray:
    """Returns start, middle and end of dashes `(n, m, 2, 2)`, `(n, 3 m, 2)`."""
    start, end = dashes[:, :, 0], dashes[:, :, 1]
    return np.concatenate([start, (start + end) / 2, end], 1)


def _any_taken(taken: np.ndarray, rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Returns whether any of the points `(*rows.shape, m, 2)` is taken, or outside."""
    with np.errstate(invalid="ignore"):
        y, x = np.moveaxis(np.round(GRID * points).astype(int), -1, 0)
    outside = (np.minimum(y, x) < 0) | (np.maximum(y, x) >= taken.shape[1])
    y[outside] = x[outside] = 0
    return (taken[rows[..., None], y, x] | outside).any(-1)


def _any_angle(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    return rng.uniform(-np.pi, np.pi, len(rows))


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(angle), np.cos(angle)], -1)


TASKS: Mapping[str, Mapping[str, Task]] = {
    "pathfinder": {
        "small": Pathfinder(
            size=10,
            dashes=3,
            distracting=0,
            dash=1,
            margins=(0.65,),
            seed_distance=2.5,
            radius=1,
            levels=4,
            train=20_000,
            held=1000,
        ),
        "published": Pathfinder(),
    },
    "pathfinder64": {
        "small": Pathfinder(dashes=9, train=5000, held=500),
        "published": Pathfinder(
            size=64,
            distracting=22,
            dash=5,
            thickness=1,
            continuity=1.8,
            seed_distance=12,
            radius=2.5,
            contrast=0.8,
        ),
    },
    "pathx": {
        "small": Pathfinder(
            size=48,
            dashes=9,
            dash=3,
            thickness=1,
            continuity=1.8,
            seed_distance=9,
            radius=2,
            contrast=0.8,
            train=2000,
            held=200,
        ),
        "published": Pathfinder(
            size=128,
            distracting=35,
            dash=5,
            thickness=1.5,
            margins=(2, 3),
            continuity=1.8,
            seed_distance=20,
            radius=3,
            contrast=0.9,
        ),
    },
}
