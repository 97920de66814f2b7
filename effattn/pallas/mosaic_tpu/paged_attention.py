"""Paged decode attention for TPUs, lowered by Mosaic.

The grid is `(sequences, pages)`. A step has one page of one sequence for all key heads, as the pool
stores the key heads of a page together. The number of the page is read from the table in scalar
memory before the step begins, so that this page is copied in while the previous page is computed.
Pages outside the window or past the end of the sequence are neither copied nor computed. All query
heads of a key head and all queries of a sequence are the rows of one product. int8 pages are
widened in the same step.

Decoding is bound by the bytes of keys and values, and a step costs about as much as copying 64 kB:
pages of 128 tokens or more keep memory busy, smaller pages do not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from effattn import dispatch
from effattn.interfaces import paged_attention as interface
from effattn.interfaces.paged_attention import Config, Pages
from effattn.pallas.block_tiles import Softmax

MOST_ROWS = 128  # of a key head's product
LIMITS = dispatch.Limits(
    ("float32", "bfloat16"),
    256,
    f"pages of multiples of 16 tokens; up to {MOST_ROWS} queries times query heads of a key head",
)
ROWS, LANES = 16, 128  # shape of a register in bfloat16


def refusal(query: jax.Array, keys: Pages, values: Pages, table: jax.Array, *_) -> str | None:
    """Returns the reason why the kernel cannot take these operands of `paged`, or None."""
    page = keys.array.shape[1]
    if reason := LIMITS.refusal(query.dtype, query.shape[-1], values.array.shape[-1]):
        return reason
    if page % ROWS:
        return f"takes pages of multiples of {ROWS} tokens, got {page}"
    if table.size > 2**17:
        return f"takes tables of up to {2**17} pages, in scalar memory, got {table.size}"
    return interface.refusal(query, keys, values, MOST_ROWS)


@functools.partial(jax.jit, static_argnums=(0, 1))
def paged(
    config: Config,
    interpreted: Any,
    query: jax.Array,
    keys: Pages,
    values: Pages,
    table: jax.Array,
    lengths: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Paged decode attention; see `effattn.xla.paged_attention.paged` for arguments and results."""
    batch, queries, heads, size = query.shape
    pages, page, key_heads, _ = keys.array.shape
    value_size, width = values.array.shape[-1], table.shape[1]
    group = heads // key_heads
    rows = -(-group * queries // ROWS) * ROWS
    # A row is one pair of a query head of the key head and a query token.
    grouped = interface.by_key_head(query, key_heads)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group * queries), (0, 0)))

    def of_page(b, m, table, lengths):
        first, last = _span(config, queries, page, lengths[b])
        m = jnp.clip(m, first, jnp.maximum(last, first + 1) - 1)
        return table[b * np.int32(width) + m]

    def pool(array):
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec(
            (None, *array.shape[1:]), lambda b, m, *scalars: (of_page(b, m, *scalars), *zeros)
        )

    def of_sequence(*block):
        return pl.BlockSpec((None, *block), lambda b, m, *_: (b, *(0 for _ in block)))

    pools = jax.tree.leaves((keys, values))
    semantics: Any = ("parallel", "arbitrary")
    varying = jax.typeof(query).manual_axis_type
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            queries=queries,
            page=page,
            quantized=(keys.scales is not None, values.scales is not None),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, width),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                of_sequence(key_heads, rows, size),
                *map(pool, pools),
            ],
            out_specs=[
                of_sequence(key_heads, rows, value_size),
                of_sequence(key_heads, rows, LANES),
            ],
            scratch_shapes=[
                pltpu.VMEM((key_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((key_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((key_heads, rows, value_size), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
            for shape, dtype in (
                ((batch, key_heads, rows, value_size), query.dtype),
                ((batch, key_heads, rows, LANES), jnp.float32),
            )
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpreted,
        name="paged_attention",
    )(
        # With two axes, each row would take a multiple of 128 entries of scalar memory.
        jnp.clip(table, 0, pages - 1).astype(jnp.int32).reshape(-1),
        lengths.astype(jnp.int32),
        scale.reshape(1),
        grouped,
        *pools,
    )
    return (
        interface.by_token(out, queries, heads),
        interface.by_token(lse[..., 0], queries, heads),
    )


def _span(config, queries, page, length):
    """Returns the first page that a sequence reads and one past the last page."""
    first, last = jnp.int32(0), lax.div(length + (page - 1), np.int32(page))
    if config.left is not None:
        first = lax.div(jnp.maximum(length - queries - config.left, 0), np.int32(page))
    return first, last


def _kernel(table, lengths, scale, query, *refs, config, queries, page, quantized):
    """Kernel of one page: updates the online softmax `(K, R, ...)` of each row of each key head."""
    *pools, out, lse, largest, total, mixed = refs
    keys, *key_scales = pools[: 1 + quantized[0]]
    values, *value_scales = pools[1 + quantized[0] :]
    b, m = pl.program_id(0), pl.program_id(1)
    key_heads, rows, value_size = mixed.shape
    length, dtype = lengths[b], query.dtype
    first, last = _span(config, queries, page, length)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else config.precision
    sums = largest, total, mixed

    @pl.when(m == 0)
    def _():
        start = Softmax.start(rows, value_size, keepdims=True)
        for ref, value in zip(sums, start, strict=True):
            ref[...] = jnp.broadcast_to(value, ref.shape)

    def dot(left, right, axis):
        numbers = (((1,), (axis,)), ((), ()))
        return lax.dot_general(
            left, right, numbers, precision=precision, preferred_element_type=jnp.float32
        )

    def read(pool, scales, head):
        """Loads `(p, H)` of a key head, with zeros past the end of the sequence."""
        entries = pool[:, head, :].astype(jnp.float32)
        if scales:
            entries = entries * scales[0][...][:, head : head + 1]
        there = m * page + lax.broadcasted_iota(jnp.int32, (page, 1), 0) < length
        return jnp.where(there, entries, 0.0).astype(dtype)

    @pl.when((m >= first) & (m < last))
    def _():
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        position = length - queries + lax.rem(row, np.int32(queries))
        at = m * page + lax.broadcasted_iota(jnp.int32, (1, page), 1)
        allowed = at <= position
        if config.left is not None:
            allowed &= at >= position - config.left
        for head in range(key_heads):
            logits = dot(query[head], read(keys, key_scales, head), 1) * scale[0]
            if config.soft_cap is not None:
                logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
            value = read(values, value_scales, head)

            def mix(weights, value=value):
                return dot(weights.astype(dtype), value, 0)

            before = Softmax(largest[head][:, :1], total[head][:, :1], mixed[head])
            after = before.seeing(jnp.where(allowed, logits, -jnp.inf), mix)
            for ref, sum_ in zip(sums, after, strict=True):
                ref[head] = jnp.broadcast_to(sum_, ref.shape[1:])

    @pl.when(m == pl.num_programs(1) - 1)
    def _():
        for head in range(key_heads):
            output, log_sum, _ = Softmax(largest[head], total[head], mixed[head]).finish()
            out[head] = output.astype(out.dtype)
            lse[head] = log_sum
