"""Mixture of block attention: each query attends to the blocks of keys with the largest scores."""

import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import fold, over_batch
from effattn.arrays.segments import valid
from effattn.cores import attention, chosen_blocks, document_blocks, folding
from effattn.cores.document_blocks import Reach
from effattn.dispatch.partition import by_device
from effattn.functional import softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Execution, Packing, Padding, Residual, Scale, declared

# Minimum queries whose scores are in memory at a time.
_QUERIES = 128


class Options(Padding, Packing, Scale, Residual, Execution, total=False):
    """The shared options of `moba_attention`."""


def naive(query, key, value, pairs, *, scale, block_size, top_k):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp.

    In packed rows, blocks count from the start of the document.
    """
    # The number of each token's block in its document, and the token that begins the block.
    number, n = pairs.places // block_size, jnp.arange(len(key))
    start = n - pairs.places % block_size
    members = pairs.present & (start == n[:, None])  # (T, T), empty but for first tokens
    dtype = jnp.promote_types(key.dtype, jnp.float32)
    exact = functools.partial(jnp.matmul, precision="highest")
    means = exact(members.astype(dtype), key) / jnp.maximum(members.sum(1), 1)[:, None]

    scores = exact(query.astype(dtype), means.T)  # (T, T)
    is_same = pairs.query_ids[:, None] == pairs.key_ids
    is_past = is_same & (number < number[:, None]) & members.any(1)
    this, other = scores[:, :, None], scores[:, None]
    is_before = (other > this) | ((other == this) & (n < n[:, None]))
    rank = (is_before & is_past[:, None]).sum(2)
    chosen = (is_past & (rank < top_k - 1)) | (n == start[:, None])
    allowed = pairs.where(chosen[:, start])
    return softmax.naive(query, key, value, allowed, scale=scale)


@with_naive(over_pairs(naive))
@declared
def moba_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    top_k: int,
    **options: Unpack[Options],
) -> Any:
    r"""Mixture of block attention.

    Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs".

    Blocks have b tokens. Each query head scores the blocks before its own by their mean keys,

        s_i = q . mean(k_j for j in block i),

    and a query attends, in one softmax, to its own block up to itself and to the top_k - 1 earlier
    blocks with the largest scores; equal scores go to the earlier block. The choice has no
    gradient. Always causal. With as many blocks as the sequence has, the result is causal
    `effattn.dot_product_attention`.

    Pairs of a query and a block are sorted by block, so that products are those of whole tiles.
    Time O(T (T / b) H) for the scores and O(T top_k b (H + Hv)) for the attention, that is
    O(T sqrt(T)) for b near sqrt(T). Memory O(T top_k), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K. Each query head chooses its own blocks.
      value: `(*B, T, K, Hv)`.
      block_size: b, tokens in a block, 1 or more. T need not be a multiple of it.
      top_k: blocks of a query, its own block included; 1 or more.
      **options: padding, packing, scale, log-sum-exp and execution: see `effattn.options`. Padded
        keys are in no mean. Blocks of a packed document count from its start, and `segment_ids` are
        one array `(*B, T)`. `precision` applies to the products of the attention; scores have the
        highest.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
    """
    name = "moba_attention"
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    size, top_k = check_options(block_size, top_k, query.shape[-3])
    query, key, value = attention.without_padding(query, key, value, given)
    length = query.shape[-3]

    def run(query, key, value, lengths, scale, ids):
        options: dict[str, Any] = {
            "scale": scale,
            "precision": given.precision,
            "implementation": given.implementation,
        }
        heads = query, key, value
        if ids is not None and length:
            return _attend_documents(name, size, top_k, heads, lengths, ids, **options)
        limits = jnp.full(query.shape[:-3], length, jnp.int32)
        if lengths is not None:
            limits = jnp.minimum(lengths, limits)
        sums = block_sums(lax.stop_gradient(key), size)
        return attend(name, size, top_k, heads, sums, limits, **options)

    with jax.named_scope(name):
        run = by_device(run, query, (-2, -2, -2, 0, 0, 0), results=2)
        scale = jnp.asarray(given.scale, dtypes.wide(query, key, value))
        ids = None if given.segments is None else given.segments[0]
        out, lse = run(query, key, value, given.key_lengths, scale, ids)
    out, lse = attention.clear_rows(out, lse, valid(given.query_lengths, ids, length))
    return attention.results(checkpoint_name(out, name), lse, given)


def _attend_documents(name, size, top_k, heads, lengths, ids, **options):
    """Moves the tokens so that each document begins a block, attends, and moves them back."""
    blocks = document_blocks.blocks_of(ids, size)
    reach = document_blocks.reach_of(blocks, ids, lengths)
    documents = Reach(reach.counts, blocks.gather_ids(reach.first), blocks.gather_ids(reach.last))
    query, key, value = map(blocks.gather, heads)
    of_main = jnp.where(blocks.is_main[..., None, None], lax.stop_gradient(key), 0)
    sums = block_sums(of_main, size)
    positions = jnp.arange(key.shape[-3], dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, key.shape[:-2])
    limits = jnp.full(key.shape[:-3], key.shape[-3], jnp.int32)
    heads = query, key, value
    out, lse = attend(name, size, top_k, heads, sums, limits, positions, documents, **options)
    return blocks.gather_back(out), blocks.gather_back(lse)


def check_options(block_size: Any, top_k: Any, length: int) -> tuple[int, int]:
    """Returns the checked number of tokens in a block, at most `length`, and of blocks."""
    size = checks.at_least("block_size", block_size, 1, "tokens in a block")
    top_k = checks.at_least("top_k", top_k, 1, "blocks, the own block included")
    return min(size, max(length, 1)), top_k


def block_sums(keys: jax.Array, size: int) -> jax.Array:
    """Sums of the keys of each block, `(*B, n, K, H)`, at least float32."""
    axis = keys.ndim - 3
    return fold(dtypes.widen(keys), size, axis).sum(axis + 1)


def attend(
    name: str,
    size: int,
    top_k: int,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    sums: jax.Array,
    limits: jax.Array,
    positions: jax.Array | None = None,
    documents: Reach | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Chooses blocks and attends to them.

    Args:
      name: name of the mechanism, for messages.
      size: b, tokens in a block.
      top_k: blocks of a query.
      heads: query `(*B, T, N, H)`, key `(*B, S, K, H)` and value `(*B, S, K, Hv)`, with zeros in
        the padding.
      sums: sums of the keys of each block, `(*B, n, K, H)`; those of blocks that are not over are
        not read.
      limits: int32 `(*B)`, valid keys.
      positions: int32 `(*B, T)`, position of each query among the keys; None if queries and keys
        are the same tokens.
      documents: packed documents, with positions; None for one document a row.
      **options: scale, precision and implementation: see `chosen_blocks.attend_causal`.

    Returns:
      Output `(*B, T, N, Hv)` and log-sum-exp `(*B, T, N)`.
    """
    query, key, value = heads
    *batch, length, count, _ = query.shape
    if 0 in (*batch, length, key.shape[-3]):
        dtype = dtypes.wide(query, key, value)
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
        return out, jnp.full(query.shape[:-1], dtypes.lowest(dtype), dtype)

    def head(query, key, value, sums, limit, positions, documents):
        at = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
        every = jnp.arange(len(sums), dtype=jnp.int32)
        counts, places = jnp.clip(limit - every * size, 0, size), (at, jnp.zeros_like(at))
        reach = None
        if documents is not None:
            counts, places = documents.counts, (at, documents.first)
            reach = documents.first, documents.last
        blocks = _choose(lax.stop_gradient(query), sums, counts, places, size, top_k - 1)
        out, lse = chosen_blocks.attend_causal(
            name,
            query[:, None],
            key,
            value,
            blocks,
            limit,
            positions,
            reach,
            block_size=size,
            **options,
        )
        return out[:, 0], lse[:, 0]

    # Map over query heads of a key head, then over key heads and batch dimensions.
    head = jax.vmap(head, (-2, None, None, None, None, None, None), (-2, -1))
    head = jax.vmap(head, (-3, -2, -2, -2, None, None, None), (-3, -2))
    head = over_batch(head, len(batch))
    key_heads = key.shape[-2]
    query = query.reshape(*batch, length, key_heads, count // key_heads, -1)
    out, lse = head(query, key, value, sums, limits, positions, documents)
    shape = *batch, length, count
    return out.reshape(*shape, value.shape[-1]), lse.reshape(shape)


def _choose(query, sums, counts, places, size, count):
    """The earlier blocks that each query `(T, H)` has chosen, int32 `(T, count)`; -1 for none.

    `counts (n,)` are keys in blocks; `places` are those of queries and of the first tokens of their
    documents, both `(T,)`.
    """
    blocks, lowest = jnp.arange(len(sums), dtype=jnp.int32), dtypes.lowest(sums.dtype)
    means = sums / jnp.maximum(counts, 1).astype(sums.dtype)[:, None]

    def tile(x):
        query = x[0].astype(sums.dtype)
        own, first = (place[:, None] // size for place in x[1])
        scores = jnp.einsum("th,nh->tn", query, means, precision="highest")
        is_past = (blocks[None] >= first) & (blocks[None] < own) & (counts > 0)[None]
        return chosen_blocks.largest(jnp.where(is_past, scores, lowest), count)

    return folding.in_tiles_of_queries(tile, (query, places), max(size, _QUERIES))


registry.register(
    registry.Mechanism(
        name="moba",
        family="sparse",
        paper="Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs",
        function=moba_attention,
        capabilities=frozenset({"causal"}),
        decoder="effattn.decode.moba:MobaDecoder",
        options={"block_size": 64, "top_k": 3},
        options_at=lambda length: {"block_size": math.isqrt(length), "top_k": 3},
        complexity="O(N (k b + N / b)), O(N sqrt N) at best",
        time_exponent=1.5,
        causality="rounding",
    )
)
