"""The three branches of native sparse attention: compressed blocks, selected blocks, a window."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import fold, over_batch
from effattn.arrays.combine import exponentials
from effattn.arrays.products import widened
from effattn.arrays.segments import positions_from
from effattn.cores import attention, chosen_blocks, folding, packed_pairs

Heads = tuple[jax.Array, jax.Array, jax.Array]
Compress = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

SIZES = ("compression_size", "compression_stride", "block_size", "num_selected", "window_size")

_NAME = "native_sparse_attention"

# Parts of a sequence; more parts skip more, and take longer to compile.
_PARTS = 4
# Queries whose scores are in memory at a time.
_QUERIES = 128
# The first block of the sequence, the block before the own block, and the own block.
_ALWAYS = 3


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
        *,
        compression_size: Any = 32,
        compression_stride: Any = 16,
        block_size: Any = 64,
        num_selected: Any = 16,
        window_size: Any = 512,
    ) -> "Settings":
        """Checks the sizes; by default, they are those of the paper."""
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

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> "Settings":
        """Checks the sizes in a mapping of options."""
        return cls.of(**{name: options[name] for name in SIZES if name in options})

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
            strides = fold(x, self.stride, axis)
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
    if compress is not None:
        checks.accepts("compress", compress, ("keys", "values"))
    found = (means if compress is None else compress)(keys, values)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(
            f"compress must return two arrays, for keys and values, got {type(found).__name__}"
        )
    results = []
    for name, x, block in zip(("keys", "values"), found, (keys, values), strict=True):
        shape = (*block.shape[:-2], block.shape[-1])
        x = checks.as_array(f"{name} of compress", x)
        if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"compress must map {name} {block.shape} to floating point of shape {shape}, got "
                f"{x.dtype} of shape {x.shape}"
            )
        results.append(x.astype(block.dtype))
    return results[0], results[1]


class Documents(NamedTuple):
    """Packed documents, with copies of keys and values at the places of `document_blocks`.

    Attributes:
      key: `(*B, P, K, H)`, in blocks of b tokens.
      value: `(*B, P, K, Hv)`.
      ids: int `(*B, T)`, segment ids.
      begin: int32 `(*B, T)`, the first token of each token's document.
      place: int32 `(*B, T)`, the place of each token.
      first, last: int32 `(*B, T)`, the first and last place of keys of each token's document.
      ends: int32 `(*B, M)`, the last token of each compressed block; T for no block.
      strides: int32 `(*B, n, b / d)`, for each stride of each block, the compressed block that
        begins there.
    """

    key: jax.Array
    value: jax.Array
    ids: jax.Array
    begin: jax.Array
    place: jax.Array
    first: jax.Array
    last: jax.Array
    ends: jax.Array
    strides: jax.Array


class _Queries(NamedTuple):
    """Keys and blocks that each query may see, int32 `(T,)` each.

    Attributes:
      begin, last: the first and the last key.
      own, first: its own block, and the first block of its document.
    """

    begin: jax.Array
    last: jax.Array
    own: jax.Array
    first: jax.Array


def attend(
    settings: Settings,
    heads: Heads,
    compressed: tuple[jax.Array, jax.Array],
    gates: jax.Array,
    offset: int | jax.Array,
    limits: jax.Array,
    documents: Documents | None = None,
    **options: Any,
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
      documents: packed documents, with offset 0; None for one document a row.
      **options: scale, precision and implementation: see `chosen_blocks.attend_causal`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.
    """
    query, key, value = heads
    if 0 in (*query.shape[:-2], key.shape[-3]):
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    if documents is not None or not isinstance(offset, int):
        return _attend_branches(
            settings, heads, compressed, gates, offset, limits, documents, **options
        )
    return _attend_whole(settings, heads, compressed, gates, limits, **options)


def _attend_whole(
    settings: Settings, heads: Heads, compressed, gates, limits, **options
) -> jax.Array:
    """`attend` for whole sequences of one document.

    CPUs have a kernel for query heads that share a key head; it reads each key once for all of
    them. If each query head has its own key head, the kernels of block attention are faster,
    because they read a block of keys once for many queries.
    """
    call = _call_of(heads, (*compressed, gates))
    chosen = dispatch.choose(options["implementation"], call)

    def by_branches(heads, compressed, gates, limits):
        return _attend_branches(settings, heads, compressed, gates, 0, limits, **options)

    def by_kernel(heads, compressed, gates, limits):
        from effattn.llvm import native_sparse  # imported on first use, as it imports llvmlite

        query, key, value = heads
        scale = options["scale"]
        if not isinstance(scale, float):  # the kernel needs a static scale
            query, scale = (query * scale).astype(query.dtype), 1.0
        form = _by_xla(settings, scale, options["precision"])
        config = native_sparse.Config(dataclasses.astuple(settings), scale, form)
        head: Callable[..., jax.Array] = functools.partial(native_sparse.attend, config)
        head = jax.vmap(head, (-3, *[-2] * 4, -3, None), -3)
        head = over_batch(head, limits.ndim)
        query, gates = (_in_groups(x, key.shape[-2]) for x in (query, gates))
        out = head(query, key, value, *compressed, gates, limits)
        return out.reshape(*heads[0].shape[:-1], value.shape[-1])

    forms = dict.fromkeys(chosen.names, by_branches)
    if "llvm" in forms and _are_shared(heads):
        forms["llvm"] = by_kernel
    return dispatch.on_platform(chosen, _NAME, forms, heads, compressed, gates, limits)


