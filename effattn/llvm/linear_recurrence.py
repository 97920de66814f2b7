"""The linear recurrence for CPUs, in float32: what JAX sees of the kernels of `recurrence_kernels`.

XLA makes the terms of a block of tokens, and the kernels go through it. The last entry of 1 that a
normalised recurrence gives values is made in the kernels, which also divide by what it sums.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, clear, masked_terms
from effattn.llvm import compiled
from effattn.llvm.primitive import kernel
from effattn.xla import linear_recurrence as by_xla

LIMITS = dispatch.Limits(("float32",), others="llvmlite; no decays and no packed documents")


def refusal(config: Config, x: Inputs) -> str | None:
    """Why it does not take these operands, if so."""
    dtypes = [array.dtype for array in jax.tree.leaves((x.state, x.queries, x.keys))]
    for dtype in (*dtypes, config.dtype):
        if reason := LIMITS.refusal(jnp.dtype(dtype)):
            return reason
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    given = [name for name in terms._fields[3:] if getattr(terms, name) is not None]
    given += ["packed documents"] if x.tokens is not None and x.tokens.starts is not None else []
    given += ["no tokens"] if 0 in (*x.state.shape, *terms.query.shape) else []
    if terms.value.shape[-2] != terms.key.shape[-2]:
        given.append("value heads that share keys")
    if given:
        return f"does not take {' and '.join(given)}"
    return compiled.refusal()


def forward(config: Config, x: Inputs) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    """`((output, state), saved)`: the state at the start of every block."""
    return by_xla.forward(config, x, _blocks(x))


def backward(
    config: Config,
    x: Inputs,
    saved: list[jax.Array] | None,
    d_output: jax.Array,
    d_state: jax.Array,
) -> Inputs:
    """The gradients of all but `tokens`, from the last block to the first."""
    return by_xla.backward(config, x, saved, d_output, d_state, _blocks(x))


def _blocks(x):
    """Of so many tokens that their features, a quarter of a megabyte a head, lie in near memory."""
    features = x.state.shape[-2]
    return by_xla.Blocks(_block, _pull_back, max(2**16 // features // 64, 1) * 64)


def _terms(config, dtype, tokens, parameters, queries, keys):
    plain = config._replace(normalized=False)
    return masked_terms(plain, parameters, queries, keys, tokens, dtype)[:3]


def _block(config, chunk, parameters, state, queries, keys, tokens):
    """Consecutive tokens: `(state after, outputs)`."""
    terms = _terms(config, state.dtype, tokens, parameters, queries, keys)
    output, after = _kernel(("forward", config.normalized), *terms, state)
    return after, clear(output, tokens.query_mask)


def _pull_back(cotangents, config, chunk, parameters, state, queries, keys, tokens):
    """The gradients of all but tokens."""
    d_after, d_output = cotangents
    of_tokens = functools.partial(_terms, config, state.dtype, tokens)
    terms, to_arguments = jax.vjp(of_tokens, parameters, queries, keys)
    operands = *terms, state, clear(d_output, tokens.query_mask), d_after
    *d_terms, d_state = _kernel(("backward", config.normalized), *operands)
    d_parameters, d_queries, d_keys = to_arguments(tuple(d_terms))
    return d_parameters, d_state, d_queries, d_keys


def _shapes(static, query, key, value, state, *_):
    if static[0] == "backward":
        return query.shape, key.shape, value.shape, state.shape
    return (*query.shape[:-1], value.shape[-1]), state.shape


def _by_xla(static, query, key, value, state, *cotangents):
    direction, normalized = static
    config = Config(lambda _, query, keys: Terms(query, *keys), jnp.float32, normalized)
    x = Inputs(None, state, query, (key, value), Tokens())
    results, saved = by_xla.forward(config, x)
    if direction == "forward":
        return results
    found = by_xla.backward(config, x, saved, *cotangents)
    return found.queries, *found.keys, found.state


def _axes(static, *arrays):
    return (3,) * len(arrays)


def _by_kernel(static, shapes, *arrays: Any):
    direction, _ = static
    if direction == "backward":
        rows = shapes[0][:-1]
        shapes = (*shapes, (2, *rows))
    return compiled.call(f"effattn_linear_recurrence_{direction}", shapes, arrays)[:4]


_kernel = kernel("effattn_linear_recurrence", _by_kernel, _by_xla, _shapes, _axes)
