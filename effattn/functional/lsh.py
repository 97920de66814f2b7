"""Locality-sensitive hashing (LSH) attention: tokens attend within hash buckets."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes, reverse_mode
from effattn.arrays.axes import lead
from effattn.arrays.products import widened
from effattn.arrays.segments import positions_from, positions_from_segment_ids, within
from effattn.naive import dot, over_pairs, with_naive

# Logit of a token for itself, used only if the token attends to nothing else.
SELF_LOGIT = -1e5
# Minimum tokens of a head whose logits are in memory at a time.
_TOKENS_AT_A_TIME = 1024


def naive(query_key, value, pairs, *, rotations, num_buckets, chunk_length):
    """One head: query_key `(T, H)`, value `(T, Hv)`, rotations `(n, H, columns)`.

    `num_buckets` are the factors of b. Returns output and log-sum-exp.
    """
    t, wide = jnp.arange(len(value)), query_key.astype(rotations.dtype)
    seen = False
    for rotation in rotations:
        seen = seen | _seen(_bucket(wide, rotation, num_buckets), pairs, chunk_length)
    itself = t[:, None] == t
    pairs = pairs.where(pairs.present[:, None])  # a padded key is no query
    seen = pairs.allowed & seen & ~itself
    alone = itself & ~seen.any(1, keepdims=True)

    key = wide / jnp.sqrt((wide**2).sum(1, keepdims=True) + 1e-6 * wide.shape[1])
    logits = jnp.where(alone, -1e5, dot(query_key, key.astype(query_key.dtype).T))
    weights, lse = pairs.where(seen | alone).softmax(logits)
    return dot(weights, value), lse


def _bucket(query_key, rotation, factors):
    """The bucket of each token, int `(T,)`; the hash by each factor is one digit."""
    bucket, digit = jnp.zeros(len(query_key), int), 1
    for factor in factors:
        columns, rotation = rotation[:, : factor // 2], rotation[:, factor // 2 :]
        rotated = jnp.matmul(query_key, columns, precision="highest")
        bucket += digit * jnp.concatenate([rotated, -rotated], 1).argmax(1)
        digit *= factor
    return bucket


def _seen(bucket, pairs, m):
    """Bool `(T, T)`: the keys that each query sees in one round."""
    t, of = jnp.arange(len(bucket)), pairs.key_ids
    document = pairs.present & (of[:, None] == of)
    same = bucket[:, None] == bucket
    is_before = (bucket < bucket[:, None]) | (same & (t < t[:, None]))
    place = (document & is_before).sum(1)  # of each token in its sorted document
    last = same & (place[:, None] - place <= m)
    chunk, chunks = place // m, -(-document.sum(1) // m)
    before = (chunk - 1) % jnp.maximum(chunks, 1)
    near = (chunk[:, None] == chunk) | (before[:, None] == chunk)
    return jnp.where(pairs.is_causal, last, near)


def _rotations_and_factors(query_key, *, num_rounds, num_buckets, rng, rotations, **_):
    """The rotations, drawn if the caller gives none, and the factors of the number of buckets."""
    dtype = jnp.promote_types(query_key.dtype, jnp.float32)
    if rng is not None:
        heads, size = query_key.shape[-2:]
        rotations = lsh_rotations(rng, num_rounds, num_buckets, size, num_heads=heads, dtype=dtype)
    return {"rotations": rotations.astype(dtype), "num_buckets": factors_of(num_buckets)}


@with_naive(over_pairs(naive, per_head={"rotations": 3}, derived=_rotations_and_factors, queries=0))
@checks.checked
def lsh_attention(
    query_key: jax.Array,
    value: jax.Array,
    *,
    num_rounds: int,
    num_buckets: int | tuple[int, ...],
    chunk_length: int,
    rng: jax.Array | None = None,
    rotations: jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_residual: bool = False,
) -> Any:
    r"""LSH attention (Kitaev, Kaiser and Levskaya 2020, "Reformer: The Efficient Transformer").

    Keys are the normalised queries. In each of n rounds, a token gets one of b buckets,

        k_j = q_j / sqrt(|q_j|^2 + 1e-6 H),    bucket_r(j) = argmax [q_j R_r ; -q_j R_r],

    by a random rotation R_r of b / 2 columns. Token i attends to P_i = P_i^1 u ... u P_i^n,

        out_i = sum_{j in P_i} exp(q_i . k_j - L_i) v_j,    L_i = log sum_{j in P_i} exp(q_i . k_j).

    The rounds are computed one by one and combined by their log-sum-exps. As in the paper, the
    weight of a pair that occurs in several rounds is divided by the number of these rounds. A token
    attends to itself only if P_i is empty otherwise; then L_i is -1e5.

    Bidirectional calls use the sets of the paper: tokens are sorted by bucket and then by time and
    cut in chunks of m; a token attends to its own chunk and the chunk before it; the first chunk
    attends to the last, as in the code of the authors. The causal form of the paper masks these
    chunks. Chunk borders depend on later tokens, so the future would change what a token attends
    to. Here, in causal calls, P_i^r holds the last m tokens before i in the same bucket.

    Hashing to b buckets costs b / 2 products a token. If b is a product of even factors, each
    factor has its own rotation, and the bucket is the number whose digits are the hashes; the first
    factor is the lowest digit. The cost is then half the sum of the factors.

    Time O(T log T + n T m (H + Hv)), memory O(T (m + H + Hv)), forward and backward.

    Args:
      query_key: `(*B, T, N, H)`, any number of batch dimensions, also none.
      value: `(*B, T, N, Hv)`.
      num_rounds: n, 1 or more.
      num_buckets: b, 1 or an even int, at most T. A multiple of 4 is split in the two even factors
        nearest to its square root; a tuple gives the even factors.
      chunk_length: m, 1 or more tokens.
      rng: a `jax.random` key; `effattn.lsh_rotations` draws the rotations with this key.
      rotations: given instead of `rng`, floating point `(N, n, H, sum of the factors / 2)`.
      is_causal: attend to earlier tokens only.
      query_seq_lengths: int `(*B)`, valid queries; the other rows give zeros.
      key_value_seq_lengths: int `(*B)`, valid tokens; the other tokens are padding, as keys and as
        queries, and are in no bucket.
      segment_ids: int `(*B, T)`; tokens attend within a contiguous run of equal ids; documents are
        sorted and cut separately; 0 is padding.
      return_residual: also return the log-sum-exp.
      implementation: None, "xla" or "naive".

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf in the padding.

    Raises:
      ValueError: wrong shapes, dtypes or values; `rng` and `rotations` both or neither.
      TypeError: in forward-mode differentiation.
    """
    query_key, value = jnp.asarray(query_key), jnp.asarray(value)
    batch = checks.query_key_value(query_key, query_key, value)
    checks.known_length("lsh_attention", query_key)
    length, heads, size = query_key.shape[-3:]
    rounds = checks.at_least("num_rounds", num_rounds, 1)
    factors = factors_of(num_buckets)
    if (buckets := math.prod(factors)) > max(length, 1):
        raise ValueError(
            f"num_buckets must be at most the {length} tokens, got {buckets}; pass fewer, so that "
            "tokens share buckets"
        )
    if (rng is None) == (rotations is None):
        raise ValueError(
            "lsh_attention needs rng, a jax.random key to draw rotations with, or rotations, got "
            f"{'neither' if rng is None else 'both'}"
        )
    if rng is not None:
        wide = dtypes.wide(query_key.dtype)
        rotations = lsh_rotations(rng, rounds, num_buckets, size, num_heads=heads, dtype=wide)
    if checks.is_pair(segment_ids, (*batch, length)):
        raise ValueError("segment_ids must be one array, as queries are the keys; got a pair")
    segments = checks.segment_ids(segment_ids, batch, length, length)
    shape = (heads, rounds, size, sum(factors) // 2)
    out, lse = attend(
        query_key,
        value,
        hashed(query_key, checks.shaped("rotations", rotations, shape), factors),
        chunk_length=checks.at_least("chunk_length", chunk_length, 1, "tokens"),
        is_causal=is_causal,
        query_lengths=checks.lengths("query_seq_lengths", query_seq_lengths, batch),
        lengths=checks.lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        segment_ids=None if segments is None else segments[0],
    )
    return (out, dtypes.logarithms(lse)) if return_residual else out


@checks.checked
def lsh_rotations(
    rng: jax.Array,
    num_rounds: int,
    num_buckets: int | tuple[int, ...],
    head_dim: int,
    *,
    num_heads: int = 1,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Draws random rotations for `effattn.lsh_attention`.

    Args:
      rng: a `jax.random` key.
      num_rounds: n, as in `effattn.lsh_attention`.
      num_buckets: b, as in `effattn.lsh_attention`.
      head_dim: H, the size of queries and keys.
      num_heads: N; each head has its own rotations.
      dtype: floating point.

    Returns:
      `(num_heads, num_rounds, head_dim, sum of the factors of num_buckets / 2)`, standard normal.

    Raises:
      ValueError: an odd number of buckets other than 1, or another size out of its range.
    """
    rng, dtype = checks.key("rng", rng), checks.dtype("dtype", dtype)
    num_rounds = checks.at_least("num_rounds", num_rounds, 1)
    head_dim = checks.at_least("head_dim", head_dim, 1, "features")
    num_heads = checks.at_least("num_heads", num_heads, 1)
    columns = sum(factors_of(num_buckets)) // 2
    return jax.random.normal(rng, (num_heads, num_rounds, head_dim, columns), dtype)


