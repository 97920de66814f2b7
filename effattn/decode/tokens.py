"""Cache with one slot of arrays for each token, in order, up to a fixed capacity."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import mesh_axes
from effattn.arrays.segments import positions_from, within
from effattn.decode.state import check_capacity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenState:
    """Arrays of each token, at slots `[0, length)` of each row.

    Attributes:
      tokens: a pytree of `(B, S, ...)`, S the capacity; zeros in unfilled slots.
      length: `(B,)` int32, tokens seen.
    """

    tokens: Any
    length: jax.Array

    def forget(self, n: jax.Array, most: int) -> "TokenState":
        """The state without the last n tokens of each row, at most `most`."""
        length = self.length - n
        tokens = jax.tree.map(lambda kept: cleared(kept, length, n, most), self.tokens)
        return TokenState(tokens, length)


def append(state: TokenState, new: Any, lengths: jax.Array) -> TokenState:
    """Appends T new tokens, a pytree of `(B, T, ...)`: see `append_to`."""
    return append_to(state, lengths, tokens=new)


def append_to(state: Any, lengths: jax.Array, **new: Any) -> Any:
    """Appends the first `lengths[b]` of T new tokens `(B, T, ...)` to the named fields of a state.

    Raises `ValueError` if a row outgrows the capacity and the lengths are concrete. With traced
    lengths, tokens past the capacity are dropped.
    """
    kept = {name: getattr(state, name) for name in new}
    check_capacity(state.length, lengths, jax.tree.leaves(kept)[0].shape[1])
    fields = jax.tree.map(lambda old, x: stored(old, x, state.length, lengths), kept, new)
    return dataclasses.replace(state, **fields, length=state.length + lengths)


def stored(kept: jax.Array, new: jax.Array, length: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes the first `lengths[b]` of `new (B, T, ...)` into `kept (B, S, ...)` at `length[b]`.

    Tokens past the end are dropped.
    """
    capacity = kept.shape[1]
    if capacity == 0:
        return kept  # JAX cannot differentiate a scatter into an empty array.
    # Padding goes to slot `capacity`, which does not exist, so `mode="drop"` drops it.
    time = new.shape[1]
    slots = jnp.where(within(lengths, time), positions_from(length, time), capacity)

    @jax.vmap
    def of_row(kept, slots, new):
        return kept.at[slots].set(new.astype(kept.dtype), mode="drop")

    return of_row(mesh_axes.beside(new, kept), mesh_axes.beside(new, slots), new)


def cleared(kept: jax.Array, length: jax.Array, n: jax.Array, most: int) -> jax.Array:
    """`kept (B, S, ...)` with zeros in the n slots from `length` on, n `(B,)` at most `most`.

    A NaN in a slot would reach outputs, even where its weight is zero.
    """
    return stored(kept, jnp.zeros_like(kept[:, :most]), length, n)


def choose_rows(rows: jax.Array, a: Any, b: Any) -> Any:
    """Selects the rows of pytree `a` where `rows (B,)` is True, else those of `b`."""

    def choose(a, b):
        return jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, a, b)
