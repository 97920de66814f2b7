"""Maps a function of one head over heads and batch dimensions, and what both lifts share."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def over_heads(
    function: Callable[..., Any],
    batch: int,
    num_heads: int | None,
    *,
    tokens: Mapping[str, Any],
    heads: Mapping[str, Any],
    examples: Mapping[str, Any],
    both: Mapping[str, Any],
    out_axes: Any,
    state_axes: Any = 0,
) -> Any:
    """Maps a function of one head of one example over all heads and examples.

    Args:
      function: takes the arrays that are not None by name; returns arrays.
      batch: number of batch dimensions `*B`.
      num_heads: R; head r reads head r // (R // n) of an array of n heads. None without heads.
      tokens: `(*B, L, n, ...)` by name; without heads `(*B, L, ...)`.
      heads: `(n, ...)` by name, which all examples share.
      examples: pytrees `(*B, ...)` by name, which all heads share.
      both: pytrees `(*B, n, ...)` by name.
      out_axes: the axes of heads in the results of one example, as in `jax.vmap`.
      state_axes: the axes of heads in the `initial_state` of one example, as in `jax.vmap`.

    Returns:
      The results, with batch dimensions first.
    """

    def given(arrays):
        return {name: x for name, x in arrays.items() if x is not None}

    def repeated(arrays, axis):
        def repeat(x, axis):
            return x if num_heads is None else jnp.repeat(x, num_heads // x.shape[axis], axis)

        return map_by_axis(repeat, axis, given(arrays))

    def call(tokens, heads, examples, both):
        return function(**tokens, **heads, **examples, **both)

    axes = {name: state_axes if name == "initial_state" else 0 for name in given(both)}
    full_axes = jax.tree.map(lambda axis: batch + axis, axes)
    arrays = (
        repeated(tokens, batch + 1),
        repeated(heads, 0),
        given(examples),
        repeated(both, full_axes),
    )
    if num_heads is not None:
        call = jax.vmap(call, (1, 0, None, axes), out_axes, axis_size=num_heads)
    for _ in range(batch):
        call = jax.vmap(call, (0, None, 0, 0))
    return call(*arrays)


def map_by_axis(function: Callable[[jax.Array, int], jax.Array], axes: Any, tree: Any) -> Any:
    """Maps arrays with their axes, a prefix of the tree; arrays of axis None stay as they are."""

    def of_axis(axis, part):
        return part if axis is None else jax.tree.map(lambda x: function(x, axis), part)

    return jax.tree.map(of_axis, axes, tree, is_leaf=lambda axis: axis is None)


def first_of_groups(state: Any, batch: int, num_heads: int, state_axes: Any = 0) -> Any:
    """The states of key heads from those of query heads, which are equal within a group."""

    def pick(x, axis):
        axis = batch + axis
        return jax.lax.slice_in_dim(x, 0, None, x.shape[axis] // num_heads, axis)

    return map_by_axis(pick, state_axes, state)


def example_arguments(
    given: Mapping[str, Any], shape: tuple[int, ...], queries: int, keys: int
) -> dict[str, Any]:
    """Segment ids, lengths and offset of each example by name: ints `(*B)` or `(*B, L)`."""
    query_ids, key_ids = _pair_of_ids(given.get("segment_ids"), (*shape, keys))
    of_both = given.get("lengths")
    of_queries = of_both if queries == keys else None
    arguments = {
        "query_ids": (jnp.ones(queries, jnp.int32) if query_ids is None else query_ids, (queries,)),
        "key_ids": (jnp.ones(keys, jnp.int32) if key_ids is None else key_ids, (keys,)),
        "query_lengths": (given.get("query_seq_lengths", of_queries), ()),
        "key_lengths": (given.get("key_value_seq_lengths", of_both), ()),
        "offset": (given.get("query_offset", 0), ()),
    }
    return {
        name: None if x is None else _of_examples(jnp.asarray(x), (*shape, *own_shape))
        for name, (x, own_shape) in arguments.items()
    }


def _of_examples(x, shape):
    """Broadcasts to a shape; without a batch, lengths may be `(1,)`, as in `jax.nn`."""
    return jnp.broadcast_to(x[0] if shape == () and x.shape == (1,) else x, shape)


def _pair_of_ids(ids: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Ids of queries and keys: a tuple is a pair, and so is a list that has not `shape`."""
    if not isinstance(ids, tuple | list):
        return ids, ids
    if isinstance(ids, list):
        try:
            is_array = np.shape(ids) == shape
        except ValueError:  # a pair of different lengths
            is_array = False
        if is_array:
            return ids, ids
    of_queries, of_keys = ids
    return of_queries, of_keys


def per_example_tokens(array: Any, shape: tuple[int, ...], length: int) -> Any:
    """`(*B, L, ...)`, of an array of that shape or of one `(L, ...)` for all examples."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.shape[: len(shape) + 1] == (*shape, length):
        return array
    return jnp.broadcast_to(array, (*shape, *array.shape))


def per_head_array(array: Any, rank: int) -> Any:
    """`(n, ...)`, of an array of that shape or of one of `rank` axes for all heads."""
    if array is None:
        return None
    array = jnp.asarray(array)
    return array[None] if array.ndim == rank else array


def without_padding(array: jax.Array, present: jax.Array) -> jax.Array:
    """`(L, ...)` with zeros for the tokens that are not present, bool `(L,)`."""
    return jnp.where(present.reshape(-1, *[1] * (array.ndim - 1)), array, 0)


def present_tokens(ids: jax.Array, length: jax.Array | None) -> jax.Array:
    """Bool `(L,)`, the tokens of one example that are not padding."""
    present = ids != 0
    return present if length is None else present & (jnp.arange(ids.size) < length)


def widened(x: Any, *arrays: jax.Array) -> Any:
    """A real array in the promoted dtype of all arrays, at least float32; others as they are."""

    def widen(x):
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)):
            return x
        return x.astype(jnp.result_type(jnp.float32, *(array.dtype for array in arrays)))

    return jax.tree.map(widen, x)


def precision(value: Any) -> contextlib.AbstractContextManager:
    """Context of matrix products in the caller's precision."""
    if value is None:
        return contextlib.nullcontext()
    both = value if isinstance(value, tuple | list) else (value, value)
    names = [x.name.lower() if isinstance(x, jax.lax.Precision) else x for x in both]
    # Products have one precision here: the higher one of a pair.
    order = ("default", "high", "highest")
    is_pair_of_levels = all(name in order for name in names)
    name = max(names, key=order.index) if is_pair_of_levels else names[0]
    return jax.default_matmul_precision(getattr(name, "name", name))


def named(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the name and the documentation of another, and no reference to it."""
    function = functools.wraps(like, assigned=("__module__", "__name__", "__doc__"))(function)
    del function.__wrapped__
    return function
