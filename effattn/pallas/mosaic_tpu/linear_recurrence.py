"""Linear recurrence for TPUs, lowered by Mosaic.

The kernels of the plain form are in `recurrence_steps`. This file has those of the delta form. A
program computes one block of 64 tokens of one head. The pipeline copies blocks of the arrays to
VMEM and back: a whole state of up to 256 x 256, which is 256 KB in float32, and at most 64 KB each
of queries, keys, values and results. Two buffers of each array and the intermediate results fit in
a few of the 16 MB of VMEM. The backward of keys and values holds all query heads of one key head,
so the number of these query heads is limited (`GROUP_LANES`).

`_correct` and `_correct_back` go through the blocks in order. The state, or its gradient, stays in
scratch memory between blocks and is saved before each block; one more step saves it after the last.
The other kernels compute blocks in any order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.mosaic_tpu import recurrence_steps
from effattn.pallas.mosaic_tpu.recurrence_blocks import FORGETS, Decays, Pairs, Plan, times
from effattn.pallas.recurrence import BLOCK, Arrays

LANES = 128
# Largest number of lanes of the query heads of a key head and of their output gradients; two blocks
# of 64 tokens take 4 MB.
GROUP_LANES = 8192
LIMITS = dispatch.Limits(("float32", "bfloat16"), 256)


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    dtypes = {array.dtype for array in jax.tree.leaves((x.queries, x.keys))}
    for dtype in (*dtypes, config.dtype):
        if reason := LIMITS.refusal(dtype, 0):
            return reason
    if reason := recurrence.refusal(config, x):
        return reason
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    group = max(terms.query.shape[-2] // x.state.shape[-3], 1)
    lanes = sum(pl.cdiv(size, LANES) * LANES for size in x.state.shape[-2:])
    if group * lanes > GROUP_LANES:
        return (
            f"takes up to {GROUP_LANES // lanes} query heads for each key head of this size, got "
            f"{group}"
        )
    return None


def forward(config: Config, x: Inputs):
    """Returns `((output, state), saved)`; see `effattn.pallas.recurrence.forward`."""
    return recurrence.forward(KERNELS, config, x)


def backward(config: Config, x: Inputs, saved, d_output, d_state) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.recurrence.backward`."""
    return recurrence.backward(KERNELS, config, x, saved, d_output, d_state)


# Calls of kernels, with the block specifications of arrays.


def _by_head(x):
    """Transposes `(B, T, heads, size)` to `(B, heads, T', size)`, padded to whole blocks."""
    x = jnp.moveaxis(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % BLOCK), (0, 0)])


def _terms(arrays):
    """Returns queries, keys and values; XLA applies the scale of the queries."""
    query, key, value, _, scale = arrays
    return query if scale is None else query.astype(scale.dtype) * scale, key, value


def _by_token(x, length):
    return jnp.moveaxis(x[:, :, :length], 2, 1)


def _log_decay(arrays):
    """Returns a list of the log decays, or an empty list without decay.

    Decays per feature are `(B, heads, T', F)`; decays per token are `(B, V, n, 1, C)`.
    """
    if arrays.log_decay is None:
        return []
    finite = jnp.maximum(arrays.log_decay.astype(jnp.float32), FORGETS)
    if finite.ndim == 4:
        return [_by_head(finite)]
    rows = _by_head(finite[..., None])
    return [rows.reshape(*rows.shape[:2], -1, 1, BLOCK)]


def _call(
    plan,
    kernel,
    heads,
    inputs,
    specs,
    shapes,
    out_specs,
    scratch=(),
    in_order=False,
    dtype=jnp.float32,
):
    inputs = mesh_axes.vary_alike(inputs)
    varying = jax.typeof(inputs[0]).manual_axis_type
    interpreter = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    order: Any = "arbitrary" if in_order else "parallel"
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(plan.batch, heads, plan.blocks + in_order),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape in shapes
        ],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", order)),
        interpret=interpreter if plan.how.interpreted else False,
        name=f"linear_recurrence{kernel.__name__}",
    )(*inputs)


def _every(n):
    """The block of a step of a kernel that computes blocks in any order."""
    return n


def _in_order(plan):
    """Returns a function from a step of a walk to its block; the extra step gets the last block."""
    return lambda n: jnp.minimum(n, plan.blocks - 1)


