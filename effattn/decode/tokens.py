"""The cache of tokens: what each one left for those after it, in order, up to a capacity."""

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
    """What tokens left, at slots `[0, length)` of each row.

    Attributes:
      tokens: a pytree of `(B, S, ...)`, S the capacity; zeros where no token is yet.
      length: `(B,)` int32, tokens seen.
    """

    tokens: Any
    length: jax.Array


def append(state: TokenState, new: Any, lengths: jax.Array) -> TokenState:
    """Stores the first `lengths[b]` of T new tokens, a pytree of `(B, T, ...)`, where they fit.

    `ValueError` if a row outgrows the capacity and the lengths are concrete.
    """
    first = jax.tree.leaves(state.tokens)[0]
    check_capacity(state.length, lengths, first.shape[1])
    tokens = jax.tree.map(lambda kept, x: stored(kept, x, state.length, lengths), state.tokens, new)
    return TokenState(tokens=tokens, length=state.length + lengths)


def stored(kept: jax.Array, new: jax.Array, length: jax.Array, lengths: jax.Array) -> jax.Array:
    """`kept (B, S, ...)` with the first `lengths[b]` of `new (B, T, ...)` from slot `length[b]`."""
    capacity = kept.shape[1]
    # Padding is sent to slot `capacity`, which does not exist, and so is dropped.
    time = new.shape[1]
    slots = jnp.where(within(lengths, time), positions_from(length, time), capacity)

    @jax.vmap
    def of_row(kept, slots, new):
        return kept.at[slots].set(new.astype(kept.dtype), mode="drop")

    return of_row(mesh_axes.beside(new, kept), mesh_axes.beside(new, slots), new)
