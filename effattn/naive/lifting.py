"""Maps a function of one head over heads and batch dimensions, and what both lifts share."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


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

    Returns:
      The results, with batch dimensions first.
    """

    def repeated(arrays, axis):
        def repeat(x):
            return x if num_heads is None else jnp.repeat(x, num_heads // x.shape[axis], axis)

        return jax.tree.map(repeat, {n: x for n, x in arrays.items() if x is not None})

    def call(tokens, heads, examples, both):
        return function(**tokens, **heads, **examples, **both)

    examples = {name: x for name, x in examples.items() if x is not None}
    arrays = repeated(tokens, batch + 1), repeated(heads, 0), examples, repeated(both, batch)
    if num_heads is not None:
        call = jax.vmap(call, (1, 0, None, 0), out_axes, axis_size=num_heads)
    for _ in range(batch):
        call = jax.vmap(call, (0, None, 0, 0))
    return call(*arrays)


def first_of_groups(state: Any, axis: int, num_heads: int) -> Any:
    """The states of key heads from those of query heads, which are equal within a group."""

    def pick(x):
        return jax.lax.slice_in_dim(x, 0, None, x.shape[axis] // num_heads, axis)

    return jax.tree.map(pick, state)


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
        dtypes = (array.dtype for array in arrays)
        return x.astype(functools.reduce(jnp.promote_types, dtypes, jnp.float32))

    return jax.tree.map(widen, x)


def precision(value: Any) -> contextlib.AbstractContextManager:
    """Context of matrix products in the caller's precision."""
    if value is None:
        return contextlib.nullcontext()
    if isinstance(value, tuple | list):
        value = value[0]
    name = value.name if isinstance(value, jax.lax.Precision) else str(value)
    return jax.default_matmul_precision(name.lower())


def named(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the name and the documentation of another, and no reference to it."""
    function = functools.wraps(like, assigned=("__module__", "__name__", "__doc__"))(function)
    del function.__wrapped__  # type: ignore[attr-defined]
    return function
