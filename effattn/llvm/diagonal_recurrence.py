"""The diagonal recurrence on CPUs, in float32: the kernels are in `diagonal_kernels`.

A block of tokens is one call of a kernel. The forward pass saves the state before each block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.arrays.axes import lead, over_batch
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch.places import HEADS, ONCE, SAME
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, clear
from effattn.llvm import runtime
from effattn.llvm.diagonal_kernels import PIECE
from effattn.llvm.primitive import in_first_part, kernel, with_gradients
from effattn.xla import diagonal_recurrence as by_xla
from effattn.xla import linear_recurrence as in_blocks

LIMITS = dispatch.Limits(("float32",), others="llvmlite")


def refusal(config: Config, x: Inputs) -> str | None:
    """Reason why the kernels do not take these inputs, or None."""
    arrays = jax.tree.leaves((x.parameters, x.state, x.queries, x.keys))
    for dtype in (*(array.dtype for array in arrays), config.dtype):
        if reason := LIMITS.refusal(jnp.dtype(dtype)):
            return reason
    if 0 in (*x.state.shape, *x.queries.shape):
        return "does not take empty arrays"
    return runtime.refusal()


def diagonal_recurrence(
    config: Config, parameters: Any, state: jax.Array, queries: Any, keys: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """The output and the state after the last token, as `effattn.cores.diagonal_recurrence`."""
    return _recurrence(config, parameters, state, queries, keys, tokens)


def _blocks(features):
    """Blocks of tokens: the states of their chunks take 1 MB or less a task up to 64 features."""
    return in_blocks.Blocks(_run, _pull_back, min(max(2**16 // features, 128), 1024))


def _forward(config, *operands):
    x = Inputs(*operands)
    return in_blocks.forward(config, x, _blocks(x.state.shape[-2]))


def _with_residuals(config, *operands):
    results, saved = _forward(config, *operands)
    return results, (operands, saved)


def _backward(config, residuals, cotangents):
    operands, saved = residuals
    d_output, d_state = cotangents
    x = Inputs(*operands)
    blocks = _blocks(x.state.shape[-2])
    return tuple(in_blocks.backward(config, x, saved, d_output, d_state, blocks))


_recurrence = with_derivatives(
    lambda *operands: _forward(*operands)[0],
    _with_residuals,
    _backward,
    by_xla.diagonal_recurrence,
)


def _run(config, chunk, parameters, state, queries, keys, tokens):
    """A block of consecutive tokens: returns `(state after, outputs)`."""
    query = clear(queries, tokens.query_mask)
    key, value, dt = clear(keys, tokens.key_mask)
    A = lead(jnp.swapaxes(parameters, -1, -2), state.ndim)
    keep = jnp.zeros_like(dt, shape=(*dt.shape[:-2], 0))
    if tokens.starts is not None:
        keep = (~tokens.starts)[..., None].astype(dt.dtype)
    output, after = _of_block(query, key, value, dt, A, state, keep)
    return after, output


def _pull_back(cotangents, config, chunk, parameters, state, queries, keys, tokens):
    """Gradients of a block, of all inputs but `tokens`."""
    run = functools.partial(_run, config, chunk, tokens=tokens)
    return jax.vjp(run, parameters, state, queries, keys)[1](cotangents)


def _gradients(run, operands, cotangents):
    """Adds up the parts of the gradients that tasks and examples have."""
    d_query, d_key, d_value, d_dt, d_A, d_state = run("backward", *operands, *cotangents)
    A = operands[4]
    d_A = d_A.sum(range(A.ndim - 3)).reshape(A.shape)
    return d_query.sum(-2), d_key.sum(-2), d_value, d_dt, d_A, d_state, None


def _shapes(direction, query, key, value, dt, A, state, *_):
    if direction == "forward":
        return (*query.shape[:-1], value.shape[-1]), state.shape
    pieces = -(-value.shape[-1] // PIECE)
    parts = ((*x.shape[:-1], pieces, x.shape[-1]) for x in (query, key))
    return *parts, value.shape, dt.shape, A.shape, state.shape


def _by_xla(direction, *arrays):
    operands, cotangents = arrays[:7], arrays[7:]
    config = Config(Terms, jnp.float32, chunk=by_xla.own_chunk())

    def of_example(*arrays):
        query, key, value, dt, A, state, keep = arrays
        starts = keep[..., 0] == 0 if keep.shape[-1] else None
        keys, tokens = (key, value, dt), Tokens(starts=starts)
        return by_xla.diagonal_recurrence(config, A.swapaxes(-1, -2), state, query, keys, tokens)

    def gradients(*arrays):
        *some, keep = arrays[:7]
        return jax.vjp(lambda *some: of_example(*some, keep), *some)[1](arrays[7:])

    run: Any = of_example if direction == "forward" else gradients
    run = over_batch(run, operands[-2].ndim - 3)
    found = run(*operands, *cotangents)
    return tuple(map(in_first_part, found, _shapes(direction, *operands)))


def _names(direction, *arrays):
    of_tokens, of_state, of_parts = (
        (None, HEADS, None),
        (HEADS, None, None),
        (None, HEADS, None, None),
    )
    operands = *[of_tokens] * 4, of_state, of_state
    if direction == "backward":
        results = *[of_parts] * 2, *operands[2:]
        return (*operands, (None, None), of_tokens, (ONCE, None, None)), results
    return (*operands, (None, None)), (of_tokens, (SAME, None, None))


def _by_kernel(direction, shapes, *arrays: Any):
    return runtime.call(f"effattn_diagonal_recurrence_{direction}", shapes, arrays)


_kernel = kernel("effattn_diagonal_recurrence", _by_kernel, _by_xla, _shapes, _names)
_of_block = with_gradients(_kernel, _gradients)
