"""Kernels on several devices: which axes of their operands and results are partitioned.

`effattn.dispatch.places` explains the names of the axes. In a program for one device, the
kernels are called as they are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from effattn.dispatch.partition import is_needed, partitioned
from effattn.dispatch.places import HEADS, ONCE, SAME, Names, rows
from effattn.interfaces.block_attention import Attended, Config, Inputs, output_dtype

Forward = Callable[[Config, Inputs, bool], Attended]
Backward = Callable[[Config, Inputs, jax.Array, jax.Array, jax.Array], Inputs]


def forward(kernel: Forward) -> Forward:
    """Decorator: each device runs a forward kernel of block attention for its rows and heads."""

    @functools.wraps(kernel)
    def run(config, x, exact):
        if not is_needed():
            return kernel(config, x, exact)
        given = _Operands(config, x)
        *_, each_query, of_tokens = given.names()
        is_exact = output_dtype(x, exact) != x.value.dtype
        names = of_tokens, *([of_tokens] if is_exact else []), each_query, each_query

        def on_device(*arrays):
            return jax.tree.leaves(kernel(*given.of_device(arrays), exact))

        call = partitioned(on_device, given.operands, names)
        out, *out_error, lse, lse_error = call(*given.arrays)
        return Attended(out, out_error[0] if out_error else None, lse, lse_error)

    return run


def backward(kernel: Backward) -> Backward:
    """Decorator: each device runs the gradients of block attention for its rows and heads."""

    @functools.wraps(kernel)
    def run(config, x, lse, d_out, delta):
        if not is_needed():
            return kernel(config, x, lse, d_out, delta)
        given = _Operands(config, x)
        *_, each_query, of_tokens = given.names()
        shapes = jax.eval_shape(functools.partial(kernel, config), x, lse, d_out, delta)
        structure = jax.tree.structure(_heads_together(shapes))
        results = _flat_names(shapes, given.names_of(x))

        def on_device(*arrays):
            x, rest = arrays[:-3], arrays[-3:]
            return jax.tree.leaves(_heads_together(kernel(*given.of_device(x), *rest)))

        operands = (*given.operands, each_query, of_tokens, each_query)
        call = partitioned(on_device, operands, results)
        whole = jax.tree.unflatten(structure, call(*given.arrays, lse, d_out, delta))
        return _heads_apart(whole, x.key.shape[-2])

    return run


class _Operands:
    """Inputs of block attention as a list of arrays, with the names of their axes.

    Biases and masks have one axis of N heads here, in place of axes of K key heads and of the heads
    of each. If a function of the call reads the example or the head of a pair, there are two more
    arrays: the indices of examples `(*B)` and heads `(N,)` in the whole call.

    Attributes:
      arrays: the arrays.
      operands: names of their axes.
    """

    def __init__(self, config: Config, x: Inputs):
        self._config, self._batch = config, x.query.shape[:-3]
        together = _heads_together(x)
        self.arrays, self._structure = jax.tree.flatten(together)
        self.operands = _flat_names(together, self.names_of(x))
        of_index = config.score_mod, config.pattern, config.dropout_rate or None
        self._with_indices = any(each is not None for each in of_index)
        if self._with_indices:
            examples = np.arange(math.prod(self._batch), dtype=np.int32).reshape(self._batch)
            self.arrays += [examples, np.arange(x.query.shape[-2], dtype=np.int32)]
            self.operands += [rows(len(self._batch)), (HEADS,)]

    def names(self) -> tuple[Names, Names, Names]:
        """Names of the axes of `(*B, L)`, `(*B, L, N)` and `(*B, L, N, H)`."""
        batch = rows(len(self._batch))
        return (*batch, None), (*batch, None, HEADS), (*batch, None, HEADS, None)

    def names_of(self, x: Inputs) -> dict[str, Any]:
        """Names of the axes of each array of the inputs, or of their gradients, by field."""
        batch = rows(len(self._batch))
        of_ids, _, of_tokens = self.names()
        pairs = (*batch, HEADS, None, None)

        def of_layout(array):
            axes = array.ndim - len(_layout_axes(x.layout, array))
            return (*_layout_axes(x.layout, array), *(None,) * axes)

        return {
            "query": of_tokens,
            "key": of_tokens,
            "value": of_tokens,
            "bias": pairs,
            "scale": (),
            "additive": (HEADS, None),
            "constants": lambda array: (None,) * array.ndim,
            "mask": pairs,
            "key_mask": of_ids,
            "segments": of_ids,
            "offset": lambda array: batch if array.ndim else (),
            "positions": of_ids,
            "seed": (None,),
            "layout": of_layout,
            "layout_of_keys": of_layout,
        }

    def of_device(self, arrays: Any) -> tuple[Config, Inputs]:
        """The configuration and the inputs of a device, from its part of `arrays`."""
        config = self._config
        if self._with_indices:
            *arrays, examples, heads = arrays
            config = _with_indices(config, examples.reshape(-1), heads)
        x = jax.tree.unflatten(self._structure, arrays)
        return config, _heads_apart(x, x.key.shape[-2])


def _layout_axes(layout, array):
    """Names of the leading axes of an array of a layout: none, heads, or examples and heads."""
    leading = layout.partial_counts.shape[:-1]
    return (*rows(len(leading) - 1), HEADS) if leading else ()


def _flat_names(x, names):
    """Names of the axes of each leaf of the inputs, in order."""
    found = []
    for field, of in names.items():
        for leaf in jax.tree.leaves(getattr(x, field)):
            found.append(of(leaf) if callable(of) else of)
    return found


def _heads_together(x: Inputs) -> Inputs:
    """Reshapes biases and masks from `(*#B, #K, #G, #T, #S)` to `(*#B, #N, #T, #S)`."""

    def together(array):
        if array is None:
            return None
        *batch, key_heads, group, queries, keys = array.shape
        shape = (*batch, key_heads * group, queries, keys)
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype)
        return array.reshape(shape)

    return x._replace(bias=together(x.bias), mask=together(x.mask))


def _heads_apart(x: Inputs, key_heads: int) -> Inputs:
    """The inverse of `_heads_together`."""

    def apart(array):
        if array is None:
            return None
        *batch, heads, queries, keys = array.shape
        by_group = (key_heads, heads // key_heads) if heads > 1 else (1, 1)
        return array.reshape(*batch, *by_group, queries, keys)

    return x._replace(bias=apart(x.bias), mask=apart(x.mask))


def _with_indices(config: Config, examples: jax.Array, heads: jax.Array) -> Config:
    """The configuration of a device whose examples and heads have these indices in the call."""
    origin = config.origin or (lambda *at: at)

    def in_call(b, h, i, j):
        return origin(examples[b], heads[h], i, j)

    pattern = None if config.pattern is None else _PatternOfHeads(config.pattern, heads)
    return dataclasses.replace(config, origin=in_call, pattern=pattern)


class _PatternOfHeads:
    """A pattern that gets the index of a head among all heads of the call."""

    def __init__(self, pattern: Any, heads: jax.Array):
        self._pattern, self._heads = pattern, heads

    def allows(self, i: jax.Array, j: jax.Array, h: jax.Array) -> jax.Array:
        return self._pattern.allows(i, j, self._heads[h])


# The linear recurrence: shapes as in `effattn.pallas.recurrence`.


def recurrence(kernels: Any) -> Any:
    """The kernels of a linear recurrence, each of which a device runs for its rows and heads."""
    tokens = _of_tokens
    gradients = tokens, tokens, tokens, tokens, _by_head, tokens
    return kernels._replace(
        forward=_spread(kernels.forward, (_by_head,), (tokens, _by_same_head)),
        backward=_spread(kernels.backward, (_by_head, tokens, _once), gradients),
    )


def _of_tokens(array: Any) -> Names:
    """Names of the axes of `(B, T, heads, size)` or `(B, T, heads)`, or of the scale `(1,)`."""
    return (None,) if array.ndim == 1 else ("row0", None, HEADS, None)[: array.ndim]


# Names of the axes of arrays `(B, heads, ...)`.


def _by_head(array: Any) -> Names:
    return "row0", HEADS, *(None,) * (array.ndim - 2)


def _by_same_head(array: Any) -> Names:
    return "row0", SAME, *(None,) * (array.ndim - 2)


def _once(array: Any) -> Names:
    return "row0", ONCE, *(None,) * (array.ndim - 2)


def _spread(kernel, more, results):
    """Each device runs `kernel(how, arrays, *rest)` for its rows and heads.

    Args:
      kernel: a kernel of the recurrence.
      more: for each further argument, the function from an array to the names of its axes.
      results: likewise, for each result.
    """

    @functools.wraps(kernel)
    def run(how, arrays, *rest):
        if not is_needed():
            return kernel(how, arrays, *rest)
        found = jax.eval_shape(functools.partial(kernel, how), arrays, *rest)
        leaves, structure = jax.tree.flatten((arrays, rest))
        operands = [_of_tokens(x) for x in jax.tree.leaves(arrays)]
        for each, of in zip(rest, more, strict=True):
            operands += map(of, jax.tree.leaves(each))
        names = [of(x) for of, x in zip(results, found, strict=True) if x is not None]

        def on_device(*leaves):
            arrays, rest = jax.tree.unflatten(structure, leaves)
            return jax.tree.leaves(kernel(how, arrays, *rest))

        return jax.tree.unflatten(
            jax.tree.structure(found), partitioned(on_device, operands, names)(*leaves)
        )

    return run
