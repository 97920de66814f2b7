"""The linear recurrence: a matrix-valued state that sums outer products of keys and values.

For one head, with features q_t, k_t (F) and values v_t (D), after Katharopoulos et al. 2020,
"Transformers are RNNs":

    S_t = S_(t-1) + k_t v_t^T        (F, D)
    y_t = S_t^T q_t                  (D)

A normalised recurrence gives every value a last entry of 1, so that the last column of the state
sums the key features, and divides y_t by its own last entry.

The causal form runs in chunks: inside a chunk the sum over the past is a masked matrix product, and
the state carries it from one chunk to the next. One step of the loop takes a block of several
chunks, whose products are batched. Time is O(T F D), memory O(T): the backward pass saves the state
at the start of each block, recomputes the block, and never rebuilds a state by subtraction.
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


class Documents(NamedTuple):
    """Which document each token is in; `(*B, T)`, or `(C,)` for one chunk.

    Attributes:
      query: the document that a query reads.
      key: the document that a key belongs to. Every key has one, padding too.
      previous: the document of the key before, and for the first key its own.
    """

    query: jax.Array
    key: jax.Array
    previous: jax.Array

    @classmethod
    def of(cls, segment_ids: jax.Array, valid: jax.Array | None = None) -> "Documents":
        """Of tokens `(*B, T)` with these ids, of which 0, and all that are not valid, are padding.

        Padding continues the document before it, or the first one at the start of the row, so that
        the state outlives it.
        """
        length = segment_ids.shape[-1]
        token = jnp.arange(length)
        in_document = segment_ids != 0
        first = jnp.min(jnp.where(in_document, token, length), -1, keepdims=True, initial=length)
        last = jnp.where(in_document if valid is None else in_document & valid, token, -1)
        last = lax.cummax(last, axis=last.ndim - 1)
        source = jnp.where(last < 0, first, last)
        key = jnp.take_along_axis(segment_ids, source, -1, mode="clip")
        return cls(segment_ids, key, jnp.concatenate([key[..., :1], key[..., :-1]], -1))

    @property
    def carried(self) -> jax.Array:
        """The document that the state at the start of a chunk belongs to."""
        return self.previous[0]

    @property
    def last(self) -> jax.Array:
        """The document that the state at the end of a chunk belongs to."""
        return self.key[-1]


class Rule(NamedTuple):
    """What is fixed when the program is traced.

    Attributes:
      normalized: divide by the sum of the weights.
      feature_map: applied to queries and keys, block by block; it may not close over arrays.
      precision: of the matrix products.
      chunk: tokens of one masked product, at most.
    """

    normalized: bool
    feature_map: Callable[[jax.Array], jax.Array]
    precision: Any = None
    chunk: int = CHUNK


class Tokens(NamedTuple):
    """What is known of each token besides its query, key and value; None where absent.

    Attributes:
      query_mask: bool `(*B, T)`, False for queries that read zeros.
      key_mask: bool `(*B, T)`, False for keys that add nothing, whatever is there.
      documents: packed documents.
    """

    query_mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    documents: Documents | None = None


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


# The maths of one key head and the G query heads that read it. Chunks: query (C, F), key (C, F),
# value (C, D), state (F, D).


def _write(key, value, documents, dot):
    """What a chunk adds to the state: the sum of k v^T over its last document."""
    if documents is not None:
        key = jnp.where((documents.key == documents.last)[:, None], key, 0)
    return dot(key.T, value)


def _carry(state, written, documents):
    """The state after a chunk, from the state before it."""
    if documents is not None:
        state = jnp.where(documents.last == documents.carried, state, 0)
    return state + written


def _read(query, key, value, state, documents, dot):
    """The outputs of a chunk: each query on the state before the chunk and on the keys up to it."""
    visible, past = jnp.tri(key.shape[0], dtype=bool), query
    if documents is not None:
        visible &= documents.query[:, None] == documents.key[None, :]
        past = jnp.where((documents.query == documents.carried)[:, None], query, 0)
    weights = jnp.where(visible, dot(query, key.T), 0)
    return dot(weights, value) + dot(past, state)


def _chunks(state, query, key, value, documents, dot):
    """M chunks, query (M, C, G, F), key (M, C, F): the state after, and outputs (M, C, G, D)."""
    written = jax.vmap(functools.partial(_write, dot=dot))(key, value, documents)
    state, starts = lax.scan(
        lambda state, chunk: (_carry(state, *chunk), state), state, (written, documents)
    )
    read = jax.vmap(functools.partial(_read, dot=dot), (1, None, None, None, None), 1)
    return state, jax.vmap(read)(query, key, value, starts, documents)


# All heads and rows of a block of chunks, and the loop over blocks, forward and backward.


class _Span(NamedTuple):
    """`blocks` blocks of `length` tokens from token `start` on, in chunks of `chunk`."""

    start: int
    blocks: int
    length: int
    chunk: int


def _spans(length: int, chunk: int) -> list[_Span]:
    """Whole blocks, then the whole chunks left, then the tokens left: nothing is padded."""
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


def clear(x, mask):
    """`x (*B, L, ...)` with zeros where `mask (*B, L)` is False; None hides nothing."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0)


def _features(rule, query, key, value, scale, tokens, dtype):
    """Queries, keys and values as the recurrence takes them, in the dtype of its sums."""
    query = rule.feature_map(clear(query, tokens.query_mask).astype(dtype))
    key = rule.feature_map(clear(key, tokens.key_mask).astype(dtype))
    value = clear(value, tokens.key_mask).astype(dtype)
    if scale is not None:
        query = query * scale
    return query, clear(key, tokens.key_mask), append_one(value) if rule.normalized else value


