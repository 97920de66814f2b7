"""Packed documents: the integer ids that say which tokens belong together.

Ids are ints `(*B, T)`; tokens attend only within equal ids, equal ids are one contiguous run, and
id 0 is padding.
"""

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.arrays.axes import lead


def within(lengths: jax.Array, size: int) -> jax.Array:
    """Which of `size` tokens lie before lengths `(*B)`: bool `(*B, size)`."""
    return lead(jnp.arange(size), lengths.ndim + 1) < lengths[..., None]


def positions_from(first: jax.Array, size: int) -> jax.Array:
    """`size` tokens' positions, `(*B, size)`, the first of them at `first (*B)`."""
    return first[..., None] + lead(jnp.arange(size, dtype=jnp.int32), first.ndim + 1)


@checks.checked
def segment_ids_from_lengths(lengths: jax.Array, max_length: int) -> jax.Array:
    """One document a row, `lengths` `(*B)` tokens long: int32 ids `(*B, max_length)`, 1, then 0.

    Lengths lie between 0 and `max_length`, which is checked where they are concrete; traced ones
    are cut to it.
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
    """Ids of documents packed into one row, from their borders.

    Args:
      cu_seqlens: `(n + 1,)` int, cumulative lengths starting at 0, as flash-attn and fla take them;
        document d is the tokens from cu_seqlens[d] up to, not including, cu_seqlens[d + 1]. Traced
        ones are not checked: tokens past total_length are left out, and borders must not fall.
      total_length: tokens in the row; those past cu_seqlens[n] are padding.

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
    """Each token's position within its own run of ids: int32 `(*B, T)`, 0 at a document's start."""
    segment_ids = checks.as_array("segment_ids", segment_ids)
    _check_integers("segment_ids", segment_ids)
    if segment_ids.ndim < 1:
        raise ValueError(f"segment_ids must have shape (*batch, length), got {segment_ids.shape}")
    index = lead(jnp.arange(segment_ids.shape[-1], dtype=jnp.int32), segment_ids.ndim)
    border = segment_ids[..., 1:] != segment_ids[..., :-1]
    starts = jnp.where(border, index[..., 1:], 0)
    first = jnp.zeros_like(segment_ids[..., :1], jnp.int32)
    starts = jnp.concatenate([first, starts], axis=-1)
    return index - jax.lax.cummax(starts, axis=starts.ndim - 1)


def _check_borders(borders: np.ndarray, total_length: int) -> None:
    if borders[0] != 0 or np.any(borders[1:] < borders[:-1]) or borders[-1] > total_length:
        raise ValueError(
            f"cu_seqlens must start at 0 and never fall, up to total_length={total_length} at "
            f"most, got {borders.tolist()}"
        )


def _check_integers(name: str, array: jax.Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}")
