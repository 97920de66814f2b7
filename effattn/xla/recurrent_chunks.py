"""Chunks of the linear recurrence for one head: products within a chunk, and the state update.

Shapes for M chunks of C tokens: query `(M, C, G, F)`, key `(M, C, F)`, value `(M, C, D)`, and log
decays `(M, C, f)` with f = F, or f = 1 if all features have the same decay. The log decays have
M = 1 if all chunks have the same decays. `dot` is the matrix product.

- Decayed products. The product of q_i and k_j contains the decays of the tokens j + 1 to i. A chunk
  is halved recursively, until each pair (i, j) is separated at exactly one border. The product is
  then (q_i decayed since the border) . (k_j decayed until the border). All products of a chunk are
  thus one matrix product per halving. Only sums of log decays are exponentiated, never differences
  of larger sums, so a log decay of -inf (the start of a packed document) needs no special case.
- Decays of values. The products of a chunk do not decay, but the values that they weigh. The chunk
  is halved likewise, and the values of each half decay until the border and since it.
- Delta form. It is a plain recurrence that also writes -u_t at a_t, where u_t = S_(t-1)^T b_t. In
  a chunk with the initial state S, and b~_i = b_i decayed since the start of the chunk,

      u_i + sum_(j<i) (b_i . a_j) u_j = S^T b~_i + sum_(j<i) (b_i . k_j) v_j

  with decayed products. This is one unit triangular system (Yang et al. 2024, "Parallelizing Linear
  Transformers with the Delta Rule over Sequence Length", after the WY form of products of
  Householder matrices).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def mapped(function, size, in_axes, out_axes):
    """`jax.vmap` over axes of length `size`; axes of length 1 are squeezed instead.

    On CPUs, jaxlib 0.10.2 and 0.11.0 fail on sums of products over seven axes, one of which is 1
    (github.com/jax-ml/jax/issues/40412).
    """
    if size != 1:
        return jax.vmap(function, in_axes, out_axes)

    def of_one(*args):
        taken = (
            x if axis is None else jax.tree.map(lambda x, at=axis: jnp.squeeze(x, at), x)
            for x, axis in zip(args, in_axes, strict=True)
        )
        return tuple(map(jnp.expand_dims, function(*taken), out_axes))

    return of_one


def _transposed(x):
    return x.swapaxes(-1, -2)


class Reader(NamedTuple):
    """Decays within a chunk. The last three fields are None without decays.

    Attributes:
      products: `(query, key) -> (M, C, C)`, decayed products; zero where i does not read j.
      since_start: `(M, C, f)`, decay from the start of the chunk to each reading token.
      until_end: `(M, C, f)`, decay from each token to the end of the chunk.
      whole: `(M, f, 1)`, decay over the whole chunk.
    """

    products: Callable[[jax.Array, jax.Array], jax.Array]
    since_start: jax.Array | None = None
    until_end: jax.Array | None = None
    whole: jax.Array | None = None


def decayed_reader(log_decay, starts, length, present, dot) -> Reader:
    """Reader of the state after each token (`present`), or of the state before each token."""
    if log_decay is None:
        visible = jnp.tri(length, k=0 if present else -1, dtype=bool)
        return Reader(lambda query, key: jnp.where(visible, dot(query, _transposed(key)), 0))
    # A token that reads the state before it does not decay that state, but drops it at a start.
    first = jnp.zeros_like(log_decay)
    if starts is not None:
        first = jnp.where(starts[..., None], -jnp.inf, first)
    if log_decay.shape[-1] == 1:
        return _alike(log_decay, None if present else first, dot)
    return _by_feature(log_decay, log_decay if present else first, present, dot)


def _alike(log_decay, first, dot) -> Reader:
    """Reader for one decay per token: plain products times a `(C, C)` matrix of decays.

    The log of each decay sums the log decays of tokens j + 1 to i (to i - 1 with `first`).
    Column 0 is the decay since the start of the chunk, row C the decay until its end.
    """
    length = log_decay.shape[1]
    visible = jnp.tri(length + 1, length, k=-1 if first is not None else 0, dtype=log_decay.dtype)
    sums = _sums(visible, log_decay)
    if first is not None:
        sums += jnp.pad(first, ((0, 0), (0, 1), (0, 0)))
    decays = jnp.exp(sums)
    weights = visible[None, :length] * decays[:, :length, 1:]
    return Reader(
        lambda query, key: dot(query, _transposed(key)) * weights,
        decays[:, :length, :1],
        _transposed(decays[:, length:, 1:]),
        decays[:, length:, :1],
    )


def sums_of_log_decays(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of log decays `(C,)` after token s, up to t: `(C, C)`, and from the start: `(C,)`."""
    sums = _sums(jnp.tri(len(log_decay), dtype=log_decay.dtype), log_decay[:, None])
    return sums[:, 1:], sums[:, 0]


