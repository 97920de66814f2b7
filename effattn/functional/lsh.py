"""Locality-sensitive hashing (LSH) attention: tokens attend within hash buckets."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import over_batch
from effattn.arrays.segments import starts_of_runs, valid, within
from effattn.cores import attention, sorted_chunks
from effattn.naive import dot, over_pairs, with_naive

# Logit of a token for itself, used only if the token attends to nothing else.
SELF_LOGIT = -1e5


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


def _drawn(query_key, *, num_rounds, num_buckets, rng, rotations, **_):
    """The rotations by `rng`."""
    if rng is None or rotations is not None:
        return {}
    heads, size = query_key.shape[-2:]
    dtype = dtypes.wide(query_key.dtype)
    made = lsh_rotations(rng, num_rounds, num_buckets, size, num_heads=heads, dtype=dtype)
    return {"rotations": made, "rng": None}


def _wide_rotations_and_factors(query_key, *, num_buckets, rotations, **_):
    dtype = jnp.promote_types(query_key.dtype, jnp.float32)
    return {"rotations": rotations.astype(dtype), "num_buckets": factors_of(num_buckets)}


@with_naive(
    over_pairs(
        naive,
        per_head={"rotations": 3},
        made_by_head=_drawn,
        derived=_wide_rotations_and_factors,
        queries=0,
    )
)
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

    Bidirectional calls use the chunks of the paper: tokens are sorted by bucket and then by time
    and cut in chunks of m; a token attends to its own chunk and the chunk before it; the first
    chunk attends to the last. As in the code of the authors, and unlike in the formula of the
    paper, tokens of other buckets in these chunks count too. The causal form of the paper masks
    the chunks. Chunk borders depend on later tokens, so the future would change what a token
    attends to. Here, in causal calls, P_i^r holds the last m tokens before i in the same bucket.

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
    """
    query_key, value = jnp.asarray(query_key), jnp.asarray(value)
    batch = checks.query_key_value(query_key, query_key, value)
    checks.known_length("lsh_attention", query_key)
    length, heads, size = query_key.shape[-3:]
    rounds = checks.at_least("num_rounds", num_rounds, 1)
    factors = factors_of(num_buckets)
    if (buckets := math.prod(factors)) > max(length, 1):
        raise ValueError(
            f"num_buckets must be at most {length}, the number of tokens, got {buckets}; pass fewer"
        )
    if (rng is None) == (rotations is None):
        raise ValueError(
            "lsh_attention needs rng, a jax.random key to draw rotations with, or rotations, got "
            f"{'neither' if rng is None else 'both'}"
        )
    if rng is not None:
        wide = dtypes.wide(query_key.dtype)
        rotations = lsh_rotations(rng, rounds, num_buckets, size, num_heads=heads, dtype=wide)
    reason = "each token is both query and key"
    checks.one_segment_array(segment_ids, (*batch, length), reason)
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
            "num_buckets must be 1, an even int or a tuple of even ints, because a rotation makes "
            f"two buckets of each column, got {num_buckets!r}"
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
        present = (documents < length)[..., None, None]
        query_key, value = jnp.where(present, query_key, 0), jnp.where(present, value, 0)

    def head(query, value, buckets, documents):
        out, lse = sorted_chunks.attend(
            query,
            keys(query),
            value,
            buckets,
            documents,
            chunk_length=min(chunk_length, length),
            is_causal=is_causal,
            is_packed=segment_ids is not None,
        )
        return or_itself(out, lse, value, None if documents is None else documents < length)

    # Map over heads, then over batch dimensions.
    head = jax.vmap(head, (-2, -2, -2, None), (-2, -1))
    head = over_batch(head, len(batch))
    with jax.named_scope("lsh_attention"):
        out, lse = head(query_key, value, buckets, documents)
    return attention.clear_rows(out, lse, valid(query_lengths, None, length))


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
        out, lse = sorted_chunks.softmax_over(query, keys(query_key), value, sees)
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
    wide = dtypes.widen(query_key)
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
    start = jnp.zeros((*batch, length), jnp.int32)
    if segment_ids is not None:
        start = starts_of_runs(segment_ids)
    present: Any = valid(lengths, segment_ids, length)
    return jnp.where(present, start, length)


registry.register(
    registry.Mechanism(
        name="lsh",
        family="clustered",
        paper="Kitaev et al. 2020, Reformer: The Efficient Transformer",
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
