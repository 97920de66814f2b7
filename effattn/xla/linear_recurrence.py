"""The linear recurrence: a matrix-valued state that sums outer products of keys and values.

For one head, with queries q_t and keys k_t of F features and values v_t of D:

    S_t = diag(exp w_t) S_(t-1) + k_t v_t^T                          (F, D)
    y_t = S_t^T q_t        or, with a bonus u,   (S_(t-1) + diag(u) k_t v_t^T)^T q_t

The log decays w_t <= 0 are none, one number a head, one a token, or F numbers a token. The delta
form also takes away what the state holds in some direction:

    S_t = (diag(exp w_t) - a_t b_t^T) S_(t-1) + k_t v_t^T

A normalised recurrence gives every value a last entry of 1, so that the last column of the state
sums the keys, and divides y_t by its own last entry.

It runs in chunks of C tokens. Inside a chunk all is matrix products, and the state carries the
chunk's sum to the next one:

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

Time is O(T F (C + D)), memory O(T): one step of the loop takes a block of several chunks, whose
products are batched. The backward pass saves the state at the start of each block, recomputes the
block, and never rebuilds a state by subtraction or division.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.xla import mesh_axes, reverse_mode

CHUNK = 64  # tokens of one masked product
BLOCK = 512  # tokens of one step of the loop, if that is not too many chunks
CHUNKS_OF_BLOCK = 8


class Terms(NamedTuple):
    """What a recurrence sums, of tokens `(*B, L)`; None where absent.

    Query head n reads key head n // (N // K), and value head v writes at key head v // (V // K);
    one of N and V is K.

    Attributes:
      query: `(*B, L, N, F)`.
      key: `(*B, L, K, F)`.
      value: `(*B, L, V, D)`.
      log_decay: `(V,)`, `(*B, L, V)`, or where V is K also `(*B, L, K, F)`; 0 or less.
      bonus: `(K, F)`: a query reads the state before its token, and of the token this much.
      removed: `(*B, L, K, F)`, the a of the delta form; None, with `recalled`, is the key.
      recalled: `(*B, L, K, F)`, the b of the delta form; None is the plain one.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None = None
    bonus: jax.Array | None = None
    removed: jax.Array | None = None
    recalled: jax.Array | None = None


class Rule(NamedTuple):
    """What is fixed when the program is traced.

    Attributes:
      terms: `(parameters, queries, keys) -> Terms`, for a block of tokens: what a mechanism makes
        of its arguments. It treats tokens alike and may not close over arrays. It is run again in
        the backward pass, so nothing that it makes is kept.
      dtype: of the output.
      normalized: divide by the sum of the weights.
      precision: of the matrix products.
      chunk: tokens of one masked product, at most.
    """

    terms: Callable[[Any, Any, Any], Terms]
    dtype: Any
    normalized: bool = False
    precision: Any = None
    chunk: int = CHUNK


class Tokens(NamedTuple):
    """What is known of each token; None where absent.

    Attributes:
      query_mask: bool `(*B, T)`, False for queries that read zeros.
      key_mask: bool `(*B, T)`, False for tokens that leave the state as it is, whatever is there.
      starts: bool `(*B, T)`, True where the state before the token is dropped.
    """

    query_mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    starts: jax.Array | None = None


def packed(segment_ids: jax.Array, tokens: Tokens) -> Tokens:
    """The tokens of packed documents: a query reads its own, and the state is that of the last.

    Padding (id 0, and what is masked) belongs to the document before it, or to the first one at
    the start of the row, so that the state outlives it.
    """
    length = segment_ids.shape[-1]
    token = jnp.arange(length)
    in_document = segment_ids != 0
    first = jnp.min(jnp.where(in_document, token, length), -1, keepdims=True, initial=length)
    written = in_document if tokens.key_mask is None else in_document & tokens.key_mask
    last = lax.cummax(jnp.where(written, token, -1), axis=segment_ids.ndim - 1)
    source = jnp.where(last < 0, first, last)
    document = jnp.take_along_axis(segment_ids, source, -1, mode="clip")
    before = jnp.concatenate([document[..., :1], document[..., :-1]], -1)
    reads = in_document & (segment_ids == document)
    return Tokens(
        reads if tokens.query_mask is None else reads & tokens.query_mask,
        written,
        document != before,
    )


@jax.custom_jvp
def normalize(output: jax.Array) -> jax.Array:
    """Divides `(..., D + 1)` by its last entry, to `(..., D)`; zeros where that is zero.

    A subnormal number counts as zero: it has too few bits to divide by. Derivatives divide by the
    normaliser once, never by its square.
    """
    return output[..., :-1] * _reciprocal(output[..., -1:])


