"""Native sparse attention: compressed blocks, selected blocks and a window, added by gates."""

import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import valid
from effattn.cores import attention, document_blocks
from effattn.cores.native_sparse import Compress, Settings, attend
from effattn.cores.packed_native_sparse import documents_of
from effattn.dispatch.partition import by_device
from effattn.functional import softmax
from effattn.naive import masked_softmax, over_pairs, with_naive
from effattn.options import Execution, Packing, Padding, Scale, declared


class Options(Padding, Packing, Scale, Execution, total=False):
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

    `selected (T, T)` says whether a query has selected the block that a token begins, by the scores
    of all heads that share the key head. In packed rows, blocks count from the start of the
    document.
    """
    i, j = pairs.i[:, None], pairs.j
    at = _windows(len(key), compression_size)  # (T, l)
    of_compressed = (compress or _means)(key[at], value[at])
    first, last = at[:, 0], at[:, -1]
    is_block = _compressed(pairs.places, compression_size, compression_stride)
    is_block &= pairs.present[first] & pairs.present[last]
    is_same = pairs.query_ids[:, None] == pairs.key_ids
    is_seen = pairs.valid[:, None] & is_block & is_same & (last <= i)
    chosen = selected[:, j - pairs.places % block_size] != 0
    parts = (
        (*of_compressed, pairs.with_keys(is_seen, last)),
        (key, value, pairs.where(chosen)),
        (key, value, pairs.where(i - j < window_size)),
    )
    outs = [softmax.naive(query, *part, scale=scale)[0] for part in parts]
    return sum(gates[:, n, None] * out for n, out in enumerate(outs))


def _windows(length, size):
    """The tokens of the block to compress that each token begins, int `(T, l)`."""
    return np.minimum(np.arange(length)[:, None] + np.arange(size), length - 1)


def _compressed(places, size, stride):
    """Bool `(..., T)`, the tokens that begin a block to compress, by their places in documents."""
    last = jnp.asarray(_windows(places.shape[-1], size)[:, -1])
    return (places % stride == 0) & (places[..., last] == places + size - 1)


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
    segment_ids,
    compression_size,
    compression_stride,
    block_size,
    num_selected,
    compress,
    **_,
):
    """The blocks that each query selects, by the tokens that begin them: bool `(*B, T, N, T)`."""
    length, heads, size = query.shape[-3:]
    batch, key_heads = query.shape[:-3], key.shape[-2]
    wide, t = jnp.promote_types(key.dtype, jnp.float32), jnp.arange(length)
    given = length if key_value_seq_lengths is None else key_value_seq_lengths
    lengths = jnp.broadcast_to(jnp.asarray(given), batch)[..., None]
    ids = jnp.ones(length, jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
    ids = jnp.broadcast_to(ids, (*batch, length))
    is_same = ids[..., :, None] == ids[..., None, :]  # (*B, T, T)
    places = t - jnp.where(is_same, t, length).min(-1, initial=length)
    present = (t < lengths) & (ids != 0)
    key, value = (jnp.where(present[..., None, None], x, 0) for x in (key, value))
    at = _windows(length, compression_size)
    blocks = (jnp.moveaxis(x[..., at, :, :], -3, -2) for x in (key, value))  # (*B, T, K, l, H)
    keys = (compress or _means)(*blocks)[0]
    scale = size**-0.5 if scale is None else scale

    query = query.reshape(*batch, length, key_heads, heads // key_heads, size).astype(wide)
    product = functools.partial(jnp.einsum, precision="highest")
    logits = scale * product("...tkgh,...mkh->...kgtm", query, keys.astype(wide))
    last = jnp.asarray(at[:, -1])
    is_block = _compressed(places, compression_size, compression_stride) & present[..., last]
    is_seen = is_same & is_block[..., None, :] & (last <= t[:, None])
    weights = masked_softmax(logits, is_seen[..., None, None, :, :]).sum(-3)  # (*B, K, T, M)

    begin = t - places % block_size  # the token that begins the block of each token
    strides = begin[..., at[:, ::compression_stride]]  # (*B, M, strides)
    overlap = (strides[..., None] == t).sum(-2).astype(wide)  # (*B, M, T)
    scores = product("...ktm,...mn->...ktn", weights, overlap)
    n, number = begin == t, places // block_size
    behind = number[..., :, None] - number[..., None, :]
    is_past = is_same & n[..., None, :] & (behind >= 0)
    always = (number[..., None, :] == 0) | (behind <= 1)
    scores = jnp.where(always[..., None, :, :], jnp.inf, scores)
    scores = jnp.where(is_past[..., None, :, :], scores, -1)
    this, other = scores[..., :, None], scores[..., None, :]
    rank = ((other > this) | ((other == this) & (t < t[:, None]))).sum(-1)
    selected = jnp.moveaxis((rank < num_selected) & is_past[..., None, :, :], -3, -2)
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

    The paper gives each branch its own keys and values; here, all branches read the same `key` and
    `value`.

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
      **options: padding, packing, scale and execution: see `effattn.options`. `segment_ids` are one
        array `(*B, T)`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: wrong shapes, dtypes or values.
    """
    name = "native_sparse_attention"
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    settings = Settings.of(
        compression_size=compression_size,
        compression_stride=compression_stride,
        block_size=block_size,
        num_selected=num_selected,
        window_size=window_size,
    )
    gates = checks.shaped("gates", gates, (*query.shape[:-1], 3))
    key_lengths, length = given.key_lengths, query.shape[-3]
    query, key, value = attention.without_padding(query, key, value, given)
    ids = given.segments and given.segments[0]
    present = valid(given.query_lengths, ids, length)
    if present is not None:
        gates = jnp.where(present[..., None, None], gates, 0)
    with jax.named_scope(name):
        with mesh_axes.of_type(query):
            key, value = (mesh_axes.gathered(x, -3) for x in (key, value))
            documents = None
            if ids is None or not length:
                compressed = settings.compressed(key, value, compress)
            else:
                compressed, documents = documents_of(
                    settings, key, value, ids, key_lengths, compress
                )
        limits = jnp.full(query.shape[:-3], length, jnp.int32)
        limits = limits if key_lengths is None else jnp.minimum(key_lengths, limits)
        options = {"precision": given.precision, "implementation": given.implementation}

        # Kernels need a scale that is known when the program is traced.
        traced = () if isinstance(given.scale, float) else (given.scale,)

        def run(heads, compressed, gates, limits, documents, scale=given.scale):
            arrays = heads, compressed, gates, 0, limits, documents
            return (attend(settings, *arrays, scale=scale, **options),)

        axes: list[Any] = [-2, -2, -2, 0, None, *[0] * len(traced)]
        if documents is not None:
            axes[4] = jax.tree.map(lambda _: 0, documents)._replace(key=-2, value=-2)
        run = by_device(run, query, axes, results=1, together=query.shape[-2] // key.shape[-2])
        (out,) = run((query, key, value), compressed, gates, limits, documents, *traced)
    if present is not None:
        out = jnp.where(present[..., None, None], out, 0)
    return checkpoint_name(out, name)


def _growing(length: int) -> dict[str, int]:
    stride = max(math.isqrt(length) // 4, 1)
    return {
        "compression_size": 2 * stride,
        "compression_stride": stride,
        "block_size": 4 * stride,
        "window_size": 8 * stride,
    }


registry.register(
    registry.Mechanism(
        name="native_sparse",
        family="sparse",
        paper="Yuan et al. 2025, Native Sparse Attention: Hardware-Aligned and Natively Trainable "
        "Sparse Attention",
        function=native_sparse_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.native_sparse:NativeSparseSelfAttention",
        decoder="effattn.decode.native_sparse:NativeSparseDecoder",
        options_at=_growing,
        complexity="O(N (n b + w + N / d)), O(N sqrt N) at best",
        time_exponent=1.5,
        causality="rounding",
    )
)
