"""The diagonal recurrence on CPUs, in float32: the kernels are in `diagonal_kernels`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.arrays.axes import lead
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch.places import HEADS, ONCE, SAME
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, clear
from effattn.llvm import runtime
from effattn.llvm.diagonal_kernels import PIECE
from effattn.llvm.primitive import in_first_part, kernel
from effattn.xla import diagonal_recurrence as by_xla

LIMITS = dispatch.Limits(("float32",), others="llvmlite")


def refusal(config: Config, x: Inputs) -> str | None:
    """Reason why the kernels do not take these inputs, or None."""
    for array in (*jax.tree.leaves((x.parameters, x.state, x.queries, x.keys)), config):
        if reason := LIMITS.refusal(jnp.dtype(array.dtype)):
            return reason
    if 0 in (*x.state.shape, *x.queries.shape):
        return "does not take empty arrays"
    return runtime.refusal()


def diagonal_recurrence(
    config: Config, parameters: Any, state: jax.Array, queries: Any, keys: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """The output and the state after the last token, as `effattn.cores.diagonal_recurrence`."""
    query = clear(queries, tokens.query_mask)
    key, value, step = clear(keys, tokens.key_mask)
    rate = lead(jnp.swapaxes(parameters, -1, -2), state.ndim)
    keep = jnp.zeros_like(step, shape=(*step.shape[:-2], 0))
    if tokens.starts is not None:
        keep = (~tokens.starts)[..., None].astype(step.dtype)
    return _recurrence(query, key, value, step, rate, state, keep)


def _outputs(_, *operands):
    return _kernel("forward", *operands)


def _with_residuals(_, *operands):
    return _outputs(_, *operands), operands


def _gradients(_, operands, cotangents):
    """Adds up the parts of the gradients that tasks and examples have."""
    d_query, d_key, d_value, d_step, d_rate, d_state = _kernel("backward", *operands, *cotangents)
    query, key, *_, rate, _, _ = operands
    of_tasks = (
        d.reshape(*x.shape[:-1], -1, x.shape[-1]).sum(-2)
        for d, x in ((d_query, query), (d_key, key))
    )
    d_rate = d_rate.sum(range(rate.ndim - 3)).reshape(rate.shape)
    return *of_tasks, d_value, d_step, d_rate, d_state, None


_recurrence = functools.partial(with_derivatives(_outputs, _with_residuals, _gradients), None)


def _shapes(direction, query, key, value, step, rate, state, *_):
    out = (*query.shape[:-1], value.shape[-1])
    if direction == "forward":
        return out, state.shape
    pieces = -(-value.shape[-1] // PIECE)
    parts = ((*x.shape[:-2], x.shape[-2] * pieces, x.shape[-1]) for x in (query, key))
    return *parts, value.shape, step.shape, rate.shape, state.shape


def _by_xla(direction, *arrays):
    operands, cotangents = arrays[:7], arrays[7:]
    config = Config(Terms, jnp.float32, chunk=by_xla.own_chunk())

    def of_example(*arrays):
        query, key, value, step, rate, state, keep = arrays
        starts = keep[..., 0] == 0 if keep.shape[-1] else None
        rate = jnp.swapaxes(rate, -1, -2)
        keys = key, value, step
        return by_xla.diagonal_recurrence(config, rate, state, query, keys, Tokens(starts=starts))

    def gradients(*arrays):
        *some, keep = arrays[:7]
        return jax.vjp(lambda *some: of_example(*some, keep), *some)[1](arrays[7:])

    run: Any = of_example if direction == "forward" else gradients
    for _ in range(operands[-2].ndim - 3):
        run = jax.vmap(run)
    found = run(*operands, *cotangents)
    return tuple(map(in_first_part, found, _shapes(direction, *operands)))


def _names(direction, *arrays):
    of_tokens, of_state = (None, HEADS, None), (HEADS, None, None)
    operands = *[of_tokens] * 4, of_state, of_state
    if direction == "backward":
        return (*operands, (None, None), of_tokens, (ONCE, None, None)), operands
    return (*operands, (None, None)), (of_tokens, (SAME, None, None))


def _by_kernel(direction, shapes, *arrays: Any):
    return runtime.call(f"effattn_diagonal_recurrence_{direction}", shapes, arrays)


_kernel = kernel("effattn_diagonal_recurrence", _by_kernel, _by_xla, _shapes, _names)