@normalize.defjvp
def _normalize_jvp(primals, tangents):
    (output,), (tangent,) = primals, tangents
    normalized = normalize(output)
    change = tangent[..., :-1] - normalized * tangent[..., -1:]
    return normalized, change * _reciprocal(output[..., -1:])


def _reciprocal(x: jax.Array) -> jax.Array:
    usable = jnp.abs(x) >= jnp.finfo(x.dtype).tiny
    return jnp.where(usable, 1 / jnp.where(usable, x, 1), 0)


def append_one(value: jax.Array) -> jax.Array:
    """Gives each value `(..., D)` a last entry of 1, which sums the weights."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


# The maths of M chunks of C tokens, of one head: query (M, C, F), key (M, C, F), value (M, C, D),
# and log decays (M, C, f) with f = F, or f = 1 where all features decay alike. M is 1 where all
# chunks decay alike.


def _transposed(x):
    return x.swapaxes(-1, -2)


class _Reader(NamedTuple):
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


def _reader(log_decay, starts, length, present, dot) -> _Reader:
    """Readers of the state after their token, or, if not `present`, of the one before."""
    if log_decay is None:
        visible = jnp.tri(length, k=0 if present else -1, dtype=bool)
        return _Reader(lambda query, key: jnp.where(visible, dot(query, _transposed(key)), 0))
    # What a reader of the state before its token drops there.
    first = jnp.zeros_like(log_decay)
    if starts is not None:
        first = jnp.where(starts[..., None], -jnp.inf, first)
    if log_decay.shape[-1] == 1:
        return _alike(log_decay, None if present else first, dot)
    return _by_feature(log_decay, log_decay if present else first, present, dot)


def _alike(log_decay, first, dot) -> _Reader:
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
    weights = visible[:length] * decays[:, :length, 1:]
    return _Reader(
        lambda query, key: dot(query, _transposed(key)) * weights,
        decays[:, :length, :1],
        _transposed(decays[:, length:, 1:]),
        decays[:, length:, :1],
    )


def _by_feature(log_decay, first, present, dot) -> _Reader:
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

    return _Reader(products, jnp.exp(since), jnp.exp(until), jnp.exp(whole)[..., None])


def _assembled(early, across, late):
    """Lower triangular blocks `(m, 2 s, 2 s)` of their quarters `(m, s, s)`."""
    upper = jnp.concatenate([early, jnp.zeros_like(across)], 2)
    return jnp.concatenate([upper, jnp.concatenate([across, late], 2)], 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(system, dot):
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


@_inverse.defjvp
def _inverse_jvp(dot, primals, tangents):
    inverse = _inverse(*primals, dot)
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
    reader = _reader(log_decay, starts, length, bonus is None, dot)

    def read(query):
        weights = reader.products(query, key)
        if bonus is not None:
            weights += jnp.eye(length) * jnp.sum(query * bonus * key, -1, keepdims=True)
        if removed is not None:
            weights = jnp.concatenate([weights, reader.products(query, removed)], 2)
        return query if log_decay is None else query * reader.since_start, weights

    query, weights = jax.vmap(read, 2, 2)(query)
    if recalled is not None:
        past = _reader(log_decay, starts, length, False, dot)
        inverse = _inverse(past.products(recalled, key if removed is None else removed), dot)
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


def _run_chunks(dot, state, *tokens):
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
        return dot(query, starts) + dot(weights, values)

    return state, jax.vmap(read, 2, 2)(chunks.query, chunks.weights)


# All heads and rows of a block of chunks, and the loop over blocks, forward and backward.


class _Span(NamedTuple):
    """`blocks` blocks of `length` tokens from token `start` on, in chunks of `chunk`."""

    start: int
    blocks: int
    length: int
    chunk: int


def _spans(length: int, chunk: int) -> list[_Span]:
    """Whole blocks, then the whole chunks left, then the tokens left."""
    block = min(max(BLOCK // chunk, 1), CHUNKS_OF_BLOCK) * chunk
    in_blocks, in_chunks = length // block * block, length // chunk * chunk
    spans = [
        _Span(0, in_blocks // block, block, chunk),
        _Span(in_blocks, 1, in_chunks - in_blocks, chunk),
        _Span(in_chunks, 1, length - in_chunks, length - in_chunks),
    ]
    return [span for span in spans if span.blocks and span.length]


def _take(span, index, arrays, axis):
    """Block `index` of a span, of arrays whose time is at `axis`."""
    start = span.start + index * span.length
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, span.length, axis), arrays)


def _put(span, index, arrays, blocks, axis):
    """The arrays with block `index` of a span written."""
    start = span.start + index * span.length
    return jax.tree.map(
        lambda x, block: lax.dynamic_update_slice_in_dim(x, block, start, axis), arrays, blocks
    )


def clear(tree, mask):
    """Arrays `(*B, L, ...)` with zeros where `mask (*B, L)` is False; None hides nothing."""
    if mask is None:
        return tree
    return jax.tree.map(
        lambda x: jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0), tree
    )


def _terms(rule, parameters, queries, keys, tokens, dtype, alike=False) -> Terms:
    """What is summed, in the dtype of the sums; of masked tokens, nothing.

    `alike` leaves a decay of each head at that: all tokens decay.
    """
    arguments = parameters, clear(queries, tokens.query_mask), clear(keys, tokens.key_mask)
    terms = rule.terms(*jax.tree.map(lambda x: x.astype(dtype), arguments))
    if rule.normalized:
        terms = terms._replace(value=append_one(terms.value))
    if terms.log_decay is not None:
        log_decay = terms.log_decay
        if log_decay.ndim == 1 and not alike:
            log_decay = jnp.broadcast_to(log_decay, terms.value.shape[:-1])
        if log_decay.ndim > 1:
            log_decay = clear(log_decay, tokens.key_mask)
        terms = terms._replace(log_decay=log_decay)
    return terms._replace(
        key=clear(terms.key, tokens.key_mask), removed=clear(terms.removed, tokens.key_mask)
    )


def _group(x, axis, groups):
    """Heads `(..., K R, ...)` at `axis` as `(..., K, R, ...)`."""
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])


def _block(rule, chunk, parameters, state, queries, keys, tokens):
    """Consecutive tokens `(*B, L, ...)` in chunks: `(state after, outputs (*B, L, N, D))`."""
    more = (1 << (chunk - 1).bit_length()) - chunk  # up to a power of two
    alike = tokens.key_mask is None and not more
    terms = _terms(rule, parameters, queries, keys, tokens, state.dtype, alike)
    *batch, length, heads, _ = terms.key.shape
    time = len(batch)
    constant = terms.log_decay is not None and terms.log_decay.ndim == 1
    by_value = terms.log_decay is not None and terms.log_decay.ndim == terms.key.ndim - 1

    def cut(x):
        """Chunks, with tokens that do nothing where their length is no power of two."""
        x = x.reshape(*batch, length // chunk, chunk, *x.shape[time + 1 :])
        widths = [(0, 0)] * x.ndim
        widths[time + 1] = (0, more)
        return jnp.pad(x, widths)

    query, value = (_group(cut(x), time + 2, heads) for x in (terms.query, terms.value))
    key, removed, recalled, starts = jax.tree.map(
        cut, (terms.key, terms.removed, terms.recalled, tokens.starts)
    )
    if constant:
        log_decay = _group(terms.log_decay, 0, heads)
    elif by_value:
        log_decay = _group(cut(terms.log_decay), time + 2, heads)
    else:
        log_decay = jax.tree.map(cut, terms.log_decay)

    # Value heads of a key head, then key heads, then rows.
    dot = functools.partial(jnp.matmul, precision=rule.precision)
    run, by_head = functools.partial(_run_chunks, dot), 0 if constant else 2
    decays = by_head if constant or by_value else None
    run = jax.vmap(run, (0, None, None, 2, decays, None, None, None, None), (0, 3))
    run = jax.vmap(run, (0, 2, 2, 2, by_head, 0, 2, 2, None), (0, 2))
    for _ in batch:
        run = jax.vmap(run, (0, 0, 0, 0, None if constant else 0, None, 0, 0, 0))
    grouped = _group(state, time, heads)
    after, output = run(
        grouped, query, key, value, log_decay, terms.bonus, removed, recalled, starts
    )
    output = jax.lax.slice_in_dim(output, 0, chunk, axis=time + 1)
    output = output.reshape(*batch, length, -1, output.shape[-1])
    output = normalize(output) if rule.normalized else output
    return after.reshape(state.shape), clear(output, tokens.query_mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(rule, parameters, state, queries, keys, tokens):
    return _forward(rule, parameters, state, queries, keys, tokens)[0]


def _forward(rule, parameters, state, queries, keys, tokens):
    """`((output, state), residuals)`; the residuals hold the state at the start of every block."""
    inputs, axis = (queries, keys, tokens), state.ndim - 3
    first = jax.tree.leaves(queries)[0]
    length = first.shape[axis]
    token = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype), inputs
    )
    _, output = jax.eval_shape(functools.partial(_block, rule, 1), parameters, state, *token)
    shape = (*output.shape[:axis], length, *output.shape[axis + 1 :])
    output = jnp.zeros_like(first, shape=shape, dtype=rule.dtype)
    saved = []
    for span in _spans(length, rule.chunk):

        def step(carry, index, span=span):
            state, output = carry
            block = _take(span, index, inputs, axis)
            after, block = _block(rule, span.chunk, parameters, state, *block)
            return (after, _put(span, index, output, block.astype(output.dtype), axis)), state

        (state, output), starts = lax.scan(step, (state, output), jnp.arange(span.blocks))
        saved.append(starts)
    return (output, state), (parameters, inputs, saved)


def _backward(rule, residuals, cotangents):
    """One sweep from the last block to the first, each recomputed from the state at its start."""
    parameters, (queries, keys, tokens), saved = residuals
    d_output, d_state = cotangents
    axis, inputs = d_state.ndim - 3, (queries, keys)
    d_parameters, d_inputs = jax.tree.map(jnp.zeros_like, (parameters, inputs))
    spans = _spans(d_output.shape[axis], rule.chunk)
    for span, starts in reversed(list(zip(spans, saved, strict=True))):

        def step(carry, start, span=span):
            d_state, d_parameters, d_inputs = carry
            index, state = start
            *block, known = _take(span, index, (*inputs, tokens), axis)
            run = functools.partial(_block, rule, span.chunk, tokens=known)
            _, pull_back = jax.vjp(run, parameters, state, *block)
            d_block = _take(span, index, d_output, axis).astype(state.dtype)
            more, d_state, *d_block = pull_back((d_state, d_block))
            d_parameters = jax.tree.map(jnp.add, d_parameters, more)
            return (d_state, d_parameters, _put(span, index, d_inputs, tuple(d_block), axis)), None

        carry, starts = (d_state, d_parameters, d_inputs), (jnp.arange(span.blocks), starts)
        (d_state, d_parameters, d_inputs), _ = lax.scan(step, carry, starts, reverse=True)
    return d_parameters, d_state, *d_inputs, None


_recurrence.defvjp(_forward, _backward)
_compiled_recurrence = jax.jit(_recurrence, static_argnums=0)  # so that eager calls compile once


def linear_recurrence(
    rule: Rule,
    parameters: Any,
    state: jax.Array,
    queries: Any,
    keys: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the keys and values up to its own token.

    Args:
      rule: what is fixed when the program is traced.
      parameters: a pytree of arrays that all tokens share, for `rule.terms`.
      state: before the first token, `(*B, V, F, D)`, or `(*B, V, F, D + 1)` if normalised. Its
        dtype is that of all sums.
      queries: a pytree of arrays `(*B, T, ...)` for `rule.terms`, cleared by the query mask.
      keys: a pytree of arrays `(*B, T, ...)` for `rule.terms`, cleared by the key mask.
      tokens: padding and packed documents.

    Returns:
      `(output (*B, T, N or V, D), state after the last token)`; the output has `rule.dtype`.

    Raises:
      TypeError: in forward-mode differentiation.
    """
    length = jax.tree.leaves(queries)[0].shape[state.ndim - 3]
    rule = rule._replace(chunk=min(rule.chunk, max(length, 1)))
    operands = mesh_axes.vary_alike((parameters, state, queries, keys, tokens))
    with reverse_mode.only("the chunked linear recurrence", "a step-by-step jax.lax.scan of it"):
        return _compiled_recurrence(rule, *operands)


def linear_sum(
    rule: Rule,
    parameters: Any,
    state: jax.Array,
    queries: Any,
    keys: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the state after the last key: the recurrence without causality.

    Takes and returns what `linear_recurrence` does, except starts, decays, a bonus and the delta
    form; there may be more or fewer queries than keys.
    """
    dot = functools.partial(jnp.dot, precision=rule.precision)
    terms = _terms(rule, parameters, queries, keys, tokens, state.dtype)
    *batch, _, heads, _ = terms.key.shape

    def head(state, query, key, value):  # (F, D), (T, G, F), (S, F), (S, D)
        state = _carry(state, dot(key.T, value), None)
        return state, dot(query, state)

    run = jax.vmap(head, (0, 1, 1, 1), (0, 1))
    for _ in batch:
        run = jax.vmap(run)
    query = _group(terms.query, len(batch) + 1, heads)
    state, output = run(state, query, terms.key, terms.value)
    output = output.reshape(*terms.query.shape[:-1], output.shape[-1])
    output = normalize(output) if rule.normalized else output
    return clear(output, tokens.query_mask).astype(rule.dtype), state
