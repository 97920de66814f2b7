"""Packed documents of native sparse attention, whose blocks count from the document's start."""

import jax
import jax.numpy as jnp

from effattn.arrays.axes import fold
from effattn.arrays.segments import starts_of_runs
from effattn.cores import document_blocks
from effattn.cores.document_blocks import Blocks
from effattn.cores.native_sparse import Compress, Documents, Settings


def documents_of(
    settings: Settings,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    lengths: jax.Array | None,
    compress: Compress | None,
) -> tuple[tuple[jax.Array, jax.Array], Documents]:
    """Compressed keys and values, and the places of the tokens of packed documents.

    Compressed blocks start at multiples of d in each document, and blocks that can be selected at
    multiples of b, so that tokens move to two places: into blocks of d and into blocks of b tokens.

    Args:
      settings: the sizes.
      key: `(*B, T, K, H)`, T at least 1.
      value: `(*B, T, K, Hv)`.
      ids: int `(*B, T)`, segment ids.
      lengths: `(*B)`, valid keys; None for all.
      compress: as in `native_sparse_attention`.
    """
    length, stride = ids.shape[-1], settings.stride
    by_stride = document_blocks.blocks_of(ids, stride)
    by_block = document_blocks.blocks_of(ids, settings.block)
    compressed = settings.compressed(by_stride.gather(key), by_stride.gather(value), compress)

    reach = document_blocks.reach_of(by_block, ids, lengths)
    return compressed, Documents(
        key=by_block.gather(key),
        value=by_block.gather(value),
        ids=ids,
        begin=starts_of_runs(ids),
        place=by_block.place,
        first=reach.first,
        last=reach.last,
        ends=_ends(settings, by_stride, compressed[0].shape[-3], length),
        strides=_strides(settings, by_stride, by_block),
    )


def _ends(settings: Settings, by_stride: Blocks, count: int, length: int) -> jax.Array:
    """The last token of each of `count` runs of l places, `(*B, M)`; `length` for other runs.

    The tokens of a run are those of one document.
    """
    each, axis = settings.compression // settings.stride, by_stride.first.ndim - 1

    def at_ends(x):
        """The entry of the last place of each run."""
        of_blocks = fold(x, settings.stride, axis)[..., -1]
        return of_blocks[..., each - 1 : each - 1 + count]

    first = by_stride.first
    is_one = first[..., :count] == first[..., each - 1 : each - 1 + count]
    return jnp.where(is_one & at_ends(by_stride.is_main), at_ends(by_stride.token), length)


def _strides(settings: Settings, by_stride: Blocks, by_block: Blocks) -> jax.Array:
    """The block of d tokens that begins each stride of the main document of a block."""
    first = (
        fold(x, settings.stride, by_stride.first.ndim - 1)[..., 0]
        for x in (by_block.token, by_block.is_main)
    )
    token, is_main = first
    at = jnp.take_along_axis(by_stride.place, token, -1, mode="clip") // settings.stride
    at = jnp.where(is_main, at, by_stride.first.shape[-1])  # past the last one
    return fold(at, settings.block // settings.stride, at.ndim - 1)
