"""Which pairs may attend, written out as the T x S array that no mechanism may have."""

from typing import Any, NamedTuple

import numpy as np


class Pairs(NamedTuple):
    """What positions, padding and packing allow.

    Attributes:
      allowed: bool `(*B, T, S)`.
      valid: bool `(*B, T)`, the queries that are not padding.
      present: bool `(*B, S)`, the keys that are not padding.
      position: int `(*B, T)`, where the queries stand among the keys.
      reads_initial: bool `(*B, T)`, the queries that see the initial state.
      reaches_final: bool `(*B, S)`, the keys that are in the final state.
      keeps_initial: bool `(*B)`, whether the initial state is in the final one.
      is_causal: bool `()`.
    """

    allowed: Any
    valid: Any
    present: Any
    position: Any
    reads_initial: Any
    reaches_final: Any
    keeps_initial: Any
    is_causal: Any


def pairs(
    batch: tuple[int, ...],
    queries: int,
    keys: int,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    dilation: int = 1,
    query_offset: Any = 0,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    mask: Any = True,
    global_mask: Any = None,
) -> Pairs:
    """The pairs of a call with these arguments, all of them concrete; `mask` is `(*#B, #T, #S)`.

    What the window leaves out, tokens of `global_mask`, `(*B, T)`, see and show nevertheless.
    """

    def of_rows(array):
        return np.broadcast_to(np.asarray(array), batch)[..., None]

    position = np.broadcast_to(np.arange(queries) + of_rows(query_offset), (*batch, queries))
    ahead = np.arange(keys) - position[..., None]
    allowed = np.broadcast_to(np.asarray(mask), ahead.shape)
    if is_causal:
        allowed = allowed & (ahead <= 0)
    if local_window_size is not None:
        window = local_window_size
        left, right = (window, window) if isinstance(window, int) else window
        steps, between = np.divmod(ahead, dilation)
        near = (between == 0) & (-left <= steps) & (steps <= right)
        if global_mask is not None:
            is_global = np.asarray(global_mask)
            near = near | is_global[..., :, None] | is_global[..., None, :]
        allowed = allowed & near

    query_ids, key_ids = np.ones((*batch, queries), int), np.ones((*batch, keys), int)
    if segment_ids is not None:
        both = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
        query_ids, key_ids = (np.asarray(ids) for ids in both)
    valid, present = query_ids != 0, key_ids != 0
    first = np.take_along_axis(key_ids, np.argmax(present, -1)[..., None], -1)
    if query_seq_lengths is not None:
        valid = valid & (np.arange(queries) < of_rows(query_seq_lengths))
    if key_value_seq_lengths is not None:
        present = present & (np.arange(keys) < of_rows(key_value_seq_lengths))
    at_last = keys - 1 - np.argmax(present[..., ::-1], -1)[..., None]
    last = np.take_along_axis(key_ids, at_last, -1)
    last = np.where(present.any(-1, keepdims=True), last, first)
    return Pairs(
        allowed=allowed
        & (query_ids[..., :, None] == key_ids[..., None, :])
        & (valid[..., :, None] & present[..., None, :]),
        valid=valid,
        present=present,
        position=position,
        reads_initial=valid & (query_ids == first),
        reaches_final=present & (key_ids == last),
        keeps_initial=(first == last)[..., 0],
        is_causal=np.asarray(is_causal),
    )
