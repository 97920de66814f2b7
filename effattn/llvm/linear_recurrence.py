"""The linear recurrence on CPUs, in float32.

XLA computes the terms (query, key, value, decays) of a block of tokens, and a kernel scans the
block (`effattn.llvm.recurrence_kernels`). A normalised recurrence is one whose values have a last
entry of 1, and XLA divides by the last entry of the output.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.arrays.axes import lead
from effattn.dispatch.places import HEADS, ONCE, SAME
from effattn.interfaces.linear_recurrence import (
    Config,
    Inputs,
    Terms,
    Tokens,
    clear,
    divided,
    masked_terms,
)
from effattn.llvm import runtime
from effattn.llvm.primitive import in_first_part, kernel, with_gradients
from effattn.xla import linear_recurrence as by_xla

LIMITS = dispatch.Limits(
    ("float32",), others="llvmlite; no decays of values, and no bonus with the delta form"
)


def refusal(config: Config, x: Inputs) -> str | None:
    """Reason why the kernels do not take these inputs, or None."""
    dtypes = [array.dtype for array in jax.tree.leaves((x.state, x.queries, x.keys))]
    for dtype in (*dtypes, config.dtype):
        if reason := LIMITS.refusal(jnp.dtype(dtype)):
            return reason
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    given = ["value_log_decay"] if terms.value_log_decay is not None else []
    if terms.bonus is not None and terms.recalled is not None:
        given.append("bonus with the delta form")
    given += ["empty arrays"] if 0 in (*x.state.shape, *terms.query.shape) else []
    if given:
        return f"does not take {' and '.join(given)}"
    return runtime.refusal()


def forward(config: Config, x: Inputs) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    """Returns `((output, state), saved)`; `saved` is the state at the start of every block."""
    return by_xla.forward(config, x, _blocks(x))


def backward(
    config: Config,
    x: Inputs,
    saved: list[jax.Array] | None,
    d_output: jax.Array,
    d_state: jax.Array,
) -> Inputs:
    """Returns the gradients of all inputs but `tokens`, from the last block to the first."""
    return by_xla.backward(config, x, saved, d_output, d_state, _blocks(x))


def _blocks(x):
    """Blocks of tokens for the cache of a core, of 128 tokens or more.

    A head's features take up to 256 KB, and the states of all chunks of a block up to 1 MB, unless
    128 tokens need more.
    """
    *_, features, values = x.state.shape
    tokens = min(2**16 // features, 2**22 // (features * values))
    return by_xla.Blocks(_run, _pull_back, max(tokens // 64, 2) * 64)


def _run(config, chunk, parameters, state, queries, keys, tokens):
    """A block of consecutive tokens: returns `(state after, outputs)`."""
    terms = masked_terms(config, parameters, queries, keys, tokens, state.dtype)
    key, recalled, log_decay = terms.key, terms.recalled, terms.log_decay
    if log_decay is not None and log_decay.ndim < key.ndim:
        log_decay = log_decay[..., None]
    query = terms.query
    if tokens.starts is not None:
        if log_decay is None:
            log_decay = jnp.zeros_like(terms.value, shape=(*terms.value.shape[:-1], 1))
        # The first token of a document finds no state before it.
        log_decay = jnp.where(tokens.starts[..., None, None], -jnp.inf, log_decay)
        recalled = clear(recalled, ~tokens.starts)
        query = query if terms.bonus is None else clear(query, ~tokens.starts)
    absent = jnp.zeros_like(key, shape=(*key.shape[:-1], 0))
    no_decay = jnp.zeros_like(key, shape=(*terms.value.shape[:-1], 0))
    others = [no_decay if log_decay is None else log_decay]
    others += [absent if x is None else x for x in (recalled, terms.removed)]
    if terms.bonus is None:
        output, after = _recurrence(query, key, terms.value, state, *others)
    else:
        output, after = _before_each_token(query, key, terms.value, state, *others)
        output += _bonus_output(terms, output.shape[-2])
    return after, clear(divided(config, output, terms.least), tokens.query_mask)


def _before_each_token(query, key, value, state, *others):
    """The recurrence whose queries read the state before their own token.

    A query reads the state after the token before, and the first query the given state.
    """
    time = state.ndim - 3
    rest = jnp.concatenate([query[..., 1:, :, :], jnp.zeros_like(query[..., :1, :, :])], time)
    output, after = _recurrence(rest, key, value, state, *others)
    heads = output.shape[-2]
    of_first = _spread(query[..., 0, :, :], heads, -2), _spread(state, heads, -3)
    first = jnp.einsum("...hf,...hfv->...hv", *of_first, precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([first[..., None, :, :], output[..., :-1, :, :]], time), after


def _bonus_output(terms, heads):
    """The share of the bonus in the output: (q . diag(u) k) v of each token."""
    bonus = lead(terms.bonus, terms.key.ndim)
    found = terms.query, terms.key * bonus, terms.value
    query, key, value = (_spread(x, heads, -2) for x in found)
    return jnp.sum(query * key, -1, keepdims=True) * value


def _spread(x, heads, axis):
    return jnp.repeat(x, heads // x.shape[axis], axis)


def _pull_back(cotangents, config, chunk, parameters, state, queries, keys, tokens):
    """Gradients of a block, of all inputs but `tokens`."""
    run = functools.partial(_run, config, chunk, tokens=tokens)
    return jax.vjp(run, parameters, state, queries, keys)[1](cotangents)


def _gradients(run, operands, cotangents):
    """Sums the gradients over the states or outputs that share a head of an operand."""
    return tuple(map(_summed, run("backward", *operands, *cotangents), operands))


def _summed(gradient, operand):
    heads = operand.shape[-2]
    if gradient.shape == operand.shape:
        return gradient
    *outer, many, size = gradient.shape
    return gradient.reshape(*outer, heads, many // heads, size).sum(-2)


def _shapes(direction, query, key, value, state, log_decay, recalled, removed, *_):
    *outer, heads, values = value.shape
    out_heads = max(heads, query.shape[-2])
    if direction == "forward":
        return (*outer, out_heads, values), state.shape
    of_keys = [(*outer, heads, x.shape[-1]) for x in (recalled, removed)]
    of_queries, keys = ((*outer, n, key.shape[-1]) for n in (out_heads, heads))
    return of_queries, keys, value.shape, state.shape, log_decay.shape, *of_keys


def _by_xla(direction, query, key, value, state, *others):
    log_decay, recalled, removed, *cotangents = others
    keys = key, value, log_decay, recalled, removed

    def terms(_, query, keys):
        key, value, *others = keys
        log_decay, recalled, removed = (x if x.shape[-1] else None for x in others)
        if log_decay is not None and log_decay.shape[-1] == 1:
            log_decay = log_decay[..., 0]
        return Terms(query, key, value, log_decay, None, removed, recalled)

    x = Inputs(None, state, query, keys, Tokens())
    config = Config(terms, jnp.float32)
    results, saved = by_xla.forward(config, x)
    if direction == "forward":
        return results
    found = by_xla.backward(config, x, saved, *cotangents)
    d_key, d_value, *d_others = found.keys
    gradients = found.queries, d_key, d_value, found.state, *d_others
    full = _shapes(direction, query, key, value, state, *others)
    return tuple(map(in_first_part, gradients, full))


def _names(direction, *arrays):
    tokens, state = (None, HEADS, None), (HEADS, None, None)
    operands = tokens, tokens, tokens, state, tokens, tokens, tokens
    if direction == "backward":
        return (*operands, tokens, (ONCE, None, None)), operands
    return operands, (tokens, (SAME, None, None))


def _by_kernel(direction, shapes, *arrays: Any):
    return runtime.call(f"effattn_linear_recurrence_{direction}", shapes, arrays)


_kernel = kernel("effattn_linear_recurrence", _by_kernel, _by_xla, _shapes, _names)
_recurrence = with_gradients(_kernel, _gradients)
