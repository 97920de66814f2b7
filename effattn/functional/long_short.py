"""Long-short attention: a window of tokens and dynamic low-rank projections, in one softmax."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import fold, lead, shifted, unfold
from effattn.arrays.combine import combine
from effattn.arrays.norms import layer_norm
from effattn.arrays.segments import positions_from, positions_from_segment_ids, valid, within
from effattn.cores import attention, document_blocks, document_slots, folding
from effattn.functional import softmax
from effattn.functional.block_linformer import EarlierBlocks
from effattn.naive import masked_softmax, over_pairs, projected, with_naive
from effattn.options import Direction, Packing, Sink, Softmax, Tile, declared

Norm = tuple[jax.Array, jax.Array]


class Options(Direction, Packing, Sink, Tile, Softmax, total=False):
    """The shared options of `long_short_attention`."""


def naive(
    query,
    key,
    value,
    pairs,
    *,
    scale,
    window_size,
    segment_size,
    projection=None,
    slot_scores=None,
    window_norm=None,
    slot_norm=None,
):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, projection `(H, r)`.

    slot_scores are `(T, r)`; each norm is scale and bias, `(2, H)`. Returns output and log-sum-exp.
    In packed rows, segments count from the start of the document.
    """
    i, j, w, length = pairs.i[:, None], pairs.j, window_size, len(key)
    size = segment_size or jnp.where(pairs.is_causal, w, length)
    m = pairs.places // size
    is_same = pairs.query_ids[:, None] == pairs.key_ids
    # The tokens of the segment that each token begins, (T, T).
    begins = pairs.places % size == 0
    members = pairs.present & is_same & (m == m[:, None]) & begins[:, None]

    scores = projected(key, projection) if slot_scores is None else slot_scores
    p = masked_softmax(scores.T, members[:, None])  # (T, r, T)

    def with_slots(x):
        slots = (p @ x).reshape(length * p.shape[1], x.shape[1]).astype(x.dtype)
        return jnp.concatenate([_layer_norm(x, window_norm), _layer_norm(slots, slot_norm)])

    start, place = (pairs.places // w * w)[:, None], pairs.places
    around = (start - w // 2 <= place) & (place < start + w + w // 2)
    near = pairs.allowed & jnp.where(pairs.is_causal, i - j < w, around)
    finished = jnp.logical_not(pairs.is_causal) | (m < m[:, None])
    seen = pairs.valid[:, None] & is_same & finished & members.any(1)
    seen = jnp.repeat(seen, p.shape[1], 1)
    of_slots = (j // size)[:, None] * p.shape[1] + jnp.arange(p.shape[1])
    at = jnp.hstack([j, length + of_slots.ravel()])
    pairs = pairs.with_keys(jnp.hstack([near, seen]), at)
    return softmax.naive(query, with_slots(key), with_slots(value), pairs, scale=scale)


def _layer_norm(x, norm):
    """Layer norm of each row, by scale and bias `(2, H)`."""
    if norm is None:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - wide.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (centred / deviation * norm[0] + norm[1]).astype(x.dtype)


def _for_one_head(key, slot_scores, window_norm, slot_norm, **_):
    """The scores `(*B, T, K, r)` in at least float32, and each norm as `(K, 2, H)`."""
    norms = {"window_norm": window_norm, "slot_norm": slot_norm}
    arrays = {name: jnp.stack(norm, 1) for name, norm in norms.items() if norm is not None}
    if slot_scores is not None:
        dtype = jnp.promote_types(jnp.result_type(key, slot_scores), jnp.float32)
        shape = (*key.shape[:-1], jnp.shape(slot_scores)[-1])
        arrays["slot_scores"] = jnp.broadcast_to(jnp.asarray(slot_scores, dtype), shape)
    return arrays


@with_naive(
    over_pairs(
        naive,
        per_token=("slot_scores",),
        per_head={"projection": 2, "window_norm": 2, "slot_norm": 2},
        derived=_for_one_head,
    )
)
@declared
def long_short_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window_size: int,
    segment_size: int | None = None,
    projection: jax.Array | None = None,
    slot_scores: jax.Array | None = None,
    window_norm: Norm | None = None,
    slot_norm: Norm | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Long-short attention (Zhu et al. 2021, "Long-Short Transformer").

    Tokens are projected to r slots, by weights that are a softmax of scores Z over the tokens:

        P = softmax_tokens(Z),   K' = P^T K,   V' = P^T V,   Z = K W for W = projection

    A query attends, in one softmax, to the tokens of its window and to slots:

        bidirectional   the tokens of its block of w tokens and w/2 more on each side of the block;
                        the r slots of the whole sequence, or of each segment of l tokens
        causal          the last w tokens, including itself;
                        the r slots of each finished segment of l tokens before its own

    Blocks and segments of a packed document count from its start. Tokens in the window are also in
    slots. In the paper, Z is a separate projection of the tokens, not of the keys: that is
    `slot_scores`, which `effattn.nn.LongShortSelfAttention` computes. The DualLN of the paper is
    two layer norms, shared by keys and values and here over the features of a head: `window_norm`
    for tokens in windows, and `slot_norm` for slots.

    Time O(T (w + r) (H + Hv)) with one segment and O(T (w + r T / l) (H + Hv)) with more: causal,
    O(T sqrt(r T)) for w and l near sqrt(r T). Memory O(T r), forward and backward; in packed rows
    also one boolean for each pair of segments.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      window_size: w, in tokens, 1 or more; w/2 is rounded down.
      segment_size: l, in tokens; default w if causal, else the whole sequence.
      projection: W, `(H, r)`, or `(K, H, r)` with one matrix for each key head.
      slot_scores: Z, broadcastable to `(*B, T, K, r)`; given instead of `projection`.
      window_norm: scale and bias of a layer norm, `(K, H)` each, with Hv == H; None for none.
      slot_norm: scale and bias of the layer norm of slots, likewise.
      **options: direction, padding, packing, scale, soft cap, sink, dropout, log-sum-exp, tiles
        and execution: see `effattn.options`. Padded keys are in no slot; without keys there are no
        slots. For dropout, slots count as further tokens. `segment_ids` are one array `(*B, T)`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check("long_short_attention", query, key, value, **options)
    checks.self_attention("long_short_attention", query, key)
    checks.known_length("long_short_attention", query)
    if segment_size is None:
        segment_size = window_size if given.is_causal else max(key.shape[-3], 1)
    settings = Settings.of(window_size, segment_size, window_norm, slot_norm, key, value)
    with jax.named_scope("long_short_attention"):
        out, lse = _attend(settings, projection, slot_scores, query, key, value, given)
    return attention.results(out, lse, given)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked window size, segment size and layer norms."""

    window: int
    segment: int
    window_norm: Norm | None
    slot_norm: Norm | None

    @classmethod
    def of(cls, window_size: Any, segment_size: Any, window_norm, slot_norm, key, value):
        """Checks the arguments for the given keys and values."""
        window = checks.at_least("window_size", window_size, 1, "tokens")
        segment = checks.at_least("segment_size", segment_size, 1, "tokens")
        norms = []
        for name, norm in (("window_norm", window_norm), ("slot_norm", slot_norm)):
            if norm is not None:
                if not isinstance(norm, tuple) or len(norm) != 2:
                    raise ValueError(f"{name} must be a pair (scale, bias), got {norm!r}")
                if key.shape[-1] != value.shape[-1]:
                    raise ValueError(
                        f"{name} needs keys and values of the same head size, got {key.shape[-1]} "
                        f"in key and {value.shape[-1]} in value; leave {name} out"
                    )
                norm = tuple(checks.shaped(name, part, key.shape[-2:]) for part in norm)
            norms.append(norm)
        return cls(window, segment, *norms)


def scores_of(projection: Any, slot_scores: Any, key: jax.Array, precision: Any) -> jax.Array:
    """Returns the scores Z `(*B, S, K, r)`, given or by the projection, after checks.

    By the projection, they are at least float32.
    """
    if (projection is None) == (slot_scores is None):
        raise ValueError(
            "long_short_attention needs one of projection and slot_scores, got "
            f"{'neither' if projection is None else 'both'}"
        )
    if slot_scores is not None:
        return _check_scores(slot_scores, key)
    key, projection = dtypes.alike(key, _check_projection(projection, key))
    return jnp.einsum(
        "...skh,hr->...skr" if projection.ndim == 2 else "...skh,khr->...skr",
        key,
        projection,
        precision=precision,
        preferred_element_type=dtypes.wide(key, projection),
    )


def _check_projection(projection: Any, key: jax.Array) -> jax.Array:
    """Returns the checked projection, `(H, r)` or `(K, H, r)`."""
    projection = jnp.asarray(projection)
    heads, size = key.shape[-2:]
    if (
        not jnp.issubdtype(projection.dtype, jnp.floating)
        or projection.ndim not in (2, 3)
        or projection.shape[:-1] not in ((size,), (heads, size))
        or projection.shape[-1] < 1
    ):
        raise ValueError(
            f"projection must be floating point of shape ({size}, slots) or ({heads}, {size}, "
            f"slots), got {projection.dtype} of shape {projection.shape}"
        )
    return projection


def _check_scores(scores: Any, key: jax.Array) -> jax.Array:
    """Returns the checked scores, broadcast to `(*B, T, K, r)`."""
    scores = jnp.asarray(scores)
    slots = scores.shape[-1] if scores.ndim else 0
    if slots < 1 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            "slot_scores must be floating point of shape (..., slots) with 1 or more slots, got "
            f"{scores.dtype} of shape {scores.shape}"
        )
    shape = (*key.shape[:-1], slots)
    return jnp.broadcast_to(
        checks.broadcastable("slot_scores", scores, shape, "(*B, T, K, r)"), shape
    )


def _attend(settings: Settings, projection, scores, query, key, value, given: attention.Arguments):
    """Attends to the window and to the slots in one softmax."""
    batch, length = key.shape[:-3], key.shape[-3]
    lengths = jnp.full(batch, length) if given.key_lengths is None else given.key_lengths
    present = within(lengths, length)
    if given.segments is not None:
        present &= given.segments[1] != 0
    key, value = (jnp.where(present[..., None, None], x, 0) for x in (key, value))
    scores = scores_of(projection, scores, key, given.precision)
    keys, values = (normalise(x, settings.window_norm) for x in (key, value))
    if given.segments is None or given.is_causal or not length:
        window = _attend_windows(settings.window, query, keys, values, given)
    else:
        window = _attend_windows_of_documents(settings.window, query, keys, values, given)

    slots, size, axis = scores.shape[-1], settings.segment, len(batch)
    segments = math.ceil(length / size) - given.is_causal
    if segments < 1:
        return window
    if given.segments is not None:
        arrays = scores, query, key, value
        parts = [window]
        if not given.is_causal:
            parts.append(_attend_slots_of_segments(settings, *arrays, given, present))
        if size < length:
            parts.append(_attend_slots_of_documents(settings, *arrays, given))
        return combine(*zip(*parts, strict=True))

    def in_segments(array):
        cut = jax.lax.slice_in_dim(array, 0, min(segments * size, length), axis=axis)
        return fold(cut, size, axis)

    scores, key, value, present = map(in_segments, (scores, key, value, present))
    of_segments = project(scores, key, value, present, given.precision)
    keys, values = (
        normalise(unfold(x, segments * slots, axis), settings.slot_norm) for x in of_segments
    )
    to_slots = dataclasses.replace(
        given,
        sink=None,
        is_causal=False,
        pattern=EarlierBlocks(slots, size) if given.is_causal else None,
        origin=_origin_of_slots(length),
    )
    if given.key_lengths is not None:
        of_example = slots * present.any(-1).sum(-1)
        to_slots = dataclasses.replace(to_slots, key_lengths=of_example)
    return combine(*zip(window, attention.attend(query, keys, values, to_slots), strict=True))


def _attend_slots_of_documents(settings, scores, query, key, value, given: attention.Arguments):
    """Attends to the slots of other segments of the document; if causal, of finished ones."""
    assert given.segments is not None
    slots, size, axis = scores.shape[-1], settings.segment, query.ndim - 3
    length, row_ids = query.shape[-3], given.segments[0]
    blocks, of_queries, of_keys = document_blocks.moved(given, size, length)
    query, key, value, scores = map(blocks.gather, (query, key, value, scores))
    in_blocks = functools.partial(fold, size=size, axis=axis)
    is_key, ids = document_blocks.main_keys(blocks, row_ids, of_keys)
    projected = project(
        in_blocks(scores), in_blocks(key), in_blocks(value), in_blocks(is_key), given.precision
    )
    count = blocks.first.shape[-1]
    keys, values = (
        normalise(unfold(x, count * slots, axis), settings.slot_norm) for x in projected
    )
    at = length + (in_blocks(blocks.token)[..., :1] // size) * slots
    at = (at + lead(jnp.arange(slots, dtype=jnp.int32), at.ndim)).reshape(*ids.shape[:-1], -1)
    is_pair: Any = document_blocks.earlier(blocks)
    if not given.is_causal:
        is_other = jnp.asarray(is_pair | is_pair.T)
        is_pair = document_blocks.same_document(blocks) & lead(is_other, axis + 3)
    of_slots = document_blocks.attend_slots(
        blocks,
        (of_queries, jnp.repeat(ids, slots, -1)),
        query,
        keys,
        values,
        given,
        at,
        is_pair,
    )
    return tuple(map(blocks.gather_back, of_slots))


def _attend_slots_of_segments(settings, scores, query, key, value, given, present):
    """Attends to the slots of the own segment of each token."""
    ids, size, slots = given.segments[0], settings.segment, scores.shape[-1]
    place = positions_from_segment_ids(ids)
    token = lead(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.ndim)
    begin = token - place % size  # the first token of the segment
    weights = document_slots.softmax_over_documents(scores, begin, present)
    query, key, value = attention.without_padding(query, key, value, given)
    out, lse = document_slots.attend(
        (weights, weights),
        begin,
        present,
        query,
        key,
        value,
        given,
        ids.shape[-1] + begin // size * slots,
        functools.partial(normalise, norm=settings.slot_norm),
    )
    return attention.clear_rows(out, lse, valid(given.query_lengths, ids, ids.shape[-1]))


def _attend_windows_of_documents(size: int, query, key, value, given: attention.Arguments):
    """Attends within documents to the own block of `size` tokens and half of those beside it."""
    axis = query.ndim - 3
    blocks, of_queries, of_keys = document_blocks.moved(given, size, query.shape[-3])
    query, key, value = map(blocks.gather, (query, key, value))
    around = functools.partial(_with_sides, size=size, axis=axis)
    in_blocks = functools.partial(fold, size=size, axis=axis)
    folded = dataclasses.replace(
        given,
        query_lengths=None,
        key_lengths=None,
        segments=(in_blocks(of_queries), around(of_keys)),
        positions=(in_blocks(blocks.token), around(blocks.token)) if given.dropout_rate else None,
        origin=folding.example_of_blocks(blocks.first.shape[-1]),
    )
    found = attention.attend(in_blocks(query), around(key), around(value), folded)
    places = blocks.token.shape[-1]
    return tuple(blocks.gather_back(unfold(x, places, axis)) for x in found)


def _attend_windows(size: int, query, key, value, given: attention.Arguments):
    """Attends to the last tokens if causal; else in blocks, which become a batch axis."""
    length, axis = query.shape[-3], query.ndim - 3
    if given.is_causal or length == 0:
        given = dataclasses.replace(given, window=(size - 1, 0))
        return attention.attend(query, key, value, given)
    half, blocks = size // 2, math.ceil(length / size)

    start = size * jnp.arange(blocks) - half
    at = lead(positions_from(start, half + size + half), axis + 2)
    end = length if given.key_lengths is None else given.key_lengths[..., None, None]
    folded = dataclasses.replace(
        given,
        query_lengths=folding.fold_lengths(given.query_lengths, blocks, size),
        key_lengths=None,
        mask=jnp.asarray((at >= 0) & (at < end))[..., None, None, :],
        origin=_origin_of_blocks(blocks, size),
    )
    query = fold(query, size, axis)
    out, lse = attention.attend(
        query, _with_sides(key, size, axis), _with_sides(value, size, axis), folded
    )
    return unfold(out, length, axis), unfold(lse, length, axis)


def _with_sides(array: jax.Array, size: int, axis: int) -> jax.Array:
    """`(*B, L, ...)` to `(*B, blocks, half + size + half, ...)`, zeros past the ends."""
    half = size // 2
    own = fold(array, size, axis)
    before = jax.lax.slice_in_dim(own, size - half, size, axis=axis + 1)
    after = jax.lax.slice_in_dim(own, 0, half, axis=axis + 1)
    return jnp.concatenate([shifted(before, 1, axis), own, shifted(after, -1, axis)], axis + 1)


@functools.cache
def _origin_of_blocks(blocks: int, size: int):
    def origin(b, h, i, j):
        start = b % blocks * size
        return b // blocks, h, start + i, start - size // 2 + j

    return origin


def project(scores, key, value, present, precision) -> tuple[jax.Array, jax.Array]:
    """Projects tokens `(*B, S, ...)` that are `present (*B, S)` to slots `(*B, r, K, H)`."""
    present = present[..., None, None]
    dtype = dtypes.wide(scores, key, value)
    # A finite fill value keeps the softmax finite if no token is present.
    scores = jnp.where(present, scores.astype(dtype), jnp.finfo(dtype).min)
    weights = jnp.where(present, jax.nn.softmax(scores, -3), 0)
    keys, values = (
        jnp.einsum("...skr,...skh->...rkh", *dtypes.alike(weights, x), precision=precision).astype(
            x.dtype
        )
        for x in (key, value)
    )
    return keys, values


def normalise(x: jax.Array, norm: Norm | None) -> jax.Array:
    """Layer norm over the last axis, computed in at least float32."""
    if norm is None:
        return x
    scale, bias = (lead(jnp.asarray(part), x.ndim) for part in norm)
    return (layer_norm(x, 1e-5) * scale + bias).astype(x.dtype)


@functools.cache
def _origin_of_slots(length: int):
    """Returns an origin that puts slots at positions after the last token."""
    return lambda b, h, i, j: (b, h, i, length + j)


def _strided(length: int, num_projected: int = 16) -> Mapping[str, Any]:
    """Options with slots that mostly read every r-th token, and segments longer than windows."""
    of_tokens = 4 * np.eye(num_projected, dtype=np.float32)[np.arange(length) % num_projected]
    segment = math.isqrt(length * num_projected)
    return {
        "window_size": max(segment // 8, 1),
        "segment_size": segment,
        "slot_scores": of_tokens[:, None],
    }


registry.register(
    registry.Mechanism(
        name="long_short",
        family="low rank",
        paper="Zhu et al. 2021, Long-Short Transformer: Efficient Transformers for Language and "
        "Vision",
        function=long_short_attention,
        options={"window_size": 64},
        options_at=_strided,
        builder="effattn.nn.long_short:LongShortSelfAttention",
        decoder="effattn.decode.long_short:LongShortDecoder",
        complexity="O(N (w + r)), causal O(N (w + N r / l)), O(N sqrt(N r)) at best",
        time_exponent=1.5,
    )
)
