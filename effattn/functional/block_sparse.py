"""Block-sparse attention: softmax attention over the blocks of a block mask."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention, document_blocks
from effattn.functional import softmax, sparse
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Packing, Score, Sink, Softmax, declared
from effattn.patterns import BlockMask, Causal
from effattn.patterns.blocks import BlockLists
from effattn.patterns.layouts import BlockLayout


class Options(Direction, Packing, Score, Sink, Softmax, total=False):
    """The shared options of `block_sparse_attention`."""


def naive(query, key, value, pairs, *, scale, block_size, block_mask, packed=False):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, mask `(query blocks, key blocks)`.

    Returns output and log-sum-exp. In packed rows, blocks count from the start of the document.
    """
    i, j = (pairs.places, pairs.places) if packed else (pairs.i, pairs.j)
    allowed = block_mask[i[:, None] // block_size, j // block_size]
    return softmax.naive(query, key, value, pairs.where(allowed), scale=scale)


def _rule_as_mask(query, key, block_size, block_mask, segment_ids=None, **_):
    """The mask `(query blocks, key blocks)` of a rule of block indices; whether rows are packed."""
    packed = {"packed": segment_ids is not None}
    if not callable(block_mask):
        return packed
    m, n = (np.arange(-(-x.shape[-3] // block_size)) for x in (query, key))
    mask = np.broadcast_to(block_mask(m[:, None], n), (len(m), len(n)))
    return {**packed, "block_mask": mask}


@with_naive(over_pairs(naive, per_head={"block_mask": 2}, derived=_rule_as_mask))
@declared
def block_sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    block_mask: jax.Array | np.ndarray | Callable[[Any, Any], Any],
    **options: Unpack[Options],
) -> Any:
    r"""Block-sparse attention (Gray et al. 2017, "GPU Kernels for Block-Sparse Weights").

    Tokens of block m attend to tokens of block n where the mask is True: query i attends to

        {j : block_mask[h, i // block_size, j // block_size]}

    In packed rows, blocks count from the start of each document, and a document of n blocks has the
    first n rows and columns of the mask.

    Time O(P (H + Hv)) for the P pairs in these blocks, memory O(T + S), forward and backward;
    packed rows are moved into at most 2 T / block_size + 1 blocks, with a flag in memory for each
    pair of blocks. `effattn.sparse_attention` takes any other pattern.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, S, K, H)`, N a multiple of K.
      value: `(*B, S, K, Hv)`.
      block_size: tokens in a block, 1 or more.
      block_mask: bool `(ceil(T / block_size), ceil(S / block_size))`, or one mask for each query
        head, `(N, ..., ...)`. A traced mask may differ by key head, `(K, ..., ...)`. Or a rule of
        block indices for any length, `(m, n) -> bool` on NumPy integers that broadcast.
      **options: direction, padding, packing, scale, soft cap, `score_mod`, sink, dropout,
        log-sum-exp and execution: see `effattn.options`. Causal calls see nothing at later
        positions, whatever the mask says. `segment_ids` are one array `(*B, T)`, and need T = S.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    if options.get("segment_ids") is not None:
        checks.self_attention("block_sparse_attention with segment_ids", query, key)
        document_blocks.one_array(options["segment_ids"], query.shape[:-2])
    given = attention.check("block_sparse_attention", query, key, value, **options)
    checks.known_length("block_sparse_attention", query, key)
    (queries, heads), (keys, key_heads) = query.shape[-3:-1], key.shape[-3:-1]
    mask = _check_mask(block_size, block_mask, (queries, keys), heads, key_heads)
    with jax.named_scope("block_sparse_attention"):
        if not mask.size:  # without queries or keys
            out, lse = attention.attend(query, key, value, given)
        elif given.segments is not None:
            out, lse = _attend_packed(query, key, value, given, mask, block_size)
        elif isinstance(mask, np.ndarray):
            kept = BlockMask(mask, block_size)
            given = sparse.with_pattern(query, key, given, kept)
            out, lse = attention.attend(query, key, value, given)
        else:
            out, lse = attend_blocks(query, key, value, given, _indices(mask), block_size)
    return attention.results(out, lse, given)


def _attend_packed(query, key, value, given, mask, block_size):
    """Attends within documents, whose blocks count from their start."""
    mask = mask if mask.ndim == 3 else mask[None]  # (1, K or N, query blocks, key blocks)
    heads, batch = query.shape[-2], query.ndim - 3
    if mask.shape[0] == heads:
        repeats = heads // key.shape[-2]
        key, value = jnp.repeat(key, repeats, -2), jnp.repeat(value, repeats, -2)

    def allowed(m, n, blocks):
        found = jnp.asarray(mask).at[:, m[..., 0, :, :], n[..., 0, :, :]].get(mode="clip")
        return jnp.moveaxis(found, 0, batch)

    first_block = mask[:, 0, 0]
    if isinstance(mask, np.ndarray) and mask[:, *np.diag_indices(mask.shape[-1])].all():
        first_block = None
    return document_blocks.attend(query, key, value, given, block_size, allowed, first_block)


def pattern(
    length: int, heads: int, key_heads: int, block_size: int, block_mask: Any
) -> BlockMask | BlockLists:
    """Returns the pattern; if heads differ, they are query heads, or key heads of a traced mask."""
    mask = _check_mask(block_size, block_mask, (length, length), heads, key_heads)
    if isinstance(mask, np.ndarray):
        return BlockMask(mask, block_size)
    return BlockLists(_indices(mask), block_size)


def _check_mask(block_size, given, lengths, heads, key_heads):
    """Returns the checked mask, bool `(..., nq, nk)`; NumPy unless it is traced."""
    checks.at_least("block_size", block_size, 1, "tokens in a block")
    blocks = tuple(-(-length // block_size) for length in lengths)
    if callable(given):
        rows, columns = np.arange(blocks[0])[:, None], np.arange(blocks[1])
        given = np.broadcast_to(np.asarray(given(rows, columns)), blocks)
    traced = isinstance(given, jax.core.Tracer)
    if not traced:
        given = np.asarray(given)
    most = key_heads if traced else heads
    if given.dtype != bool or given.shape not in (blocks, (1, *blocks), (most, *blocks)):
        raise ValueError(
            f"block_mask must be bool of shape {blocks}, for blocks of {block_size} in "
            f"{lengths[0]} queries and {lengths[1]} keys, or {(most, *blocks)}, for the {most} "
            f"{'key heads of a traced mask' if traced else 'heads'}, got {given.dtype} of shape "
            f"{given.shape}"
        )
    return given


def _indices(mask):
    """Returns the blocks of a mask `(..., nq, nk)` as lists; -1 where the mask is False."""
    return jnp.where(mask, jnp.arange(mask.shape[-1]), -1)


def attend_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    given: attention.Arguments,
    indices: jax.Array | np.ndarray,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each query block to its listed key blocks; indices may be traced.

    Args:
      query: `(*B, T, N, H)`; the first query has position `query_offset`, the start of a block.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      given: the checked arguments.
      indices: int `(nq, k)` or `(K, nq, k)`, -1 for no block; repeated blocks count once.
      block_size: tokens in a block.
    """
    partial = rule = None
    if given.is_causal:
        first = given.query_offset // block_size
        own = first + np.arange(-(-query.shape[-3] // block_size))[:, None]
        xp = jnp if isinstance(indices, jax.Array) else np
        partial = xp.where((indices == own).any(-1, keepdims=True), own, -1)
        indices = xp.where(indices < own, indices, -1)
        rule = Causal()
    layout = BlockLayout.from_indices(
        indices,
        tile=(block_size, block_size),
        lengths=(query.shape[-3], key.shape[-3]),
        partial=partial,
    )
    listed = dataclasses.replace(given, is_causal=False, pattern=rule, layout=layout)
    return attention.attend(query, key, value, listed)


def first_and_near(m, n):
    """Block mask for any length: the first block, the own block and two on each side."""
    return (n == 0) | (abs(m - n) <= 2)


registry.register(
    registry.Mechanism(
        name="block_sparse",
        family="sparse",
        paper="Gray et al. 2017, GPU Kernels for Block-Sparse Weights",
        function=block_sparse_attention,
        capabilities=frozenset({"cross"}),
        decoder="effattn.decode.gathered:GatheredDecoder",
        pattern=pattern,
        options={"block_size": 32, "block_mask": first_and_near},
        complexity="O(N b) for b kept keys a row",
        time_exponent=1.0,
    )
)
