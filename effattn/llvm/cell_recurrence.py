"""The recurrence of a cell on CPUs, in float32: the kernels are in `cell_kernels`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import dispatch
from effattn.arrays.axes import lead, over_batch
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch.places import HEADS
from effattn.interfaces.cell_recurrence import OUTPUT, Config, Inputs
from effattn.llvm import runtime
from effattn.llvm.primitive import kernel
from effattn.xla import cell_recurrence as by_xla

LIMITS = dispatch.Limits(("float32",), others="llvmlite")


def refusal(config: Config, x: Inputs) -> str | None:
    """Reason why the kernels do not take these operands, or None."""
    for dtype in (x.tokens.dtype, x.carry.dtype, config.dtype):
        if reason := LIMITS.refusal(jnp.dtype(dtype)):
            return reason
    if 0 in x.tokens.shape:
        return "does not take empty arrays"
    return runtime.refusal()


def cell_recurrence(
    config: Config,
    tokens: jax.Array,
    recurrent: jax.Array,
    bias: jax.Array,
    carry: jax.Array,
    starts: jax.Array | None,
    valid: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The outputs and the carry after the last token, as `effattn.cores.cell_recurrence`."""
    marks = jnp.zeros((*tokens.shape[:-3], 0), jnp.float32)
    if starts is not None or valid is not None:
        kept = jnp.ones(tokens.shape[:-3], bool) if starts is None else ~starts
        is_valid = jnp.ones(tokens.shape[:-3], bool) if valid is None else valid
        marks = jnp.stack([kept, is_valid], -1).astype(jnp.float32)
    matrix, bias = (x.astype(jnp.float32) for x in (recurrent, bias))
    matrix, bias = lead(matrix, carry.ndim + 1), lead(bias, carry.ndim)
    return _recurrence((config.cell, config.is_reversed), tokens, matrix, bias, carry, marks)


def _forward(static, *operands):
    out, after = _kernel(("forward", *static), *operands)
    return (out, after), (operands, out)


def _backward(static, residuals, cotangents):
    (tokens, recurrent, bias, carry, marks), out = residuals
    h = _before(static, out, carry, marks)

    def preactivations(tokens, recurrent, bias):
        of_state = by_xla.parts_of_state(h, _alone(recurrent, 4), _alone(bias, 3), jnp.float32)
        return by_xla.join(static[0], tokens, of_state)

    found, pull_back = jax.vjp(preactivations, tokens, recurrent, bias)
    operands = found, recurrent, carry, marks, *cotangents
    d_preactivations, d_carry = _kernel(("backward", *static), *operands)
    return *pull_back(d_preactivations), d_carry, None


def _before(static, out, carry, marks):
    """The output that each token's gates read, `(*B, T, N, H)`."""
    cell, is_reversed = static
    axis = carry.ndim - 3
    first = lax.index_in_dim(carry, OUTPUT[cell], axis)
    count = out.shape[axis] - 1
    if is_reversed:
        h = jnp.concatenate([lax.slice_in_dim(out, 1, count + 1, axis=axis), first], axis)
    else:
        h = jnp.concatenate([first, lax.slice_in_dim(out, 0, count, axis=axis)], axis)
    if not marks.shape[-1]:
        return h
    return jnp.where(marks[..., 0, None, None] != 0, h, 0)


def _alone(array, axes):
    """An array without its batch axes, which have length 1."""
    return array.reshape(array.shape[-axes:])


def _plain(static, tokens, recurrent, bias, carry, marks):
    cell, is_reversed = static
    config = Config(cell, jnp.float32, is_reversed)
    return _of_example(config, tokens, _alone(recurrent, 4), _alone(bias, 3), carry, marks)


def _by_xla(static, *arrays):
    direction, cell, is_reversed = static
    config = Config(cell, jnp.float32, is_reversed)
    form = _of_example if direction == "forward" else _gradients_of_example
    run: Any = over_batch(lambda *arrays: form(config, *arrays), arrays[0].ndim - 4)
    return run(*arrays)


