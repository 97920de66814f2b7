"""Decode states that may forget their last tokens, as speculative decoding needs.

A cache with one slot for each token forgets by a smaller length and zeros in the freed slots. Any
other state is kept as it was before the last R tokens, together with these tokens: `extend` reads
them again, and to forget is to drop them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import within
from effattn.decode.state import check_rows, is_concrete, new_lengths
from effattn.decode.tokens import stored

# Extends a state: `(x, state, lengths) -> (y, state)`.
Extend = Callable[[jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RewindableState:
    """A decode state whose last tokens `rewind` can forget.

    Attributes:
      state: the state before the tokens in `recent`; after all tokens if `recent` is None.
      recent: `(B, R, ...)`, the last `count` tokens of each row, in order, at slots `[0, count)`;
        other slots hold any value. None if `state` can forget by itself.
      count: `(B,)` int32, number of tokens that can be forgotten.
      max_rewind: static; R, the largest `count`.
    """

    state: Any
    recent: jax.Array | None
    count: jax.Array
    max_rewind: int = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> jax.Array:
        """Number of tokens read, `(B,)` int32."""
        return self.state.length if self.recent is None else self.state.length + self.count


def rewindable(state: Any, max_rewind: int, token: jax.ShapeDtypeStruct) -> Any:
    """An empty state that can forget up to `max_rewind` tokens; the state itself for 0.

    `token` is the shape and dtype of one token of each row, `(B, 1, ...)`.
    """
    if checks.at_least("max_rewind", max_rewind, 0, "tokens") == 0:
        return state
    recent = None
    if not can_forget(state):
        batch, _, *features = token.shape
        recent = jnp.zeros((batch, max_rewind, *features), token.dtype)
    return RewindableState(state, recent, jnp.zeros_like(state.length), max_rewind)


def can_forget(state: Any) -> bool:
    """True if a state, with all its parts, forgets tokens by itself: by a method `forget`."""
    return hasattr(state, "forget") and all(map(can_forget, getattr(state, "parts", ())))


def rewind(state: RewindableState, n: int | jax.Array) -> RewindableState:
    """Forgets the last n tokens of each row.

    Later outputs are those of a state that has never read these tokens. A row can forget
    `state.count` tokens: those that it has read, up to `max_rewind`. Forgetting n tokens reduces
    the count by n, and reading new tokens increases it again.

    Args:
      state: a state of `init_state(..., max_rewind=R)`.
      n: an int, or an int array `(B,)`.

    Returns:
      The state without these tokens, in time O(R).

    Raises:
      ValueError: the state has no `max_rewind`; n is negative or above the number of tokens that
        can be forgotten, where these are concrete. With traced counts, n is clipped to them.
    """
    if not isinstance(state, RewindableState):
        raise ValueError(
            f"state must be one that can forget tokens, got {type(state).__name__}; make it by "
            "init_state with max_rewind=R, the most tokens to forget"
        )
    known, n = checks.known(n), checks.as_array("n", n)
    rows = state.count.shape
    if n.shape not in ((), rows) or not jnp.issubdtype(n.dtype, jnp.integer):
        raise ValueError(
            f"n must be an int or integers of shape {rows}, got {n.dtype} of shape {n.shape}"
        )
    most = np.asarray(state.count) if is_concrete(state.count) else state.max_rewind
    if known is not None and ((known < 0) | (known > most)).any():
        raise ValueError(
            f"n must be between 0 and the tokens that the state can forget, "
            f"{np.asarray(most).tolist()} with max_rewind={state.max_rewind}, got {known.tolist()}"
        )
    n = jnp.clip(n.astype(jnp.int32), 0, state.count)
    if state.recent is not None:
        return dataclasses.replace(state, count=state.count - n)
    like, *_ = jax.tree.leaves(state.state)
    places = jax.tree.map(lambda leaf: PartitionSpec(*mesh_axes.spec(leaf)), state.state)
    forget = mesh_axes.placed(lambda inner, n: (inner.forget(n, state.max_rewind),), like, places)
    (inner,) = forget(state.state, n)
    return dataclasses.replace(state, state=inner, count=state.count - n)


def refuse_with_rewind(what: str, *given: Any) -> None:
    """Raises `NotImplementedError` if arguments of new tokens are given that are not kept."""
    if any(each is not None for each in given):
        raise NotImplementedError(
            f"a state with max_rewind takes no {what}, because it keeps the tokens alone; make the "
            "state without max_rewind"
        )


def extend_rewindable(
    extend: Extend, x: jax.Array, state: RewindableState, lengths: jax.Array | None
) -> tuple[jax.Array, RewindableState]:
    """The outputs of new tokens x `(B, T, ...)`, and the state after them.

    It takes two calls of `extend`, for T and for R tokens, or one for T if the state can forget by
    itself. Outputs in the padding are zero.
    """
    batch, time = x.shape[:2]
    check_rows(state, batch)
    if state.recent is not None and dtypes.common(x, state.recent) != state.recent.dtype:
        raise ValueError(
            f"x must have a dtype that {state.recent.dtype}, that of the tokens which a state with "
            f"max_rewind keeps, can hold, got {x.dtype}"
        )
    new = new_lengths(lengths, batch, time)
    rows, *_ = mesh_axes.spec(x)
    of_rows, of_tokens = PartitionSpec(rows), PartitionSpec(*mesh_axes.spec(x))
    if state.recent is None:
        y, after = extend(x, state.state, lengths)
        counted = mesh_axes.placed(_counted, x, of_rows)
        (count,) = counted(state.count, new, jnp.int32(state.max_rewind))
        return y, dataclasses.replace(state, state=after, count=count)
    places = of_tokens, PartitionSpec(rows, *mesh_axes.spec(state.recent)[1:]), of_rows, of_rows
    leaving, recent, gone, count = mesh_axes.placed(_moved, x, *places)(
        x, state.recent, state.count, new
    )
    y_leaving, before = extend(leaving, state.state, gone)
    y_recent, _ = extend(recent.astype(x.dtype), before, count)
    place = PartitionSpec(*mesh_axes.spec(y_leaving))
    (y,) = mesh_axes.placed(_of_new, x, place)(y_leaving, y_recent, state.count, gone, new)
    return y, dataclasses.replace(state, state=before, recent=recent, count=count)


def _counted(count, new, most):
    return (jnp.minimum(count + new, most),)


def _moved(x, recent, count, new):
    """Appends new tokens to `recent` and keeps the last R; the older ones leave it.

    Returns `(leaving (B, T, ...), recent (B, R, ...), number of leaving tokens, count)`.
    """
    time, most = x.shape[1], recent.shape[1]
    room = jnp.zeros((x.shape[0], time, *x.shape[2:]), recent.dtype)
    both = stored(jnp.concatenate([recent, room], 1), x, count, new)
    gone = jnp.maximum(count + new - most, 0)
    cut = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, most))
    return both[:, :time].astype(x.dtype), cut(both, gone), gone, count + new - gone


def _of_new(y_leaving, y_recent, count, gone, new):
    """The outputs of the T new tokens, which follow `count` others: leaving ones, then recent."""
    time = y_leaving.shape[1]
    place = count[:, None] + jnp.arange(time, dtype=jnp.int32)
    place = jnp.where(place < gone[:, None], place, time + place - gone[:, None])
    y = jnp.take_along_axis(
        jnp.concatenate([y_leaving, y_recent], 1), place[..., None], 1, mode="clip"
    )
    return (jnp.where(within(new, time)[..., None], y, 0),)
