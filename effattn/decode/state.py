"""The protocol of decode states, and argument checks that all decoders share.

A *state* is a small frozen pytree with `length (B,)` int32, the number of tokens that each row has
seen. A *decoder* makes and extends states for one attention function: `extend` takes any state and
any number T >= 1 of new tokens; row b has `lengths[b]` valid tokens, right padded. Prefill, chunked
prefill, unequal prompts and single steps are the same call.
"""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from effattn.arrays import checks


class State(Protocol):
    """Protocol of a decode state: a pytree with the number of tokens that each row has seen."""

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32."""
        ...


def is_concrete(*arrays: Any) -> bool:
    """Returns whether all values are known now: not traced, and addressable by this process."""
    return not any(
        isinstance(array, Tracer) or not getattr(array, "is_fully_addressable", True)
        for array in arrays
    )


def check_vocabulary(name: str, tokens: Any, valid: Any, size: int) -> None:
    """Raises `ValueError` for a token outside the vocabulary, if tokens and padding are concrete.

    `valid` is bool, of the shape of the tokens, and False in the padding; None means no padding.
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
    """Casts tokens to int32, clipped to the range from -1 to the largest int32."""
    most = min(2**31 - 1, jnp.iinfo(tokens.dtype).max)
    least = max(-1, jnp.iinfo(tokens.dtype).min)
    return jnp.clip(tokens, least, most).astype(jnp.int32)


def new_lengths(lengths: Any, batch: int, time: int) -> jax.Array:
    """Returns the checked valid tokens of each row, `(B,)` int32; None means all `time` tokens."""
    if time < 1:
        raise ValueError("there must be at least one token, got a sequence of length 0")
    return row_lengths(lengths, batch, time)


def row_lengths(lengths: Any, batch: int, time: int, *, name: str = "lengths") -> jax.Array:
    """Checks `lengths` as `new_lengths` does, but also allows sequences without tokens.

    The result is a NumPy array, whose values are known in a trace, for Python or NumPy integers and
    for None with a known batch and time. Otherwise it is a JAX array.
    """
    # The open length of an exported program compares with no number.
    is_open = not (isinstance(time, int) and isinstance(batch, int))
    if lengths is None:
        of_all: Any = (jnp if is_open else np).full((batch,), time, np.int32)
        return of_all
    known, array = checks.known(lengths), checks.as_array(name, lengths)
    if array.shape != (batch,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape ({batch},), one for each row, "
            f"got {array.dtype} of shape {array.shape}"
        )
    most = time if isinstance(time, int) else math.inf
    if known is not None and (known.min(initial=0) < 0 or known.max(initial=0) > most):
        raise ValueError(
            f"{name} must lie between 0 and the {time} tokens given, got {known.tolist()}"
        )
    kept: Any = array if known is None or isinstance(lengths, jax.Array) else known
    return kept.astype(np.int32)


def check_capacity(length: jax.Array, lengths: jax.Array, capacity: int) -> None:
    """Raises `ValueError` if a row would outgrow `capacity`, as far as the lengths are concrete.

    `length` counts the tokens of each row before, `lengths` its new tokens. Where only the new ones
    are known, as in a trace, they alone are compared.
    """
    if not is_concrete(lengths):
        return
    before = np.asarray(length) if is_concrete(length) else 0
    needed = int(np.max(before + np.asarray(lengths), initial=0))
    if needed > capacity:
        raise ValueError(
            f"the state holds at most {capacity} tokens a row, got {needed}; call init_state with "
            f"max_length of at least {needed}"
        )


def bounded(size: int, max_length: int) -> tuple[int, int | None]:
    """Returns the number of slots for the last `size` tokens of a row of up to `max_length`.

    Returns:
      `(min(size, max_length), bound)`; `bound` is `max_length` if it is less than `size`, else
      None.
    """
    return (size, None) if size <= max_length else (max_length, max_length)


def check_bound(state: Any, lengths: jax.Array, slots: int, size: int) -> None:
    """Checks a state that keeps the last `min(size, state.max_length)` tokens of a row.

    Raises:
      ValueError: the number of `slots` of the state is another, or the lengths are concrete and a
        row would hold more than `state.max_length` tokens.
    """
    needed = size if state.max_length is None else min(size, state.max_length)
    if slots != needed:
        raise ValueError(
            f"state must keep the last {needed} tokens, got {slots}; it is the state of another "
            "layer"
        )
    if state.max_length is not None:
        check_capacity(state.length, lengths, state.max_length)


def bound_of(state: Any) -> int | None:
    """Returns the first `max_length` that is set in a state or in a part of it, else None."""

    def is_bounded(part):
        return getattr(part, "max_length", None) is not None

    parts = jax.tree.leaves(state, is_leaf=is_bounded)
    return next((part.max_length for part in parts if is_bounded(part)), None)


# A state in 8 bits or fewer would need a scale for each array; states store no scales.
_STATE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def check_init(batch: Any, max_length: Any, dtype: Any) -> np.dtype:
    """Checks the arguments of `Decoder.init` and returns the dtype."""
    # An exported program may leave the number of rows open.
    if not jax.export.is_symbolic_dim(batch):
        checks.at_least("batch", batch, 0, "rows")
    checks.at_least("max_length", max_length, 0, "tokens")
    return state_dtype(dtype)


def state_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype; raises `ValueError` unless it is a supported dtype of a decode state."""
    try:
        # NumPy reads None as float64.
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
    """Raises `ValueError` unless `state` is an instance of `kind` for `batch` rows."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state must be the {kind.__name__} that init_state returned, "
            f"got {type(state).__name__}"
        )
    check_rows(state, batch)


def check_rows(state: Any, batch: int) -> None:
    """Raises `ValueError` unless `state` has `batch` rows."""
    length = checks.as_array("length of state", state.length)
    if length.shape != (batch,) or not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(
            f"state must have length of shape {(batch,)}, an integer for each row of the input, "
            f"got {length.dtype} of shape {length.shape}; call init_state with batch={batch}"
        )
