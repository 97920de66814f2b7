"""Bidirectional linear attention: one sum over all keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays.axes import over_batch
from effattn.interfaces.linear_recurrence import Config, Tokens, clear, divided, masked_terms
from effattn.xla.recurrent_block import split_heads


def linear_sum(
    config: Config,
    parameters: Any,
    state: jax.Array,
    queries: Any,
    keys: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Bidirectional linear attention: every query reads the state after the last key.

    Arguments and results are those of `effattn.cores.linear_recurrence.linear_recurrence`. Document
    starts, decays, a bonus and the delta form are not supported. The query length may differ from
    the key length.
    """
    dot = functools.partial(jnp.dot, precision=config.precision)
    terms = masked_terms(config, parameters, queries, keys, tokens, state.dtype)
    *batch, _, heads, _ = terms.key.shape

    def head(state, query, key, value):  # (F, D), (T, G, F), (S, F), (S, D)
        state += dot(key.T, value)
        return state, dot(query, state)

    run = jax.vmap(head, (0, 1, 1, 1), (0, 1))
    run = over_batch(run, len(batch))
    query = split_heads(terms.query, len(batch) + 1, heads)
    state, output = run(state, query, terms.key, terms.value)
    output = output.reshape(*terms.query.shape[:-1], output.shape[-1])
    output = divided(config, output, terms.least)
    return clear(output, tokens.query_mask).astype(config.dtype), state
