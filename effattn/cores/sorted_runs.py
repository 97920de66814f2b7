"""Tokens sorted into buckets, and the runs of sorted places that each tile of queries reads.

All of this is for one head with T tokens, n rounds, and tiles and chunks of m sorted places.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.gathers import inverse_of
from effattn.arrays.segments import ends_of_runs, positions_from, starts_of_runs

# Minimum tokens of a head whose logits are in memory at a time.
_TOKENS_AT_A_TIME = 1024


class Sorted(NamedTuple):
    """Tokens sorted by document, then by bucket, then by time.

    Attributes:
      order: `(n, T)`, the token at each place.
      place: `(n, T)`, the place of each token.
      sees: pair of `(n, T)`, the keys of each query: if causal, first <= place < second; else
        the two chunks that start at these places.
      is_at: `(n, T)`, the place of each key if causal, else the start of its chunk; -1 for padding.
    """

    order: jax.Array
    place: jax.Array
    sees: tuple[jax.Array, jax.Array]
    is_at: jax.Array


class Spans(NamedTuple):
    """Start and end of the document at each sorted place; `(T,)` each."""

    start: jax.Array
    end: jax.Array


class Runs(NamedTuple):
    """Key places that the queries of each tile read: r runs of m places.

    Attributes:
      places: `(tiles, r, m)`, -1 for no place; no place occurs twice in the runs of a tile.
      readers: `(T, p)`, for each place the flat indices in `places` from which a query may attend
        to the place; -1 for none.
    """

    places: jax.Array
    readers: jax.Array


def sorted_in_chunks(buckets, documents, size, is_causal) -> tuple[Sorted, Spans]:
    """Sorts tokens for each round, and cuts them in chunks of `size` places.

    Args:
      buckets: int `(n, T)`, the bucket of each token.
      documents: int `(T,)`, the start of each token's document, T in the padding; or None.
      size: places in a chunk; if causal, tokens of its bucket that a query sees.
      is_causal: whether queries see earlier tokens only.
    """
    rounds, length = buckets.shape
    index = jnp.arange(length, dtype=jnp.int32)
    every = jnp.broadcast_to(index, buckets.shape)
    if documents is None:
        of_buckets, order = lax.sort((buckets, every), num_keys=1)
        spans = Spans(jnp.zeros_like(index), jnp.full_like(index, length))
    else:
        given = jnp.broadcast_to(documents, buckets.shape)
        of_documents, of_buckets, order = lax.sort((given, buckets, every), num_keys=2)
        # The spans are equal in all rounds.
        spans = _spans(of_documents[0])

    def of_tokens(at_places):
        return jnp.take_along_axis(jnp.broadcast_to(at_places, place.shape), place, -1)

    place = inverse_of(order)
    if is_causal:
        bucket_start = starts_of_runs(of_buckets)
        bucket_start = jnp.maximum(bucket_start, spans.start[None])
        sees = jnp.maximum(place - size, of_tokens(bucket_start)), place
        is_at = place
    else:
        chunk = spans.start + (index - spans.start) // size * size
        last = spans.start + (spans.end - 1 - spans.start) // size * size
        before = jnp.where(chunk == spans.start, last, chunk - size)
        sees = of_tokens(chunk), of_tokens(before)
        is_at = sees[0]
    if documents is not None:
        is_at = jnp.where(documents < length, is_at, -1)
    return Sorted(order, place, sees, is_at), spans


def _spans(of_places) -> Spans:
    """The spans of runs of equal numbers `(T,)`."""
    return Spans(starts_of_runs(of_places), ends_of_runs(of_places))


def groups_of(length: int, size: int) -> int:
    """The number of groups of tiles in which a round is computed."""
    return max(1, length // max(size, _TOKENS_AT_A_TIME))


def _tiles(length: int, size: int) -> int:
    """The number of tiles, a multiple of `groups_of`; the last tiles may be empty."""
    groups = groups_of(length, size)
    return groups * math.ceil(length / (size * groups))


def runs_of(spans: Spans, length: int, size: int, *, is_causal: bool, is_packed: bool) -> Runs:
    """The runs that the queries of each tile read."""
    if is_causal:
        return _runs_causal(length, size)
    return (_runs_packed if is_packed else _runs)(spans, length, size)


def _runs_causal(length, size) -> Runs:
    """Runs of the tile before and the own tile."""
    tiles = _tiles(length, size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    return _whole_tiles(
        jnp.stack([tile - 1, tile], 1), jnp.stack([tile + 1, tile], 1), length, size
    )


def _runs(spans, length, size) -> Runs:
    """Runs of the tile before (for the first tile: the last valid tile) and the tile."""
    tiles = _tiles(length, size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    last = (spans.end[0] - 1) // size
    before = jnp.where(tile == 0, jnp.where(last == 0, -1, last), tile - 1)
    after = jnp.where(tile == last, jnp.where(last == 0, -1, 0), tile + 1)
    # Tiles after `last` hold only padding.
    before, after = jnp.where(tile > last, -1, before), jnp.where(tile > last, -1, after)
    return _whole_tiles(jnp.stack([before, tile], 1), jnp.stack([after, tile], 1), length, size)


def _runs_packed(spans, length, size) -> Runs:
    """Runs of two tiles before to one tile after, for packed documents.

    Chunks start with documents, not with tiles. The first chunk of a document also reads the last
    chunk of this document. If the document continues after the four tiles, its last chunk is one
    more run; at most one document per tile continues, the document at the first place after these
    tiles.
    """
    tiles = _tiles(length, size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    steps = jnp.arange(-2, 2, dtype=jnp.int32)[None]
    near = _whole_tiles(tile[:, None] + steps, tile[:, None] - steps, length, size)
    last = spans.start + (spans.end - 1 - spans.start) // size * size

    after = (tile + 2) * size
    goes_on = after < length
    chunk = last[jnp.minimum(after, length - 1)]
    far = positions_from(chunk, size)
    is_read = goes_on[:, None] & (far >= after[:, None]) & (far < length)
    places = jnp.concatenate([near.places, jnp.where(is_read, far, -1)[:, None]], 1)

    runs = places.shape[1]
    # `near.readers` assumes four runs a tile.
    readers = jnp.where(
        near.readers < 0, -1, near.readers + near.readers // (4 * size) * (runs - 4) * size
    )
    index = jnp.arange(length, dtype=jnp.int32)
    first = positions_from(spans.start // size, 2)
    begin = (first + 2) * size
    reads = (index >= last)[:, None] & (begin < spans.end[:, None]) & (index[:, None] >= begin)
    more = (first * runs + 4) * size + (index - last)[:, None]
    return Runs(places, jnp.concatenate([readers, jnp.where(reads, more, -1)], 1))


def _whole_tiles(reads, read_by, length, size) -> Runs:
    """Runs of whole tiles: the tiles that each tile reads, and is read by, `(tiles, r)`."""
    tiles, runs = reads.shape
    places = positions_from(reads * size, size)
    places = jnp.where((reads[..., None] >= 0) & (places < length), places, -1)
    index = jnp.arange(length, dtype=jnp.int32)
    reader = read_by[index // size]
    run = jnp.arange(runs, dtype=jnp.int32)[None]
    flat = (reader * runs + run) * size + (index % size)[:, None]
    return Runs(places, jnp.where((reader >= 0) & (reader < tiles), flat, -1))
