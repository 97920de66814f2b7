"""The recurrence in which every entry of the state decays by itself, token by token.

For one head, with queries and keys of F features, values and steps of D, and rates A `(F, D)`:

    S_t = exp(A * dt_t) * S_(t-1) + k_t (dt_t * v_t)^T        (F, D), * by entry
    y_t = S_t^T q_t

No product of matrices computes it: the decays of a pair of tokens differ for every entry. It is a
scan over chunks, of which only the states between them are kept; the backward pass computes again
what is within. There the decays of all tokens are made at once, which leaves the scan over tokens
one product and one sum, and what sums over features is a product of matrices: XLA's own sums of
products, in loops on a CPU, are many times slower.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.arrays import mesh_axes, reverse_mode
from effattn.arrays.axes import lead
from effattn.interfaces.linear_recurrence import Config, Tokens, clear

LIMITS = dispatch.Limits()

# Tokens of a chunk: the decays and states of a few fit in a CPU's cache.
CHUNK = 16

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def diagonal_recurrence(
    config: Config, parameters: Any, state: jax.Array, queries: Any, keys: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the keys and values up to its own token.

    Args:
      config: its `chunk` is how many tokens lie between two states that are kept.
      parameters: the rates A, `(K, D, F)`.
      state: before the first token, `(*B, K, F, D)`. Its dtype is that of all sums.
      queries: `(*B, T, N, F)`.
      keys: the keys `(*B, T, K, F)`, the values and the steps, `(*B, T, K, D)`.
      tokens: padding and packed documents.

    Returns:
      `(output (*B, T, N, D), state after the last token)`; the output has `config.dtype`.

    Raises:
      TypeError: in forward-mode differentiation.
    """
    arguments = parameters, state, queries, keys, tokens
    rate, state, query, keys, tokens = mesh_axes.vary_alike(arguments)
    with reverse_mode.only("the selective scan", "a step-by-step jax.lax.scan of it"):
        return _recurrence(config, rate, state, query, keys, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _recurrence(config, rate, state, query, keys, tokens):
    axis, length, dtype = state.ndim - 3, query.shape[state.ndim - 3], state.dtype
    query = clear(query, tokens.query_mask)
    # A token that is not there takes a step of zero, which changes nothing.
    key, value, step = clear(keys, tokens.key_mask)
    rate = jnp.swapaxes(rate.astype(dtype), -1, -2)
    chunk = max(1, min(config.chunk, length))

    def in_chunks(x):
        x = jnp.moveaxis(x, axis, 0)
        x = jnp.pad(x, [(0, -length % chunk), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(x.shape[0] // chunk, chunk, *x.shape[1:])

    def of_chunk(state, tokens):
        query, key, value, step, starts = tokens
        query, key, value, step = (x.astype(dtype) for x in (query, key, value, step))
        decay = jnp.exp(_log_decay(rate, step))
        if starts is not None:
            decay = clear(decay, ~starts)
        written = _einsum("...f,...d->...fd", key, step * value)
        state, states = _states(state, decay, written)
        group = query.shape[-2] // key.shape[-2]
        of_heads = query.reshape(*key.shape[:-1], group, key.shape[-1])
        out = jnp.matmul(of_heads, states, precision=lax.Precision.HIGHEST)
        return state, out.reshape(*query.shape[:-1], value.shape[-1]).astype(config.dtype)

    chunks = jax.tree.map(in_chunks, (query, key, value, step, tokens.starts))
    state, out = lax.scan(jax.checkpoint(of_chunk, prevent_cse=False), state, chunks)
    out = lax.collapse(out, 0, 2)[:length]
    return jnp.moveaxis(out, 0, axis), state


@jax.custom_vjp
def _states(state, decay, written):
    """`(last, all)` of S_t = decay_t * S_(t-1) + written_t; of C tokens `(C, ...)`."""

    def of_token(state, token):
        decay, written = token
        state = decay * state + written
        return state, state

    return lax.scan(of_token, state, (decay, written))


def _states_forward(state, decay, written):
    last, states = _states(state, decay, written)
    return (last, states), (state, decay, states)


def _states_backward(residuals, cotangents):
    state, decay, states = residuals
    last, read = cotangents

    def of_token(later, token):
        decay, read = token
        change = read + later
        return decay * change, change

    # What a state changes is what its own query reads, and what it passes on to later ones.
    first, changes = lax.scan(of_token, last, (decay, read), reverse=True)
    before = jnp.concatenate([state[None], states[:-1]])
    return first, changes * before, changes


_states.defvjp(_states_forward, _states_backward)


@jax.custom_vjp
def _log_decay(rate, step):
    """A * dt `(C, *B, K, F, D)`, of rates `(K, F, D)` and steps `(C, *B, K, D)`.

    Its rule says in which form the two sums are taken; see above.
    """
    return lead(rate, step.ndim + 1) * step[..., None, :]


def _log_decay_forward(rate, step):
    return _log_decay(rate, step), (rate, step)


def _log_decay_backward(residuals, changes):
    rate, step = residuals

    def of_token(total, token):
        change, step = token
        return total + change * step[..., None, :], None

    of_rates, _ = lax.scan(of_token, jnp.zeros_like(changes[0]), (changes, step))
    ones = jnp.ones(changes.shape[:-1], changes.dtype)
    of_steps = _einsum("...f,...fd->...d", ones, changes * lead(rate, changes.ndim))
    return of_rates.sum(range(of_rates.ndim - rate.ndim)), of_steps


_log_decay.defvjp(_log_decay_forward, _log_decay_backward)