def _sums(visible, log_decay):
    """Sums of log decays `(*M, C, 1)`: those of tokens j to i in row i and column j.

    The rows of `visible` say which tokens a row adds up. The result is a product with it; a
    difference of running sums would cancel.
    """
    length = log_decay.shape[-2]
    # 0 * -inf is NaN, so -inf is replaced by a finite number whose exponential is zero too.
    finite = jnp.maximum(log_decay, jnp.finfo(log_decay.dtype).min / (2 * length))
    after = jnp.where(jnp.tri(length, length + 1, dtype=bool), finite, 0)
    return jnp.matmul(visible, after, precision=lax.Precision.HIGHEST)


def _by_feature(log_decay, first, present, dot) -> Reader:
    """Reader for log decays `(M, C, F)`, C a power of two: one matrix product per halving.

    `first (M, C, F)` is the log decay that a query applies at its own token.
    """
    features = log_decay.shape[-1]
    borders, since_start, until_end, whole = _halvings(log_decay, first)

    def products(query, key):
        blocks = jnp.sum(query * key, -1) if present else jnp.zeros_like(query[..., 0])
        blocks, size = blocks.reshape(-1, 1, 1), 1
        for until, since in borders:
            keys, queries = (x.reshape(-1, 2, size, features) for x in (key, query))
            across = dot(queries[:, 1] * since, _transposed(keys[:, 0] * until))
            blocks, size = _assembled(blocks[::2], across, blocks[1::2]), 2 * size
        return blocks

    return Reader(products, since_start, until_end, whole[..., None])


def _halvings(log_decay, first):
    """Decays at the borders of all halvings of chunks, from the smallest to the largest halves.

    Returns:
      For each halving the decays `(m, s, F)` of the first halves until the border and of the second
      halves since it; then the decays since the start of the chunk and until its end `(M, C, F)`,
      and those of the whole chunk `(M, F)`.
    """
    _, length, features = log_decay.shape
    # Blocks double from one token to the whole chunk. For each block: sums of log decays since its
    # start (`since`), until its end (`until`) and over all of it (`whole`). `borders` has, for each
    # pair of neighbouring blocks, the decays of the first block's keys and second block's queries.
    since, whole = first.reshape(-1, 1, features), log_decay.reshape(-1, features)
    until, borders = jnp.zeros_like(since), []
    while since.shape[1] < length:
        borders.append((jnp.exp(until[::2]), jnp.exp(since[1::2])))
        early, late = whole[::2, None], whole[1::2, None]
        since = jnp.concatenate([since[::2], since[1::2] + early], 1)
        until = jnp.concatenate([until[::2] + late, until[1::2]], 1)
        whole = whole[::2] + whole[1::2]

    return borders, jnp.exp(since), jnp.exp(until), jnp.exp(whole)


def _assembled(early, across, late):
    """Assembles lower block-triangular `(m, 2 s, 2 s)` from three quarters `(m, s, s)`."""
    upper = jnp.concatenate([early, jnp.zeros_like(across)], 2)
    return jnp.concatenate([upper, jnp.concatenate([across, late], 2)], 1)


