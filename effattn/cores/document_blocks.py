"""Packed documents moved into blocks of tokens, such that each long document begins a block."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from effattn.arrays import checks, mesh_axes
from effattn.arrays.axes import fold, lead, over_batch, unfold
from effattn.arrays.gathers import permute
from effattn.arrays.segments import (
    ends_of_runs,
    positions_from_segment_ids,
    starts_of_runs,
    within,
)
from effattn.cores import attention, folding
from effattn.patterns import Causal
from effattn.patterns.layouts import BlockLayout


class Blocks(NamedTuple):
    """Places of the tokens of packed documents in n blocks of b tokens.

    A block holds b tokens of one document, its *main* document, from a multiple of b on. A block
    that the last tokens of its main document do not fill may also hold whole documents of fewer
    than b tokens. Two neighbouring blocks together hold more than b tokens, so there are fewer than
    2 T / b + 1 blocks.

    Attributes:
      token: int32 `(*B, n b)`, the token at each place; any token at empty places.
      is_token: bool `(*B, n b)`, False at empty places.
      is_main: bool `(*B, n b)`, True at tokens of the main document.
      place: int32 `(*B, T)`, the place of each token.
      first, last: int32 `(*B, n)`, the first and last block of the main document of each block.
      is_used: bool `(*B, n)`, False at blocks without tokens.
    """

    token: jax.Array
    is_token: jax.Array
    is_main: jax.Array
    place: jax.Array
    first: jax.Array
    last: jax.Array
    is_used: jax.Array

    def gather(self, x: jax.Array) -> jax.Array:
        """Moves tokens `(*B, T, ...)` to their places `(*B, n b, ...)`."""
        return mesh_axes.placed_like(x, permute, x, self.token, self.place)

    def gather_back(self, x: jax.Array) -> jax.Array:
        """Moves `(*B, n b, ...)` back to the tokens `(*B, T, ...)`."""

        def move(x, is_token, place, token):
            is_token = is_token.reshape(*is_token.shape, *[1] * (x.ndim - is_token.ndim))
            return permute(jnp.where(is_token, x, 0), place, token)

        return mesh_axes.placed_like(x, move, x, self.is_token, self.place, self.token)

    def gather_ids(self, ids: jax.Array) -> jax.Array:
        """Moves ids `(*B, T)` to their places; 0 at empty places."""
        moved = jnp.take_along_axis(ids, self.token, -1, mode="clip")
        return jnp.where(self.is_token, moved, 0)


class Reach(NamedTuple):
    """Keys of packed documents whose tokens are in blocks.

    Attributes:
      counts: int32 `(*B, n)`, keys of the main document in each block.
      first, last: int32 `(*B, T)`, places of the first and last key of each token's document.
    """

    counts: jax.Array
    first: jax.Array
    last: jax.Array


def reach_of(blocks: Blocks, segment_ids: jax.Array, lengths: jax.Array | None) -> Reach:
    """The reach of documents in blocks, for `segment_ids (*B, T)` and key lengths `(*B)`."""
    length = segment_ids.shape[-1]
    size = blocks.token.shape[-1] // blocks.first.shape[-1]
    token = lead(jnp.arange(length, dtype=jnp.int32), segment_ids.ndim)
    inside = positions_from_segment_ids(segment_ids)
    last = length - 1 if lengths is None else jnp.minimum(lengths, length)[..., None] - 1
    present = (segment_ids != 0) & (token <= last)
    is_key = blocks.gather_ids(present.astype(jnp.int32)) * blocks.is_main.astype(jnp.int32)
    first = blocks.place - inside
    return Reach(
        counts=is_key.reshape(*blocks.first.shape, size).sum(-1, dtype=jnp.int32),
        first=first,
        last=first + last - (token - inside),
    )


def number_of_blocks(length: int, size: int) -> int:
    """The largest number of blocks of `size` tokens for documents in `length` tokens."""
    return max(2 * ((length - 1) // (size + 1)) + 1, 2 * (length // (size + 1)))


def blocks_of(segment_ids: jax.Array, size: int) -> Blocks:
    """Blocks of `size` tokens for the documents of `segment_ids (*B, T)`, T at least 1."""
    of_rows: Any = functools.partial(_of_row, size=size)
    of_rows = over_batch(of_rows, segment_ids.ndim - 1)
    spec = PartitionSpec(*mesh_axes.spec(segment_ids)[:-1], None)
    found = mesh_axes.placed(of_rows, segment_ids, *[spec] * len(Blocks._fields))(segment_ids)
    return Blocks(*found)


def _of_row(ids, size):
    length = len(ids)
    count = number_of_blocks(length, size)
    token = jnp.arange(length, dtype=jnp.int32)
    start = starts_of_runs(ids)
    end = ends_of_runs(ids)
    # The block that begins at a token ends after `size` tokens of its document, or before the first
    # document that does not fit.
    later = jnp.minimum(token + size, length)
    whole = jnp.append(start, length)[later]
    following = jnp.append(jnp.where(end >= token + size, later, whole), length)

    # The first tokens of blocks, by steps of 1, 2, 4, ... blocks.
    number, at = jnp.arange(count + 1), jnp.zeros(count + 1, jnp.int32)
    for bit in range(count.bit_length()):
        at = jnp.where(number >> bit & 1, following[at], at)
        following = following[following]

    begin, until = at[:-1], at[1:]
    block = jnp.searchsorted(begin, token, side="right").astype(jnp.int32) - 1
    block = jnp.minimum(block, jnp.sum(begin < length).astype(jnp.int32) - 1)
    inside = jnp.arange(size, dtype=jnp.int32)
    own = begin[:, None] + inside[None]
    of_main = jnp.minimum(begin, length - 1)
    own_token = jnp.minimum(own, length - 1)
    is_token = own < until[:, None]
    blocks = Blocks(
        token=own_token.reshape(-1),
        is_token=is_token.reshape(-1),
        is_main=(is_token & (start[own_token] == start[of_main][:, None])).reshape(-1),
        place=block * size + token - begin[block],
        first=block[start[of_main]],
        last=block[end[of_main] - 1],
        is_used=begin < length,
    )
    return tuple(blocks)


def moved(
    given: attention.Arguments, size: int, length: int
) -> tuple[Blocks, jax.Array, jax.Array]:
    """Blocks for the documents of a call, and the ids of queries and keys there; 0 is padding."""
    assert given.segments is not None
    ids = given.segments[0]
    blocks = blocks_of(ids, size)

    def gather(lengths):
        return blocks.gather_ids(
            ids if lengths is None else jnp.where(within(lengths, length), ids, 0)
        )

    return blocks, gather(given.query_lengths), gather(given.key_lengths)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    given: attention.Arguments,
    size: int,
    allowed: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    first_block: jax.Array | np.ndarray | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over pairs of blocks of each document.

    Time O(b (H + Hv)) for each token and each pair of blocks that it reads; memory O(T), and a flag
    for each pair of blocks in a row.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      given: the checked arguments, with segment ids that queries and keys share.
      size: b, tokens in a block.
      allowed: `(i, j, count) -> bool (*B, #K, n, n)`: whether queries in block i of a document
        attend to keys in its block j. The int32 arrays i `(*B, 1, n, 1)` and j `(*B, 1, 1, n)`
        count from the first block of the document, and count `(*B, 1, n, 1)` is its number of
        blocks with keys.
      first_block: bool `(#K)`, whether the first block of a document attends to itself. None means
        that all blocks attend to themselves.
    """
    size = min(size, query.shape[-3])  # no document has more tokens
    blocks, of_queries, of_keys = moved(given, size, query.shape[-3])
    m, number = _numbers(blocks, of_keys, size)
    is_pair = same_document(blocks) & allowed(_by_row(m), _by_column(m), _by_row(number))
    own = lead(jnp.arange(m.shape[-1], dtype=jnp.int32), m.ndim)
    places = blocks.token.shape[-1]
    needs_positions = given.score_mod is not None or given.dropout_rate
    of_blocks = dataclasses.replace(
        given,
        is_causal=False,
        query_lengths=None,
        key_lengths=None,
        positions=(blocks.token, blocks.token) if needs_positions else None,
    )
    query, key, value = map(blocks.gather, (query, key, value))

    def over(is_pair, is_kept):
        """Attends over pairs of blocks, from and to the tokens that are kept."""
        full, rule = None, None
        if given.is_causal:
            full, rule = is_pair & (_by_column(own) < _by_row(own)), Causal()
            is_pair = is_pair & (_by_column(own) <= _by_row(own))
        layout = BlockLayout.from_block_mask(
            is_pair, tile=(size, size), lengths=(places, places), full=full
        )
        segments = jnp.where(is_kept, of_queries, 0), jnp.where(is_kept, of_keys, 0)
        part = dataclasses.replace(of_blocks, pattern=rule, layout=layout, segments=segments)
        return attention.attend(query, key, value, part)

    if first_block is None:
        out, lse = over(is_pair, blocks.is_token)
    else:
        # Documents that share a block with the main document of the block are their first block.
        is_main = blocks.is_main[..., None]
        other = (_by_row(own) == _by_column(own)) & jnp.asarray(first_block)[:, None, None]
        other = jnp.broadcast_to(other, jnp.broadcast_shapes(other.shape, is_pair.shape))
        out_of_main, lse_of_main = over(is_pair, blocks.is_main)
        out, lse = over(other, ~blocks.is_main)
        out = jnp.where(is_main[..., None], out_of_main, out)
        lse = jnp.where(is_main, lse_of_main, lse)
    return blocks.gather_back(out), blocks.gather_back(lse)


