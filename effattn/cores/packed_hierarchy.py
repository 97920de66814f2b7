"""Hierarchical attention within packed documents, whose units count from the document's start."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from effattn.arrays.axes import fold, lead, shifted, unfold
from effattn.arrays.combine import combine
from effattn.cores import attention, document_blocks, folding, hierarchy, sequence_parts
from effattn.cores.document_blocks import Blocks
from effattn.cores.hierarchy import Hierarchy, Summaries
from effattn.cores.pooling import Runs, pool, tokens


def attend(
    sizes: Hierarchy, query, key, value, summary_query, given: attention.Arguments
) -> tuple[jax.Array, jax.Array]:
    """Attends to the own segment, to siblings and to units of the last level, of each document.

    Documents are moved so that each segment of a document with several segments is a block. All
    levels have an entry for each block, for the unit that would begin there.
    """
    sequence_parts.check_whole_rows("segments")
    assert given.segments is not None
    length, axis = query.shape[-3], query.ndim - 3
    blocks, of_queries, of_keys = document_blocks.moved(given, sizes.segment, length)
    query, key, value = map(blocks.gather, (query, key, value))
    ids = of_queries, of_keys
    parts = [document_blocks.attend_inside(blocks, ids, query, key, value, given)]

    in_blocks = functools.partial(fold, size=sizes.segment, axis=axis)
    is_key, of_blocks = document_blocks.main_keys(blocks, given.segments[0], of_keys)
    # The number of each block in its document.
    number = jnp.arange(blocks.first.shape[-1], dtype=jnp.int32)
    number = lead(number, blocks.first.ndim) - blocks.first
    siblings = sizes.siblings(length)
    has_others = sizes.segments(length) > 2**siblings
    runs = tokens(in_blocks(key), in_blocks(value), in_blocks(is_key), summary_query, given.scale)
    levels = []
    for level in range(1, siblings + has_others + 1):
        runs = pool(runs, sizes.piece(1)) if level == 1 else _merged(runs, blocks, level)
        starts = lead(jnp.asarray(sizes.starts(level, sizes.pieces)), runs.present.ndim)
        starts = number[..., None] * sizes.segment + starts
        levels.append(Summaries.of(runs, starts, level, (key, value)))

    if siblings:
        seen = _siblings(levels[:siblings], blocks, number, given.is_causal)
        # A block of queries may have no keys itself.
        own = document_blocks.ids_of_blocks(blocks, given.segments[0])
        folded = dataclasses.replace(
            given,
            query_lengths=None,
            segments=(in_blocks(of_queries), jnp.where(seen.seen, own[..., None], 0)),
            origin=folding.example_of_blocks(number.shape[-1]),
        )
        found = hierarchy.attend(sizes, in_blocks(blocks.token), in_blocks(query), seen, folded)
        out, lse = (unfold(x, query.shape[axis], axis) for x in found)
        parts.append((out, lse))
    if has_others:
        unit, seen = number >> siblings, levels[siblings]
        by_row, by_column = unit[..., None, :, None], unit[..., None, None, :]
        is_pair = by_column < by_row if given.is_causal else by_column != by_row
        is_pair &= (number % 2**siblings == 0)[..., None, None, :]
        is_pair &= document_blocks.same_document(blocks)
        far = dataclasses.replace(given, score_mod=hierarchy.LogTokens(sizes, siblings + 1))
        key, value = (unfold(x, x.shape[axis] * sizes.pieces, axis) for x in seen[:2])
        of_slots = jnp.where(seen.seen, of_blocks[..., None], 0)
        parts.append(
            document_blocks.attend_slots(
                blocks,
                (of_queries, of_slots.reshape(*of_blocks.shape[:-1], -1)),
                query,
                key,
                value,
                far,
                seen.at.reshape(*of_blocks.shape[:-1], -1),
                is_pair,
            )
        )
    out, lse = combine(*zip(*parts, strict=True))
    return blocks.gather_back(out), blocks.gather_back(lse)


def _merged(runs: Runs, blocks: Blocks, level: int) -> Runs:
    """Runs `(*B, n, r, ...)` of units of a level, each merged from two of the level below.

    The unit that begins at block n is made of two units of the level below: the one that begins at
    block n, and the next one.
    """
    half, axis = 2 ** (level - 2), blocks.first.ndim - 1
    following = Runs(*(shifted(x, -half, axis) for x in runs))
    block = lead(jnp.arange(blocks.last.shape[-1], dtype=jnp.int32), blocks.last.ndim)
    is_same = (block + half <= blocks.last)[..., None]
    following = following._replace(present=jnp.where(is_same, following.present, 0))
    both = (jnp.concatenate(arrays, axis + 1) for arrays in zip(runs, following, strict=True))
    return pool(Runs(*both), 2)


def _siblings(
    levels: list[Summaries], blocks: Blocks, number: jax.Array, is_causal: bool
) -> Summaries:
    """The sibling pieces of each block, `(*B, n, levels * r, ...)`.

    From the highest level down, the second half of each unit copies the siblings of the first half,
    by static shifts, whose gradients are shifts.
    """
    axis = number.ndim - 1
    siblings: Summaries | None = None
    for level, summaries in reversed(list(enumerate(levels, 1))):
        half, is_second = 2 ** (level - 1), (number >> (level - 1)) % 2 == 1

        def choose(second, first, is_second=is_second):
            ones = [1] * (first.ndim - is_second.ndim)
            return jnp.where(is_second.reshape(*is_second.shape, *ones), second, first)

        found = Summaries(
            *(choose(shifted(x, half, axis), shifted(x, -half, axis)) for x in summaries)
        )
        follows = number + half <= blocks.last - blocks.first
        exists = is_second if is_causal else is_second | follows
        found = found._replace(seen=found.seen & exists[..., None])
        if siblings is not None:
            upper = Summaries(*(choose(shifted(x, half, axis), x) for x in siblings))
            pairs = zip(found, upper, strict=True)
            found = Summaries(*(jnp.concatenate(arrays, axis + 1) for arrays in pairs))
        siblings = found
    assert siblings is not None
    return siblings