def _are_shared(heads: Heads) -> bool:
    """Returns whether several query heads share a key head."""
    query, key, _ = heads
    return query.shape[-2] > key.shape[-2]


def _call_of(heads: Heads, others: tuple[jax.Array, ...]) -> dispatch.Call:
    """Description of a call of `_attend_whole`, for `dispatch.choose`."""
    query, key, value = heads
    given = attention.check(_NAME, query, key, value, scale=1.0)
    found = attention.call_of(query, key, value, given)
    refusals = {name: found.refusals[name] for name in (*packed_pairs.KERNELS, "xla")}

    def refusal():
        from effattn.llvm import native_sparse  # imported on first use, as it imports llvmlite

        return native_sparse.refusal(*heads, *others)

    def limits(name):
        from effattn.llvm import native_sparse  # imported on first use, as it imports llvmlite

        return native_sparse.LIMITS if name == "llvm" else found.limits(name)

    if _are_shared(heads):
        refusals["llvm"] = refusal
    return found._replace(refusals=refusals, limits=limits, signature=None)


@functools.cache  # so that equal calls reuse one compiled program
def _by_xla(settings: Settings, scale: float, precision: Any) -> Callable[..., jax.Array]:
    """The form in XLA of the kernel's call, for a key head."""
    options = {"scale": scale, "precision": precision, "implementation": "xla"}

    def run(query, key, value, compressed_key, compressed_value, gates, limit):
        key, value, *compressed = (
            x[:, None] for x in (key, value, compressed_key, compressed_value)
        )
        heads = query, key, value
        return _attend_branches(settings, heads, compressed, gates, 0, limit, **options)

    return run


