"""Shared argument checks of mechanisms that mix tokens `(B, T, D)` without heads."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.arrays.segments import within
from effattn.cores import sequence_parts


def check(
    mechanism: str,
    arrays: dict[str, Any],
    *,
    lengths: Any = None,
    segment_ids: Any = None,
    initial_state: Any = None,
    **others: Any,
) -> tuple[Any, ...]:
    """Checks arrays `(B, T, D)` of one dtype, and sets their padding to zero.

    Args:
      mechanism: name of the function, for messages.
      arrays: the arrays by name.
      lengths: `(B,)`, or None.
      segment_ids: `(B, T)`, or None.
      initial_state: anything but None is refused together with `segment_ids`.
      **others: other options, which need no check here.

    Returns:
      The arrays; then `valid` and `starts`, bool `(B, T)` or None: True at valid tokens, and True
      at the first token of each document.
    """
    arrays = {name: checks.as_array(name, array) for name, array in arrays.items()}
    (first, like), *_ = arrays.items()
    if like.ndim != 3 or not jnp.issubdtype(like.dtype, jnp.floating):
        raise ValueError(
            f"{first} must be floating point of shape (B, T, D), got {like.dtype} of shape "
            f"{like.shape}"
        )
    for name, array in arrays.items():
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ValueError(
                f"{name} must be {like.dtype} of shape {like.shape}, as {first} is, got "
                f"{array.dtype} of shape {array.shape}"
            )
    checks.known_length(mechanism, like, axis=-2)
    batch, time = like.shape[:2]
    valid = starts = None
    lengths = checks.lengths("lengths", lengths, (batch,), time)
    if lengths is not None:
        valid = within(lengths, time)
    checks.one_segment_array(segment_ids, (batch, time), "the mechanism has no keys")
    pair = checks.segment_ids(segment_ids, (batch,), time, time)
    if pair is not None:
        if initial_state is not None:
            raise ValueError(
                "initial_state needs segment_ids=None, because each document starts with an empty "
                "state, got both; pass one document a row, padded by lengths"
            )
        ids = pair[0]
        valid = (ids != 0) if valid is None else (ids != 0) & valid
        before = sequence_parts.with_tokens_before(ids, 1)[:, :-1]
        # Padding starts no document: the last state is that of the last document.
        starts = (ids != before) & valid
    return *(cleared(x, valid) for x in arrays.values()), valid, starts


def ends(valid: jax.Array | None, starts: jax.Array | None) -> jax.Array | None:
    """True at the last token of each document, `(B, T)`, from the arrays of `check`.

    Read from the end, a document starts there. None without documents.
    """
    if starts is None or valid is None:
        return None
    after = starts[:, 1:] | ~valid[:, 1:]
    return jnp.concatenate([after, jnp.ones_like(starts[:, :1])], 1) & valid


def cleared(array: jax.Array, valid: jax.Array | None) -> jax.Array:
    """`(..., B, T, D)` with zeros where `valid (B, T)` is False; None is True everywhere."""
    return array if valid is None else jnp.where(valid[..., None], array, 0)
