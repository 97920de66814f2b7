"""BigBird attention: a window of blocks, global blocks and random blocks."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention, document_blocks
from effattn.functional import softmax
from effattn.functional.block_sparse import attend_blocks
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Packing, Score, Sink, Softmax, declared
from effattn.patterns.algebra import Or
from effattn.patterns.blocks import BlockLists
from effattn.patterns.named import bigbird_parts


class Options(Direction, Packing, Score, Sink, Softmax, total=False):
    """The shared options of `bigbird_attention`."""


def naive(
    query,
    key,
    value,
    pairs,
    *,
    scale,
    block_size,
    random_blocks,
    num_window_blocks=1,
    num_global_blocks=0,
    packed=False,
):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, random blocks `(n, r)`.

    Returns output and log-sum-exp. In packed rows, blocks count from the start of the document.
    """
    n, blocks = pairs.places // block_size, -(-len(key) // block_size)
    m = n[:, None]
    if packed:
        in_document = pairs.present & (pairs.query_ids[:, None] == pairs.key_ids)
        blocks = jnp.where(in_document, n + 1, 0).max(1, keepdims=True, initial=0)
    first, last = num_global_blocks if np.ndim(num_global_blocks) else (num_global_blocks, 0)
    window = abs(m - n) <= num_window_blocks // 2
    of_ends = [(block < first) | (block >= blocks - last) & (block < blocks) for block in (m, n)]
    random = (random_blocks[m] == n[:, None]).any(-1)
    allowed = window | of_ends[0] | of_ends[1] | random
    return softmax.naive(query, key, value, pairs.where(allowed), scale=scale)


def drawn_blocks(
    key,
    *,
    block_size,
    num_random_blocks,
    seed,
    random_blocks,
    is_causal,
    num_window_blocks=1,
    num_global_blocks=0,
    **_,
):
    """The random blocks of each key head, if the caller gives none."""
    if random_blocks is not None:
        return {}
    sizes = block_size, num_window_blocks, num_global_blocks, num_random_blocks
    drawn = bigbird_parts(*sizes, seed, is_causal, key.shape[-2])[2]
    return {"random_blocks": drawn.blocks((key.shape[-3],) * 2)}


def is_packed(*, segment_ids=None, **_):
    """The option `packed`: True for a call with packed rows."""
    return {"packed": segment_ids is not None}


