"""Recurrences that are computed for one key head at a time, in XLA, and mapped over the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn.arrays import checks, mesh_axes
from effattn.arrays.axes import fold
from effattn.cores import sequence_parts
from effattn.cores.recurrence import Arguments
from effattn.interfaces.linear_recurrence import clear


class Marks(NamedTuple):
    """Place of each token, `(M, C)` in M chunks of C tokens.

    Attributes:
      present: bool, False in the padding, which changes no state.
      document: int32, number of the document; 0 continues the initial state.
      position: int32, present tokens of the document before this one, without those before the
        call.
    """

    present: jax.Array
    document: jax.Array
    position: jax.Array


def run(
    name: str,
    size: int,
    of_head: Callable[..., tuple[jax.Array, Any]],
    given: Arguments,
    queries: Any,
    keys: Any,
    state: Any,
    parameters: Any = None,
) -> tuple[jax.Array, Any]:
    """The output `(*B, T, N, Hv)` in the dtype of the values, and the state after the last token.

    Args:
      name: name of the mechanism's function.
      size: C, tokens in a chunk. Zeros and padding fill the last chunk.
      of_head: `(queries, keys, marks, state, parameters) -> (output (M, C, G, Hv), state)` of one
        key head with G query heads. Its arrays have `given.dtype`.
      given: the shared arguments.
      queries: pytree of arrays `(*B, T, N, ...)`; `of_head` gets `(M, C, G, ...)`.
      keys: pytree of arrays `(*B, T, K, ...)`; `of_head` gets `(M, C, ...)`.
      state: pytree of arrays `(*B, K, ...)`.
      parameters: pytree of arrays `(K, ...)`.
    """
    sequence_parts.refuse(name)
    axes, length, key_heads = len(given.batch), given.key.shape[-3], given.key.shape[-2]
    groups = given.query.shape[-2] // key_heads if key_heads else 0
    *batch, time, heads, _ = mesh_axes.spec(given.value)

    def widened(tree):
        return jax.tree.map(lambda x: x.astype(given.dtype), tree)

    def grouped(x):
        return x.reshape(*x.shape[: axes + 1], key_heads, groups, *x.shape[axes + 2 :])

    def over_heads(queries, keys, state, parameters, tokens):
        queries = jax.tree.map(grouped, clear(queries, tokens.query_mask))
        keys, marks = clear(keys, tokens.key_mask), _marks(given, tokens)
        # Cut before the mapping over heads: XLA then copies an array once, not twice.
        queries, keys = jax.tree.map(lambda x: fold(x, size, axes), (queries, keys))
        marks = _in_chunks(marks, size)
        mapped = jax.vmap(of_head, (2, 2, None, 0, 0), (2, 0))
        for _ in range(axes):
            mapped = jax.vmap(mapped, (0, 0, 0, 0, None))
        arguments = queries, keys, marks, state, parameters
        out, state = mapped(*mesh_axes.vary_alike(arguments))
        out = lax.collapse(lax.collapse(out, axes + 2, axes + 4), axes, axes + 2)
        out = lax.slice_in_dim(out, 0, length, axis=axes)
        return clear(out, tokens.query_mask).astype(given.value.dtype), state

    state_specs = jax.tree.map(
        lambda x: PartitionSpec(*batch, heads, *[None] * (x.ndim - axes - 1)), state
    )
    query_axis = mesh_axes.spec(given.query)[-2]
    specs = PartitionSpec(*batch, time, query_axis, None), state_specs
    with jax.named_scope(name):
        out, state = mesh_axes.placed(over_heads, given.query, *specs)(
            *widened((queries, keys, state, parameters)), given.tokens
        )
    return checkpoint_name(out, name), state


def _marks(given: Arguments, tokens) -> Marks:
    shape = (*given.batch, given.key.shape[-3])
    present = jnp.ones(shape, bool) if tokens.key_mask is None else tokens.key_mask
    count = jnp.cumsum(present, -1, dtype=jnp.int32)
    before = count - present.astype(jnp.int32)
    if tokens.starts is None:
        return Marks(present, jnp.zeros(shape, jnp.int32), before)
    first = lax.cummax(jnp.where(tokens.starts, before, 0), before.ndim - 1)
    return Marks(present, jnp.cumsum(tokens.starts, -1, dtype=jnp.int32), before - first)


def _in_chunks(marks: Marks, size: int) -> Marks:
    """Marks `(*B, T)` in chunks; the last chunk is filled with padding of the last document."""
    rest = -marks.present.shape[-1] % size
    if rest:
        present, document, position = (x[..., -1:] for x in marks)
        last = Marks(jnp.zeros_like(present), document, position + present.astype(jnp.int32))
        pairs = zip(marks, last, strict=True)
        marks = Marks(*(jnp.concatenate([x, jnp.repeat(y, rest, -1)], -1) for x, y in pairs))
    return jax.tree.map(lambda x: fold(x, size, x.ndim - 1), marks)


def tokens_read(marks: Marks, first: jax.Array) -> jax.Array:
    """Number of tokens of the last document so far, with `first` of document 0 before this call."""
    if not len(marks.present):
        return first
    present, document, position = (x[-1, -1] for x in marks)
    read = position + present.astype(jnp.int32)
    return read.astype(first.dtype) + jnp.where(document == 0, first, 0)


def check_state(kind: Any, state: Any, shapes: tuple[tuple[int, ...], ...], given: Arguments):
    """The checked state of a call, a NamedTuple `kind` of arrays of these shapes; None is zeros."""
    if state is None:
        return kind(*(jnp.zeros(shape, given.dtype) for shape in shapes))
    if not isinstance(state, kind):
        raise ValueError(
            f"initial_state must be the {kind.__name__} that an earlier call returned, got "
            f"{type(state).__name__}"
        )
    pairs = zip(state._asdict().items(), shapes, strict=True)
    return kind(*(checks.shaped(f"initial_state.{name}", x, shape) for (name, x), shape in pairs))
