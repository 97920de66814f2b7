"""Causal variation of Linformer: exact in the own block, projected in earlier blocks."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.arrays import checks
from effattn.arrays.axes import fold, lead, unfold
from effattn.arrays.combine import combine
from effattn.cores import attention, document_blocks, folding, sequence_parts
from effattn.functional import softmax
from effattn.functional.linformer import mean_pooling, project
from effattn.naive import over_pairs, with_naive
from effattn.options import Packing, Sink, Softmax, Tile, declared
from effattn.patterns.layouts import BlockLayout


class Options(Packing, Sink, Tile, Softmax, total=False):
    """The shared options of `block_linformer_attention`."""


def naive(query, key, value, pairs, *, scale, key_projection, value_projection):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`; E and F `(r, b)`.

    Returns output and log-sum-exp. In packed rows, blocks count from the start of the document.
    """
    r, b = key_projection.shape
    token = jnp.arange(len(key))
    inside = jnp.minimum(token[:, None] + jnp.arange(b), len(key) - 1)  # (T, b)
    of_document = pairs.key_ids[inside] == pairs.key_ids[:, None]
    members = of_document & (token[:, None] + jnp.arange(b) < len(key)) & pairs.present[inside]

    def with_slots(projection, x):
        """`(T + T r, ...)`: the tokens, and slots as if each token began a block."""
        tokens = jnp.where(members[..., None], x[inside], 0)
        slots = (projection @ tokens).astype(x.dtype).reshape(len(x) * r, x.shape[1])
        return jnp.concatenate([x, slots])

    key, value = with_slots(key_projection, key), with_slots(value_projection, value)
    m = pairs.places // b
    is_same = pairs.query_ids[:, None] == pairs.key_ids
    begins = (pairs.places % b == 0) & members.any(1)
    own = pairs.allowed & (m[:, None] == m)
    earlier = pairs.valid[:, None] & is_same & begins & (m < m[:, None])
    start, slot = jnp.divmod(jnp.arange(len(token) * r), r)
    allowed = jnp.hstack([own, jnp.repeat(earlier, r, 1)])
    pairs = pairs.with_keys(allowed, jnp.hstack([pairs.j, start + slot]))
    return softmax.naive(query, key, value, pairs, scale=scale)


@with_naive(over_pairs(naive, per_head={"key_projection": 2, "value_projection": 2}))
@declared
def block_linformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_projection: jax.Array,
    value_projection: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""A causal variation of Linformer (after Wang et al. 2020), with a projection of each block.

    The mechanism of the paper sums over the whole sequence and cannot be causal. Here, each
    finished block of b tokens is projected to r slots, with the same matrices for all blocks:

        K'_m = E K_m,   V'_m = F V_m,   for block m, E = key_projection, F = value_projection

    A query in block m attends, in one softmax, to the tokens of its own block up to itself and to
    the slots of blocks 0 to m - 1. All slots of a block count: slots that only cover padding have
    logit 0 and value 0. Blocks of a packed document count from its start. With r = b and identity
    projections, or with one block for the whole sequence, the result is causal
    `effattn.dot_product_attention`.

    Time O(T (b + r T / b) (H + Hv)), that is O(T sqrt(r T) (H + Hv)) for b near sqrt(r T); memory
    O(T), forward and backward, in addition to the projections.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      key_projection: E, `(r, b)`, or `(K, r, b)` with one matrix for each key head; r is at most b.
      value_projection: F, as key_projection, with the same r and b.
      **options: padding, packing, scale, soft cap, sink, dropout, log-sum-exp, tiles and
        execution: see `effattn.options`. `segment_ids` are one array `(*B, T)`. Padded keys are in
        no slot, and blocks without keys have no slots.
        Dropout drops the weight of slot s of a block where exact attention would drop the weight of
        the block's token s.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check(
        "block_linformer_attention", query, key, value, is_causal=True, **options
    )
    checks.self_attention("block_linformer_attention", query, key)
    checks.known_length("block_linformer_attention", query)
    projections = check_projections(key_projection, value_projection, key.shape[-2])
    attend = _attend if given.segments is None or not query.shape[-3] else _attend_packed
    with jax.named_scope("block_linformer_attention"):
        out, lse = attend(projections, query, key, value, given)
    return attention.results(out, lse, given)


def check_projections(of_keys: Any, of_values: Any, heads: int) -> tuple[jax.Array, jax.Array]:
    """Returns the checked E and F, of the same r and b, for `heads` key heads."""
    of_keys, of_values = jnp.asarray(of_keys), jnp.asarray(of_values)
    for name, array in (("key_projection", of_keys), ("value_projection", of_values)):
        if (
            not jnp.issubdtype(array.dtype, jnp.floating)
            or array.ndim not in (2, 3)
            or array.shape[:-2] not in ((), (heads,))
            or not 1 <= array.shape[-2] <= array.shape[-1]
        ):
            raise ValueError(
                f"{name} must be floating point of shape (slots, block size) or ({heads}, slots, "
                f"block size), for {heads} key heads and no more slots than the block size, got "
                f"{array.dtype} of shape {array.shape}"
            )
    if of_keys.shape[-2:] != of_values.shape[-2:]:
        raise ValueError(
            "key_projection and value_projection must have the same number of slots and block "
            f"size, got {of_keys.shape[-2:]} and {of_values.shape[-2:]}"
        )
    return of_keys, of_values


