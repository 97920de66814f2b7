"""Chunked linear recurrence in XLA, for any device.

Tokens are cut into chunks of C tokens. Within a chunk the recurrence is matrix products
(`effattn.xla.recurrent_chunks`); the state carries the sums to the next chunk.

Time is O(T (C (F + D) + F D)), memory O(T). Each step of the outer loop computes a block of several
chunks (`effattn.xla.recurrent_block`), whose matrix products are batched. The forward pass saves
the state at the start of each block, and the backward pass recomputes the block from the saved
state. It never reconstructs a state by subtraction or division.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.arrays import dtypes
from effattn.interfaces.linear_recurrence import Config, Inputs, Tokens
from effattn.xla.recurrent_block import padded, pull_back, run_block

BLOCK = 512  # tokens in a block, limited to CHUNKS_OF_BLOCK chunks
CHUNKS_OF_BLOCK = 8


class _Span(NamedTuple):
    """Equal blocks of consecutive tokens.

    Attributes:
      start: index of the first token.
      blocks: number of blocks.
      length: tokens in a block.
      chunk: tokens in a chunk.
    """

    start: int
    blocks: int
    length: int
    chunk: int


def _block_length(chunk):
    return min(max(BLOCK // chunk, 1), CHUNKS_OF_BLOCK) * chunk


def _spans(length: int, chunk: int, block: int | None) -> list[_Span]:
    """Spans that cover the sequence: all whole blocks, then the rest as one shorter block.

    At most two spans, because each span adds one loop body to compile.
    """
    chunk = min(chunk, max(length, 1))
    block = block or _block_length(chunk)
    in_blocks = length // block * block
    rest = length - in_blocks
    spans = [
        _Span(0, in_blocks // block, block, chunk),
        _Span(in_blocks, 1, rest, min(chunk, rest)),
    ]
    return [span for span in spans if span.blocks and span.length]


def _in_spans(config, x: Inputs, blocks: "Blocks") -> tuple[Inputs, list[_Span]]:
    """Returns the operands and their spans.

    If an exported program leaves the length open, padding tokens fill the last block, because the
    number of remaining tokens is not known.
    """
    axis, first = x.state.ndim - 3, jax.tree.leaves(x.queries)[0]
    length: Any = first.shape[axis]
    if isinstance(length, int):
        return x, _spans(length, config.chunk, blocks.length)
    block = blocks.length or _block_length(config.chunk)
    span = _Span(0, -(-length // block), block, config.chunk)
    tokens = x.tokens or Tokens()
    key_mask = tokens.key_mask
    if key_mask is None:
        key_mask = jnp.ones(first.shape[: axis + 1], bool)
    tokens = tokens._replace(key_mask=key_mask)
    return _filled(x._replace(tokens=tokens), axis, span), [span]


def _filled(x, axis, span):
    """Pads the arrays with a time axis by zeros to whole blocks."""

    def fill(array):
        return padded(array, axis, span.blocks * span.length - array.shape[axis])

    if not isinstance(x, Inputs):
        return fill(x)
    queries, keys, tokens = jax.tree.map(fill, (x.queries, x.keys, x.tokens))
    return x._replace(queries=queries, keys=keys, tokens=tokens)


def _first_tokens(arrays, axis, length):
    """Drops the padding of `_filled`, by a gather: slices do not take an open length."""
    if isinstance(length, int):
        return arrays
    index = jnp.arange(length, dtype=jnp.int32)
    return jax.tree.map(lambda array: jnp.take(array, index, axis, mode="clip"), arrays)


def _take(span, index, arrays, axis):
    """Slices block `index` of a span; `axis` is the time axis."""
    start = span.start + index * span.length
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, span.length, axis), arrays)


def _put(span, index, arrays, blocks, axis):
    """Writes block `index` of a span into the arrays; `axis` is the time axis."""
    start = span.start + index * span.length
    return jax.tree.map(
        lambda x, block: lax.dynamic_update_slice_in_dim(x, block, start, axis), arrays, blocks
    )


class Blocks(NamedTuple):
    """Functions that compute one block of tokens, forward and backward.

    Attributes:
      run: `(config, chunk, parameters, state, queries, keys, tokens)` to
        `(state after, outputs (*B, L, N, D))`.
      pull_back: `((d_after, d_outputs), config, ...)`, followed by the other arguments of `run`, to
        the gradients of parameters, state, queries and keys.
      length: tokens in a block; None is the default for XLA (see `BLOCK`).
    """

    run: Callable[..., tuple[jax.Array, jax.Array]] = run_block
    pull_back: Callable[..., tuple[Any, Any, Any, Any]] = pull_back
    length: int | None = None


_IN_CHUNKS = Blocks()


def forward(
    config: Config, x: Inputs, blocks: Blocks = _IN_CHUNKS
) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    """Forward pass: `((output, state), saved)`, where `saved` has the state before each block."""
    length = jax.tree.leaves(x.queries)[0].shape[x.state.ndim - 3]
    x, spans = _in_spans(config, x, blocks)
    inputs, state, axis = (x.queries, x.keys, x.tokens), x.state, x.state.ndim - 3
    first = jax.tree.leaves(x.queries)[0]
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    heads = max(terms.query.shape[-2], terms.value.shape[-2])
    shape = (*first.shape[: axis + 1], heads, terms.value.shape[-1])
    output = jnp.zeros_like(first, shape=shape, dtype=config.dtype)
    saved = []
    for span in spans:

        def step(carry, index, span=span):
            state, output = carry
            block = _take(span, index, inputs, axis)
            after, block = blocks.run(config, span.chunk, x.parameters, state, *block)
            return (after, _put(span, index, output, block.astype(output.dtype), axis)), state

        (state, output), starts = lax.scan(step, (state, output), jnp.arange(span.blocks))
        saved.append(starts)
    return (_first_tokens(output, axis, length), state), saved


def backward(
    config: Config,
    x: Inputs,
    saved: list[jax.Array] | None,
    d_output: jax.Array,
    d_state: jax.Array,
    blocks: Blocks = _IN_CHUNKS,
) -> Inputs:
    """Backward pass, from the last block to the first: gradients of the inputs.

    Each block is recomputed from the state before it. With `saved=None` the forward pass runs again
    to compute these states.
    """
    if saved is None:
        _, saved = forward(config, x, blocks)
    axis = x.state.ndim - 3
    length: Any = d_output.shape[axis]
    x, spans = _in_spans(config, x, blocks)
    if dispatch.open_length(length):
        d_output = _filled(d_output, axis, spans[0])
    inputs = x.queries, x.keys
    # Accumulated in float32 or wider: a 16-bit sum over blocks loses small terms.
    d_parameters = jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=dtypes.wide(p.dtype)), x.parameters
    )
    carry: Any = d_state, d_parameters, jax.tree.map(jnp.zeros_like, inputs)
    for span, starts in reversed(list(zip(spans, saved, strict=True))):

        def step(carry, start, span=span):
            d_state, d_parameters, d_inputs = carry
            index, state = start
            block = _take(span, index, (*inputs, x.tokens), axis)
            cotangents = d_state, _take(span, index, d_output, axis).astype(state.dtype)
            more, d_state, *d_block = blocks.pull_back(
                cotangents, config, span.chunk, x.parameters, state, *block
            )
            d_parameters = jax.tree.map(dtypes.added, d_parameters, more)
            return (d_state, d_parameters, _put(span, index, d_inputs, tuple(d_block), axis)), None

        carry, _ = lax.scan(step, carry, (jnp.arange(span.blocks), starts), reverse=True)
    d_state, d_parameters, d_inputs = carry
    d_queries, d_keys = _first_tokens(d_inputs, axis, length)
    d_parameters = jax.tree.map(lambda d, p: d.astype(p.dtype), d_parameters, x.parameters)
    return Inputs(d_parameters, d_state, d_queries, d_keys, None)
