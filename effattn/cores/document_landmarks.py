"""Landmarks of packed documents: means of segments of each document, in blocks of landmarks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.axes import fold, lead
from effattn.arrays.gathers import inverse_of, permute
from effattn.arrays.segments import positions_from_segment_ids, starts_of_runs
from effattn.cores import document_blocks
from effattn.cores.document_blocks import Blocks
from effattn.cores.document_slots import document_sums
from effattn.cores.segment_means import Segments
from effattn.patterns.layouts import BlockLayout

# Least tokens and landmarks in a tile.
_TILE = 64


class Landmarks(NamedTuple):
    """Places of up to m landmarks for each document, in n blocks of m places.

    The landmarks of a document are in one block. A document with m landmarks or more tokens has a
    block of its own; others may share one.

    Attributes:
      ids: int `(*B, T)`, segment ids.
      begin: int32 `(*B, T)`, the first token of each token's document.
      order: int32 `(*B, T)`, the tokens, the first m tokens of each document before all others.
      inverse: int32 `(*B, T)`, the inverse of `order`.
      blocks: the places of these first tokens, one for each landmark.
    """

    ids: jax.Array
    begin: jax.Array
    order: jax.Array
    inverse: jax.Array
    blocks: Blocks

    @property
    def size(self) -> int:
        """m, the places in a block."""
        return self.blocks.token.shape[-1] // self.blocks.first.shape[-1]

    def of(self, x: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Landmarks of `x (*B, T, N, H)`, zeros where `present (*B, T)` is False.

        Segments split the present tokens of a document as `numpy.array_split` does.

        Returns:
          Means `(*B, n m, N, H)`, and the segment ids of the landmarks `(*B, n m)`, 0 for none.
        """
        length, size = self.ids.shape[-1], self.size
        token = lead(jnp.arange(length, dtype=jnp.int32), self.ids.ndim)
        place = token - self.begin
        count = document_sums(present[..., None].astype(jnp.int32), self.begin)[..., 0]
        segments = Segments.of(count, size)
        segment = segments.segment(place)
        first = self.begin + segments.start(segment)
        sums = document_sums(lax.collapse(x, x.ndim - 2), first).reshape(x.shape)
        tokens = jnp.maximum(segments.tokens(segment), 1).astype(x.dtype)
        means = sums / tokens[..., None, None]
        exists = (place < jnp.minimum(count, size)) & (self.ids != 0)
        at = jnp.where(exists, self.begin + segments.start(place), token)
        found = jnp.take_along_axis(means, at[..., None, None], -3, mode="clip")
        found = jnp.where(exists[..., None, None], found, 0)
        of_places = self.blocks.gather(permute(found, self.order, self.inverse))
        return of_places, self._ids_at(jnp.where(exists, self.ids, 0))

    def layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """The tiles of landmarks and tokens of one document, by rows of landmarks and of tokens."""
        length, places = self.ids.shape[-1], self.blocks.token.shape[-1]
        tiles = self.size * -(-_TILE // self.size), _TILE
        token = lead(jnp.arange(length, dtype=jnp.int32), self.ids.ndim)
        number = jnp.cumsum(self.begin == token, -1, dtype=jnp.int32)  # from 1 on
        number = jnp.where(self.ids == 0, 0, number)
        of_places = jnp.where(self._ids_at(self.ids) == 0, 0, self._ids_at(number))
        of_landmarks = _range_of_tiles(of_places, tiles[0])
        of_tokens = _range_of_tiles(number, tiles[1])

        def layout(rows, columns, tile, lengths):
            low, high = (x[..., None, :, None] for x in rows)
            first, last = (x[..., None, None, :] for x in columns)
            is_pair = (low <= last) & (first <= high)
            return BlockLayout.from_block_mask(is_pair, tile=tile, lengths=lengths)

        return (
            layout(of_landmarks, of_tokens, tiles, (places, length)),
            layout(of_tokens, of_landmarks, tiles[::-1], (length, places)),
        )

    def _ids_at(self, ids):
        """Ids `(*B, T)` of the first tokens, at the places of their landmarks; 0 for none."""
        is_first = positions_from_segment_ids(self.ids) < self.size
        ids = jnp.where(is_first, ids, 0)
        return self.blocks.gather_ids(jnp.take_along_axis(ids, self.order, -1, mode="clip"))


def landmarks_of(ids: jax.Array, count: int) -> Landmarks:
    """Places of up to `count` landmarks for each document of `ids (*B, T)`."""
    place = positions_from_segment_ids(ids)
    begin = starts_of_runs(ids)
    is_first = (place < count) & (ids != 0)
    order = jnp.argsort(~is_first, -1, stable=True).astype(jnp.int32)
    first_ids = jnp.take_along_axis(jnp.where(is_first, ids, 0), order, -1, mode="clip")
    blocks = document_blocks.blocks_of(first_ids, count)
    return Landmarks(ids, begin, order, inverse_of(order), blocks)


def _range_of_tiles(number: jax.Array, tile: int) -> Any:
    """The first and last document of each tile, by their numbers `(*B, L)` from 1 on; 0 is none."""
    number = fold(number, tile, number.ndim - 1)
    most = jnp.iinfo(number.dtype).max
    return jnp.where(number == 0, most, number).min(-1), number.max(-1)