def _of_example(config, tokens, recurrent, bias, carry, marks):
    return by_xla.cell_recurrence(config, tokens, recurrent, bias, carry, *_flags(marks))


def _gradients_of_example(config, preactivations, recurrent, carry, marks, d_out, d_after):
    """The results of the backward kernel; pre-activations and R are independent operands."""
    cell, output = config.cell, OUTPUT[config.cell]
    starts, valid = _flags(marks)

    def forward(before, inputs):
        preactivation, start, is_valid = inputs
        before = by_xla.restarted(before, start)
        after = by_xla.chosen(is_valid, by_xla.advance(cell, preactivation, before), before)
        return after, before

    def backward(d_after, inputs):
        before, preactivation, start, is_valid, d_h = inputs
        d_after = [*d_after]
        d_after[output] += d_h
        _, of_cell = jax.vjp(functools.partial(by_xla.advance, cell), preactivation, before)
        d_preactivation, d_before = of_cell(d_after)
        of_state = jax.vjp(lambda v: by_xla.join(cell, jnp.zeros_like(v), v), no_product)[1]
        d_before[output] += jnp.einsum("gnk,nhgk->nh", *of_state(d_preactivation), recurrent)
        if is_valid is not None:
            d_preactivation = jnp.where(is_valid, d_preactivation, 0)
        d_before = by_xla.chosen(is_valid, d_before, d_after)
        return by_xla.restarted(d_before, start), d_preactivation

    no_product = jnp.zeros_like(
        preactivations[0], shape=(recurrent.shape[-2], *preactivations.shape[-2:])
    )
    first, by_time = by_xla.separate(cell, carry), (preactivations, starts, valid)
    _, carries = lax.scan(forward, first, by_time, reverse=config.is_reversed)
    last, backwards = by_xla.separate(cell, d_after), not config.is_reversed
    d_first, found = lax.scan(backward, last, (carries, *by_time, d_out), reverse=backwards)
    return found, jnp.stack(d_first)


def _flags(marks):
    if not marks.shape[-1]:
        return None, None
    return marks[..., 0] == 0, marks[..., 1] != 0


def _shapes(static, tokens, *others):
    if static[0] == "forward":
        *batch, time, _, heads, size = tokens.shape
        return (*batch, time, heads, size), others[2].shape
    return tokens.shape, others[1].shape


def _names(static, *_):
    of_tokens, of_head = (None, None, HEADS, None), (HEADS, None, None, None)
    of_carry = None, HEADS, None
    shared, of_marks = (of_tokens, of_head), (of_carry, (None, None))
    if static[0] == "forward":
        return (*shared, of_carry, *of_marks), (of_carry, of_carry)
    return (*shared, *of_marks, of_carry, of_carry), (of_tokens, of_carry)


def _by_kernel(static, shapes, *arrays: Any):
    direction, cell, is_reversed = static
    attributes = {"limits": np.array([int(is_reversed)]), "scale": np.float32(1)}
    # The features of a token are one axis: XLA would copy an array with an axis of one head.
    given = _with_one_axis(arrays[0].shape)
    first, second = shapes
    found = _with_one_axis(first) if direction == "backward" else first
    arrays = arrays[0].reshape(given), *arrays[1:]
    out = runtime.call(f"effattn_{cell}_{direction}", (found, second), arrays, **attributes)
    return out[0].reshape(first), out[1]


def _with_one_axis(shape):
    """The shape `(*B, T, G N H)` of an array `(*B, T, G, N, H)`."""
    return *shape[:-3], math.prod(shape[-3:])


_kernel = kernel("effattn_cell_recurrence", _by_kernel, _by_xla, _shapes, _names)
_recurrence = with_derivatives(
    lambda static, *operands: _forward(static, *operands)[0], _forward, _backward, _plain
)
