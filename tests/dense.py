"""Softmax attention over all pairs, by its naive form, with gradients."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import effattn

# Array arguments of softmax attention; any other array belongs to a `score_mod`.
NAMES = ("query", "key", "value", "bias", "scale", "sink")


def draw(
    queries=11, keys=14, batch=(2,), heads=4, key_heads=2, size=3, value_size=5, dtype=np.float64
) -> dict[str, np.ndarray]:
    """Query, key and value, with lengths that are no multiples of the tiles used in the tests."""
    rng = np.random.default_rng(queries + keys)
    shapes = {
        "query": (queries, heads, size),
        "key": (keys, key_heads, size),
        "value": (keys, key_heads, value_size),
    }
    return {name: rng.normal(size=(*batch, *s)).astype(dtype) for name, s in shapes.items()}


def cotangents(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Random cotangents of output and log-sum-exp, the same numbers in every precision."""
    rng = np.random.default_rng(1)
    rows, values = arrays["query"].shape[:-1], arrays["value"].shape[-1:]
    dtype = arrays["value"].dtype
    lse_dtype = np.promote_types(dtype, np.float32)
    d_out, d_lse = rng.integers(-8, 9, rows + values) / 4, rng.integers(-8, 9, rows) / 4
    return d_out.astype(dtype), d_lse.astype(lse_dtype)


def with_gradients(function: Callable[..., Any], arrays, known=None) -> Any:
    """`((out, lse), gradients of arrays)` of `function(arrays, known) -> (out, lse)`, compiled."""
    return _with_gradients(function, arrays, {} if known is None else known, cotangents(arrays))


@functools.partial(jax.jit, static_argnums=0)
def _with_gradients(function, arrays, known, cotangents):
    results, pull_back = jax.vjp(lambda a: function(a, known), arrays)
    return results, pull_back(cotangents)[0]


def dense_with_gradients(arrays, *, score_mod_of=None, **options) -> Any:
    """`with_gradients` of the naive form; `score_mod_of(arrays)` returns the score_mod."""
    leaves = {name: jax.tree.leaves(x) for name, x in options.items()}
    known = {n: options[n] for n in options if any(hasattr(x, "shape") for x in leaves[n])}
    static = {name: x for name, x in options.items() if name not in known}
    return with_gradients(_naive(score_mod_of, tuple(sorted(static.items()))), arrays, known)


@functools.cache
def _naive(score_mod_of, static):
    options = dict(static)
    attend = effattn.naive.sliding_window if "dilation" in options else effattn.naive.softmax

    def naive(arrays, known):
        given = {} if score_mod_of is None else {"score_mod": score_mod_of(arrays)}
        own = {name: arrays[name] for name in NAMES if name in arrays}
        return attend(**own, **known, **options, **given, return_residual=True)

    return naive
