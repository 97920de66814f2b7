"""Factorised dense Synthesizer: logits of a token as products of two short vectors."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import fold, lead
from effattn.arrays.segments import positions_from, positions_from_segment_ids, within
from effattn.functional.synthesizer import CAPABILITIES, entry
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Lengths, Offset, Packing, declared

# Queries in a tile.
_TILE = 128


class Options(Direction, Offset, Lengths, Packing, total=False):
    """The shared options of `factorized_synthesizer_attention`."""


def naive(coarse, fine, value, pairs):
    """One head: coarse `(T, l)`, fine `(T, m)`, value `(S, Hv)`."""
    logits = jax.vmap(lambda a, b: jnp.outer(a, b).ravel())(coarse, fine)  # (T, l m)
    weights, _ = pairs.softmax(logits[:, pairs.places])
    return weights @ value


@with_naive(over_pairs(naive, queries=2, wide=True))
@jax.named_scope("factorized_synthesizer_attention")
@declared
def factorized_synthesizer_attention(
    coarse: jax.Array,
    fine: jax.Array,
    value: jax.Array,
    **options: Unpack[Options],
) -> jax.Array:
    r"""Factorised dense synthetic attention (Tay et al. 2020, "Synthesizer", section 3.1.1).

        y_t = sum_s softmax_s(a_t[s // m] b_t[s % m]) v_s

    The l m logits of a token are products of l + m factors, computed for one block of m keys at a
    time. Time is O(T S Hv), memory O(T (l + m + Hv)), forward and backward.

    Args:
      coarse: a, `(B, T, N, l)`.
      fine: b, `(B, T, N, m)`, with l m at least S.
      value: `(B, S, N, Hv)`.
      **options: direction, offset, lengths and packing: see `effattn.options`. `lengths` are those
        of the keys, and of the queries if T is S. In packed documents, s counts from the start of
        the document.

    Returns:
      `(B, T, N, Hv)` in the dtype of `value`; logits and sums are in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    is_causal = options.get("is_causal", False)
    if not coarse.ndim == fine.ndim == value.ndim == 4:
        raise ValueError(
            "coarse must have shape (B, T, N, l), fine (B, T, N, m) and value (B, S, N, Hv), got "
            f"{coarse.shape}, {fine.shape} and {value.shape}"
        )
    checks.known_length("factorized_synthesizer_attention", coarse, value)
    batch, time, heads, blocks = coarse.shape
    checks.shaped("coarse", coarse, coarse.shape)
    size, keys = fine.shape[-1], value.shape[1]
    checks.shaped("fine", fine, (batch, time, heads, size))
    checks.shaped("value", value, (batch, keys, heads, value.shape[-1]))
    if blocks * size < keys:
        raise ValueError(
            f"coarse and fine must give at least {keys} logits, one for each key, got {blocks} x "
            f"{size}; make coarse or fine larger"
        )
    lengths = checks.lengths("lengths", options.get("lengths"), (batch,), keys)
    ids = checks.segment_ids(options.get("segment_ids"), (batch,), time, keys)
    query_ids: Any = None
    key_ids: Any = None
    if ids is not None:
        query_ids, key_ids = ids
        present = jnp.not_equal(query_ids, 0)[..., None, None]
        coarse, fine = jnp.where(present, coarse, 0), jnp.where(present, fine, 0)
        value = jnp.where(jnp.not_equal(key_ids, 0)[..., None, None], value, 0)
    offset = checks.offset(options.get("query_offset", 0), (batch,))
    offset = jnp.broadcast_to(jnp.asarray(offset), (batch,))
    if lengths is not None:
        value = jnp.where(within(lengths, keys)[..., None, None], value, 0)
        if time == keys:
            valid = within(lengths, time)[..., None, None]
            coarse, fine = jnp.where(valid, coarse, 0), jnp.where(valid, fine, 0)
    seen_keys = jnp.full((batch,), keys) if lengths is None else lengths
    out = _attend(coarse, fine, value, query_ids, key_ids, seen_keys, offset, is_causal)
    if lengths is not None and time == keys:
        out = jnp.where(valid, out, 0)
    if query_ids is not None:
        out = jnp.where(present, out, 0)
    return out.astype(value.dtype)


def _attend(coarse, fine, value, query_ids, key_ids, seen_keys, offset, is_causal):
    """The outputs of checked arrays whose padding is zero.

    Args:
      coarse: `(B, T, N, l)`.
      fine: `(B, T, N, m)`.
      value: `(B, S, N, Hv)`.
      query_ids: segment ids `(B, T)`, or None.
      key_ids: segment ids `(B, S)`, or None.
      seen_keys: int `(B,)`, the first keys that are not padding.
      offset: int `(B,)`, the position of the first query.
      is_causal: whether query t sees keys 0 to t only.

    Returns:
      `(B, T, N, Hv)` in at least float32.
    """
    batch, time = coarse.shape[:2]
    size, keys = fine.shape[-1], value.shape[1]
    wide = dtypes.wide(value.dtype)
    blocks = -(-keys // size)

    def in_blocks(array):
        """Keys `(B, S, ...)` in blocks of m, `(blocks, B, m, ...)`."""
        return jnp.moveaxis(fold(array, size, 1), 1, 0)

    of_documents = None
    if key_ids is not None:
        places = positions_from_segment_ids(key_ids)
        of_documents = tuple(map(in_blocks, (key_ids, places // size, places % size)))
    values = in_blocks(value)

    @jax.checkpoint
    def of_tile(first, a, b, ids):
        """Returns the output of the queries from `first` on, `(B, C, N, Hv)`."""
        positions = positions_from(offset + first, a.shape[1])

        def add(sums, of_block):
            out, total, largest = sums
            block, value, coarse, of_keys = of_block
            a_of_keys, b_of_keys = coarse[..., None], b
            key = lead(block * size + jnp.arange(size), 3)
            seen = jnp.broadcast_to(key < seen_keys[:, None, None], (batch, a.shape[1], size))
            if is_causal:
                seen = seen & (key <= positions[..., None])
            if of_keys is not None:
                key_ids, *at = of_keys
                seen = seen & (key_ids[:, None] == ids[..., None])
                a_of_keys, b_of_keys = (
                    jnp.take_along_axis(x, places[:, None, None], -1)
                    for x, places in zip((a, b), at, strict=True)
                )
            logit = a_of_keys.astype(wide) * b_of_keys.astype(wide)
            logit = jnp.where(seen[:, :, None], logit, dtypes.lowest(wide))
            # At least the initial value, so that differences are finite.
            new = jax.lax.stop_gradient(jnp.maximum(largest, logit.max(-1)))
            share, weight = jnp.exp(largest - new), jnp.exp(logit - new[..., None])
            added = jnp.einsum("bcnm,bmnh->bcnh", weight, value.astype(wide))
            return (out * share[..., None] + added, total * share + weight.sum(-1), new), None

        empty = jnp.zeros(a.shape[:3], wide)
        start = jnp.zeros((*a.shape[:3], value.shape[-1]), wide), empty, empty - 1e30
        per_block = jnp.arange(blocks), values, jnp.moveaxis(a, -1, 0)[:blocks], of_documents
        start, _ = mesh_axes.vary_alike((start, (a, b, values, seen_keys, ids)))
        (out, total, _), _ = jax.lax.scan(add, start, per_block)
        return out / jnp.where(total > 0, total, 1)[..., None]

    tile = max(1, min(_TILE, time))
    firsts = jnp.arange(0, time, tile)

    def tiles(array):
        return None if array is None else jnp.moveaxis(fold(array, tile, 1), 1, 0)

    of_queries = firsts, *map(tiles, (coarse, fine, query_ids))
    out = jax.lax.map(lambda of: of_tile(*of), of_queries)
    return jax.lax.collapse(jnp.moveaxis(out, 0, 1), 1, 3)[:, :time]


registry.register(
    entry(
        name="synthesizer_factorized",
        function=factorized_synthesizer_attention,
        capabilities=CAPABILITIES,
        options={"kind": "factorized"},
        complexity="O(N^2 H), O(N H) a step",
        memory_exponent=1.5,
    )
)
