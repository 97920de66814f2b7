"""Calls of mechanisms without heads: mixers with random parameters, and their naive forms.

The arrays of a call are the tokens `x (B, T, D)` and the parameters. Parameters start as the mixer
initialises them and are moved at random, so that none is zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from effattn import registry
from effattn.testing.case import Case

ROWS, LENGTH, FEATURES, HEADS = 4, 13, 8, 2

Options = tuple[tuple[str, Any], ...]


class Mixer(NamedTuple):
    """A mixer of one mechanism, with one set of options, in one direction."""

    name: str
    variant: str
    case: Case
    is_causal: bool

    @property
    def entry(self) -> registry.Mechanism:
        """The registry entry."""
        return registry.get(self.name)

    @property
    def mix(self) -> Any:
        """The naive form `(mixer, x (T, D)) -> (T, D)`."""
        return self.case.mix or self.entry.naive

    def has(self, capability: str) -> bool:
        """Returns whether the mechanism claims a capability."""
        return capability in self.entry.capabilities

    def __str__(self) -> str:
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.name}{variant}-{'causal' if self.is_causal else 'bidirectional'}"


def directions(name: str) -> list[bool]:
    """The values of `is_causal` that a mechanism takes."""
    capabilities = registry.get(name).capabilities
    ways = {"causal": True, "bidirectional": False}
    return [is_causal for way, is_causal in ways.items() if way in capabilities]


def build(subject: Mixer, features: int = FEATURES, heads: int = HEADS, **options: Any) -> Any:
    """The mixer that the registry builds."""
    given = {**subject.case.variants[subject.variant], **options}
    return subject.entry.build(
        features, heads, is_causal=subject.is_causal, rngs=nnx.Rngs(0), **given
    )


@functools.cache
def made(subject: Mixer, tuned: bool = False, more: Options = (), dtype: Any = None) -> Any:
    """The mixer with random parameters in float64; `more` are further options, as pairs."""
    of_shapes = dict(more)
    options = dict(subject.case.tuning) if tuned else {}
    if dtype is not None:
        options["dtype"] = dtype
    mixer = _moved(subject, more)
    if not options:
        return mixer
    # These options change no parameter, so the parameters serve all of them.
    like = jax.eval_shape(lambda: build(subject, **options, **of_shapes))
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(mixer))


@functools.cache
def _moved(subject: Mixer, options: Options) -> Any:
    mixer = jax.jit(lambda: build(subject, **dict(options)))()
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x, np.float64) + rng.normal(size=x.shape) / 8, mixer)


def cast(tree: Any, dtype: Any) -> Any:
    """The tree with NumPy arrays in a dtype."""
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tree)


def tokens(seed: int, rows: int = ROWS, length: int = LENGTH) -> np.ndarray:
    """Random tokens, float64 `(B, T, D)`."""
    return np.random.default_rng(seed).normal(size=(rows, length, FEATURES))


def padding(subject: Mixer) -> dict[str, np.ndarray]:
    """Arguments that pad and pack nothing."""
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
    """Outputs and gradients of the mixer."""
    with jax.numpy_rank_promotion("raise"):
        return both(lambda m, x: m(x, **padding), mixer, x, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def run_naive(subject, mixer, x, cotangent):
    """Outputs and gradients of the naive form, row by row."""
    return both(lambda m, x: jax.vmap(lambda row: subject.mix(m, row))(x), mixer, x, cotangent)


def run_in_float32(subject: Mixer, x: np.ndarray, cotangent: np.ndarray) -> Any:
    """Outputs and gradients of the mixer in float32, as NumPy arrays."""
    mixer = cast(made(subject), np.float32)
    y = run(mixer, x.astype(np.float32), cotangent.astype(np.float32), {})
    return jax.tree.map(np.asarray, y)
