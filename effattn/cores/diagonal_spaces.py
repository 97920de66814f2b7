"""Diagonal state spaces, one for each feature, as convolutions or as recurrences.

A feature has M modes with a decay each:

    s_t = exp(logs) * s_(t-1) + written * x_t;    y_t = sum_m output_m s_(t, m)

The modes are real, or complex ones of conjugate pairs, and then y_t is twice the real part.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.axes import fold, lead
from effattn.arrays.segments import positions_from, within
from effattn.cores import passed_states, sequence_parts, token_mixing
from effattn.xla.linear_scan import linear_scan
from effattn.xla.long_convolution import long_convolution

# Tokens in a chunk of the recurrence.
_CHUNK = 64


class Space(NamedTuple):
    """Modes of D features, each array `(D, M)`, real or complex.

    Attributes:
      logs: logarithms of the decays, with real parts of 0 or less.
      written: factors of the inputs.
      output: weights of the states in the outputs.
    """

    logs: jax.Array
    written: jax.Array
    output: jax.Array


class Rows(NamedTuple):
    """Padding and documents, as `token_mixing.check` returns them; None if there are none.

    Attributes:
      valid: bool `(B, T)`, True at valid tokens.
      starts: bool `(B, T)`, True at the first token of each document.
    """

    valid: jax.Array | None = None
    starts: jax.Array | None = None


def mix(
    name: str,
    x: jax.Array,
    space: Space,
    state: jax.Array | None,
    rows: Rows,
    *,
    by_recurrence: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of all tokens, and the state after the last one.

    The convolution takes time O(T D (log T + M)) and memory O(T D + sqrt(T) D M); later tokens
    change earlier outputs by rounding errors. The recurrence runs chunk by chunk in time O(T D M)
    and memory O(T D).

    Args:
      name: name of the mechanism, a key of `sequence_parts.SUPPORTED`.
      x: `(B, T, D)`, zero in the padding.
      space: the state space.
      state: `(B, D, M)`, the state before the first token; None for zeros.
      rows: padding and documents.
      by_recurrence: whether to run the recurrence in place of the convolution. Documents always run
        as a recurrence.

    Returns:
      `(B, T, D)`, and the state `(B, D, M)`.
    """
    batch, time = x.shape[:2]
    by_recurrence = by_recurrence or rows.starts is not None
    is_first = state is None
    state = jnp.zeros((batch, *space.logs.shape), space.logs.dtype) if state is None else state

    def last_from(state):
        if by_recurrence:
            return _recurrence(x, space, state, rows)[1]
        return _last(x, space, state, None if rows.valid is None else count)

    count = jnp.full((batch,), time) if rows.valid is None else rows.valid.sum(1)
    state, after = _passed(name, last_from, space.logs, state, count, rows.starts)
    if by_recurrence:
        y, last = _recurrence(x, space, state, rows)
    else:
        y = long_convolution(x, kernel(space, time))
        if not is_first or after is not None:
            y = y + _seen(space, state, time)
        last = last_from(state)
    return y, last if after is None else after


def mix_both_ways(name: str, x: jax.Array, space: Space, later: Space, rows: Rows) -> jax.Array:
    """Outputs `(B, T, D)` of two spaces: one reads tokens up to t, the other one from t on.

    Both are convolutions, or recurrences if there are documents. The arguments are those of `mix`.
    """
    sequence_parts.refuse(f"{name} with is_causal=False")
    if rows.starts is None:
        taps, of_later = (kernel(each, x.shape[1]) for each in (space, later))
        taps = jnp.concatenate([taps[:1] + of_later[:1], taps[1:]])
        return long_convolution(x, taps, of_later[1:])
    y, _ = mix(name, x, space, None, rows)
    ends = token_mixing.ends(rows.valid, rows.starts)
    valid, starts = (None if a is None else jnp.flip(a, 1) for a in (rows.valid, ends))
    z, _ = mix(name, jnp.flip(x, 1), later, None, Rows(valid, starts))
    return y + jnp.flip(z, 1)


def kernel(space: Space, time: int) -> jax.Array:
    """The first `time` taps of the convolution, `(T, D)`, by powers of blocks and in blocks."""
    blocks, size = _split(time)
    weights = space.output * space.written
    of_blocks = weights[..., None] * _powers(space.logs, blocks, size)
    taps = jnp.einsum("dma,dmb->dab", of_blocks, _powers(space.logs, size))
    return _real(taps).reshape(space.logs.shape[0], -1)[:, :time].T


