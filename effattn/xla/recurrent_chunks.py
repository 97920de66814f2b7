"""The maths of one head's chunks: what tokens read of each other, and what the state becomes.

Arrays of M chunks of C tokens: query `(M, C, G, F)`, key `(M, C, F)`, value `(M, C, D)`, and log
decays `(M, C, f)` with f = F, or f = 1 where all features decay alike. M is 1 where all chunks
decay alike. `dot` is the matrix product.

- Decayed products. q_i reads k_j with the decays of the tokens after j, up to i. A pair of tokens
  is parted once as a chunk is halved again and again, at a border between them; there q_i has
  decayed since the border and k_j until it. So all products of a chunk are one matrix product for
  each halving, and only sums of log decays are exponentiated, never a difference of larger sums.
  A log decay of -inf, with which a packed document starts, is as good as any.
- The delta form is a plain recurrence that also writes -u_t at a_t, where u_t = S_(t-1)^T b_t. Of
  a chunk, with b~_i = b_i decayed since its start and S the state there,

      u_i + sum_(j<i) (b_i . a_j) u_j = S^T b~_i + sum_(j<i) (b_i . k_j) v_j

  with decayed products: one unit triangular system (Yang et al. 2024, "Parallelizing Linear
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
    """`jax.vmap` over axes of one size, which are taken away where that is 1.

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
    """How the tokens of a chunk read what was written up to them.

    Attributes:
      products: `(query, key) -> (M, C, C)`, decayed; zero where i does not read j.
      since_start: `(M, C, f)`, how what is there at a chunk's start decays until it is read.
      until_end: `(M, C, f)`, how keys decay until the end of the chunk.
      whole: `(M, f, 1)`, over the whole chunk. These three are None where nothing decays.
    """

    products: Callable[[jax.Array, jax.Array], jax.Array]
    since_start: jax.Array | None = None
    until_end: jax.Array | None = None
    whole: jax.Array | None = None


def decayed_reader(log_decay, starts, length, present, dot) -> Reader:
    """Readers of the state after their token, or, if not `present`, of the one before."""
    if log_decay is None:
        visible = jnp.tri(length, k=0 if present else -1, dtype=bool)
        return Reader(lambda query, key: jnp.where(visible, dot(query, _transposed(key)), 0))
    # What a reader of the state before its token drops there.
    first = jnp.zeros_like(log_decay)
    if starts is not None:
        first = jnp.where(starts[..., None], -jnp.inf, first)
    if log_decay.shape[-1] == 1:
        return _alike(log_decay, None if present else first, dot)
    return _by_feature(log_decay, log_decay if present else first, present, dot)


def _alike(log_decay, first, dot) -> Reader:
    """Of features that decay alike: the plain products, times a matrix of decays.

    Its logarithms are sums of the log decays after token j and up to token i (before it, where
    there is `first`): a product with a triangle of ones, exact where a difference of running sums
    would cancel. Column 0 is for what is there at the start, row C for the end of the chunk.
    """
    length = log_decay.shape[1]
    visible = jnp.tri(length + 1, length, k=-1 if first is not None else 0, dtype=log_decay.dtype)
    # A product of 0 and -inf is no number; the exponential of this is as much zero.
    finite = jnp.maximum(log_decay, jnp.finfo(log_decay.dtype).min / (2 * length))
    after = jnp.where(jnp.tri(length, length + 1, dtype=bool), finite, 0)
    sums = jnp.matmul(visible, after, precision=lax.Precision.HIGHEST)
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


def _by_feature(log_decay, first, present, dot) -> Reader:
    """Of log decays `(M, C, F)`, C a power of two: one product for each halving of the chunks.

    `first (M, C, F)` is what a reader decays at its own token.
    """
    _, length, features = log_decay.shape
    # Of blocks of one token, then two, four, ...: sums since the block's start, until its end, and
    # of all. Where two blocks meet: how the first one's keys and the second one's queries decay.
    since, whole = first.reshape(-1, 1, features), log_decay.reshape(-1, features)
    until, borders = jnp.zeros_like(since), []
    while since.shape[1] < length:
        borders.append((jnp.exp(until[::2]), jnp.exp(since[1::2])))
        early, late = whole[::2, None], whole[1::2, None]
        since = jnp.concatenate([since[::2], since[1::2] + early], 1)
        until = jnp.concatenate([until[::2] + late, until[1::2]], 1)
        whole = whole[::2] + whole[1::2]

    def products(query, key):
        blocks = jnp.sum(query * key, -1) if present else jnp.zeros_like(query[..., 0])
        blocks, size = blocks.reshape(-1, 1, 1), 1
        for until, since in borders:
            keys, queries = (x.reshape(-1, 2, size, features) for x in (key, query))
            across = dot(queries[:, 1] * since, _transposed(keys[:, 0] * until))
            blocks, size = _assembled(blocks[::2], across, blocks[1::2]), 2 * size
        return blocks

    return Reader(products, jnp.exp(since), jnp.exp(until), jnp.exp(whole)[..., None])


def _assembled(early, across, late):
    """Lower triangular blocks `(m, 2 s, 2 s)` of their quarters `(m, s, s)`."""
    upper = jnp.concatenate([early, jnp.zeros_like(across)], 2)
    return jnp.concatenate([upper, jnp.concatenate([across, late], 2)], 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def unit_inverse(system, dot):
    """Of I + `system (M, C, C)`, which is zero on and above the diagonal; C a power of two."""
    blocks, acrosses = system, []
    while (size := blocks.shape[1] // 2) > 0:
        acrosses.append(blocks[:, size:, :size])
        halves = blocks[:, :size, :size], blocks[:, size:, size:]
        blocks = jnp.stack(halves, 1).reshape(-1, size, size)
    inverse = jnp.ones_like(blocks)
    for across in reversed(acrosses):
        early, late = inverse[::2], inverse[1::2]
        inverse = _assembled(early, -dot(dot(late, across), early), late)
    return inverse


@unit_inverse.defjvp
def _inverse_jvp(dot, primals, tangents):
    inverse = unit_inverse(*primals, dot)
    return inverse, -dot(dot(inverse, tangents[0]), inverse)


class _Chunks(NamedTuple):
    """M chunks before the states at their starts are known.

    C' is C, or 2 C where the delta form removes in directions of its own.

    Attributes:
      query: `(M, C, G, F)`, as they read the state.
      weights: `(M, C, G, C')`, of the chunk's own values in what is read.
      key: `(M, C', F)`, as they are in the state after the chunk.
      value: `(M, C', D)`, what is written where the state is zero.
      recalled: `(M, C', F)`: what is written on a state S is `value - recalled S`; None where it is
        `value` on any.
      kept: `(M or 1, f, 1)`, what remains of the state; None for all.
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
            # One for each chunk, so that its gradient is a sum of sums, which round less.
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
    """The state after a chunk, from the state before it."""
    return written + (state if kept is None else state * kept)


def run_chunks(dot, state, *tokens):
    """M chunks in a row, of one head: the state after, and outputs `(M, C, G, D)`."""
    chunks = _chunks(dot, *tokens)
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