def factors_of(num_buckets: Any) -> tuple[int, ...]:
    """Returns the even factors of the number of buckets; `()` for one bucket."""
    given = num_buckets if isinstance(num_buckets, tuple | list) else (num_buckets,)
    if given == (1,):
        return ()
    if not given or not all(checks.is_integer(b) and b > 0 and b % 2 == 0 for b in given):
        raise ValueError(
            "num_buckets must be 1, an even int or a tuple of even ints, as a rotation makes two "
            f"buckets of each column; got {num_buckets!r}"
        )
    if isinstance(num_buckets, tuple | list) or num_buckets % 4:
        return tuple(int(b) for b in given)
    half = num_buckets // 4
    small = max(d for d in range(1, math.isqrt(half) + 1) if half % d == 0)
    return 2 * small, 2 * (half // small)


def attend(
    query_key: jax.Array,
    value: jax.Array,
    buckets: jax.Array,
    *,
    chunk_length: int,
    is_causal: bool,
    query_lengths: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns output `(*B, T, N, Hv)` and log-sum-exp `(*B, T, N)`; buckets are `(*B, T, N, n)`."""
    batch, length = query_key.shape[:-3], query_key.shape[-3]
    wide = dtypes.wide(query_key.dtype)
    if math.prod((*batch, length)) == 0:
        return jnp.zeros(value.shape, value.dtype), jnp.zeros(query_key.shape[:-1], wide)
    documents = None
    if lengths is not None or segment_ids is not None:
        documents = _documents(batch, length, lengths, segment_ids)
        valid = (documents < length)[..., None, None]
        query_key, value = jnp.where(valid, query_key, 0), jnp.where(valid, value, 0)
    head = functools.partial(
        _attend_head,
        chunk_length=min(chunk_length, length),
        is_causal=is_causal,
        is_packed=segment_ids is not None,
    )
    # Map over heads, then over batch dimensions.
    head = jax.vmap(head, (-2, -2, -2, None), (-2, -1))
    for _ in batch:
        head = jax.vmap(head)
    with jax.named_scope("lsh_attention"), reverse_mode.only("LSH attention", "a dense form of it"):
        out, lse = head(query_key, value, buckets, documents)
    if query_lengths is not None:
        present = within(query_lengths, length)
        out = jnp.where(present[..., None, None], out, 0)
        lse = jnp.where(present[..., None], lse, dtypes.lowest(lse.dtype))
    return out, lse


def attend_at(
    query_key: jax.Array,
    value: jax.Array,
    buckets: jax.Array,
    query: jax.Array,
    positions: jax.Array,
    *,
    chunk_length: int,
) -> jax.Array:
    """Returns the causal output `(B, T, N, Hv)` of queries `(B, T, N, H)` at `positions (B, T)`.

    Computes all T x S pairs, so it is for few queries; keys and values are `(B, S, N, ...)`.
    """

    @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, 0))
    @functools.partial(jax.vmap, in_axes=(-2, -2, -2, -2, None), out_axes=-2)
    def head(query_key, value, buckets, query, positions):
        past = within(positions, query_key.shape[0])
        sees = jnp.zeros(past.shape, bool)
        for of_round in buckets.T:
            same = past & (of_round[None] == of_round[positions][:, None])
            # The sum counts the tokens of the bucket from each key to the query.
            sees |= same & (
                lax.cumsum(same.astype(jnp.int32), axis=1, reverse=True) <= chunk_length
            )
        out, lse = _softmax(query, keys(query_key), value, sees)
        return or_itself(out, lse, value[positions])[0]

    positions = jnp.minimum(positions, query_key.shape[1] - 1)
    return head(query_key, value, buckets, query, positions)


def hashed(query_key: jax.Array, rotations: jax.Array, factors: tuple[int, ...]) -> jax.Array:
    """Hashes `(*B, T, N, H)` by rotations `(N, n, H, columns)` to int32 `(*B, T, N, n)`."""
    wide = dtypes.wide(query_key.dtype)
    tokens = lax.stop_gradient(query_key).astype(wide)
    rotations = lax.stop_gradient(rotations).astype(wide)
    rotated = jnp.einsum("...nh,nrhc->...nrc", tokens, rotations, precision="highest")
    buckets = jnp.zeros(rotated.shape[:-1], jnp.int32)
    start, digit = 0, 1
    for factor in factors:
        part = rotated[..., start : start + factor // 2]
        both = jnp.concatenate([part, -part], -1)
        buckets = buckets + digit * jnp.argmax(both, -1).astype(jnp.int32)
        start, digit = start + factor // 2, digit * factor
    return buckets


def keys(query_key: jax.Array) -> jax.Array:
    """Returns queries scaled to length 1; zero queries and their gradients stay finite."""
    wide = query_key.astype(dtypes.wide(query_key.dtype))
    size = query_key.shape[-1]
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * size**-0.5
    return (wide * inverse).astype(query_key.dtype)


def or_itself(out, lse, value, valid=None):
    """Replaces the output of tokens that attend to nothing by their own values.

    Takes `out (T, Hv)`, `lse (T,)` and the values; returns the new `out` and `lse`.
    """
    alone = lse == dtypes.lowest(lse.dtype)
    if valid is not None:
        alone = alone & valid
    out = jnp.where(alone[..., None], value.astype(out.dtype), out)
    return out.astype(value.dtype), jnp.where(alone, SELF_LOGIT, lse)


def _documents(batch, length, lengths, segment_ids) -> jax.Array:
    """Returns the start of the document of each token, int32 `(*B, T)`; T in the padding."""
    time = jnp.arange(length, dtype=jnp.int32)
    start = jnp.zeros((*batch, length), jnp.int32)
    valid = jnp.ones((*batch, length), bool)
    if segment_ids is not None:
        start = lead(time, segment_ids.ndim) - positions_from_segment_ids(segment_ids)
        valid = segment_ids != 0
    if lengths is not None:
        valid = valid & within(lengths, length)
    return jnp.where(valid, start, length)


# One head: T tokens, n rounds, tiles of m sorted places.


class _Sorted(NamedTuple):
    """Tokens sorted by document, then by bucket, then by time.

    Attributes:
      order: `(n, T)`, the token at each place.
      place: `(n, T)`, the place of each token.
      sees: pair of `(n, T)`, the keys of each query: if causal, first <= place < second; else
        the two chunks that start at these places.
      is_at: `(n, T)`, the place of each key if causal, else the start of its chunk; -1 for padding.
    """

    order: jax.Array
    place: jax.Array
    sees: tuple[jax.Array, jax.Array]
    is_at: jax.Array


class _Spans(NamedTuple):
    """Start and end of the document at each sorted place; `(T,)` each."""

    start: jax.Array
    end: jax.Array


def _attend_head(query, value, buckets, documents, *, chunk_length, is_causal, is_packed):
    """Returns output `(T, Hv)` and log-sum-exp `(T,)` of one head, `(T, H)` and `(T, Hv)`."""
    length = query.shape[0]
    sorted_, spans = _sort(buckets.T, documents, chunk_length, is_causal)
    if is_causal:
        runs = _runs_causal(length, chunk_length)
    elif is_packed:
        runs = _runs_packed(spans, length, chunk_length)
    else:
        runs = _runs(spans, length, chunk_length)
    key = keys(query)

    @jax.checkpoint
    def attend_round(query, key, value, each):
        return _attend_round(query, key, value, sorted_, runs, each, is_causal)

    def step(_, each):
        return None, attend_round(query, key, value, each)

    own = sorted_.order, sorted_.place, sorted_.sees, sorted_.is_at
    _, (outs, lses) = lax.scan(step, None, own)
    largest = lax.stop_gradient(lses.max(0))
    lowest = dtypes.lowest(lses.dtype)
    weights = jnp.exp(lses - jnp.where(largest == lowest, 0, largest)[None])
    total = weights.sum(0)
    total_or_one = jnp.where(total == 0, 1, total)
    out = (weights[..., None] * outs).sum(0) / total_or_one[:, None]
    lse = jnp.where(total == 0, lowest, largest + jnp.log(total_or_one))
    return or_itself(out, lse, value, None if documents is None else documents < length)


def _sort(buckets, documents, size, is_causal) -> tuple[_Sorted, _Spans]:
    rounds, length = buckets.shape
    index = jnp.arange(length, dtype=jnp.int32)
    every = jnp.broadcast_to(index, buckets.shape)
    if documents is None:
        of_buckets, order = lax.sort((buckets, every), num_keys=1)
        spans = _Spans(jnp.zeros_like(index), jnp.full_like(index, length))
    else:
        given = jnp.broadcast_to(documents, buckets.shape)
        of_documents, of_buckets, order = lax.sort((given, buckets, every), num_keys=2)
        # The spans are equal in all rounds.
        spans = _spans(of_documents[0])

    @jax.vmap
    def inverse(order):
        return jnp.zeros_like(order).at[order].set(index, unique_indices=True)

    def of_tokens(at_places):
        return jnp.take_along_axis(jnp.broadcast_to(at_places, place.shape), place, -1)

    place = inverse(order)
    if is_causal:
        change = of_buckets[:, 1:] != of_buckets[:, :-1]
        bucket_start = lax.cummax(
            jnp.pad(jnp.where(change, index[1:], 0), ((0, 0), (1, 0))), axis=1
        )
        bucket_start = jnp.maximum(bucket_start, spans.start[None])
        sees = jnp.maximum(place - size, of_tokens(bucket_start)), place
        is_at = place
    else:
        chunk = spans.start + (index - spans.start) // size * size
        last = spans.start + (spans.end - 1 - spans.start) // size * size
        before = jnp.where(chunk == spans.start, last, chunk - size)
        sees = of_tokens(chunk), of_tokens(before)
        is_at = sees[0]
    if documents is not None:
        is_at = jnp.where(documents < length, is_at, -1)
    return _Sorted(order, place, sees, is_at), spans


def _spans(of_places) -> _Spans:
    """Returns the spans of runs of equal numbers `(T,)`."""
    length = of_places.shape[0]
    index = jnp.arange(length, dtype=jnp.int32)
    change = of_places[1:] != of_places[:-1]
    start = lax.cummax(jnp.pad(jnp.where(change, index[1:], 0), (1, 0)))
    end = jnp.pad(jnp.where(change, index[1:], length), (0, 1), constant_values=length)
    return _Spans(start, lax.cummin(end, reverse=True))


class _Runs(NamedTuple):
    """Key places that the queries of each tile read: r runs of m places.

    Attributes:
      places: `(tiles, r, m)`, -1 for no place; no place occurs twice in the runs of a tile.
      readers: `(T, p)`, for each place the flat indices in `places` from which a query may attend
        to the place; -1 for none.
    """

    places: jax.Array
    readers: jax.Array


def _groups(length: int, size: int) -> int:
    """Returns the number of groups of tiles in which a round is computed."""
    return max(1, length // max(size, _TOKENS_AT_A_TIME))


def _tiles(length: int, size: int) -> int:
    """Returns the number of tiles, a multiple of `_groups`; the last tiles may be empty."""
    groups = _groups(length, size)
    return groups * math.ceil(length / (size * groups))


def _runs_causal(length, size) -> _Runs:
    """Returns runs of the tile before and the own tile."""
    tiles = _tiles(length, size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    return _whole_tiles(
        jnp.stack([tile - 1, tile], 1), jnp.stack([tile + 1, tile], 1), length, size
    )


def _runs(spans, length, size) -> _Runs:
    """Returns runs of the tile before (for the first tile: the last valid tile) and the tile."""
    tiles = _tiles(length, size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    last = (spans.end[0] - 1) // size
    before = jnp.where(tile == 0, jnp.where(last == 0, -1, last), tile - 1)
    after = jnp.where(tile == last, jnp.where(last == 0, -1, 0), tile + 1)
    # Tiles after `last` hold only padding.
    before, after = jnp.where(tile > last, -1, before), jnp.where(tile > last, -1, after)
    return _whole_tiles(jnp.stack([before, tile], 1), jnp.stack([after, tile], 1), length, size)


def _runs_packed(spans, length, size) -> _Runs:
    """Returns runs of two tiles before to one tile after, for packed documents.

    Chunks start with documents, not with tiles. The first chunk of a document also reads the last
    chunk of this document. If the document continues after the four tiles, its last chunk is one
    more run; at most one document per tile continues, the document at the first place after these
    tiles.
    """
    tiles = _tiles(length, size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    steps = jnp.arange(-2, 2, dtype=jnp.int32)[None]
    near = _whole_tiles(tile[:, None] + steps, tile[:, None] - steps, length, size)
    last = spans.start + (spans.end - 1 - spans.start) // size * size

    after = (tile + 2) * size
    goes_on = after < length
    chunk = last[jnp.minimum(after, length - 1)]
    far = positions_from(chunk, size)
    is_read = goes_on[:, None] & (far >= after[:, None]) & (far < length)
    places = jnp.concatenate([near.places, jnp.where(is_read, far, -1)[:, None]], 1)

    runs = places.shape[1]
    # `near.readers` assumes four runs a tile.
    readers = jnp.where(
        near.readers < 0, -1, near.readers + near.readers // (4 * size) * (runs - 4) * size
    )
    index = jnp.arange(length, dtype=jnp.int32)
    first = positions_from(spans.start // size, 2)
    begin = (first + 2) * size
    reads = (index >= last)[:, None] & (begin < spans.end[:, None]) & (index[:, None] >= begin)
    more = (first * runs + 4) * size + (index - last)[:, None]
    return _Runs(places, jnp.concatenate([readers, jnp.where(reads, more, -1)], 1))


def _whole_tiles(reads, read_by, length, size) -> _Runs:
    """Returns runs of whole tiles: the tiles that each tile reads, and is read by, `(tiles, r)`."""
    tiles, runs = reads.shape
    places = positions_from(reads * size, size)
    places = jnp.where((reads[..., None] >= 0) & (places < length), places, -1)
    index = jnp.arange(length, dtype=jnp.int32)
    reader = read_by[index // size]
    run = jnp.arange(runs, dtype=jnp.int32)[None]
    flat = (reader * runs + run) * size + (index % size)[:, None]
    return _Runs(places, jnp.where((reader >= 0) & (reader < tiles), flat, -1))


def _attend_round(query, key, value, sorted_, runs, each, is_causal):
    """Returns output `(T, Hv)`, at least float32, and log-sum-exp `(T,)` of one round."""
    order, place, own_sees, own_is_at = each
    tiles, size = runs.places.shape[0], runs.places.shape[-1]
    length, rounds = order.shape[0], sorted_.order.shape[0]
    at_queries = order[jnp.minimum(jnp.arange(tiles * size), length - 1)].reshape(tiles, size)
    there = runs.places.reshape(tiles, -1)
    at = order[jnp.maximum(there, 0)]

    def of_queries(array):
        """`(..., T)` to `(tiles, ..., m)`."""
        return jnp.moveaxis(array[..., at_queries], -2, 0)

    def of_keys(array):
        """`(..., T)` to `(tiles, ..., r m)`, -1 at places that are not read."""
        return jnp.moveaxis(jnp.where(there < 0, -1, array[..., at]), -2, 0)

    readers = runs.readers[place]
    tokens = (
        _take(query, at_queries, place[:, None]),
        _take(key, at, readers),
        _take(value, at, readers),
    )
    index = jnp.arange(length, dtype=jnp.int32)
    seen = {"tokens": (of_queries(index), of_keys(index))}
    seen["own"] = tuple(map(of_queries, own_sees)), of_keys(own_is_at)
    if rounds > 1:
        seen["all"] = tuple(map(of_queries, sorted_.sees)), of_keys(sorted_.is_at)

    def tile(x):
        queries, keys, values, seen = x
        which = _meets(seen["own"], is_causal)
        if not is_causal:
            of_query, of_key = seen["tokens"]
            which = which & (of_query[:, None] != of_key[None])
        times = _meets(seen["all"], is_causal).sum(0) if rounds > 1 else None
        return _softmax(queries, keys, values, which, times)

    some = tiles // _groups(length, size)
    results = lax.map(jax.checkpoint(tile), (*tokens, seen), batch_size=some)
    back = jnp.pad(order, (0, tiles * size - length), constant_values=-1)[:, None]
    out, lse = (_take(x.reshape(tiles * size, *x.shape[2:]), place, back) for x in results)
    return out, lse


def _softmax(query, key, value, which, times=None):
    """Softmax over the pairs `which (m, s)`: output `(m, Hv)`, at least float32, and lse `(m,)`.

    The weight of each pair is divided by its `times`.
    """
    wide = dtypes.wide(query, value)
    logits = widened(functools.partial(jnp.einsum, "mh,sh->ms"), query, key, wide)
    lowest = dtypes.lowest(wide)
    logits = jnp.where(which, logits, lowest)
    largest = lax.stop_gradient(logits.max(-1))
    largest = jnp.where(largest == lowest, 0, largest)
    weights = jnp.exp(logits - largest[:, None])
    if times is not None:
        weights = weights / jnp.maximum(times, 1).astype(wide)
    total = weights.sum(-1)
    total_or_one = jnp.where(total == 0, 1, total)
    product = functools.partial(jnp.einsum, "ms,sv->mv")
    mixed = widened(product, weights.astype(value.dtype), value, wide)
    lse = jnp.where(total == 0, lowest, largest + jnp.log(total_or_one))
    return mixed / total_or_one[:, None], lse


def _meets(seen, is_causal):
    """Returns whether queries `sees (..., m)` attend to keys `is_at (..., s)`: `(..., m, s)`."""
    sees, is_at = seen
    (first, second), is_at = (x[..., None] for x in sees), is_at[..., None, :]
    if is_causal:
        return (is_at >= first) & (is_at < second)
    return (is_at == first) | (is_at == second)


@jax.custom_vjp
def _take(x, indices, readers):
    """Gather `x[indices]` with a deterministic gradient; custom VJP.

    `x` is `(L, ...)`. `readers (L, p)` holds the flat positions of each row in `indices`, or -1.
    The backward pass gathers by `readers` in place of a scatter, and sums in a fixed order.
    """
    return jnp.take(x, indices, 0, mode="clip")


def _take_forward(x, indices, readers):
    return _take(x, indices, readers), (readers, indices.ndim)


def _take_backward(residuals, cotangent):
    readers, axes = residuals
    cotangent = cotangent.reshape(-1, *cotangent.shape[axes:])
    found = jnp.take(cotangent, jnp.maximum(readers, 0), 0, mode="clip")
    is_read = readers.reshape(*readers.shape, *[1] * (found.ndim - 2)) >= 0
    return jnp.where(is_read, found, 0).sum(1), None, None


_take.defvjp(_take_forward, _take_backward)


registry.register(
    registry.Mechanism(
        name="lsh",
        family="clustered",
        paper="Kitaev et al. 2020, Reformer",
        function=lsh_attention,
        takes_heads=False,
        capabilities=frozenset(
            {"bidirectional", "causal", "lengths", "segments", "residual", "decode"}
        ),
        builder="effattn.nn.lsh:LSHSelfAttention",
        complexity="O(N log N + N n m), O(N) a step",
        time_exponent=1.0,
        causality="rounding",
    )
)
