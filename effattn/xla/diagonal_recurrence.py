"""The recurrence in which every entry of the state decays by itself, token by token.

For one head, with queries and keys of F features, values and steps of D, and rates A `(F, D)`:

    S_t = exp(A * dt_t) * S_(t-1) + k_t (dt_t * v_t)^T        (F, D), * by entry
    y_t = S_t^T q_t

No product of matrices computes it: the decays of a pair of tokens differ for every entry. It is a
scan over chunks, of which only the states between them are kept, and within each a scan over its
tokens, which the backward pass runs again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.cores.linear_recurrence import Rule, Tokens, clear
from effattn.xla import mesh_axes

LIMITS = dispatch.Limits()


def diagonal_recurrence(
    rule: Rule, parameters: Any, state: jax.Array, queries: Any, keys: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the keys and values up to its own token.

    Args:
      rule: its `chunk` is how many tokens lie between two states that are kept.
      parameters: the rates A, `(K, D, F)`.
      state: before the first token, `(*B, K, F, D)`. Its dtype is that of all sums.
      queries: `(*B, T, N, F)`.
      keys: the keys `(*B, T, K, F)`, the values and the steps, `(*B, T, K, D)`.
      tokens: padding and packed documents.

    Returns:
      `(output (*B, T, N, D), state after the last token)`; the output has `rule.dtype`.
    """
    arguments = parameters, state, queries, keys, tokens
    rate, state, query, keys, tokens = mesh_axes.vary_alike(arguments)
    return _recurrence(rule, rate, state, query, keys, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _recurrence(rule, rate, state, query, keys, tokens):
    axis, length, dtype = state.ndim - 3, query.shape[state.ndim - 3], state.dtype
    query = clear(query, tokens.query_mask)
    # A token that is not there takes a step of zero, which changes nothing.
    key, value, step = clear(keys, tokens.key_mask)
    starts = tokens.starts
    if starts is None:
        starts = jnp.zeros((), bool)
    starts = jnp.broadcast_to(starts, query.shape[: axis + 1])
    rate = jnp.swapaxes(rate.astype(dtype), -1, -2)
    chunk = max(1, min(rule.chunk, length))

    def in_chunks(x):
        x = jnp.moveaxis(x, axis, 0)
        x = jnp.pad(x, [(0, -length % chunk), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(-1, chunk, *x.shape[1:])

    def of_token(state, token):
        query, key, value, step, starts = token
        query, key, value, step = (x.astype(dtype) for x in (query, key, value, step))
        decay = jnp.exp(step[..., None, :] * rate)
        decay = jnp.where(starts[..., None, None, None], 0, decay)
        state = decay * state + key[..., :, None] * (step * value)[..., None, :]
        of_heads = query.reshape(*key.shape[:-1], -1, key.shape[-1], 1)
        out = (of_heads * state[..., None, :, :]).sum(-2)
        return state, out.reshape(*query.shape[:-1], value.shape[-1]).astype(rule.dtype)

    def of_chunk(state, tokens):
        return lax.scan(of_token, state, tokens)

    chunks = jax.tree.map(in_chunks, (query, key, value, step, starts))
    state, out = lax.scan(jax.checkpoint(of_chunk, prevent_cse=False), state, chunks)
    out = out.reshape(-1, *out.shape[2:])[:length]
    return jnp.moveaxis(out, 0, axis), state