def _halved(matrix):
    """The diagonal of `(M, C, C)` as `(M C, 1, 1)`, and its lower quarters `(m, s, s)` by halves.

    The quarters are those below the diagonal, from the smallest to the largest.
    """
    blocks, acrosses = matrix, []
    while (size := blocks.shape[1] // 2) > 0:
        acrosses.append(blocks[:, size:, :size])
        halves = blocks[:, :size, :size], blocks[:, size:, size:]
        blocks = jnp.stack(halves, 1).reshape(-1, size, size)
    return blocks, acrosses[::-1]


def unit_inverse(system, dot):
    """Inverse of I + `system (M, C, C)`, `system` strictly lower triangular, C a power of two."""
    if system.shape[-1] == 1:
        return jnp.ones_like(system)
    return _inverse(system, dot)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(system, dot):
    diagonal, acrosses = _halved(system)
    inverse = jnp.ones_like(diagonal)
    for across in acrosses:
        early, late = inverse[::2], inverse[1::2]
        inverse = _assembled(early, -dot(dot(late, across), early), late)
    return inverse


@_inverse.defjvp
def _inverse_jvp(dot, primals, tangents):
    inverse = _inverse(*primals, dot)
    return inverse, -dot(dot(inverse, tangents[0]), inverse)


class _Chunks(NamedTuple):
    """Terms of M chunks that do not depend on the states at the starts of the chunks.

    C' is C, or 2 C if the delta form has `removed` vectors that differ from the keys.

    Attributes:
      query: `(M, C, G, F)`, queries times their decay since the start of the chunk.
      weights: `(M, C, G, C')`, weights of the values of the same chunk.
      key: `(M, C', F)`, keys times their decay until the end of the chunk.
      value: `(M, C', D)`, values written to a zero state.
      recalled: `(M, C', F)`; the values written to a state S are `value - recalled S`. None without
        the delta form.
      kept: `(M or 1, f, 1)`, decay of the state over the chunk; None without decays.
    """

    query: jax.Array
    weights: jax.Array
    key: jax.Array
    value: jax.Array
    recalled: jax.Array | None
    kept: jax.Array | None


def _chunks(dot, query, key, value, log_decay, bonus, removed, recalled, starts) -> _Chunks:
    length = key.shape[1]
    if starts is not None:
        log_decay = jnp.zeros((), key.dtype) if log_decay is None else log_decay
    if log_decay is not None and log_decay.ndim == 0:
        log_decay = jnp.full((1, length), log_decay)
    if log_decay is not None and log_decay.ndim == 2:
        log_decay = log_decay[..., None]
    if starts is not None:
        log_decay = jnp.where(starts[..., None], -jnp.inf, log_decay)
    reader = decayed_reader(log_decay, starts, length, bonus is None, dot)

    def read(query):
        weights = reader.products(query, key)
        if bonus is not None:
            # Broadcast to chunks: the gradient is then a sum of sums per chunk, which rounds less.
            by_chunk = jnp.broadcast_to(bonus[:, None], (len(key), *bonus.shape, 1))
            own = jnp.matmul(query * key, by_chunk, precision=lax.Precision.HIGHEST)
            weights += jnp.where(jnp.eye(length, dtype=bool), own, 0)
        if removed is not None:
            weights = jnp.concatenate([weights, reader.products(query, removed)], 2)
        return query if log_decay is None else query * reader.since_start, weights

    query, weights = mapped(read, query.shape[2], (2,), (2, 2))(query)
    if recalled is not None:
        past = decayed_reader(log_decay, starts, length, False, dot)
        inverse = unit_inverse(past.products(recalled, key if removed is None else removed), dot)
        found = value if removed is None else dot(past.products(recalled, key), value)
        found = dot(inverse, found)
        recalled = recalled if log_decay is None else recalled * past.since_start
        recalled = dot(inverse, recalled)
        if removed is None:
            value = found
        else:
            key, value = jnp.concatenate([key, removed], 1), jnp.concatenate([value, -found], 1)
            recalled = jnp.concatenate([jnp.zeros_like(recalled), recalled], 1)
    until_end = reader.until_end
    if until_end is not None:
        key = key * (until_end if removed is None else jnp.concatenate([until_end] * 2, 1))
    return _Chunks(query, weights, key, value, recalled, reader.whole)


def _carry(state, written, kept):
    """State after a chunk, from the state before the chunk."""
    return written + (state if kept is None else state * kept)


def run_chunks(dot, state, *tokens):
    """Runs M consecutive chunks of one head: `(state after, outputs (M, C, G, D))`."""
    *terms, value_log_decay = tokens
    if value_log_decay is not None:
        query, key, value, *_, starts = terms
        return _run_by_value(dot, state, query, key, value, value_log_decay, starts)
    chunks = _chunks(dot, *terms)
    values, kept = chunks.value, chunks.kept
    if kept is not None:
        kept = jnp.broadcast_to(kept, (len(values), *kept.shape[1:]))

    if chunks.recalled is None:
        written = dot(_transposed(chunks.key), values)
        state, starts = lax.scan(
            lambda state, chunk: (_carry(state, *chunk), state), state, (written, kept)
        )
    else:

        def step(state, chunk):
            key, value, recalled, kept = chunk
            value -= dot(recalled, state)
            return _carry(state, dot(key.T, value), kept), (state, value)

        state, (starts, values) = lax.scan(step, state, (chunks.key, values, chunks.recalled, kept))

    def read(query, weights):
        return (dot(query, starts) + dot(weights, values),)

    query, weights = chunks.query, chunks.weights
    return state, *mapped(read, query.shape[2], (2, 2), (2,))(query, weights)


def _run_by_value(dot, state, query, key, value, log_decay, starts):
    """`run_chunks` with log decays `(M, C, D)` of the values."""
    if starts is not None:
        log_decay = jnp.where(starts[..., None], -jnp.inf, log_decay)
    borders, since_start, until_end, whole = _halvings(log_decay, log_decay)
    written = dot(_transposed(key), value * until_end)
    state, before = lax.scan(
        lambda state, chunk: (_carry(state, *chunk), state), state, (written, whole[:, None])
    )

    def read(query):
        weights = dot(query, _transposed(key))
        return (dot(query, before) * since_start + _decayed_sums(weights, value, borders, dot),)

    return state, *mapped(read, query.shape[2], (2,), (2,))(query)


def _decayed_sums(weights, value, borders, dot):
    """Sums over the earlier tokens of weights `(M, C, C)` times decayed values `(M, C, D)`."""
    size = value.shape[-1]
    diagonal, acrosses = _halved(weights)
    sums = diagonal * value.reshape(-1, 1, size)
    for across, (until, since) in zip(acrosses, borders, strict=True):
        early = value.reshape(-1, 2, across.shape[1], size)[:, 0]
        late = sums[1::2] + since * dot(across, early * until)
        sums = jnp.concatenate([sums[::2], late], 1)
    return sums