def _in_reverse(plan):
    """Returns the same for a walk from the last block to the first."""
    return lambda n: jnp.maximum(plan.blocks - 1 - n, 0)


def _tokens(size, share=1, group=None, block_at=_every):
    """Specifies blocks `(C, size)`, or `(group, C, size)`, of an array `(B, heads, T', size)`.

    `share` heads of the grid read one head of the array. `block_at(step)` is the block of a step.
    """
    return pl.BlockSpec((None, group, BLOCK, size), lambda b, h, n: (b, h // share, block_at(n), 0))


def _decays(plan, arrays, share=1, block_at=_every):
    if plan.decay is None:
        return []
    if plan.decay == "feature":
        return [_tokens(arrays.key.shape[-1], share, block_at=block_at)]

    def place(b, h, n):
        return b, h // share, block_at(n), 0, 0

    return [pl.BlockSpec((None, None, None, 1, BLOCK), place)]


def _saved(sizes, place):
    return pl.BlockSpec((None, None, None, *sizes), lambda b, h, n: (*place(b, h, n), 0, 0))


def _of_queries(plan, arrays, kernel, states, size, *more, dtype=jnp.float32):
    """Runs a kernel for each block of each head of the output; returns `(B, T, heads, size)`.

    `more` are arrays `(B, T, heads, D)` that the kernel also reads.
    """
    features, values = states.shape[3:]
    length = plan.blocks * BLOCK
    (out,) = _call(
        plan,
        kernel,
        plan.heads,
        [
            *map(_by_head, (*more, *_terms(arrays))),
            *_log_decay(arrays),
            states,
        ],
        [
            *[_tokens(values)] * len(more),
            _tokens(features, plan.heads // plan.query_heads),
            _tokens(features, plan.heads // plan.key_heads),
            _tokens(values, plan.group),
            *_decays(plan, arrays, plan.group),
            _saved((features, values), lambda b, h, n: (b, h // plan.group, n)),
        ],
        [(plan.batch, plan.heads, length, size)],
        [_tokens(size)],
        dtype=dtype,
    )
    return _by_token(out, arrays.query.shape[1])


def _read(how, arrays: Arrays, states):
    plan = Plan.of(how, arrays)
    return _of_queries(plan, arrays, _read_block, states, states.shape[4], dtype=how.dtype)


def _d_query(how, arrays: Arrays, states, d_out):
    plan = Plan.of(how, arrays)
    return _of_queries(plan, arrays, _d_query_block, states, states.shape[3], d_out)


def _d_key_value(how, arrays: Arrays, co_states, d_out):
    plan = Plan.of(how, arrays)
    features, values = sizes = co_states.shape[3:]
    share, length = plan.value_heads // plan.key_heads, plan.blocks * BLOCK
    gradients = _call(
        plan,
        _d_key_value_block,
        plan.value_heads,
        [*map(_by_head, (d_out, *_terms(arrays))), *_log_decay(arrays), co_states],
        [
            _tokens(values, 1, plan.group),
            _tokens(features, plan.heads // plan.query_heads, plan.group),
            _tokens(features, share),
            _tokens(values),
            *_decays(plan, arrays),
            _saved(sizes, lambda b, h, n: (b, h, n + 1)),
        ],
        [(plan.batch, plan.value_heads, length, size) for size in sizes],
        [_tokens(features), _tokens(values)],
    )
    return [_by_token(x, arrays.query.shape[1]) for x in gradients]


def _corrected(how, arrays: Arrays, chunks, state):
    plan = Plan.of(how, arrays)
    return _of_chunks(plan, _correct, chunks, state, _in_order(plan), lambda n: n)


def _corrected_back(how, arrays: Arrays, chunks, d_state):
    plan = Plan.of(how, arrays)
    place = functools.partial(jnp.subtract, plan.blocks)
    return _of_chunks(plan, _correct_back, chunks, d_state, _in_reverse(plan), place)


def _of_chunks(plan, kernel, chunks, state, chunk_at, place):
    """Returns corrected values `(B, V, n, C, D)`, and the states before and after each chunk.

    `chunk_at(step)` is the chunk of a step of the grid, and `place(step)` that of the state before
    the step.
    """

    def spec(x):
        return pl.BlockSpec(
            (None, None, None, *x.shape[3:]),
            lambda b, h, step: (b, h, chunk_at(step), *(0,) * (x.ndim - 3)),
        )

    arrays = [x for x in chunks if x is not None]
    states = (*state.shape[:2], plan.blocks + 1, *state.shape[2:])
    return _call(
        plan,
        kernel,
        plan.value_heads,
        [*arrays, state[:, :, None]],
        [*map(spec, arrays), _saved(state.shape[2:], lambda b, h, n: (b, h, 0))],
        [chunks.value.shape, states],
        [spec(chunks.value), _saved(state.shape[2:], lambda b, h, n: (b, h, place(n)))],
        [pltpu.VMEM(state.shape[2:], jnp.float32)],
        in_order=True,
    )


KERNELS = recurrence.Kernels(
    forward=recurrence_steps.forward,
    states=recurrence_steps.states,
    backward=recurrence_steps.backward,
    read=_read,
    d_query=_d_query,
    d_key_value=_d_key_value,
    correct=_corrected,
    correct_back=_corrected_back,
)


# Kernels: a program has one block of tokens, (C, F) and (C, D), and one state (F, D).


def _save(plan, given, saved, state):
    """Saves the state before each step, starting from the given state.

    Returns a decorator that runs a function except in the last step, which has no block.
    """
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        state[...] = given[...]

    saved[...] = state[...]
    return pl.when(step < plan.blocks)


def _correct(plan, recalled, key, value, kept, initial, corrected, states, state):
    @_save(plan, initial, states, state)
    def _():
        corrected[...], state[...] = _corrected_chunk(plan, recalled, key, value, kept, state)


def _correct_back(
    plan, recalled, key, value, kept, query, d_out, last, corrected, co_states, co_state
):
    @_save(plan, last, co_states, co_state)
    def _():
        corrected[...], before = _corrected_chunk(plan, recalled, key, value, kept, co_state)

        def of_head(g, before):
            return before + plan.dot(query[g], d_out[g], (0, 0))

        co_state[...] = plan.over_group(of_head, before)


def _corrected_chunk(plan, recalled, key, value, kept, state):
    """Returns the corrected values of a chunk and the state after the chunk."""
    before = state[...]
    found = value[...] - plan.dot(recalled[...], before)
    return found, kept[...] * before + plan.dot(key[...], found, (0, 0))


def _read_block(plan, query, key, value, *refs):
    *log_decay, states, out = refs
    at = _decays_of(plan, log_decay)
    queries = _wide(query)
    weights = Pairs(at).products(queries, _wide(key))
    read = plan.dot(times(queries, at.since_start()), states[...])
    out[...] = (read + plan.dot(weights, _wide(value))).astype(out.dtype)


def _d_query_block(plan, d_out, query, key, value, *refs):
    *log_decay, states, d_query = refs
    at = _decays_of(plan, log_decay)
    d_read = _wide(d_out)
    across = times(plan.dot(d_read, states[...], (1, 1)), at.since_start())
    d_weights = plan.dot(d_read, _wide(value), (1, 1))
    d_query[...] = across + Pairs(at).gradient(d_weights, _wide(key), (1, 0))


def _d_key_value_block(plan, d_out, query, key, value, *refs):
    *log_decay, co_states, d_key, d_value = refs
    at = _decays_of(plan, log_decay)
    pairs = Pairs(at)
    keys, values, until_end = _wide(key), _wide(value), at.until_end()
    d_keys = times(plan.dot(values, co_states[...], (1, 1)), until_end)
    d_values = plan.dot(times(keys, until_end), co_states[...])

    def of_head(g, gradients):
        d_keys, d_values = gradients
        queries, d_read = _wide(query, g), _wide(d_out, g)
        d_keys += pairs.gradient(plan.dot(d_read, values, (1, 1)), queries, (0, 0))
        return d_keys, d_values + plan.dot(pairs.products(queries, keys), d_read, (0, 0))

    d_key[...], d_value[...] = plan.over_group(of_head, (d_keys, d_values))


def _decays_of(plan, log_decay):
    return Decays(plan, log_decay[0][...] if log_decay else None)


def _wide(ref, index=...):
    """Loads an array of tokens in float32."""
    return ref[index].astype(jnp.float32)
