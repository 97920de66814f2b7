"""Attention to chosen blocks of keys by the kernels of block attention.

The pairs of a query and a block are sorted by block. The queries of a block's pairs are then a
document, and so are the keys of the block: one call of block attention over packed documents
computes all pairs. The results of a query's blocks are then combined by their log-sum-exps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.arrays.combine import combine
from effattn.arrays.gathers import inverse_of, permute
from effattn.cores import attention, folding

KERNELS = "llvm", "mosaic_gpu", "triton"
# Pairs whose queries are copied at a time, for each key head.
_PAIRS = 2**16


def call(
    mechanism: str, query: jax.Array, key: jax.Array, value: jax.Array, *, is_whole: bool
) -> dispatch.Call:
    """Description of a call of `attend`, for `dispatch.choose`, with `KERNELS` and "xla".

    `is_whole` says whether queries and keys are the same tokens.
    """
    given = attention.check(mechanism, query, key[:, None], value[:, None], scale=1.0)
    found = attention.call_of(query, key[:, None], value[:, None], given)
    refusals = {name: found.refusals[name] for name in (*KERNELS, "xla")}
    if not is_whole:
        cannot = dict.fromkeys(
            KERNELS, lambda: "takes whole sequences of one document, no decoding"
        )
        refusals |= cannot
    return found._replace(refusals=refusals, signature=None, is_partitioned=False)


def attend(
    mechanism: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: jax.Array,
    limit: jax.Array,
    block_size: int,
    precision: Any = None,
    implementation: str = "llvm",
) -> tuple[jax.Array, jax.Array]:
    """Attends from each query to its own block, up to itself, and to chosen blocks.

    Args:
      mechanism: name of the mechanism, for messages.
      query: `(T, G, H)`, times the scale.
      key: `(T, H)`.
      value: `(T, Hv)`.
      blocks: int32 `(T, k)`, different blocks before the own one for each query; -1 for none.
      limit: int32 `()`, valid keys.
      block_size: b, keys in a block.
      precision: as in `jax.lax.dot`.
      implementation: one of `KERNELS`.

    Returns:
      Output `(T, G, Hv)` and log-sum-exp `(T, G)`, as `chosen_blocks.attend` returns them.
    """
    length, each = blocks.shape
    key, value = key[:, None], value[:, None]
    check = functools.partial(
        attention.check, mechanism, scale=1.0, precision=precision, implementation=implementation
    )
    given = check(query, key, value, is_causal=True, key_value_seq_lengths=limit)
    own = folding.attend_inside(block_size, query, key, value, given)
    if each == 0:
        return own
    at = jnp.arange(length, dtype=jnp.int32)
    key_ids = jnp.where(at < limit, at // block_size + 1, 0)

    @jax.checkpoint
    def past(tile):
        query, blocks = tile
        # Id 0 is padding.
        ids, order = lax.sort_key_val((blocks + 1).reshape(-1), lax.iota(jnp.int32, blocks.size))
        place = inverse_of(order)
        copies = jnp.broadcast_to(query[:, None], (len(query), each, *query.shape[1:]))
        pairs = permute(lax.collapse(copies, 0, 2), order, place)
        found = attention.attend(
            pairs, key, value, check(pairs, key, value, segment_ids=(ids, key_ids))
        )
        outs, lses = (permute(x, place, order).reshape(*blocks.shape, *x.shape[1:]) for x in found)
        parts = range(each)
        return combine([outs[:, n] for n in parts], [lses[:, n] for n in parts])

    outs, lses = folding.in_tiles_of_queries(past, (query, blocks), max(_PAIRS // each, 1))
    return combine([own[0], outs], [own[1], lses])