def _outputs(rule, output, tokens, dtype):
    """What the queries read, divided by the sum of the weights if the rule says so."""
    output = normalize(output) if rule.normalized else output
    return clear(output, tokens.query_mask).astype(dtype)


def _block(rule, chunk, state, scale, query, key, value, tokens):
    """Consecutive tokens `(*B, L, ...)` in chunks: `(state after, outputs (*B, L, K, G, D))`."""
    batch, rest = key.shape[:-3], key.ndim - 2
    features = _features(rule, query, key, value, scale, tokens, state.dtype)

    def cut(x):
        return x.reshape(*batch, -1, chunk, *x.shape[rest:])

    queries, keys, values, documents = jax.tree.map(cut, (*features, tokens.documents))
    dot = functools.partial(jnp.dot, precision=rule.precision)
    chunks = jax.vmap(functools.partial(_chunks, dot=dot), (0, 2, 2, 2, None), (0, 2))
    for _ in batch:
        chunks = jax.vmap(chunks)
    state, output = chunks(state, queries, keys, values, documents)
    output = output.reshape(*batch, -1, *output.shape[rest + 1 :])
    return state, _outputs(rule, output, tokens, value.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(rule, query, key, value, state, scale, tokens):
    return _forward(rule, query, key, value, state, scale, tokens)[0]


def _forward(rule, query, key, value, state, scale, tokens):
    """`((output, state), residuals)`; the residuals hold the state at the start of every block."""
    inputs, axis = (query, key, value, tokens), key.ndim - 3
    output = jnp.zeros_like(value, shape=(*query.shape[:-1], value.shape[-1]))
    saved = []
    for span in _spans(key.shape[axis], rule.chunk):

        def step(carry, index, span=span):
            state, output = carry
            block = _take(span, index, inputs, axis)
            after, block = _block(rule, span.chunk, state, scale, *block)
            return (after, _put(span, index, output, block, axis)), state

        (state, output), starts = lax.scan(step, (state, output), jnp.arange(span.blocks))
        saved.append(starts)
    return (output, state), (inputs, scale, saved)


def _backward(rule, residuals, cotangents):
    """One sweep from the last block to the first, each recomputed from the state at its start."""
    (*inputs, tokens), scale, saved = residuals
    d_output, d_state = cotangents
    axis = inputs[1].ndim - 3
    d_inputs, d_scale = jax.tree.map(jnp.zeros_like, (inputs, scale))
    spans = _spans(inputs[1].shape[axis], rule.chunk)
    for span, starts in reversed(list(zip(spans, saved, strict=True))):

        def step(carry, start, span=span):
            d_state, d_scale, d_inputs = carry
            index, state = start
            *block, known = _take(span, index, (*inputs, tokens), axis)
            run = functools.partial(_block, rule, span.chunk, tokens=known)
            _, pull_back = jax.vjp(run, state, scale, *block)
            d_state, more, *d_block = pull_back((d_state, _take(span, index, d_output, axis)))
            d_scale = jax.tree.map(jnp.add, d_scale, more)
            return (d_state, d_scale, _put(span, index, d_inputs, d_block, axis)), None

        carry, starts = (d_state, d_scale, d_inputs), (jnp.arange(span.blocks), starts)
        (d_state, d_scale, d_inputs), _ = lax.scan(step, carry, starts, reverse=True)
    return *d_inputs, d_state, d_scale, None


_recurrence.defvjp(_forward, _backward)
_compiled_recurrence = jax.jit(_recurrence, static_argnums=0)  # so that eager calls compile once


def linear_recurrence(
    rule: Rule,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    state: jax.Array,
    scale: jax.Array | None,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the keys and values up to its own token.

    Args:
      rule: what is fixed when the program is traced.
      query: `(*B, T, N, H)`, with features `(*B, T, N, F)`; head n reads key head n // (N // K).
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, D)`.
      state: before the first token, `(*B, K, F, D)`, or `(*B, K, F, D + 1)` if normalised. Its
        dtype is that of all sums.
      scale: `()`, multiplies the features of the queries; None is 1.
      tokens: padding and packed documents. A query reads its own document only, and the state is
        that of the last document.

    Returns:
      `(output (*B, T, N, D), state after the last token)`; the output has the dtype of `value`.

    Raises:
      TypeError: in forward-mode differentiation.
    """
    heads, key_heads = query.shape[-2], key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, query.shape[-1])
    rule = rule._replace(chunk=min(rule.chunk, max(key.shape[-3], 1)))
    operands = mesh_axes.vary_alike((grouped, key, value, state, scale, tokens))
    with reverse_mode.only("the chunked linear recurrence", "a step-by-step jax.lax.scan of it"):
        output, state = _compiled_recurrence(rule, *operands)
    return output.reshape(*query.shape[:-1], value.shape[-1]), state


def linear_sum(
    rule: Rule,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    state: jax.Array,
    scale: jax.Array | None,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the state after the last key: the recurrence without causality.

    Takes and returns what `linear_recurrence` does, except documents; there may be more or fewer
    queries than keys.
    """
    dot = functools.partial(jnp.dot, precision=rule.precision)

    def head(query, key, value, state):  # (T, G, F), (S, F), (S, D), (F, D)
        state = _carry(state, _write(key, value, None, dot), None)
        return dot(query, state), state

    heads_of = jax.vmap(head, (1, 1, 1, 0), (1, 0))
    for _ in key.shape[:-3]:
        heads_of = jax.vmap(heads_of)
    heads, key_heads = query.shape[-2], key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, query.shape[-1])
    operands = _features(rule, grouped, key, value, scale, tokens, state.dtype)
    output, state = heads_of(operands[0], operands[1], operands[2], state)
    output = _outputs(rule, output, tokens, value.dtype)
    return output.reshape(*query.shape[:-1], value.shape[-1]), state
