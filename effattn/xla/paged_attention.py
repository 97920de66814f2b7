"""Paged attention in XLA: decoding with a KV cache in pages, which a block table lists.

The loop gathers several pages per step, and computes an online softmax. The query heads of one key
head and the queries of one sequence are the rows of one matrix product. The loop starts at the
first step that the window of any sequence reaches, and ends with the longest sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.forward_only import forward_only
from effattn.arrays.products import widened
from effattn.arrays.segments import positions_from
from effattn.interfaces import paged_attention as interface
from effattn.interfaces.paged_attention import Config, Pages

KEYS = 512  # keys in a step of the loop

_NO_GRADIENTS = (
    "paged attention is for decoding and has no gradients: for those gather the pages by "
    "block_table, and call dot_product_attention"
)


@functools.partial(jax.jit, static_argnums=(0, 1))
def paged(
    config: Config,
    interpreted: bool,
    query: jax.Array,
    keys: Pages,
    values: Pages,
    table: jax.Array,
    lengths: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Paged attention: the output `(B, T, N, Hv)` and the log-sum-exp `(B, T, N)`.

    The output has the dtype of the value pages, or of the query if the pages are quantised.

    Args:
      config: static configuration.
      interpreted: unused here; device kernels take it.
      query: `(B, T, N, H)`, the last T tokens of each sequence.
      keys: pages of keys.
      values: pages of values.
      table: block table, int `(B, M)`, the pages of each sequence.
      lengths: int `(B,)`, number of tokens in each sequence.
      scale: `()`, factor of the logits; dtype of the query, at least float32.
    """
    pages, rows, key_heads, _ = keys.array.shape
    batch, queries, heads, size = query.shape
    group = heads // key_heads
    dtype = dtypes.wide(query.dtype)
    width = max(1, min(table.shape[1], KEYS // rows))
    step = width * rows
    # Clipped to pages that exist and padded to whole steps; keys past a sequence's end are masked.
    table = jnp.clip(table, 0, pages - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))
    lengths = lengths.astype(jnp.int32)
    position = positions_from(lengths - queries, queries)

    def matrix(left, right, contract):
        """One product per sequence and key head, over the last axis of `left` and `contract`."""
        product = functools.partial(
            lax.dot_general,
            dimension_numbers=(((3,), (contract,)), ((0, 1), (0, 2))),
            precision=config.precision,
        )
        return widened(product, left, right, dtype)

    def read(of, which, present):
        """Gathers pages as `(B, s, K, H)`, with zeros where no token is present."""
        array = of.array[which].reshape(batch, step, key_heads, of.array.shape[-1])
        if of.scales is not None:
            scales = of.scales[which].reshape(batch, step, key_heads, 1)
            array = (array.astype(dtype) * scales.astype(dtype)).astype(query.dtype)
        return jnp.where(present[..., None, None], array, 0)

    # (B, K, G T, H)
    grouped = interface.by_key_head(query, key_heads)

    def attend(n, carry):
        largest, total, mixed = carry
        which = lax.dynamic_slice_in_dim(table, n * width, width, 1)
        at = n * step + jnp.arange(step, dtype=jnp.int32)
        present = at[None] < lengths[:, None]
        key, value = read(keys, which, present), read(values, which, present)
        logits = matrix(grouped, key, 3) * scale
        if config.soft_cap is not None:
            logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
        at = at[None, None]
        allowed = at <= position[..., None]  # (B, T, s)
        if config.left is not None:
            allowed &= at >= position[..., None] - config.left
        allowed = jnp.tile(allowed[:, None], (1, 1, group, 1))
        logits = jnp.where(allowed, logits, -jnp.inf)
        new = jnp.maximum(largest, logits.max(-1))
        weights, decay = jnp.exp(logits - new[..., None]), jnp.exp(largest - new)
        mixed = mixed * decay[..., None] + matrix(weights.astype(value.dtype), value, 1)
        return new, total * decay + weights.sum(-1), mixed

    # Finite, so that rows without keys so far never compute inf - inf.
    empty = (
        jnp.full(grouped.shape[:-1], jnp.finfo(dtype).min, dtype),
        jnp.zeros(grouped.shape[:-1], dtype),
        jnp.zeros((*grouped.shape[:-1], values.array.shape[-1]), dtype),
    )
    carry = tuple(mesh_axes.vary_like(grouped, x) for x in empty)
    last = -(-jnp.max(lengths, initial=0) // step)
    first = jnp.int32(0)
    if config.left is not None:
        first = jnp.maximum(jnp.min(position, initial=2**30) - config.left, 0) // step
    first, last = jnp.minimum(first, last), jnp.minimum(last, table.shape[1] // width)
    carry = lax.fori_loop(first, last, attend, carry)
    largest, total, mixed = forward_only(carry, _NO_GRADIENTS)
    total_or_one = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, dtypes.lowest(dtype), largest + jnp.log(total_or_one))
    out = mixed / total_or_one[..., None]
    out = out.astype(query.dtype if values.scales is not None else values.array.dtype)
    return interface.by_token(out, queries, heads), interface.by_token(lse, queries, heads)