def _attend(projections, query, key, value, given: attention.Arguments):
    """Attends to the own block and to slots of earlier blocks in one softmax."""
    parts, length = (
        sequence_parts.parts_for("block_linformer_attention", "share_keys"),
        query.shape[-3],
    )
    slots, size = projections[0].shape[-2:]
    sequence_parts.check_blocks("blocks", size, length)
    with sequence_parts.alone():
        own = folding.attend_inside(size, query, key, value, given)
    # The last block of a device is finished before the first one of the next device.
    finished = math.ceil(length / size) - (parts is None)
    if finished < 1:
        return own
    lengths = folding.fold_lengths(given.key_lengths, finished, size)
    keys, values = (
        project_blocks(projection, x[..., : finished * size, :, :], lengths, given.precision)
        for projection, x in zip(projections, (key, value), strict=True)
    )
    total, first = given.key_lengths, 0
    if parts is not None:
        keys, values = (parts.gather(x, x.ndim - 3) for x in (keys, values))
        finished, first = finished * parts.devices, parts.index * length
        total = None if total is None else parts.sum(total)
    of_slots = None
    if total is not None:
        of_slots = slots * -(-jnp.clip(total, 0, finished * size) // size)
    before = dataclasses.replace(
        given,
        is_causal=False,
        sink=None,
        query_offset=first,
        key_lengths=of_slots,
        pattern=EarlierBlocks(slots, size),
        origin=_origin_of_slots(slots, size),
    )
    with sequence_parts.alone():
        of_earlier = attention.attend(query, keys, values, before)
    return combine(*zip(own, of_earlier, strict=True))


def _attend_packed(projections, query, key, value, given: attention.Arguments):
    """Attends within documents, which are moved so that each begins a block."""
    sequence_parts.check_whole_rows("blocks")
    assert given.segments is not None
    row_ids = given.segments[0]
    slots, size = projections[0].shape[-2:]
    blocks, of_queries, of_keys = document_blocks.moved(given, size, query.shape[-3])
    query, key, value = map(blocks.gather, (query, key, value))
    own = document_blocks.attend_inside(blocks, (of_queries, of_keys), query, key, value, given)
    is_key, ids = document_blocks.main_keys(blocks, row_ids, of_keys)
    keys, values = (
        project_blocks(projection, jnp.where(is_key[..., None, None], x, 0), None, given.precision)
        for projection, x in zip(projections, (key, value), strict=True)
    )
    of_slots = fold(blocks.token, size, query.ndim - 3)[..., :1]
    of_slots = of_slots + lead(jnp.arange(slots, dtype=jnp.int32), of_slots.ndim)
    at = lax.collapse(of_slots, query.ndim - 3, query.ndim - 1)
    of_earlier = document_blocks.attend_slots(
        blocks,
        (of_queries, jnp.repeat(ids, slots, -1)),
        query,
        keys,
        values,
        given,
        at,
        document_blocks.earlier(blocks),
    )
    out, lse = combine(*zip(own, of_earlier, strict=True))
    return blocks.gather_back(out), blocks.gather_back(lse)


def project_blocks(projection, array, lengths, precision):
    """Projects `(*B, M b, K, H)` to `(*B, M r, K, H)`; `lengths (*B, M)` are valid tokens."""
    axis = array.ndim - 3
    folded = fold(array, projection.shape[-1], axis)
    slots = project(projection, folded, lengths, precision)
    return unfold(slots, slots.shape[axis] * slots.shape[axis + 1], axis)


@dataclasses.dataclass(frozen=True)
class EarlierBlocks:
    """Pattern of pairs of a token and a slot of an earlier block.

    Attributes:
      slots: slots of a block.
      size: tokens of a block.
    """

    slots: int
    size: int

    def allows(self, i, j, h):
        """Returns whether token i may attend to slot j."""
        return j // self.slots < i // self.size

    def layout(self, T, S, *, tile, offset=0, key_heads=None):
        """Returns the tiles with allowed pairs, as `effattn.patterns.Pattern.layout`."""
        first = offset + np.arange(0, T, tile[0])[:, None]
        last = np.minimum(first + tile[0], offset + T) - 1
        seen_by_all, seen = (self.slots * (token // self.size) for token in (first, last))
        start = np.arange(0, S, tile[1])
        stop = np.minimum(start + tile[1], S)
        return BlockLayout.from_block_mask(
            start < seen, full=stop <= seen_by_all, tile=tile, lengths=(T, S)
        )


@functools.cache
def _origin_of_slots(slots: int, size: int):
    """Returns an origin that gives slot s of a block the position of token s of the block."""
    return lambda b, h, i, j: (b, h, i, j // slots * size + j % slots)


def _means_in_blocks(length: int, num_projected: int = 8) -> Mapping[str, Any]:
    block_size = num_projected * math.ceil(math.isqrt(length * num_projected) / num_projected)
    return mean_pooling(block_size, num_projected)


registry.register(
    registry.Mechanism(
        name="block_linformer",
        family="low rank",
        paper="a causal variation of Wang et al. 2020, Linformer",
        function=block_linformer_attention,
        capabilities=frozenset({"causal"}),
        options_at=_means_in_blocks,
        builder="effattn.nn.block_linformer:BlockLinformerSelfAttention",
        decoder="effattn.decode.block_linformer:BlockLinformerDecoder",
        complexity="O(N (b + N r / b)), O(N sqrt(N r)) at best",
        time_exponent=1.5,
    )
)
