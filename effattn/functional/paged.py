"""Paged decode attention: a few queries a sequence, over a paged KV cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from effattn import dispatch
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.dispatch import cache
from effattn.interfaces.paged_attention import Config, Pages

IMPLEMENTATIONS = dispatch.Implementations(
    "paged attention",
    {
        "xla": "effattn.xla.paged_attention",
        "triton": "effattn.pallas.triton.paged_attention",
        "jax_triton": "effattn.triton.paged_attention",
        "mosaic_tpu": "effattn.pallas.mosaic_tpu.paged_attention",
    },
)


@checks.checked
def paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    *,
    block_table: jax.Array,
    lengths: jax.Array,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_residual: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Causal softmax attention of the last tokens of each sequence over a paged KV cache.

    The keys and values of all sequences lie in one pool of pages of p tokens, in any order; token j
    of sequence b is row j % p of page block_table[b, j // p] (Kwon et al. 2023, "Efficient Memory
    Management for Large Language Model Serving with PagedAttention"). Query t of sequence b belongs
    to token lengths[b] - T + t, whose key is already in its page:

        out_t = sum_(j <= lengths - T + t) softmax_j(scale * q_t . k_j) v_j

    Pages are read a few at a time, up to the end of the longest sequence. Time is
    O(B T max(lengths) N (H + Hv)) for any table width, memory in addition to the pages O(B). Pages
    of int8 are dequantised as they are read. There are no gradients: the function is for decoding.

    Args:
      query: `(B, T, N, H)`, the last T tokens of each sequence; usually T is 1.
      key_pages: `(P, p, K, H)`, N a multiple of K: query head n reads key head n // (N // K). In
        the dtype of `query`, or int8.
      value_pages: `(P, p, K, Hv)`, floating point, or int8.
      block_table: int `(B, M)`, the pages of each sequence in order, 0 to P - 1, checked if the
        table and the lengths are concrete; a traced entry out of range reads another page. Entries
        after the last page of a sequence are not read.
      lengths: int `(B,)`, tokens of each sequence, including the tokens of `query`. Queries before
        the first token of a short sequence give zeros.
      key_scales: `(P, p, K)`, factors of int8 keys, from `quantize_pages`.
      value_scales: `(P, p, K)`, factors of int8 values, from `quantize_pages`.
      scale: scale of the logits; default H**-0.5.
      local_window_size: w or (w, 0): a query attends to its token and the w tokens before; None for
        all tokens.
      logits_soft_cap: c, for c * tanh(logits / c).
      return_residual: also return the log-sum-exp of the logits.
      precision: precision of the matrix products, as in `jax.lax.dot`.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("paged_attention")` lists the names and
        what they take.

    Returns:
      `(B, T, N, Hv)` in the dtype of the value pages, or of `query` if they are int8; with
      `return_residual`, `(out, lse)`, the second `(B, T, N)`, at least float32, -inf for a query
      without keys.

    Raises:
      ValueError: wrong shapes, dtypes or options; int8 without scales, or scales without int8.
      NotImplementedError: an unknown implementation, or an implementation that does not take these
        arguments; at lowering, an implementation that does not run on the platform.
      TypeError: in reverse-mode differentiation.
    """
    batch, rows = _check_shapes(query, key_pages, value_pages)
    table = checks.as_array("block_table", block_table)
    if (
        table.ndim != 2
        or len(table) != batch
        or table.shape[1] == 0
        or not jnp.issubdtype(table.dtype, jnp.integer)
    ):
        raise ValueError(
            f"block_table must be integers of shape ({batch}, M), the M >= 1 pages of each "
            f"sequence, got {table.dtype} of shape {table.shape}"
        )
    if table.dtype.itemsize < 4:  # too narrow for the number of pages
        table = table.astype(jnp.int32)
    counts = checks.lengths("lengths", lengths, (batch,))
    if counts is None:
        raise ValueError(f"lengths must be integers of shape ({batch},), got None")
    room = table.shape[1] * rows
    _check_room(counts, room)
    counts = jnp.minimum(counts, min(room, 2**31 - 1))  # traced lengths cannot be checked
    _check_pages(checks.known(block_table), checks.known(lengths), key_pages.shape[:2])
    window = None if local_window_size is None else checks.window(local_window_size)
    if isinstance(local_window_size, tuple | list) and window is not None and window[1] != 0:
        raise ValueError(
            "local_window_size must be w or (w, 0), the number of tokens before each token, got "
            f"{window}"
        )
    config = Config(
        left=None if window is None else window[0],
        soft_cap=checks.soft_cap(logits_soft_cap),
        precision=precision,
    )
    keys = _check_scales("key", key_pages, key_scales, query.dtype)
    values = _check_scales("value", value_pages, value_scales, None)
    dtype = dtypes.wide(query.dtype)
    multiplier = jnp.asarray(checks.scale(scale, query.shape[-1]), dtype)

    operands = mesh_axes.vary_alike((query, keys, values, table, counts, multiplier))

    call = IMPLEMENTATIONS.call(
        "paged_attention",
        *operands,
        signature=functools.partial(_signature, config, *operands),
        differentiable=False,
        suited=("cuda",) if query.dtype.itemsize == 2 else (),
        is_partitioned=False,
    )
    chosen = dispatch.choose(implementation, call)

    def form(module):
        return functools.partial(module.paged, config, chosen.interpreted)

    attend = functools.partial(IMPLEMENTATIONS.run, chosen, form)
    *axes, _ = mesh_axes.spec(query)
    placed = mesh_axes.placed(attend, query, PartitionSpec(*axes, None), PartitionSpec(*axes))
    with jax.named_scope("paged_attention"):
        out, lse = placed(*operands)
    return (out, dtypes.logarithms(lse)) if return_residual else out


