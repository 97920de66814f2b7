"""Attention to slots of packed documents: weighted sums of the keys and values of each document.

A row may have as many documents as tokens, each with r slots. To take memory linear in the length,
the slots are computed one after the other, as sums over the document of each token.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dropout, dtypes, mesh_axes
from effattn.arrays.axes import fold, lead, unfold
from effattn.arrays.linear_map import with_derivatives
from effattn.cores import attention
from effattn.cores.running_maxima import maxima_of_documents

# Tokens whose pairs are computed at a time.
_CHUNK = 64


def document_sums(x: jax.Array, ids: jax.Array) -> jax.Array:
    """The sum of `x (*B, T, F)` over the document of each token, in the same shape.

    A document is a contiguous run of equal `ids (*B, T)`. The order of summation is fixed. Time
    O(T F), memory O(T F).
    """
    return _summed(None, x, ids)


def _sums(_, x, ids):
    length, axis = ids.shape[-1], ids.ndim - 1
    size = min(_CHUNK, length)
    # A new id for the padding.
    ids = jnp.pad(ids, [*[(0, 0)] * axis, (0, -length % size)], constant_values=-1)
    x, ids = fold(x, size, axis), fold(ids, size, axis)  # (*B, n, c, F)
    is_same = (ids[..., :, None] == ids[..., None, :]).astype(x.dtype)
    inside = jnp.einsum("...ts,...sf->...tf", is_same, x, precision="highest")
    first, last = ids[..., 0], ids[..., -1]

    def carried(sums, is_through, joins, reverse):
        """The sums of the other chunks that continue at the first token of each chunk."""

        def step(carry, chunk):
            sums, is_through, joins = chunk
            before = jnp.where(joins[..., None], carry, 0)
            return sums + jnp.where(is_through[..., None], before, 0), before

        chunks = jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), (sums, is_through, joins))
        zero = mesh_axes.vary_like(sums, jnp.zeros_like(chunks[0][0]))
        return jnp.moveaxis(lax.scan(step, zero, chunks, reverse=reverse)[1], 0, axis)

    is_through = first == last
    edge = jnp.zeros_like(first[..., :1], bool)
    continues = first[..., 1:] == last[..., :-1]
    joins = jnp.concatenate([edge, continues], axis)
    joins_later = jnp.concatenate([continues, edge], axis)
    before = carried(inside[..., -1, :], is_through, joins, False)
    after = carried(inside[..., 0, :], is_through, joins_later, True)
    of_first, of_last = ids == first[..., None], ids == last[..., None]
    total = inside + jnp.where(of_first[..., None], before[..., None, :], 0)
    total = total + jnp.where(of_last[..., None], after[..., None, :], 0)
    return unfold(total, length, axis)


# The sum over a document is its own transpose.
_summed = with_derivatives(
    _sums,
    lambda _, x, ids: (_sums(_, x, ids), ids),
    lambda _, ids, cotangent: (_sums(_, cotangent, ids), None),
)


def softmax_over_documents(scores: jax.Array, ids: jax.Array, present: jax.Array) -> jax.Array:
    """Softmax of `scores (*B, T, K, r)` over the present tokens of each document."""
    present = present[..., None]
    flat = lax.collapse(scores, scores.ndim - 2)
    largest = maxima_of_documents(jnp.where(present, flat, dtypes.lowest(flat.dtype)), ids)
    weights = jnp.where(present, jnp.exp(jnp.where(present, flat - largest, 0)), 0)
    total = document_sums(weights, ids)
    return (weights / jnp.where(total == 0, 1, total)).reshape(scores.shape)


def attend(
    weights: tuple[jax.Array, jax.Array],
    ids: jax.Array,
    present: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    given: attention.Arguments,
    at: jax.Array,
    norm: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each token to the r slots of its document.

    Time O(T r (H + Hv)), memory O(T (r + H + Hv)), forward and backward.

    Args:
      weights: `(*B, T, #K, r)` each, those of tokens in the slots of keys and in those of values;
        0 for tokens that are not present.
      ids: int `(*B, T)`; a document is a contiguous run of equal ids.
      present: bool `(*B, T)`. A document without present tokens has no slots.
      query: `(*B, T, N, H)`, zeros in the padding.
      key: `(*B, T, K, H)`, likewise.
      value: `(*B, T, K, Hv)`, likewise.
      given: the checked arguments. Direction, lengths and segments are not read.
      at: int32 `(*B, T)`, for dropout: the position of the first slot of each token.
      norm: a function of slots `(*B, T, K, H)`, such as a layer norm.

    Returns:
      Output and log-sum-exp, as `attention.attend` returns them.
    """
    *batch, length, heads, size = query.shape
    key_heads, dtype = key.shape[-2], dtypes.wide(query, key, value)
    rows = query.astype(dtype).reshape(*batch, length, key_heads, heads // key_heads, size)
    product = functools.partial(jnp.einsum, precision=given.precision)

    def slot(weight, x):
        """The slot of each token's document, `(*B, T, K, H)`."""
        sums = lax.collapse(weight[..., None] * x.astype(dtype), x.ndim - 2)
        return norm(document_sums(sums, ids).reshape(x.shape).astype(x.dtype)).astype(dtype)

    @jax.checkpoint
    def logits_of(weight, rows, key):
        return product("...tkgh,...tkh->...tkg", rows, slot(weight, key))

    of_keys, of_values = (jnp.moveaxis(x.astype(dtype), -1, 0) for x in weights)
    logits = lax.map(lambda weight: logits_of(weight, rows, key), of_keys)  # (r, *B, T, K, G)
    logits = dtypes.product(given.scale, logits)
    if given.soft_cap is not None:
        logits = given.soft_cap * jnp.tanh(logits / given.soft_cap)
    lse = jax.nn.logsumexp(logits, 0)
    shares = jnp.exp(logits - lse[None])
    if given.dropout_rate:
        assert given.dropout_rng is not None
        kept = _kept(given, given.dropout_rng, at, (len(shares), *batch, length, heads))
        shares = jnp.where(kept.reshape(shares.shape), shares / (1 - given.dropout_rate), 0)

    @jax.checkpoint
    def mixed(share, weight, value):
        return product("...tkg,...tkh->...tkgh", share, slot(weight, value))

    def add(out, x):
        return out + mixed(*x, value), None

    zero = jnp.zeros((*shares.shape[1:], value.shape[-1]), dtype)
    zero = mesh_axes.vary_like(shares, zero)
    out, _ = lax.scan(add, zero, (shares, of_values))
    out = out.reshape(*batch, length, heads, value.shape[-1]).astype(value.dtype)
    has_keys = document_sums(present[..., None].astype(dtype), ids)[..., 0] > 0
    return attention.clear_rows(out, lse.reshape(*batch, length, heads), has_keys)


def _kept(
    given: attention.Arguments, rng: jax.Array, at: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Dropout mask `(r, *B, T, N)`."""
    slots, *batch, length, heads = shape
    b = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(1, *batch, 1, 1)
    h, i = (jnp.arange(size, dtype=jnp.int32) for size in (heads, length))
    j = lead(at[..., None], len(shape))
    j = j + jnp.arange(slots, dtype=jnp.int32).reshape(slots, *[1] * (len(shape) - 1))
    b, h, i, j = jnp.broadcast_arrays(b, lead(h, len(shape)), lead(i[:, None], len(shape)), j)
    return dropout.keep(dropout.seed_from_rng(rng), given.dropout_rate, b, h, i, j)
