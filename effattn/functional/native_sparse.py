"""Native sparse attention: compressed blocks, selected blocks and a window, added by gates."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes, reverse_mode
from effattn.arrays.products import widened
from effattn.arrays.segments import positions_from, valid
from effattn.cores import attention, chosen_blocks, folding
from effattn.functional import softmax
from effattn.naive import masked_softmax, over_pairs, with_naive
from effattn.options import Padding, Precision, Scale, declared

Compress = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

# Queries whose scores are in memory at a time.
_QUERIES = 128
# The first block of the sequence, the block before the own block, and the own block.
_ALWAYS = 3


class Options(Padding, Scale, Precision, total=False):
    """The shared options of `native_sparse_attention`."""


def naive(
    query,
    key,
    value,
    pairs,
    *,
    scale,
    gates,
    selected,
    compression_size,
    compression_stride,
    block_size,
    window_size,
    compress=None,
):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, gates `(T, 3)`.

    `selected (T, blocks)` says which blocks a query has selected, by the scores of all heads that
    share the key head.
    """
    i, j = pairs.i[:, None], pairs.j
    at = _windows(len(key), compression_size, compression_stride)  # (M, l)
    of_compressed = (compress or _means)(key[at], value[at])
    last = jnp.asarray(at[:, -1])
    is_seen = pairs.valid[:, None] & pairs.present[last] & (last <= i)
    chosen = selected[:, j // block_size] != 0
    parts = (
        (*of_compressed, pairs.with_keys(is_seen, last)),
        (key, value, pairs.where(chosen)),
        (key, value, pairs.where(i - j < window_size)),
    )
    outs = [softmax.naive(query, *part, scale=scale)[0] for part in parts]
    return sum(gates[:, n, None] * out for n, out in enumerate(outs))


def _windows(length, size, stride):
    """The tokens of each block to compress, int `(M, l)`."""
    return np.arange(0, length - size + 1, stride)[:, None] + np.arange(size)


def _means(*blocks):
    """The mean of each block `(..., l, H)`."""
    wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in blocks)
    return [mean.mean(-2).astype(x.dtype) for mean, x in zip(wide, blocks, strict=True)]