def _signature(config, query, keys, values, table, *_):
    """Returns the tuning key: sizes that the time depends on, counts rounded to powers of two."""
    batch, tokens, heads, size = query.shape
    _, rows, key_heads, value_size = values.array.shape
    room = cache.rounded(table.shape[1] * rows)
    window = "" if config.left is None else f", window {cache.rounded(config.left)}"
    return (
        f"paged attention, {query.dtype} {keys.array.dtype} {values.array.dtype}, "
        f"sizes {size} and {value_size}, "
        f"group {heads // key_heads}, heads {heads}, batch {cache.rounded(batch)}, "
        f"queries {tokens}, pages of {rows}, room {room}{window}"
    )


@checks.checked
def quantize_pages(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises keys or values to int8, with one scale for each token and head.

        scale = max |x| / 127,    int8 = round(x / scale)

    Args:
      pages: `(..., H)`, floating point.

    Returns:
      int8 `(..., H)` and the scales `(...)`, float32; a zero vector has scale 0. The error of an
      entry is at most half a scale.
    """
    wide = checks.shaped("pages", pages, pages.shape).astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), -1) / 127
    steps = wide / jnp.where(scales == 0, 1, scales)[..., None]
    return jnp.round(steps).astype(jnp.int8), scales


def _check_shapes(query, key_pages, value_pages):
    """Returns the number of sequences and the tokens in a page."""
    if query.ndim != 4 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            "query must be floating point of shape (B, T, N, H), got "
            f"{query.dtype} of shape {query.shape}"
        )
    batch, _, heads, size = query.shape
    if key_pages.ndim != 4 or key_pages.shape[-1] != size or 0 in key_pages.shape:
        raise ValueError(
            f"key_pages must have shape (P, p, K, {size}), for P pages of p tokens, got "
            f"{key_pages.shape}"
        )
    if value_pages.ndim != 4 or value_pages.shape[:3] != key_pages.shape[:3]:
        raise ValueError(
            "value_pages must have the pages, tokens and heads of key_pages, "
            f"{key_pages.shape[:3]}, got {value_pages.shape[:3]}"
        )
    key_heads = key_pages.shape[2]
    if heads % key_heads:
        raise ValueError(
            "the number of query heads must be a multiple of the number of key heads, got "
            f"{heads} query heads and {key_heads} key heads"
        )
    return batch, key_pages.shape[1]


def _check_room(lengths, room):
    # NumPy, because JAX would trace the comparison of concrete values inside a trace.
    if not isinstance(lengths, jax.core.Tracer) and np.max(np.asarray(lengths), initial=0) > room:
        raise ValueError(
            f"lengths must be at most {room}, the number of tokens that the pages in block_table "
            f"hold, got {lengths.tolist()}; give more pages"
        )


def _check_pages(table, lengths, sizes):
    """Checks that the pages to read exist, if the table and the lengths are concrete."""
    if table is None or lengths is None:
        return
    number, rows = sizes
    read = table[np.arange(table.shape[1]) * rows < lengths[:, None]]
    if read.size and (read.min() < 0 or read.max() >= number):
        raise ValueError(
            f"block_table must hold page numbers from 0 to {number - 1}, got "
            f"{read.min() if read.min() < 0 else read.max()}"
        )


def _check_scales(of: str, pages: Any, scales: Any, dtype: Any) -> Pages:
    """Returns int8 pages with scales, or floating-point pages (of `dtype`, if given) without."""
    if pages.dtype == jnp.int8:
        if scales is None:
            raise ValueError(
                f"{of}_pages of int8 need {of}_scales of shape {pages.shape[:3]}, got None; "
                "quantize_pages returns both"
            )
        return Pages(pages, checks.shaped(f"{of}_scales", scales, pages.shape[:3]))
    if scales is not None:
        raise ValueError(
            f"{of}_scales needs {of}_pages of int8, got {pages.dtype}; leave {of}_scales out"
        )
    if pages.dtype != dtype and (dtype or not jnp.issubdtype(pages.dtype, jnp.floating)):
        wanted = f"{dtype}, as the query," if dtype else "floating point"
        raise ValueError(f"{of}_pages must be {wanted} or int8, got {pages.dtype}")
    return Pages(pages, None)