def _real(sums):
    """Sums over all modes; of complex ones, the array has one of each conjugate pair."""
    return 2 * sums.real if jnp.iscomplexobj(sums) else sums


def _passed(name, last_from, logs, state, count, starts):
    """The state before this device's part of a sequence, and that after the whole sequence.

    `last_from(state)` is the state after this part, of `count (B,)` valid tokens. Outside of
    `sequence_parts.along`, the results are `state` and None.
    """
    parts = sequence_parts.parts_for(name, "pass_states")
    if parts is None:
        return state, None
    kept = jnp.exp(dtypes.product(logs[None], count[:, None, None]))
    if starts is not None:
        kept = jnp.where(starts.any(1)[:, None, None], 0, kept)
    pair = kept, last_from(jnp.zeros_like(state))
    return passed_states.chained(
        parts, pair, state, lambda before, pair: pair[0] * before + pair[1]
    )


def _split(time):
    """Splits `time` in blocks: returns their number and size, both near the square root."""
    size = max(1, math.isqrt(time))
    return -(-time // size), size


def _powers(logs, count, stride=1, first=0):
    """Returns exp(logs (first + stride n)) for n < count, `(..., count)`."""
    steps = lead(first + stride * jnp.arange(count), logs.ndim + 1)
    return jnp.exp(dtypes.product(logs[..., None], steps))


def _seen(space, state, time):
    """Returns the contribution of the initial state to all outputs, `(B, T, D)`."""
    logs = space.logs
    blocks, size = _split(time)
    of_blocks = (state * space.output[None])[..., None] * _powers(logs, blocks, size, first=1)[None]
    seen = _real(jnp.einsum("rdma,dmb->rabd", of_blocks, _powers(logs, size)))
    return seen.reshape(state.shape[0], blocks * size, logs.shape[0])[:, :time]


def _last(x, space, state, lengths):
    """Returns the state after the last valid token."""
    batch, time, features = x.shape
    logs = space.logs
    blocks, size = _split(time)
    x = jnp.pad(x, ((0, 0), (blocks * size - time, 0), (0, 0)))
    count = jnp.full((batch,), time) if lengths is None else lengths
    if lengths is not None:
        # Right-align the valid tokens, so that the place of a token gives its power.
        at = positions_from(count - time, blocks * size)
        moved = jnp.take_along_axis(x, at[..., None], 1, mode="clip")
        fits = ~within(blocks * size - count, blocks * size)
        x = jnp.where(fits[..., None], moved, 0)
    x = x.reshape(batch, blocks, size, features)
    inside, between = _powers(logs, size)[..., ::-1], _powers(logs, blocks, size)[..., ::-1]
    of_blocks = jnp.einsum("rabd,dmb->radm", x.astype(logs.dtype), inside)
    added = jnp.einsum("radm,dma->rdm", of_blocks, between)
    logs_read = dtypes.product(logs[None], count[:, None, None])
    return jnp.exp(logs_read) * state + added * space.written[None]


def _recurrence(x, space, state, rows):
    """Runs the recurrence chunk by chunk; the backward pass recomputes the states."""
    decay = jnp.exp(space.logs)
    x, decay, written, output, state = mesh_axes.vary_alike(
        (x, decay, space.written, space.output, state)
    )
    batch, time, features = x.shape
    chunk = max(1, min(_CHUNK, time))

    def chunks(array):
        return None if array is None else jnp.moveaxis(fold(array, chunk, 1), 1, 0)

    @jax.checkpoint
    def step(before, of_chunk):
        x, valid, starts = of_chunk
        shape = (batch, chunk, *decay.shape)
        kept = jnp.broadcast_to(decay, shape)
        if starts is not None:
            kept = jnp.where(starts[..., None, None], 0, kept)
        kept = jnp.where(valid[..., None, None], kept, 1)
        added = jnp.where(valid[..., None, None], dtypes.product(x[..., None], lead(written, 4)), 0)
        states = linear_scan(kept, added, before)
        return states[:, -1], _real(jnp.einsum("rtdm,dm->rtd", states, output))

    valid = jnp.ones((batch, time), bool) if rows.valid is None else rows.valid
    state, y = lax.scan(step, state, tuple(map(chunks, (x, valid, rows.starts))))
    return lax.collapse(jnp.moveaxis(y, 0, 1), 1, 3)[:, :time], state
