"""Softmax attention with all its pairs, called as `effattn.dot_product_attention` is."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import dropout
from tests.references.pairs import Pairs, pairs
from tests.references.softmax import softmax

RESTRICTIONS = (
    "is_causal local_window_size dilation query_offset query_seq_lengths key_value_seq_lengths "
    "segment_ids mask"
).split()


def draw(
    queries=11, keys=14, batch=(2,), heads=4, key_heads=2, size=3, value_size=5, dtype=np.float64
) -> dict[str, np.ndarray]:
    """Query, key and value; the lengths are no multiples of the tiles used in the tests."""
    rng = np.random.default_rng(queries + keys)
    shapes = {
        "query": (queries, heads, size),
        "key": (keys, key_heads, size),
        "value": (keys, key_heads, value_size),
    }
    return {name: rng.normal(size=(*batch, *s)).astype(dtype) for name, s in shapes.items()}


def cotangents(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Random ones for the output and the log-sum-exp, the same numbers in every precision."""
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


def dense_with_gradients(
    arrays, *, score_mod_of=None, dropout_rate=0.0, dropout_rng=None, **options
) -> Any:
    """The same from the definition; `score_mod_of(arrays)` makes the score_mod."""
    allowed = {name: options.pop(name) for name in RESTRICTIONS if name in options}
    if "mask" in allowed:
        allowed["mask"] = np.asarray(allowed["mask"])[..., 0, :, :]
    *batch, queries, heads, _ = arrays["query"].shape
    which = pairs(tuple(batch), queries, arrays["key"].shape[-3], **allowed)
    keep = dropout_keep(dropout_rng, dropout_rate, which, heads) if dropout_rate else None
    function = _definition(score_mod_of, dropout_rate, tuple(options.items()))
    return with_gradients(function, arrays, (which, keep))


@functools.cache
def _definition(score_mod_of, dropout_rate, options):
    def definition(arrays, known):
        score_mod = None if score_mod_of is None else score_mod_of(arrays)
        results = softmax(
            arrays, *known, score_mod=score_mod, dropout_rate=dropout_rate, **dict(options)
        )
        return results["out"], results["lse"]

    return definition


def dropout_keep(rng, rate: float, which: Pairs, heads: int) -> jax.Array:
    """bool `(*B, N, T, S)`."""
    return _dropout_keep(rng, rate, which.position, heads, which.allowed.shape[-1])


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def _dropout_keep(rng, rate, position, heads, keys):
    batch = position.shape[:-1]
    b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    i = position[..., None, :, None]
    h = np.arange(heads)[:, None, None]
    return dropout.keep(dropout.seed_from_rng(rng), rate, b, h, i, jnp.arange(keys))
