"""One block of tokens of the chunked linear recurrence, for all heads."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from effattn.interfaces.linear_recurrence import clear, divided, masked_terms
from effattn.xla.recurrent_chunks import mapped, run_chunks


def split_heads(x, axis, groups):
    """Splits the heads at `axis` into groups: `(..., K R, ...)` to `(..., K, R, ...)`."""
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def padded(x, axis, width):
    """Appends `width` zeros at `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, width)
    return jnp.pad(x, widths)


def run_block(config, chunk, parameters, state, queries, keys, tokens):
    """Runs one block of tokens `(*B, L, ...)`: `(state after, outputs (*B, L, N, D))`."""
    time = state.ndim - 3
    length = jax.tree.leaves(keys)[0].shape[time]
    chunks = -(-length // chunk)
    # Padding tokens fill the last chunk (`rest`), and each chunk to a power of two (`more`).
    rest, more = chunks * chunk - length, (1 << (chunk - 1).bit_length()) - chunk
    alike = tokens.key_mask is None and not rest and not more
    terms = masked_terms(config, parameters, queries, keys, tokens, state.dtype, alike)
    *batch, _, heads, _ = terms.key.shape
    constant = terms.log_decay is not None and terms.log_decay.ndim == 1
    by_value = terms.log_decay is not None and terms.log_decay.ndim == terms.key.ndim - 1

    def cut(x):
        x = padded(x, time, rest).reshape(*batch, chunks, chunk, *x.shape[time + 1 :])
        return padded(x, time + 1, more)

    query, value, value_log_decay = jax.tree.map(
        lambda x: split_heads(cut(x), time + 2, heads),
        (terms.query, terms.value, terms.value_log_decay),
    )
    key, removed, recalled, starts = jax.tree.map(
        cut, (terms.key, terms.removed, terms.recalled, tokens.starts)
    )
    if constant:
        log_decay = split_heads(terms.log_decay, 0, heads)
    elif by_value:
        log_decay = split_heads(cut(terms.log_decay), time + 2, heads)
    else:
        log_decay = jax.tree.map(cut, terms.log_decay)

    # Maps over the value heads of a key head, then over key heads, then over batch dimensions.
    dot = functools.partial(jnp.matmul, precision=config.precision)
    run, by_head = functools.partial(run_chunks, dot), 0 if constant else 2
    decays = by_head if constant or by_value else None
    grouped = split_heads(state, time, heads)
    of_value_heads = (0, None, None, 2, decays, None, None, None, None, 2)
    run = mapped(run, grouped.shape[time + 1], of_value_heads, (0, 3))
    run = mapped(run, heads, (0, 2, 2, 2, by_head, 0, 2, 2, None, 2), (0, 2))
    for rows in reversed(batch):
        run = mapped(run, rows, (0, 0, 0, 0, None if constant else 0, None, 0, 0, 0, 0), (0, 0))
    arguments = query, key, value, log_decay, terms.bonus, removed, recalled, starts
    after, output = run(grouped, *arguments, value_log_decay)
    output = lax.slice_in_dim(output, 0, chunk, axis=time + 1)
    rows = math.prod(output.shape[time + 2 : -1])
    output = output.reshape(*batch, chunks * chunk, rows, output.shape[-1])
    output = lax.slice_in_dim(output, 0, length, axis=time)
    output = divided(config, output, terms.least)
    return after.reshape(state.shape), clear(output, tokens.query_mask)


def pull_back(cotangents, config, chunk, parameters, state, queries, keys, tokens):
    """Pulls gradients of the state and outputs back to parameters, state, queries and keys."""
    run = functools.partial(run_block, config, chunk, tokens=tokens)
    return jax.vjp(run, parameters, state, queries, keys)[1](cotangents)
