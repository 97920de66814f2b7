"""The diagonal recurrence in XLA: see `effattn.cores.diagonal_recurrence`.

The decay between two tokens differs for every entry of the state, so matrix products cannot compute
the recurrence. The implementation is a scan over chunks of tokens. It saves the states between
chunks only, and the backward pass recomputes each chunk. Within a chunk, the decays of all tokens
are computed at once. On a CPU an inner scan over tokens follows, of one product and one sum per
entry of the state; sums over features are matrix products, because XLA's reductions on a CPU are
many times slower. Other devices would wait for each step of such a scan: they compute all states of
a chunk in parallel (`effattn.xla.linear_scan.chunk_states`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.axes import fold, lead
from effattn.arrays.linear_map import with_derivatives
from effattn.interfaces.linear_recurrence import Config, Tokens, clear
from effattn.xla.linear_scan import chunk_states

# Tokens in a chunk; on a CPU few, so that their decays and states fit in its cache.
_ON_CPU, _ELSEWHERE = 16, 64

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def own_chunk() -> int:
    """Default number of tokens in a chunk."""
    return _ON_CPU if jax.default_backend() == "cpu" else _ELSEWHERE


def diagonal_recurrence(
    config: Config, parameters: Any, state: jax.Array, queries: Any, keys: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """The output and the state after the last token: see `effattn.cores.diagonal_recurrence`."""
    axis, length, dtype = state.ndim - 3, queries.shape[state.ndim - 3], state.dtype
    query = clear(queries, tokens.query_mask)
    # A padding token has a step of zero, which leaves the state unchanged.
    key, value, dt = clear(keys, tokens.key_mask)
    A = jnp.swapaxes(parameters.astype(dtype), -1, -2)
    chunk = max(1, min(config.chunk, length))

    def in_chunks(x):
        return fold(jnp.moveaxis(x, axis, 0), chunk, 0)

    def of_chunk(state, tokens):
        query, key, value, dt, starts = tokens
        query, key, value, dt = (x.astype(dtype) for x in (query, key, value, dt))
        decay = jnp.exp(_log_decay(None, A, dt))
        if starts is not None:
            decay = clear(decay, ~starts)
        written = _einsum("...f,...d->...fd", key, dt * value)
        state, states = _states(None, state, decay, written)
        group = query.shape[-2] // key.shape[-2]
        of_heads = query.reshape(*key.shape[:-1], group, key.shape[-1])
        out = jnp.matmul(of_heads, states, precision=lax.Precision.HIGHEST)
        return state, out.reshape(*query.shape[:-1], value.shape[-1]).astype(config.dtype)

    chunks = jax.tree.map(in_chunks, (query, key, value, dt, tokens.starts))
    state, out = lax.scan(jax.checkpoint(of_chunk, prevent_cse=False), state, chunks)
    out = lax.collapse(out, 0, 2)[:length]
    return jnp.moveaxis(out, 0, axis), state


def _in_order(state, decay, written):
    """States of S_t = decay_t * S_(t-1) + written_t, C tokens `(C, ...)`."""

    def of_token(state, token):
        decay, written = token
        state = decay * state + written
        return state, state

    return lax.scan(of_token, state, (decay, written))[1]


def _at_once(state, decay, written):
    return chunk_states(decay[None], written[None], state[None])[0]


def _all_states(_, state, decay, written):
    """The states of `_in_order`: `(last, all)`."""
    states = lax.platform_dependent(state, decay, written, cpu=_in_order, default=_at_once)
    return states[-1], states


def _states_forward(_, state, decay, written):
    last, states = _all_states(_, state, decay, written)
    return (last, states), (state, decay, states)


def _states_backward(_, residuals, cotangents):
    state, decay, states = residuals
    last, read = cotangents

    operands = last, decay, read
    changes = lax.platform_dependent(*operands, cpu=_back_in_order, default=_back_at_once)
    before = jnp.concatenate([state[None], states[:-1]])
    return decay[0] * changes[0], changes * before, changes


def _back_in_order(last, decay, read):
    """Gradients of the states: from the query of the token, and from the next state."""

    def of_token(later, token):
        decay, read = token
        change = read + later
        return decay * change, change

    return lax.scan(of_token, last, (decay, read), reverse=True)[1]


def _back_at_once(last, decay, read):
    # From the last token to the first this is the same recurrence, with the decay of the next one.
    decay = jnp.concatenate([decay[1:], jnp.ones_like(decay[:1])])
    return jnp.flip(_at_once(last, jnp.flip(decay, 0), jnp.flip(read, 0)), 0)


_states = with_derivatives(_all_states, _states_forward, _states_backward)


def _products(_, A, dt):
    """A * dt `(C, *B, K, F, D)`, from rates A `(K, F, D)` and steps dt `(C, *B, K, D)`."""
    return lead(A, dt.ndim + 1) * dt[..., None, :]


def _products_forward(_, A, dt):
    return _products(_, A, dt), (A, dt)


def _products_backward(_, residuals, changes):
    """Sums over features are matrix products, and on a CPU sums over tokens are scans."""
    A, dt = residuals

    def in_order(changes, dt):
        def of_token(total, token):
            change, dt = token
            return total + change * dt[..., None, :], None

        return lax.scan(of_token, jnp.zeros_like(changes[0]), (changes, dt))[0]

    def at_once(changes, dt):
        return (changes * dt[..., None, :]).sum(0)

    d_A = lax.platform_dependent(changes, dt, cpu=in_order, default=at_once)
    ones = jnp.ones(changes.shape[:-1], changes.dtype)
    d_dt = _einsum("...f,...fd->...d", ones, changes * lead(A, changes.ndim))
    return d_A.sum(range(d_A.ndim - A.ndim)), d_dt


_log_decay = with_derivatives(_products, _products_forward, _products_backward)
