"""Segment ids of packed sequences.

Segment ids are integers `(*B, T)`. Tokens attend only to tokens with an equal id. Equal ids are one
contiguous run, and id 0 is padding.
"""

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.arrays.axes import lead


def within(lengths: jax.Array, size: int) -> jax.Array:
    """Mask of the tokens before each length: bool `(*B, size)`, from lengths `(*B)`."""
    return lead(jnp.arange(size), lengths.ndim + 1) < lengths[..., None]


def valid(lengths: jax.Array | None, segment_ids: jax.Array | None, size: int) -> jax.Array | None:
    """Mask of the tokens that are not padding, bool `(*B, size)`; None if all are valid."""
    before_end = None if lengths is None else within(lengths, size)
    return both(before_end, None if segment_ids is None else jnp.not_equal(segment_ids, 0))


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """Logical and of two masks; None is a mask that is True everywhere."""
    return one if other is None else other if one is None else one & other


def positions_from(first: jax.Array, size: int) -> jax.Array:
    """Consecutive positions `(*B, size)` that start at `first (*B)`."""
    return first[..., None] + lead(jnp.arange(size, dtype=jnp.int32), first.ndim + 1)


@checks.checked
def segment_ids_from_lengths(lengths: jax.Array, max_length: int) -> jax.Array:
    """Segment ids of right-padded rows, one document per row.

    Args:
      lengths: int `(*B)`, between 0 and `max_length`. Concrete lengths are checked; traced lengths
        above `max_length` count as `max_length`.
      max_length: tokens in a row.

    Returns:
      int32 `(*B, max_length)`: 1 for the first `lengths` tokens, 0 for padding.

    Raises:
      ValueError: a concrete length is out of range, or an argument is not an integer.
    """
    known, lengths = checks.known(lengths), checks.as_array("lengths", lengths)
    _check_integers("lengths", lengths)
    max_length = checks.at_least("max_length", max_length, 0, "tokens")
    if known is not None and known.size and (known.min() < 0 or known.max() > max_length):
        raise ValueError(
            f"lengths must lie between 0 and max_length={max_length}, got {known.tolist()}"
        )
    return within(lengths, max_length).astype(jnp.int32)


@checks.checked
def segment_ids_from_cu_seqlens(cu_seqlens: jax.Array, total_length: int) -> jax.Array:
    """Segment ids of documents packed into one row, from their cumulative lengths.

    Args:
      cu_seqlens: int `(n + 1,)`, cumulative lengths starting at 0, as in flash-attn and fla.
        Document d is the tokens cu_seqlens[d] to cu_seqlens[d + 1] - 1. Traced values are not
        checked: they must not decrease, and tokens past total_length are left out.
      total_length: tokens in the row; tokens from cu_seqlens[n] on are padding.

    Returns:
      int32 `(total_length,)`: d + 1 in document d, 0 in padding.
    """
    known, cu_seqlens = checks.known(cu_seqlens), checks.as_array("cu_seqlens", cu_seqlens)
    _check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must be one-dimensional with at least 2 entries, got {cu_seqlens.shape}"
        )
    total_length = checks.at_least("total_length", total_length, 0, "tokens")
    if known is not None:
        _check_borders(known, total_length)
    cu_seqlens = checks.counts(cu_seqlens)
    token = jnp.arange(total_length, dtype=jnp.int32)
    ids = jnp.searchsorted(cu_seqlens, token, side="right").astype(jnp.int32)
    return jnp.where(token < cu_seqlens[-1], ids, 0)


@checks.checked
def positions_from_segment_ids(segment_ids: jax.Array) -> jax.Array:
    """Positions of tokens within their documents: int32 `(*B, T)`, 0 at the start of each."""
    segment_ids = checks.as_array("segment_ids", segment_ids)
    _check_integers("segment_ids", segment_ids)
    if segment_ids.ndim < 1:
        raise ValueError(f"segment_ids must have shape (*batch, length), got {segment_ids.shape}")
    index = lead(jnp.arange(segment_ids.shape[-1], dtype=jnp.int32), segment_ids.ndim)
    return index - starts_of_runs(segment_ids)


def first_of_runs(ids: jax.Array) -> jax.Array:
    """True at the first token of each run of equal `ids (*B, T)`, bool `(*B, T)`."""
    first = jnp.ones_like(ids[..., :1], bool)
    return jnp.concatenate([first, ids[..., 1:] != ids[..., :-1]], -1)


def last_of_runs(ids: jax.Array) -> jax.Array:
    """True at the last token of each run of equal `ids (*B, T)`, bool `(*B, T)`."""
    last = jnp.ones_like(ids[..., :1], bool)
    return jnp.concatenate([ids[..., 1:] != ids[..., :-1], last], -1)


def starts_of_runs(ids: jax.Array) -> jax.Array:
    """Index of the first token of each token's run of equal `ids (*B, T)`, int32 `(*B, T)`."""
    index = lead(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.ndim)
    starts = jnp.where(first_of_runs(ids), index, 0)
    return jax.lax.cummax(starts, axis=starts.ndim - 1)


def ends_of_runs(ids: jax.Array) -> jax.Array:
    """Index after the last token of each token's run of equal `ids (*B, T)`, int32 `(*B, T)`."""
    length = ids.shape[-1]
    index = lead(jnp.arange(length, dtype=jnp.int32), ids.ndim)
    ends = jnp.where(last_of_runs(ids), index + 1, length)
    return jax.lax.cummin(ends, axis=ends.ndim - 1, reverse=True)


def sums_of_runs(x: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Cumulative sums of `x (*B, T, N)` over tokens, for each run of equal `ids (*B, T)` apart."""
    if ids is None:
        return jnp.cumsum(x, -2)
    is_first = first_of_runs(ids)

    def joined(before, after):
        (sums, starts), (more, starts_again) = before, after
        return jnp.where(starts_again, more, sums + more), starts | starts_again

    return jax.lax.associative_scan(joined, (x, is_first[..., None]), axis=x.ndim - 2)[0]


def _check_borders(borders: np.ndarray, total_length: int) -> None:
    if borders[0] != 0 or np.any(borders[1:] < borders[:-1]) or borders[-1] > total_length:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at total_length={total_length} at "
            f"most, got {borders.tolist()}"
        )


def _check_integers(name: str, array: jax.Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}")