def _in_groups(x: jax.Array, key_heads: int) -> jax.Array:
    """`(*B, T, N, size)` as `(*B, T, K, G, size)`."""
    *tokens, heads, size = x.shape
    return x.reshape(*tokens, key_heads, heads // key_heads, size)


def _attend_branches(
    settings: Settings, heads: Heads, compressed, gates, offset, limits, documents=None, **options
) -> jax.Array:
    """`attend` by the cores of each branch."""
    query, key, value = heads
    *batch, length, count, _ = query.shape
    positions = None if isinstance(offset, int) else positions_from(offset, length)
    of_blocks, reach = (key, value), None
    if documents is not None:
        of_blocks, positions = documents[:2], documents.place
        reach = documents.first, documents.last
        documents = documents._replace(key=None, value=None)

    def head(query, key, value, keys, values, limit, positions, reach, documents):
        first, blocks = _attend_compressed_parts(
            settings, (query, keys, values), positions, limit, len(key), documents, options
        )
        second, _ = chosen_blocks.attend_causal(
            _NAME,
            query,
            key,
            value,
            blocks,
            limit if documents is None else jnp.int32(len(key)),
            positions,
            reach,
            block_size=settings.block,
            **options,
        )
        return first, second

    # Map over key heads, then over batch dimensions.
    each: Callable[..., Any] = jax.vmap(head, (-3, *[-2] * 4, *[None] * 4), -3)
    each = over_batch(each, len(batch))
    groups = _in_groups(query, key.shape[-2])
    outs = each(groups, *of_blocks, *compressed, limits, positions, reach, documents)
    first, second = (out.reshape(*batch, length, count, value.shape[-1]) for out in outs)

    ids = None if documents is None else documents.ids
    third = _attend_window(settings, heads, offset, limits, ids, options)

    wide = dtypes.wide(query, value)
    parts = (first, second, third)
    mixed = (dtypes.product(gates[..., n, None], x.astype(wide)) for n, x in enumerate(parts))
    return functools.reduce(jnp.add, mixed).astype(value.dtype)


def _attend_window(settings: Settings, heads, offset, limits, ids, options):
    """The branch of the window, `(*B, T, N, Hv)`."""
    query, key, value = heads
    known = {"key_value_seq_lengths": limits, "segment_ids": ids}
    if not isinstance(offset, int):
        # Queries at other positions in each row: gather the keys around them.
        before = min(settings.window - 1, key.shape[-3])
        at = positions_from(offset - before, before + query.shape[-3])
        key, value = (
            jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(x, at) for x in (key, value)
        )
        is_key = (at >= 0) & (at < limits[:, None])
        known, offset = {"mask": is_key[:, None, None]}, before
    given = attention.check(
        _NAME,
        query,
        key,
        value,
        is_causal=True,
        local_window_size=(settings.window - 1, 0),
        query_offset=offset,
        **known,
        **options,
    )
    return attention.attend(query, key, value, given)[0]


def _attend_compressed_parts(settings: Settings, heads, places, limit, length, documents, options):
    """`_attend_compressed` in parts of a sequence, each without the later compressed blocks."""
    query, keys, values = heads
    blocks = -(-length // settings.block)
    attend = functools.partial(_attend_compressed, settings, blocks, options=options)
    if documents is not None:
        token = jnp.arange(len(query), dtype=jnp.int32)
        at = _Queries(
            documents.begin,
            jnp.minimum(token, limit - 1),
            places // settings.block,
            documents.first // settings.block,
        )
        return attend(heads, at, documents.ends, documents.strides)

    def queries(positions):
        zero = jnp.zeros_like(positions)
        own = positions // settings.block
        return _Queries(zero, jnp.minimum(positions, limit - 1), own, zero)

    if places is not None:
        return attend(heads, queries(places), settings.ends(len(keys)))
    size = max(-(-len(query) // _PARTS), _QUERIES)
    found = []
    for start in range(0, len(query), size):
        stop = min(start + size, len(query))
        token, seen = jnp.arange(start, stop, dtype=jnp.int32), max(settings.count(stop), 0)
        part = query[start:stop], keys[:seen], values[:seen]
        found.append(attend(part, queries(token), settings.ends(seen)))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def _attend_compressed(
    settings: Settings, count, heads, at: _Queries, ends, strides=None, *, options
):
    """The branch of compressed blocks for a key head, and the blocks that it selects.

    Args:
      settings: the sizes.
      count: n, blocks that can be selected.
      heads: query `(T, G, H)`, compressed keys `(M, H)` and values `(M, Hv)`.
      at: places of the queries.
      ends: int32 `(M,)`, the last token of each compressed block.
      strides: int32 `(n, b / d)`, as in `Documents`; None for one document.
      options: scale and precision, among others.

    Returns:
      Output `(T, G, Hv)`, and the selected blocks before the own one of each query, int32
      `(T, n - 1)`, -1 for none.
    """
    query, keys, values = heads
    wide = dtypes.wide(query, values)
    lowest = dtypes.lowest(wide)
    n = jnp.arange(count, dtype=jnp.int32)[None]

    def product(formula, left, right):
        einsum = functools.partial(jnp.einsum, formula, precision=options["precision"])
        return widened(einsum, left.astype(right.dtype), right, wide)

    @jax.checkpoint
    def tile(x):
        query, at = x
        begin, last, own, first = (number[:, None] for number in at)
        is_seen = ((ends[None] >= begin) & (ends[None] <= last))[:, None]
        logits = dtypes.product(options["scale"], product("tgh,mh->tgm", query, keys))
        weights, total, _ = exponentials(logits, is_seen)
        weights = weights / total

        of_strides = _of_strides(settings, lax.stop_gradient(weights).sum(1))
        if strides is None:
            scores = _of_blocks(settings, of_strides, count)
        else:
            scores = of_strides.at[:, strides].get(mode="fill", fill_value=0).sum(-1)
        always = (n == first) | (n == own - 1)
        is_past = (n >= first) & (n < own)
        scores = jnp.where(is_past, jnp.where(always, -lowest, scores), lowest)
        blocks = chosen_blocks.largest(scores, settings.selected - 1)
        return product("tgm,mv->tgv", weights, values).astype(values.dtype), blocks

    return folding.in_tiles_of_queries(tile, (query, at), _QUERIES)


def _of_strides(settings: Settings, weights):
    """Scores of the strides of compressed blocks, from the weights `(m, M)` of these blocks."""
    each, count = settings.compression // settings.stride, weights.shape[1]
    before = jnp.pad(weights, ((0, 0), (each - 1, each - 1)))
    total = count + each - 1
    return functools.reduce(
        jnp.add, (lax.slice_in_dim(before, n, n + total, axis=1) for n in range(each))
    )


def _of_blocks(settings: Settings, scores, count: int):
    """Scores of `count` blocks of one document, from those of strides `(m, M + l / d - 1)`."""
    strides = settings.block // settings.stride
    missing = max(count * strides - scores.shape[1], 0)
    scores = jnp.pad(scores, ((0, 0), (0, missing)))
    return fold(scores, strides, 1).sum(-1)[:, :count]
