"""Allowed differences between a result and the exact result in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def jittered(rng: np.random.Generator, x: Any) -> np.ndarray:
    """Each number moved by one eps or less."""
    eps = float(jnp.finfo(x.dtype).eps)
    return np.asarray(x, np.float64) * (1 + eps * rng.uniform(-1, 1, size=x.shape))


def largest_difference(a: Any, b: Any) -> float:
    """Largest absolute difference; infinite if only one of two numbers is finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.where(same, 0, a - b))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def compare(
    ours: Any,
    true: Any,
    likely: Callable[[], Any],
    eps: float,
    decays: frozenset[str] = frozenset(),
    amplified: float = 1.0,
) -> Iterator[str]:
    """Yields the differences above a few times the likely error.

    `amplified` is the factor by which rounding of the sums outweighs rounding of the arguments.
    """
    paths = jax.tree.leaves_with_path(true)
    leaves = jax.tree.leaves(ours)
    # Gradients of queries and keys are differences of numbers about as large as the gradients of
    # values. With a single key the exact difference is zero, but the rounding of both numbers
    # remains.
    largest = max((float(np.abs(b[np.isfinite(b)]).max(initial=0)) for _, b in paths), default=0)
    for n, ((path, b), a) in enumerate(zip(paths, leaves, strict=True)):
        name = jax.tree_util.keystr(path)
        if a.shape != b.shape:
            yield f"{name} has shape {a.shape}, not {b.shape}"
            continue
        finite = np.abs(b[np.isfinite(b)])
        size = max(float(finite.max(initial=0)), 1.0, largest / 2)
        # The largest of many errors is much the same in every draw. The error of a single number
        # varies, and a single number is often a sum of many terms that cancel.
        few = 8 if b.size < 16 else 1
        error, allowed = largest_difference(a, b), few * (2 if eps > 1e-4 else 16) * eps * size
        if decays & {getattr(key, "key", None) for key in path}:
            allowed = max(allowed, 1e-5 * size)
        if error > allowed:
            plain, *moved = (jax.tree.leaves(errors)[n] for errors in likely())
            # `likely` rounds the inputs only; the states between pieces of a sequence are rounded
            # as well.
            likely_error = max(4 * plain, 16 * max(moved))
            allowed = max(allowed, few * amplified * likely_error)
        if error > allowed:
            yield f"{name} differs by {error:.2g}, where {allowed:.2g} is allowed, of {size:.2g}"
