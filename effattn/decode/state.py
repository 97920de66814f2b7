"""The state protocol: what decoding carries, and how a mechanism extends it.

A *state* is a small frozen pytree with `length (B,)` int32, the number of tokens that each row has
seen. A *decoder* makes and extends states for one attention function. `extend` takes any T >= 1
tokens from any state, of which row b has `lengths[b]` (right padded): prefill, chunked prefill,
unequal prompts and single steps are the same call.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from effattn.arrays import checks


class State(Protocol):
    """What every decode state has: a pytree that says how many tokens each row has seen."""

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32."""
        ...


class Decoder(Protocol):
    """How one attention function decodes; made as `decoder(function, options)`."""

    def init(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: Any,
    ) -> Any:
        """The empty state of `batch` rows that may come to hold `max_length` tokens each."""
        ...

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attends from T new tokens to all tokens so far: `(out (B, T, N, Hv), new state)`."""
        ...


def is_concrete(*arrays: Any) -> bool:
    """Whether all values are known now: outside of any trace, and to this process."""
    return not any(
        isinstance(array, Tracer) or not getattr(array, "is_fully_addressable", True)
        for array in arrays
    )


def check_vocabulary(name: str, tokens: Any, valid: Any, size: int) -> None:
    """`ValueError` for a token outside the vocabulary, where tokens and padding are known.

    `valid` is bool, of the shape of the tokens, and False in the padding; None has no padding.
    """
    if is_concrete(tokens, valid):
        known = np.asarray(tokens)
        wrong = (known < 0) | (known >= size)
        if valid is not None:
            wrong &= np.asarray(valid)
        if wrong.any():
            raise ValueError(
                f"{name} must hold tokens of the vocabulary, from 0 to {size - 1}, got "
                f"{known[wrong][0]}"
            )


def narrow(tokens: jax.Array) -> jax.Array:
    """int32 tokens; one outside the range of int32 becomes another number that is no token."""
    most = min(2**31 - 1, jnp.iinfo(tokens.dtype).max)
    least = max(-1, jnp.iinfo(tokens.dtype).min)
    return jnp.clip(tokens, least, most).astype(jnp.int32)


def new_lengths(lengths: Any, batch: int, time: int) -> jax.Array:
    """How many of `time` right-padded tokens each row has, `(B,)` int32; all of them for None."""
    if time < 1:
        raise ValueError("there must be at least one token, got a sequence of length 0")
    return row_lengths(lengths, batch, time)


def row_lengths(lengths: Any, batch: int, time: int) -> jax.Array:
    """The same, also where there are no tokens."""
    if lengths is None:
        return jnp.full((batch,), time, jnp.int32)
    known, lengths = checks.known(lengths), checks.as_array("lengths", lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths must be integers of shape ({batch},), one for each row, "
            f"got {lengths.dtype} of shape {lengths.shape}"
        )
    if known is not None and (known.min(initial=0) < 0 or known.max(initial=0) > time):
        raise ValueError(
            f"lengths must lie between 0 and the {time} tokens given, got {known.tolist()}"
        )
    return lengths.astype(jnp.int32)


def check_capacity(length: jax.Array, lengths: jax.Array, capacity: int) -> None:
    """`ValueError` if a row would outgrow `capacity`, where that can be known before running."""
    if is_concrete(length, lengths):
        needed = int(np.max(np.asarray(length) + np.asarray(lengths), initial=0))
        if needed > capacity:
            raise ValueError(
                f"the state holds {capacity} tokens a row and {needed} are needed; "
                f"call init_state with max_length of at least {needed}"
            )


def bounded(size: int, max_length: int) -> tuple[int, int | None]:
    """Slots for the last `size` tokens of a row, never more than `max_length`.

    Returns:
      The number of slots, and `max_length` if that is what bounds them, else None.
    """
    return (size, None) if size <= max_length else (max_length, max_length)


def check_bound(state: Any, lengths: jax.Array, slots: int, size: int) -> None:
    """Checks a state that keeps the last `size` tokens of a row, or its `max_length` if fewer.

    `ValueError` if it has other than those `slots`, or if a row would hold more than `max_length`
    tokens, where that can be known before running.
    """
    needed = size if state.max_length is None else min(size, state.max_length)
    if slots != needed:
        raise ValueError(
            f"state keeps the last {slots} tokens, and this layer needs {needed}; it is the state "
            "of another layer"
        )
    if state.max_length is not None:
        check_capacity(state.length, lengths, state.max_length)


def bound_of(state: Any) -> int | None:
    """The `max_length` of a state that it bounds, or of one that the state is made of."""

    def is_bounded(part):
        return getattr(part, "max_length", None) is not None

    parts = jax.tree.leaves(state, is_leaf=is_bounded)
    return next((part.max_length for part in parts if is_bounded(part)), None)


# A state in 8 bits or fewer would need a scale for each array, and states have none.
_STATE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def check_init(batch: Any, max_length: Any, dtype: Any) -> np.dtype:
    """The dtype; `ValueError` unless there can be a state of these rows and tokens in it."""
    # An exported program may leave the number of rows open.
    if not jax.export.is_symbolic_dim(batch):
        checks.at_least("batch", batch, 0, "rows")
    checks.at_least("max_length", max_length, 0, "tokens")
    return state_dtype(dtype)


def state_dtype(dtype: Any) -> np.dtype:
    """The dtype; `ValueError` unless it can hold a decode state."""
    try:
        # To NumPy, None is float64.
        known = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in _STATE_DTYPES:
        raise ValueError(
            f"the dtype of a decode state must be one of {', '.join(_STATE_DTYPES)}, "
            f"got {dtype if known is None else known.name!r}"
        )
    return known


def check_state(state: Any, kind: type[Any], batch: int) -> None:
    """`ValueError` unless `state` is of that kind and for that many rows."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state must be the {kind.__name__} that init_state returned, "
            f"got {type(state).__name__}"
        )
    check_rows(state, batch)


def check_rows(state: Any, batch: int) -> None:
    """`ValueError` unless `state` is for that many rows."""
    if state.length.shape != (batch,):
        raise ValueError(
            f"state has length of shape {state.length.shape} and cannot be extended by {batch} "
            "rows; init_state takes the number of rows as batch"
        )
