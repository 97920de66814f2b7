"""The linear recurrence: a matrix-valued state that sums outer products of keys and values.

For one head, with queries q_t and keys k_t of F features and values v_t of D:

    S_t = diag(exp w_t) S_(t-1) + k_t v_t^T                          (F, D)
    y_t = S_t^T q_t        or, with a bonus u,   (S_(t-1) + diag(u) k_t v_t^T)^T q_t

The log decays w_t <= 0 are none, one number a head, one a token, or F numbers a token. The delta
form also takes away what the state holds in some direction:

    S_t = (diag(exp w_t) - a_t b_t^T) S_(t-1) + k_t v_t^T

A normalised recurrence gives every value a last entry of 1, so that the last column of the state
sums the keys, and divides y_t by its own last entry.

It runs in chunks of C tokens. Inside a chunk all is matrix products (`recurrent_chunks`), and the
state carries the chunk's sum to the next one.

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
from effattn.xla.recurrent_chunks import run_chunks

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
    run, by_head = functools.partial(run_chunks, dot), 0 if constant else 2
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


# Traced once, where the rules of differentiation call for it twice.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(rule, parameters, state, queries, keys, tokens):
    """`((output, state), residuals)`; the residuals hold the state at the start of every block."""
    inputs, axis = (queries, keys, tokens), state.ndim - 3
    first = jax.tree.leaves(queries)[0]
    length = first.shape[axis]
    terms = jax.eval_shape(rule.terms, parameters, queries, keys)
    heads = max(terms.query.shape[-2], terms.value.shape[-2])
    shape = (*first.shape[:axis], length, heads, terms.value.shape[-1])
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
        state += dot(key.T, value)
        return state, dot(query, state)

    run = jax.vmap(head, (0, 1, 1, 1), (0, 1))
    for _ in batch:
        run = jax.vmap(run)
    query = _group(terms.query, len(batch) + 1, heads)
    state, output = run(state, query, terms.key, terms.value)
    output = output.reshape(*terms.query.shape[:-1], output.shape[-1])
    output = normalize(output) if rule.normalized else output
    return clear(output, tokens.query_mask).astype(rule.dtype), state