def attend_inside(
    blocks: Blocks,
    ids: tuple[jax.Array, jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    given: attention.Arguments,
) -> tuple[jax.Array, jax.Array]:
    """Attention inside each block of b tokens, to tokens of the own document.

    Args:
      blocks: n blocks of b tokens.
      ids: segment ids of queries and of keys, `(*B, n b)` each.
      query: `(*B, n b, N, H)`.
      key: `(*B, n b, K, H)`.
      value: `(*B, n b, K, Hv)`.
      given: the checked arguments.
    """
    count, places, axis = blocks.first.shape[-1], blocks.token.shape[-1], query.ndim - 3
    in_blocks = functools.partial(fold, size=places // count, axis=axis)
    tokens = in_blocks(blocks.token)
    inside = dataclasses.replace(
        given,
        query_lengths=None,
        key_lengths=None,
        segments=(in_blocks(ids[0]), in_blocks(ids[1])),
        positions=(tokens, tokens) if given.dropout_rate else None,
        origin=folding.example_of_blocks(count) if given.dropout_rate else None,
    )
    found = attention.attend(in_blocks(query), in_blocks(key), in_blocks(value), inside)
    out, lse = (unfold(x, places, axis) for x in found)
    return out, lse


def main_keys(
    blocks: Blocks, row_ids: jax.Array, of_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The keys of the main document of each block, and its segment id.

    Args:
      blocks: n blocks of b tokens.
      row_ids: segment ids of the tokens `(*B, T)`.
      of_keys: segment ids of the keys at their places, `(*B, n b)`, 0 for padding.

    Returns:
      Bool `(*B, n b)`, and ids `(*B, n)`, 0 for blocks without such keys.
    """
    count, axis = blocks.first.shape[-1], of_keys.ndim - 1
    is_key = blocks.is_main & (of_keys != 0)
    has_keys = fold(is_key, of_keys.shape[-1] // count, axis).any(-1)
    return is_key, jnp.where(has_keys, ids_of_blocks(blocks, row_ids), 0)


def ids_of_blocks(blocks: Blocks, row_ids: jax.Array) -> jax.Array:
    """Segment id `(*B, n)` of the main document of each block, from those of the tokens."""
    # The first token of a block belongs to its main document.
    size = blocks.token.shape[-1] // blocks.first.shape[-1]
    return fold(blocks.gather_ids(row_ids), size, row_ids.ndim - 1)[..., 0]


def attend_slots(
    blocks: Blocks,
    ids: tuple[jax.Array, jax.Array],
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    given: attention.Arguments,
    at: jax.Array,
    is_pair: jax.Array | np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """Attention to r slots of each block of the document.

    Args:
      blocks: n blocks of b tokens.
      ids: segment ids of queries `(*B, n b)`, and those of slots, `(*B, n r)`.
      query: `(*B, n b, N, H)`.
      keys: `(*B, n r, K, H)`.
      values: `(*B, n r, K, Hv)`.
      given: the checked arguments.
      at: int32 `(*B, n r)`, positions of the slots for dropout and `given.score_mod`.
      is_pair: bool `(n, n)` or `(*B, 1, n, n)`, whether queries of a block attend to the slots of
        another block, if both are of one document.
    """
    count, places, slots = blocks.first.shape[-1], query.shape[-3], keys.shape[-3]
    layout = BlockLayout.from_block_mask(
        is_pair, tile=(places // count, slots // count), lengths=(places, slots)
    )
    needs_positions = given.score_mod is not None or given.dropout_rate
    part = dataclasses.replace(
        given,
        is_causal=False,
        sink=None,
        tile=None,
        query_lengths=None,
        key_lengths=None,
        layout=layout,
        segments=ids,
        positions=(blocks.token, at) if needs_positions else None,
    )
    return attention.attend(query, keys, values, part)


def earlier(blocks: Blocks) -> np.ndarray:
    """The pairs of a block and an earlier block, bool `(n, n)`."""
    return np.tri(blocks.first.shape[-1], k=-1, dtype=bool)


def same_document(blocks: Blocks) -> jax.Array:
    """The pairs of blocks of one main document, bool `(*B, 1, n, n)`."""
    first = jnp.where(blocks.is_used, blocks.first, -1)
    return (_by_row(first) == _by_column(first)) & _by_row(blocks.is_used)


def _by_row(x):
    return x[..., None, :, None]


def _by_column(x):
    return x[..., None, None, :]


def _numbers(blocks, key_ids, size):
    """The number of each block in its main document, and of the blocks there that have keys."""
    own = jnp.arange(blocks.first.shape[-1], dtype=jnp.int32)
    is_key = (blocks.is_main & (key_ids != 0)).reshape(*blocks.first.shape, size)
    so_far = jnp.cumsum(is_key.any(-1), -1, dtype=jnp.int32)
    before = jnp.pad(so_far, [*[(0, 0)] * (so_far.ndim - 1), (1, 0)])
    at_last, at_first = (
        jnp.take_along_axis(x, at, -1, mode="clip")
        for x, at in ((so_far, blocks.last), (before, blocks.first))
    )
    return lead(own, blocks.first.ndim) - blocks.first, at_last - at_first


def one_array(segment_ids: Any, batch: tuple[int, ...]) -> None:
    """Raises `ValueError` if segment ids are a pair for queries and keys."""
    checks.one_segment_array(segment_ids, batch, "queries and keys are in the same blocks")