def _selection(
    query,
    key,
    value,
    *,
    scale,
    key_value_seq_lengths,
    compression_size,
    compression_stride,
    block_size,
    num_selected,
    compress,
    **_,
):
    """The selected blocks of each query, bool `(*B, T, N, blocks)`, by all pairs."""
    length, heads, size = query.shape[-3:]
    key_heads, wide = key.shape[-2], jnp.promote_types(key.dtype, jnp.float32)
    given = length if key_value_seq_lengths is None else key_value_seq_lengths
    lengths = jnp.broadcast_to(jnp.asarray(given), query.shape[:-3])[..., None, None, None]
    t = jnp.arange(length)
    key, value = (jnp.where(t[:, None, None] < lengths, x, 0) for x in (key, value))
    at = _windows(length, compression_size, compression_stride)
    blocks = (jnp.moveaxis(x[..., at, :, :], -3, -2) for x in (key, value))  # (*B, M, K, l, H)
    keys = (compress or _means)(*blocks)[0]
    scale = size**-0.5 if scale is None else scale

    query = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, size).astype(wide)
    product = functools.partial(jnp.einsum, precision="highest")
    logits = scale * product("...tkgh,...mkh->...kgtm", query, keys.astype(wide))
    last = jnp.asarray(at[:, -1])
    is_seen = (last <= t[:, None]) & (last < lengths)
    weights = masked_softmax(logits, is_seen[..., None, :, :]).sum(-3)  # (*B, K, T, M)

    steps = jnp.asarray(at[:, ::compression_stride][..., None])  # each stride of a window
    n, own = jnp.arange(-(-length // block_size)), t[:, None] // block_size
    overlap = (steps // block_size == n).sum(1).astype(wide)  # (M, blocks)
    scores = product("...m,mn->...n", weights, overlap)
    always = (n == 0) | (n == own) | (n == own - 1)
    scores = jnp.where(n > own, -1, jnp.where(always, jnp.inf, scores))
    this, other = scores[..., :, None], scores[..., None, :]
    rank = ((other > this) | ((other == this) & (n < n[:, None]))).sum(-1)
    selected = jnp.moveaxis((rank < num_selected) & (n <= own), -3, -2)
    return {"selected": jnp.repeat(selected, heads // key_heads, -2)}


@with_naive(over_pairs(naive, per_query=("gates", "selected"), derived=_selection))
@declared
def native_sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    gates: jax.Array,
    compression_size: int = 32,
    compression_stride: int = 16,
    block_size: int = 64,
    num_selected: int = 16,
    window_size: int = 512,
    compress: Compress | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Native sparse attention (Yuan et al. 2025, "Native Sparse Attention").

    Softmax attention over three sets of keys, added by gates of each token and head:

        out = g_1 attend(q, k~, v~) + g_2 attend(q, selected blocks) + g_3 attend(q, window)

        compressed   k~_i, v~_i = compress(the l tokens from i d on), for blocks that have ended
        selected     n blocks of b tokens up to the query: the first block, the query's own block
                     and the one before it, and those with the largest scores
        window       the last w tokens

    The score of a block adds the weights of the compressed branch, over all query heads that share
    the key head and over the strides of the block; a compressed block counts once for each of its
    strides in the block. All these heads select alike. Equal scores go to the earlier block. The
    selection has no gradient. Always causal.

    Time O(T (T / d) (H + Hv)) for the compressed blocks and O(T (n b + w) (H + Hv)) for the others,
    that is O(T sqrt(T)) if all sizes grow with sqrt(T). Memory O(T n), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      gates: `(*B, T, N, 3)`, in the order of the formula.
      compression_size: l, tokens in a compressed block, a multiple of d.
      compression_stride: d, tokens between the starts of compressed blocks.
      block_size: b, tokens in a block that can be selected, a multiple of d.
      num_selected: n, blocks of a query, 3 or more.
      window_size: w, tokens in the window, the present token included.
      compress: `(keys (..., l, H), values (..., l, Hv)) -> (..., H), (..., Hv)`, such as a learned
        network for keys and one for values; default None, means. Gradients flow through it.
      **options: padding, scale and precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      TypeError: in forward-mode differentiation.
    """
    name = "native_sparse_attention"
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    settings = Settings.of(
        compression_size, compression_stride, block_size, num_selected, window_size
    )
    gates = checks.shaped("gates", gates, (*query.shape[:-1], 3))
    key_lengths, length = given.key_lengths, query.shape[-3]
    query, key, value = attention.without_padding(query, key, value, given)
    present = valid(given.query_lengths, None, length)
    if present is not None:
        gates = jnp.where(present[..., None, None], gates, 0)
    with jax.named_scope(name), reverse_mode.only(name, "a dense form of it"):
        with mesh_axes.of_type(query):
            compressed = settings.compressed(key, value, compress)
        limits = jnp.full(query.shape[:-3], length, jnp.int32)
        limits = limits if key_lengths is None else jnp.minimum(key_lengths, limits)
        precision = given.precision

        def run(heads, compressed, gates, limits, scale):
            return (attend(settings, heads, compressed, gates, 0, limits, scale, precision),)

        run = mesh_axes.placed(run, query, PartitionSpec(*mesh_axes.spec(query)[:-1], None))
        scale = jnp.asarray(given.scale, dtypes.wide(query, key, value))
        (out,) = run((query, key, value), compressed, gates, limits, scale)
    if present is not None:
        out = jnp.where(present[..., None, None], out, 0)
    return checkpoint_name(out, name)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static configuration: l, d, b, n and w of `native_sparse_attention`."""

    compression: int
    stride: int
    block: int
    selected: int
    window: int

    @classmethod
    def of(
        cls,
        compression_size: Any,
        compression_stride: Any,
        block_size: Any,
        num_selected: Any,
        window_size: Any,
    ) -> "Settings":
        """Checks the arguments."""
        stride = checks.at_least("compression_stride", compression_stride, 1, "tokens")
        sizes = {"compression_size": compression_size, "block_size": block_size}
        for name, size in sizes.items():
            if not checks.is_integer(size) or size < 1 or size % stride:
                raise ValueError(
                    f"{name} must be an int of tokens, 1 or more and a multiple of "
                    f"compression_stride={stride}, got {size!r}"
                )
        return cls(
            int(compression_size),
            stride,
            int(block_size),
            checks.at_least(
                "num_selected",
                num_selected,
                _ALWAYS,
                "blocks: the first, the own and the one before it are always selected",
            ),
            checks.at_least("window_size", window_size, 1, "tokens"),
        )

    def count(self, length: Any) -> Any:
        """Number of compressed blocks that have ended in `length` tokens."""
        return (length - self.compression) // self.stride + 1

    def ends(self, count: int) -> jax.Array:
        """The last tokens of the compressed blocks, int32 `(count,)`."""
        return self.compression - 1 + self.stride * jnp.arange(count, dtype=jnp.int32)

    def compressed(self, key, value, compress: Compress | None) -> tuple[jax.Array, jax.Array]:
        """Compressed keys `(*B, M, K, H)` and values `(*B, M, K, Hv)`."""
        axis, count = key.ndim - 3, max(self.count(key.shape[-3]), 0)
        if count == 0:
            key, value = (lax.slice_in_dim(x, 0, 0, axis=axis) for x in (key, value))
            return key, value

        def blocks(x):  # (*B, M, K, l, H)
            strides = folding.fold(x, self.stride, axis)
            firsts = range(self.compression // self.stride)
            parts = [lax.slice_in_dim(strides, n, n + count, axis=axis) for n in firsts]
            return jnp.swapaxes(jnp.concatenate(parts, axis + 1), -3, -2)

        return compressed_blocks(blocks(key), blocks(value), compress)


def means(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of the keys `(..., l, H)` and values `(..., l, Hv)` of each block."""

    def mean(x):
        return x.mean(-2, dtype=dtypes.wide(x.dtype)).astype(x.dtype)

    return mean(keys), mean(values)


def compressed_blocks(
    keys: jax.Array, values: jax.Array, compress: Compress | None
) -> tuple[jax.Array, jax.Array]:
    """Compresses keys `(..., l, H)` and values `(..., l, Hv)`, and checks the results."""
    found = (means if compress is None else compress)(keys, values)
    results = []
    for name, x, block in zip(("keys", "values"), found, (keys, values), strict=True):
        shape = (*block.shape[:-2], block.shape[-1])
        if x.shape != shape:
            raise ValueError(f"compress must map {name} {block.shape} to {shape}, got {x.shape}")
        results.append(x.astype(block.dtype))
    return results[0], results[1]


def attend(
    settings: Settings,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    compressed: tuple[jax.Array, jax.Array],
    gates: jax.Array,
    offset: int | jax.Array,
    limits: jax.Array,
    scale: float | jax.Array,
    precision: Any,
) -> jax.Array:
    """The gated sum of the three branches.

    Args:
      settings: the sizes.
      heads: query `(*B, T, N, H)`, key `(*B, S, K, H)` and value `(*B, S, K, Hv)`, zeros in the
        padding.
      compressed: keys `(*B, M, K, H)` and values `(*B, M, K, Hv)`; those that have not ended at a
        query are not read.
      gates: `(*B, T, N, 3)`.
      offset: position of the first query among the keys: 0, or int32 `(B,)` for *B = (B,).
      limits: int32 `(*B)`, valid keys.
      scale: multiplies the logits.
      precision: of the products of the attention.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.
    """
    query, key, value = heads
    if 0 in (*query.shape[:-2], key.shape[-3]):
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    *batch, length, count, _ = query.shape
    positions = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), limits.shape)
    positions = positions_from(positions, length)

    def head(query, key, value, keys, values, positions, limit):
        last = jnp.minimum(positions, limit - 1)
        first, blocks = _attend_compressed(
            settings, (query, keys, values), positions, last, len(key), scale, precision
        )
        second, _ = chosen_blocks.attend(
            query,
            key,
            value,
            blocks,
            last,
            block_size=settings.block,
            scale=scale,
            precision=precision,
        )
        return first, second

    # Map over key heads, then over batch dimensions.
    head = jax.vmap(head, (-3, -2, -2, -2, -2, None, None), -3)
    for _ in batch:
        head = jax.vmap(head)
    groups = query.reshape(*batch, length, key.shape[-2], count // key.shape[-2], -1)
    outs = head(groups, key, value, *compressed, positions, limits)
    first, second = (out.reshape(*batch, length, count, value.shape[-1]) for out in outs)

    third = _attend_window(settings, heads, offset, limits, scale, precision)

    wide = dtypes.wide(query, value)
    parts = (first, second, third)
    mixed = (dtypes.product(gates[..., n, None], x.astype(wide)) for n, x in enumerate(parts))
    return functools.reduce(jnp.add, mixed).astype(value.dtype)


def _attend_window(settings: Settings, heads, offset, limits, scale, precision):
    """The branch of the window, `(*B, T, N, Hv)`."""
    query, key, value = heads
    options = {"key_value_seq_lengths": limits}
    if not isinstance(offset, int):
        # Queries at other positions in each row: gather the keys around them.
        before = min(settings.window - 1, key.shape[-3])
        at = positions_from(offset - before, before + query.shape[-3])
        key, value = (
            jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(x, at) for x in (key, value)
        )
        is_key = (at >= 0) & (at < limits[:, None])
        options, offset = {"mask": is_key[:, None, None]}, before
    given = attention.check(
        "native_sparse_attention",
        query,
        key,
        value,
        is_causal=True,
        local_window_size=(settings.window - 1, 0),
        query_offset=offset,
        scale=scale,
        precision=precision,
        implementation="xla",
        **options,
    )
    return attention.attend(query, key, value, given)[0]


def _attend_compressed(settings: Settings, heads, positions, last, length, scale, precision):
    """The branch of compressed blocks for a key head, and the blocks that it selects.

    Args:
      settings: the sizes.
      heads: query `(T, G, H)`, compressed keys `(M, H)` and values `(M, Hv)`.
      positions: int32 `(T,)`, positions of the queries.
      last: int32 `(T,)`, the last key that each query may see.
      length: number of keys.
      scale: multiplies the logits.
      precision: of the products.

    Returns:
      Output `(T, G, Hv)`, and the selected blocks of each query, int32 `(T, n)`, -1 for none.
    """
    query, keys, values = heads
    wide, ends = dtypes.wide(query, values), settings.ends(len(keys))
    lowest = dtypes.lowest(wide)
    n = jnp.arange(-(-length // settings.block), dtype=jnp.int32)[None]

    def product(formula, left, right):
        einsum = functools.partial(jnp.einsum, formula, precision=precision)
        return widened(einsum, left.astype(right.dtype), right, wide)

    @jax.checkpoint
    def tile(x):
        query, positions, last = x
        is_seen = (ends[None] <= last[:, None])[:, None]
        logits = jnp.where(is_seen, scale * product("tgh,mh->tgm", query, keys), lowest)
        largest = lax.stop_gradient(logits.max(-1, keepdims=True, initial=lowest))
        weights = jnp.where(is_seen, jnp.exp(logits - largest), 0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)

        scores = _of_blocks(settings, lax.stop_gradient(weights).sum(1), n.shape[1])
        own = positions[:, None] // settings.block
        always = (n == 0) | (n == own) | (n == own - 1)
        scores = jnp.where(n > own, lowest, jnp.where(always, -lowest, scores))
        blocks = chosen_blocks.largest(scores, settings.selected)
        return product("tgm,mv->tgv", weights, values).astype(values.dtype), blocks

    return chosen_blocks.in_tiles_of_queries(tile, (query, positions, last), _QUERIES)


def _of_blocks(settings: Settings, weights, blocks):
    """Scores of blocks `(m, blocks)` from the weights of compressed blocks `(m, M)`."""
    each, strides = settings.compression // settings.stride, settings.block // settings.stride
    total = max(blocks * strides, weights.shape[1] + each - 1)
    before = jnp.pad(weights, ((0, 0), (each - 1, total - weights.shape[1])))
    of_strides = functools.reduce(
        jnp.add, (lax.slice_in_dim(before, n, n + total, axis=1) for n in range(each))
    )
    return folding.fold(of_strides, strides, 1).sum(-1)[:, :blocks]


def _growing(length: int) -> dict[str, int]:
    root = math.isqrt(length)
    return {
        "compression_size": root // 2,
        "compression_stride": root // 4,
        "block_size": root,
        "window_size": 2 * root,
    }


registry.register(
    registry.Mechanism(
        name="native_sparse",
        family="sparse",
        paper="Yuan et al. 2025, Native Sparse Attention",
        function=native_sparse_attention,
        capabilities=frozenset({"causal"}),
        reasons={"segments": "its blocks start at multiples of their size, not with documents"},
        builder="effattn.nn.native_sparse:NativeSparseSelfAttention",
        decoder="effattn.decode.native_sparse:NativeSparseDecoder",
        options_at=_growing,
        complexity="O(N (n b + w + N / d)), O(N sqrt N) at best",
        time_exponent=1.5,
        causality="rounding",
    )
)
