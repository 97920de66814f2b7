"""Mechanisms that take no heads, as subjects of the laws: mixers with parameters, from x to y.

Three programs serve most laws: all that is claimed in float64, tokens alone in float32, and
decoding. Parameters start as the mixer has them and are moved at random, so that none is zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from effattn import registry
from tests.laws import battery
from tests.references import MIXERS
from tests.references.reference import MixerReference

ROWS, LENGTH, FEATURES, HEADS = 4, 13, 8, 2


class Subject(NamedTuple):
    """A mixer of one mechanism, with one set of options, in one direction."""

    name: str
    variant: str
    is_causal: bool

    @property
    def entry(self) -> registry.Mechanism:
        return registry.get(self.name)

    @property
    def reference(self) -> MixerReference:
        return MIXERS[self.name]

    def has(self, capability: str) -> bool:
        return capability in self.entry.capabilities

    def __str__(self) -> str:
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.name}{variant}-{'causal' if self.is_causal else 'bidirectional'}"


def _directions(name):
    directions = {"causal": True, "bidirectional": False}
    return [d for c, d in directions.items() if c in registry.get(name).capabilities]


SUBJECTS = [Subject(n, v, d) for n in MIXERS for v in MIXERS[n].variants for d in _directions(n)]
# One of each, for the laws that are not about values.
FIRST = [Subject(n, next(iter(MIXERS[n].variants)), _directions(n)[0]) for n in MIXERS]
# One of each layer, for the laws on calls from larger programs: kinds of a layer are alike there.
LAYERS = list({subject.entry.builder: subject for subject in reversed(FIRST)}.values())[::-1]
# One of each family, but for those of which a mechanism with heads is one.
FIRST_OF_FAMILY = [
    subject
    for subject in battery.first_of_families(FIRST)
    if subject.entry.family not in {m.entry.family for m in battery.MECHANISMS}
]
# Hybrids run on the cores of what they are made of.
WITH_CORES = [subject for subject in FIRST_OF_FAMILY if subject.entry.family != "hybrid"]


def build(subject: Subject, features: int = FEATURES, heads: int = HEADS, **options: Any) -> Any:
    """As the registry builds it."""
    given = {**subject.reference.variants[subject.variant], **options}
    return subject.entry.build(
        features, heads, is_causal=subject.is_causal, rngs=nnx.Rngs(0), **given
    )


@functools.cache
def made(subject: Subject, tuned: bool = False, narrow: bool = False, dtype: Any = None) -> Any:
    """With parameters in float64, each moved from where it starts."""
    of_shapes = dict(subject.reference.narrow) if narrow else {}
    options = dict(subject.reference.tuning) if tuned else {}
    if dtype is not None:
        options["dtype"] = dtype
    mixer = _moved(subject, tuple(of_shapes.items()))
    if not options:
        return mixer
    # These change no parameter, so that one program draws those of all.
    like = jax.eval_shape(lambda: build(subject, **options, **of_shapes))
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(mixer))


@functools.cache
def _moved(subject: Subject, options: tuple[tuple[str, Any], ...]) -> Any:
    mixer = jax.jit(lambda: build(subject, **dict(options)))()
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x, np.float64) + rng.normal(size=x.shape) / 8, mixer)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tree)


def tokens(seed: int, rows: int = ROWS, length: int = LENGTH) -> np.ndarray:
    """float64 `(B, T, D)`."""
    return np.random.default_rng(seed).normal(size=(rows, length, FEATURES))


def padding(subject: Subject) -> dict[str, np.ndarray]:
    """All that is claimed of it, where nothing is padded or packed."""
    given = {}
    if subject.has("lengths"):
        given["lengths"] = np.full(ROWS, LENGTH, np.int32)
    if subject.has("segments"):
        given["segment_ids"] = np.ones((ROWS, LENGTH), np.int32)
    return given


def both(call, mixer, x, cotangent):
    """Outputs, and the gradients of the parameters and of the tokens."""
    y, pull_back = jax.vjp(call, mixer, x)
    return y, pull_back(cotangent)


@jax.jit
def run(mixer, x, cotangent, padding):
    """The mixer itself, with the ranks of arrays as they are."""
    with jax.numpy_rank_promotion("raise"):
        return both(lambda m, x: m(x, **padding), mixer, x, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def refer(name, mixer, x, cotangent):
    """Its plain form, row by row."""
    mix = MIXERS[name].mix
    return both(lambda m, x: jax.vmap(lambda row: mix(m, row))(x), mixer, x, cotangent)


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def run_in_float32(subject: Subject, x: np.ndarray, cotangent: np.ndarray) -> Any:
    mixer = cast(made(subject), np.float32)
    return to_numpy(run(mixer, x.astype(np.float32), cotangent.astype(np.float32), {}))


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))
