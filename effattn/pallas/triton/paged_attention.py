"""Paged decode attention for GPUs, lowered by Triton (Ampere and later).

A program reads the pages of one sequence and one key head. If this gives too few programs to fill
the GPU, the pages of a sequence are split into several runs with one program each, and the results
of the runs are combined by their log-sum-exps. The query heads of the key head are the rows of one
tile, so keys and values are read once for all these heads. int8 pages are widened in registers.

Decoding is bound by the bytes of keys and values. For a page of p tokens a program reads p (H + Hv)
entries and does 2 R operations with each entry, where R >= 16 is the number of rows. Tensor cores
do hundreds of operations in the time in which memory delivers one entry. A tile is therefore one
page, and the compiler overlaps the reads of a page with the products of the previous page
(`num_stages`). The speed depends on the number of programs in flight, see `RUNS`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn import dispatch
from effattn.arrays.combine import combine
from effattn.dispatch import device
from effattn.interfaces import paged_attention as interface
from effattn.interfaces.paged_attention import Config, Pages
from effattn.pallas.triton import products

RUNS = 264  # target number of programs: two per multiprocessor of the largest GPUs
MOST_ROWS = 128  # of a tile; the sums of more do not fit in registers
LIMITS = dispatch.Limits(
    ("float32", "bfloat16", "float16"),
    256,
    "Ampere or later; pages of 16 to 256 tokens, a power of two; up to "
    f"{MOST_ROWS} queries times query heads of a key head",
)
ROWS = 16  # smallest side of a product on tensor cores


def refusal(query: jax.Array, keys: Pages, values: Pages, *_) -> str | None:
    """Returns the reason why the kernel cannot take these operands of `paged`, or None."""
    page = keys.array.shape[1]
    if reason := LIMITS.refusal(query.dtype, query.shape[-1], values.array.shape[-1]):
        return reason
    if page < ROWS or page & (page - 1) or page > 256:
        return f"takes pages of 16 to 256 tokens, a power of two, got {page}"
    for x in (keys.array, values.array):
        # Pallas has 64-bit offsets only for arrays of more than 2**32 bytes.
        if 2**31 < x.size <= 2**32 // x.dtype.itemsize:
            return f"takes no int8 pages with 2**31 to 2**32 numbers in all, got shape {x.shape}"
    return interface.refusal(query, keys, values, MOST_ROWS) or device.triton_refusal()


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
    """Paged decode attention; see `effattn.xla.paged_attention.paged` for arguments and results."""
    batch, queries, heads, size = query.shape
    pages, page, key_heads, _ = keys.array.shape
    value_size = values.array.shape[-1]
    group, room = heads // key_heads, table.shape[1]
    rows = max(ROWS, pl.next_power_of_2(group * queries))
    runs = max(1, min(room, RUNS // (batch * key_heads)))
    # A row is one pair of a query head of the key head and a query token.
    grouped = interface.by_key_head(query, key_heads)
    width, value_width = pl.next_power_of_2(size), pl.next_power_of_2(value_size)
    widths = ((0, 0), (0, 0), (0, rows - group * queries), (0, width - size))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    varying = jax.typeof(query).manual_axis_type

    def of_run(*block):
        return pl.BlockSpec(
            (None, None, None, *block), lambda b, k, n: (b, k, n, *(0 for _ in block))
        )

    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            queries=queries,
            sizes=(size, value_size),
            pages_of_run=-(-room // runs),
            quantized=(keys.scales is not None, values.scales is not None),
            interpreted=interpreted,
        ),
        grid=(batch, key_heads, runs),
        in_specs=[
            pl.BlockSpec((None, room), lambda b, k, n: (b, 0)),
            whole,
            whole,
            pl.BlockSpec((None, None, rows, width), lambda b, k, n: (b, k, 0, 0)),
            *[whole] * len(jax.tree.leaves((keys, values))),
        ],
        out_specs=[of_run(rows, value_width), of_run(rows)],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying)
            for shape in (
                (batch, key_heads, runs, rows, value_width),
                (batch, key_heads, runs, rows),
            )
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpreted,
        name="paged_attention",
    )(
        *device.aligned(
            [
                jnp.clip(table, 0, pages - 1).astype(jnp.int32),
                lengths.astype(jnp.int32),
                scale.reshape(1),
                jnp.pad(grouped, widths),
                *jax.tree.leaves((keys, values)),
            ]
        )
    )
    of_runs = range(runs)
    out, lse = combine([out[:, :, n] for n in of_runs], [lse[:, :, n] for n in of_runs])
    out, lse = (interface.by_token(x, queries, heads) for x in (out[..., :value_size], lse))
    return out.astype(query.dtype), lse


def _kernel(
    table,
    lengths,
    scale,
    query,
    *refs,
    config,
    queries,
    sizes,
    pages_of_run,
    quantized,
    interpreted,
):
    """Kernel of one run of pages: writes the output `(R, Hv)` and the log-sum-exp `(R)`."""
    *pools, out, lse = refs
    keys, *key_scales = pools[: 1 + quantized[0]]
    values, *value_scales = pools[1 + quantized[0] :]
    b, head, run = (pl.program_id(axis) for axis in range(3))
    length, page, dtype = lengths[b], keys.shape[1], query.dtype
    tile, multiplier = query[...], scale[0]
    rows, (width, value_width) = tile.shape[0], (tile.shape[1], out.shape[-1])
    # Full float32 products for float32: the default precision rounds to TensorFloat-32.
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else config.precision
    dot = functools.partial(products.dot, precision=precision, interpreted=interpreted)
    position = length - queries + jnp.arange(rows) % queries

    def read(pool, scales, which, present, size, width):
        """Loads a page `(p, width)`, with zeros as padding of tokens and features."""
        token, feature = jnp.arange(page), jnp.arange(width)
        there = present[:, None] & (feature < size)[None, :]
        within = jnp.minimum(feature, size - 1)[None, :]
        entries = triton.load(pool.at[which, token[:, None], head, within], mask=there, other=0)
        if scales:
            of_tokens = triton.load(scales[0].at[which, token, head], mask=present, other=0.0)
            entries = (entries.astype(jnp.float32) * of_tokens[:, None]).astype(dtype)
        return entries

    def attend(m, carry):
        largest, total, mixed = carry
        which, at = table[m], m * page + jnp.arange(page)
        present = at < length
        key = read(keys, key_scales, which, present, sizes[0], width)
        logits = dot(tile, key.T) * multiplier
        if config.soft_cap is not None:
            logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
        allowed = at[None, :] <= position[:, None]
        if config.left is not None:
            allowed &= at[None, :] >= position[:, None] - config.left
        logits = jnp.where(allowed, logits, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(logits, 1))
        weights, decay = jnp.exp(logits - new[:, None]), jnp.exp(largest - new)
        value = read(values, value_scales, which, present, sizes[1], value_width)
        mixed = mixed * decay[:, None] + dot(weights.astype(dtype), value)
        return new, total * decay + jnp.sum(weights, 1), mixed

    first, last = run * pages_of_run, jnp.minimum((run + 1) * pages_of_run, pl.cdiv(length, page))
    if config.left is not None:
        first = jnp.maximum(first, jnp.maximum(length - queries - config.left, 0) // page)
    carry = (
        # Finite, so that rows without keys so far do not compute inf - inf.
        jnp.full((rows,), jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, value_width), jnp.float32),
    )
    largest, total, mixed = lax.fori_loop(first, last, attend, carry)
    total_or_one = jnp.where(total == 0, 1, total)
    out[...] = mixed / total_or_one[:, None]
    lse[...] = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total_or_one))