@with_naive(
    over_pairs(naive, per_head={"random_blocks": 2}, made_by_head=drawn_blocks, derived=is_packed)
)
@declared
def bigbird_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    num_window_blocks: int = 3,
    num_global_blocks: int | tuple[int, int] = 1,
    num_random_blocks: int = 3,
    seed: int = 0,
    random_blocks: jax.Array | np.ndarray | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""BigBird's attention (Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences").

    With n = ceil(T / b) blocks of b tokens, the queries of block m attend to the blocks

        window   {m - w // 2, ..., m + w // 2}   for w = num_window_blocks
        global   the first g and the last g',    (g, g') = num_global_blocks
        random   r other blocks,                 for r = num_random_blocks

    Each key counts once. Queries of global blocks attend to all keys. Causal queries attend only to
    keys that are not later, and random blocks are drawn from the blocks before the window.

    In packed rows, each document has the blocks and the global blocks that it has alone: blocks
    count from its start, and the last blocks from its last valid key. Causal documents also have
    the random blocks that they have alone with the same seed. In bidirectional calls, a draw
    depends on the number of blocks, and all documents of a row have those of the draw for T tokens
    that they contain; give `random_blocks` for the same blocks in rows of any length.

    Time O(T b (w + g + g' + r) (H + Hv)), memory O(T), forward and backward; packed rows are moved
    into at most 2 T / b + 1 blocks, with a flag in memory for each pair of blocks.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      block_size: b, tokens in a block, 1 or more. T need not be a multiple of it.
      num_window_blocks: w, odd: the own block and (w - 1) / 2 blocks on each side.
      num_global_blocks: number of leading global blocks, or (leading, trailing); the published
        models have (1, 1).
      num_random_blocks: r. If fewer blocks are left, a block attends to all of these.
      seed: seed of the random blocks; key head k draws `patterns.RandomBlocks` with seed + k.
      random_blocks: given instead of `seed`, int `(n, r)` or `(K, n, r)`, -1 for no block; may be
        traced. A block that is also global or in the window counts once. A table for longer
        sequences is cut to its first n rows and to blocks below n.
      **options: direction, padding, packing, scale, soft cap, `score_mod`, sink, dropout,
        log-sum-exp and execution: see `effattn.options`. `segment_ids` are one array `(*B, T)`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values; in bidirectional calls, more random blocks than
        blocks.
      NotImplementedError: a named implementation does not take these arguments.
    """
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check("bigbird_attention", query, key, value, **options)
    return attend(
        query,
        key,
        value,
        given,
        block_size=block_size,
        num_window_blocks=num_window_blocks,
        num_global_blocks=num_global_blocks,
        num_random_blocks=num_random_blocks,
        seed=seed,
        random_blocks=random_blocks,
    )


def attend(query, key, value, given: attention.Arguments, **options: Any) -> Any:
    """Attends over the pattern of the options, for the mechanism that `given` names."""
    checks.self_attention(given.mechanism, query, key)
    checks.known_length(given.mechanism, query)
    length, key_heads = key.shape[-3:-1]
    whole = pattern(length, key_heads, given.is_causal, **options)
    with jax.named_scope(given.mechanism):
        if length and given.segments is not None:
            out, lse = _attend_packed(query, key, value, given, *whole.parts)
        elif length:
            out, lse = _attend(query, key, value, given, *whole.parts)
        else:
            out, lse = attention.attend(query, key, value, given)
    return attention.results(out, lse, given)


def pattern(
    length: int,
    key_heads: int,
    is_causal: bool,
    block_size: int,
    num_window_blocks: int,
    num_global_blocks: int | tuple[int, int],
    num_random_blocks: int,
    seed: int,
    random_blocks: Any,
) -> Or:
    """Returns the union of window, global and random blocks; heads, if they differ, are key heads.

    Causal calls attend to the earlier keys of it.
    """
    near, ends, random = bigbird_parts(
        block_size,
        num_window_blocks,
        num_global_blocks,
        num_random_blocks,
        seed,
        is_causal,
        key_heads,
    )
    if random_blocks is not None:
        table = _check_random_blocks(random_blocks, length, block_size, key_heads)
        return Or((near, ends, BlockLists(table, block_size)))
    blocks = -(-length // block_size)
    if 0 < blocks < num_random_blocks and not is_causal:
        raise ValueError(
            f"num_random_blocks must be at most {blocks}, the number of key blocks of {block_size} "
            f"in {length} tokens, got {num_random_blocks}; pass fewer, or a smaller block_size"
        )
    return Or((near, ends, random))


def _attend(query, key, value, given: attention.Arguments, near, ends, random):
    """Attends from global blocks to all keys, and from other blocks to their listed blocks."""
    length, size = query.shape[-3], near.block_size
    blocks = -(-length // size)
    start = min(ends.first, blocks)
    stop = max(start, blocks - ends.last)
    parts = []
    for low, high in ((0, start), (start, stop), (stop, blocks)):
        if low == high:
            continue
        low_token, high_token = low * size, min(high * size, length)
        rows = query[..., low_token:high_token, :, :]
        part = dataclasses.replace(given, query_offset=low_token)
        if given.query_lengths is not None:
            left = jnp.clip(given.query_lengths - low_token, 0, high_token - low_token)
            part = dataclasses.replace(part, query_lengths=left)
        if (low, high) != (start, stop):
            parts.append(attention.attend(rows, key, value, part))
            continue
        window = np.arange(start, stop)[:, None] + np.arange(-near.left, near.right + 1)
        window = np.where((window >= 0) & (window < blocks), window, -1)
        everywhere = np.r_[:start, stop:blocks]
        listed = _joined(window, everywhere, random.blocks((length, length))[..., start:stop, :])
        parts.append(attend_blocks(rows, key, value, part, listed, size))
    out, lse = zip(*parts, strict=True)
    return jnp.concatenate(out, axis=-3), jnp.concatenate(lse, axis=-2)


def _attend_packed(query, key, value, given: attention.Arguments, near, ends, random):
    """Attends within documents, whose blocks count from their start."""
    table = jnp.asarray(random.blocks((query.shape[-3],) * 2))  # (rows, r) or (K, rows, r)
    table = table[None] if table.ndim == 2 else table
    batch = query.ndim - 3

    def allowed(m, n, blocks):
        pairs = (m - n <= near.left) & (n - m <= near.right)
        pairs |= (m < ends.first) | (n < ends.first)
        pairs |= (m >= blocks - ends.last) & (m < blocks) | (n >= blocks - ends.last)
        rows = jnp.take(table, m[..., 0, :, 0], 1, mode="clip")  # (K, *B, n, r)
        rows = jnp.moveaxis(rows, 0, batch)[..., None]
        for choice in range(table.shape[-1]):
            pairs |= rows[..., choice, :] == n
        return pairs

    return document_blocks.attend(query, key, value, given, near.block_size, allowed)


def _joined(*lists):
    """Concatenates lists of blocks `(#K, #n, k)`."""
    xp = jnp if any(isinstance(one, jax.Array) for one in lists) else np
    rows = np.broadcast_shapes(*(one.shape[:-1] for one in lists))
    return xp.concatenate([xp.broadcast_to(one, (*rows, one.shape[-1])) for one in lists], axis=-1)


def _check_random_blocks(given: Any, length: int, block_size: int, key_heads: int) -> Any:
    """Returns the checked table, int `(n, r)` or `(K, n, r)`, -1 for no block."""
    traced = isinstance(given, jax.core.Tracer)
    array = given if traced else np.asarray(given)
    blocks = -(-length // block_size)
    if (
        not jnp.issubdtype(array.dtype, jnp.integer)
        or array.ndim < 2
        or array.shape[-2] < blocks
        or array.shape[:-2] not in ((), (1,), (key_heads,))
    ):
        raise ValueError(
            f"random_blocks must be integers of shape (n, r) or ({key_heads}, n, r), for "
            f"{key_heads} key heads and n at least {blocks}, the number of blocks of {block_size} "
            f"in {length} tokens, got {array.dtype} of shape {array.shape}"
        )
    most = array.shape[-2] - 1
    if not traced and array.size and (array.min() < -1 or array.max() > most):
        raise ValueError(
            f"random_blocks must hold block indices from 0 to {most}, or -1 for no block, got "
            f"{array.min()} to {array.max()}"
        )
    array = array[..., :blocks, :].astype(np.int32)
    return (jnp if traced else np).where(array < blocks, array, -1)


def seed_of_layer(layer: int, _: int) -> dict[str, int]:
    """Seed of a layer, so far from the next that the heads of all layers draw different blocks."""
    return {"seed": 1000 * layer}


registry.register(
    registry.Mechanism(
        name="bigbird",
        family="sparse",
        paper="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences",
        function=bigbird_attention,
        decoder="effattn.decode.gathered:GatheredDecoder",
        pattern=pattern,
        options={"block_size": 32, "num_window_blocks": 3, "num_random_blocks": 2},
        by_layer=seed_of_layer,
        complexity="O(N b (w + g + r))",
        time_exponent=1.0,
    )
)
