"""Mixture of block attention: each query attends to the blocks of keys with the largest scores."""

import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes, reverse_mode
from effattn.arrays.segments import valid
from effattn.cores import attention, chosen_blocks, folding
from effattn.functional import softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Execution, Padding, Residual, Scale, declared

# Minimum queries whose scores are in memory at a time.
_QUERIES = 128


class Options(Padding, Scale, Residual, Execution, total=False):
    """The shared options of `moba_attention`."""


def naive(query, key, value, pairs, *, scale, block_size, top_k):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp."""
    n, own = jnp.arange(-(-len(key) // block_size)), pairs.i[:, None] // block_size
    members = pairs.present & (pairs.j // block_size == n[:, None])  # (blocks, T)
    dtype = jnp.promote_types(key.dtype, jnp.float32)
    exact = functools.partial(jnp.matmul, precision="highest")
    means = exact(members.astype(dtype), key) / jnp.maximum(members.sum(1), 1)[:, None]

    scores = exact(query.astype(dtype), means.T)  # (T, blocks)
    is_past = (n < own) & members.any(1)
    this, other = scores[:, :, None], scores[:, None]
    is_before = (other > this) | ((other == this) & (n < n[:, None]))
    rank = (is_before & is_past[:, None]).sum(2)
    chosen = (is_past & (rank < top_k - 1)) | (n == own)
    allowed = pairs.where(chosen[:, pairs.j // block_size])
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
    r"""Mixture of block attention (Lu et al. 2025, "MoBA: Mixture of Block Attention ...").

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
      **options: padding, scale, log-sum-exp and execution: see `effattn.options`. Padded keys are
        in no mean. `precision` applies to the products of the attention; scores have the highest.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      TypeError: in forward-mode differentiation.
    """
    name = "moba_attention"
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    size, top_k = check_options(block_size, top_k, query.shape[-3])
    query, key, value = attention.without_padding(query, key, value, given)
    length = query.shape[-3]

    def run(query, key, value, lengths, scale):
        limits = jnp.full(query.shape[:-3], length, jnp.int32)
        if lengths is not None:
            limits = jnp.minimum(lengths, limits)
        sums = block_sums(key, size)
        options: dict[str, Any] = {
            "scale": scale,
            "precision": given.precision,
            "implementation": given.implementation,
        }
        heads = query, key, value
        return attend(name, size, top_k, heads, sums, limits, **options)

    with jax.named_scope(name), reverse_mode.only("MoBA", "a dense form of it"):
        *axes, _ = mesh_axes.spec(query)
        run = mesh_axes.placed(run, query, PartitionSpec(*axes, None), PartitionSpec(*axes))
        scale = jnp.asarray(given.scale, dtypes.wide(query, key, value))
        out, lse = run(query, key, value, given.key_lengths, scale)
    out, lse = attention.clear_rows(out, lse, valid(given.query_lengths, None, length))
    return attention.results(checkpoint_name(out, name), lse, given)


def check_options(block_size: Any, top_k: Any, length: int) -> tuple[int, int]:
    """Returns the checked number of tokens in a block, at most `length`, and of blocks."""
    size = checks.at_least("block_size", block_size, 1, "tokens in a block")
    top_k = checks.at_least("top_k", top_k, 1, "blocks, the own block included")
    return min(size, max(length, 1)), top_k


def block_sums(key: jax.Array, size: int) -> jax.Array:
    """Sums of the keys of each block, `(*B, n, K, H)`, at least float32, without a gradient."""
    axis = key.ndim - 3
    wide = lax.stop_gradient(key).astype(dtypes.wide(key.dtype))
    return folding.fold(wide, size, axis).sum(axis + 1)


def attend(
    name: str,
    size: int,
    top_k: int,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    sums: jax.Array,
    limits: jax.Array,
    positions: jax.Array | None = None,
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

    def head(query, key, value, sums, limit, positions):
        at = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
        blocks = _choose(lax.stop_gradient(query), sums, at, limit, size, top_k - 1)
        out, lse = chosen_blocks.attend_causal(
            name, query[:, None], key, value, blocks, limit, positions, block_size=size, **options
        )
        return out[:, 0], lse[:, 0]

    # Map over query heads of a key head, then over key heads and batch dimensions.
    head = jax.vmap(head, (-2, None, None, None, None, None), (-2, -1))
    head = jax.vmap(head, (-3, -2, -2, -2, None, None), (-3, -2))
    for _ in batch:
        head = jax.vmap(head)
    key_heads = key.shape[-2]
    query = query.reshape(*batch, length, key_heads, count // key_heads, -1)
    out, lse = head(query, key, value, sums, limits, positions)
    shape = *batch, length, count
    return out.reshape(*shape, value.shape[-1]), lse.reshape(shape)


def _choose(query, sums, positions, limit, size, count):
    """The earlier blocks that each query `(T, H)` has chosen, int32 `(T, count)`; -1 for none."""
    blocks, lowest = jnp.arange(len(sums), dtype=jnp.int32), dtypes.lowest(sums.dtype)
    counts = jnp.clip(limit - blocks * size, 0, size)
    means = sums / jnp.maximum(counts, 1).astype(sums.dtype)[:, None]

    def tile(x):
        query, own = x[0].astype(sums.dtype), x[1][:, None] // size
        scores = jnp.einsum("th,nh->tn", query, means, precision="highest")
        is_past = (blocks[None] < own) & (counts > 0)[None]
        return chosen_blocks.largest(jnp.where(is_past, scores, lowest), count)

    return folding.in_tiles_of_queries(tile, (query, positions), max(size, _QUERIES))


registry.register(
    registry.Mechanism(
        name="moba",
        family="sparse",
        paper="Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs",
        function=moba_attention,
        capabilities=frozenset({"causal"}),
        reasons={"segments": "its blocks start at multiples of block_size, not with documents"},
        decoder="effattn.decode.moba:MobaDecoder",
        options={"block_size": 64, "top_k": 3},
        options_at=lambda length: {"block_size": math.isqrt(length), "top_k": 3},
        complexity="O(N (k b + N / b)), O(N sqrt N) at best",
        time_exponent=1.5,
        causality="rounding",
    )
)
