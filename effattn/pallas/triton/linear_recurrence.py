"""Linear recurrence for GPUs, lowered by Triton (Ampere and later).

The state is cut into tiles of at most 64 features by 64 values, and the sequence into blocks of 64
tokens. No operand of a product is larger than 64 x 64, which is 16 KB in float32. A kernel has one
to five such operands at a time in shared memory, and fits in the 99 KB of small GPUs. There are no
atomics, and the order of every sum is fixed.

There are two kinds of kernel:

- Sequential kernels. `_walk` and `_walk_back` go through the sequence block by block. A program has
  one tile of the state in registers and saves the state, or its gradient, between blocks. These
  kernels do only one product per block, as all other work can run in parallel. `_correct` and
  `_correct_back` do the same for the delta form. There a corrected value depends on all features of
  the previous state, so a program has all features, in tiles, and fewer values: the state of a
  program keeps its number of entries.
- Parallel kernels. `_read_block`, `_d_query_block`, `_d_key_block` and `_d_value_block` compute all
  blocks in parallel, from the state saved at the start of a block or from the gradient saved at its
  end. A program computes one tile of the result. Outputs and gradients of values are sums over
  tiles of features; gradients of queries and of keys are sums over tiles of values.

Without decay, or with one decay per token, a block is one masked product. With one decay per
feature, the products decay inside the sum over features. The block is then halved repeatedly, down
to single tokens, which gives six levels. Each pair of tokens is separated at one level. The pairs
of a level are one product of queries, decayed since the start of their half, with keys, decayed
until the end of their half. This costs six exponentials per token and feature; no exponent is a
difference of sums, and all other work runs on tensor cores.

The decay from one token to another is the exponential of the sum of the log decays between them. A
scan of masked log decays or a running sum computes this sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.dispatch import device
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.recurrence import BLOCK, Arrays
from effattn.pallas.recurrence_delta import DeltaKernels, with_delta
from effattn.pallas.triton.recurrence_tiles import (
    TILE,
    Program,
    plan_of,
    put,
    tile_of,
    times,
)

LIMITS = dispatch.Limits(("float32", "bfloat16", "float16"), 256, "Ampere or later")


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    return recurrence.refusal(config, x) or device.triton_refusal()


def forward(config: Config, x: Inputs):
    """Returns `((output, state), saved)`; see `effattn.pallas.recurrence.forward`."""
    return recurrence.forward(KERNELS, config, x)


def backward(config: Config, x: Inputs, saved, d_output, d_state) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.recurrence.backward`."""
    return recurrence.backward(KERNELS, config, x, saved, d_output, d_state)


def _states(how, arrays: Arrays, state):
    plan = plan_of(how, arrays)
    return _walked(plan, _walk, (arrays.key, arrays.value, arrays.log_decay), state)


def _gradients_of_states(how, arrays: Arrays, d_out, d_state):
    plan = plan_of(how, arrays)
    shared = arrays.log_decay, arrays.scale
    return _walked(plan, _walk_back, (arrays.query, d_out, *shared), d_state)


def _read(how, arrays: Arrays, states):
    plan = plan_of(how, arrays)
    return _of_blocks(plan, _read_block, plan.heads, arrays, (states, 0), (), 1, how.dtype)


def _d_query(how, arrays: Arrays, states, d_out):
    plan = plan_of(how, arrays)
    return _of_blocks(plan, _d_query_block, plan.heads, arrays, (states, 0), (d_out,), 0)


def _d_key(how, arrays: Arrays, co_states, d_out):
    return _of_keys(how, arrays, _d_key_block, co_states, d_out, 0)


def _d_value(how, arrays: Arrays, co_states, d_out):
    return _of_keys(how, arrays, _d_value_block, co_states, d_out, 1)


def _of_keys(how, arrays, kernel, co_states, d_out, axis):
    plan = plan_of(how, arrays)
    return _of_blocks(plan, kernel, plan.value_heads, arrays, (co_states, 1), (d_out,), axis)


def _corrected(how, arrays: Arrays, chunks, state):
    return _walked_whole(plan_of(how, arrays), _correct, chunks, state)


def _corrected_back(how, arrays: Arrays, chunks, d_state):
    return _walked_whole(plan_of(how, arrays), _correct_back, chunks, d_state)


KERNELS = with_delta(
    recurrence.by_blocks(_states, _gradients_of_states, _read, _d_query, _d_key, _d_value),
    DeltaKernels(
        _read, recurrence.gradients_of_blocks(_d_query, _d_key), _corrected, _corrected_back
    ),
)


# Calls of kernels. Arrays of tokens are read by index and mask, so these arrays are not padded.
# Results have whole blocks and whole tiles.


def _call(kernel, plan, grid, inputs, specs, shapes, out_specs, stages=2, dtype=jnp.float32):
    inputs = device.aligned(mesh_axes.vary_alike(inputs))
    varying = jax.typeof(inputs[0]).manual_axis_type
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=grid,
        in_specs=[whole if spec is None else spec for spec in specs],
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape in shapes
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=stages),
        interpret=plan.how.interpreted,
        name=f"linear_recurrence{kernel.__name__}",
    )(*inputs)


def _walked(plan, kernel, arrays, state):
    """Returns saved states `(B, V, n + 1, F', D')`, padded with zeros to whole tiles."""
    batch, heads = state.shape[:2]
    state = _filled(state, *plan.whole)
    across = plan.tiles[1]
    arrays = [array for array in arrays if array is not None]
    (states,) = _call(
        kernel,
        plan,
        (batch, heads, plan.tiles[0] * across),
        (*arrays, state),
        (
            *[None] * len(arrays),
            pl.BlockSpec((None, None, *plan.tile), lambda b, h, t: (b, h, t // across, t % across)),
        ),
        [(batch, heads, plan.blocks + 1, *plan.whole)],
        [
            pl.BlockSpec(
                (None, None, plan.blocks + 1, *plan.tile),
                lambda b, h, t: (b, h, 0, t // across, t % across),
            )
        ],
    )
    return states


def _filled(x, *whole):
    """Pads the last axes with zeros, each to a size in `whole`."""
    kept = x.ndim - len(whole)
    more = [(0, size - there) for there, size in zip(x.shape[kept:], whole, strict=True)]
    return jnp.pad(x, [*[(0, 0)] * kept, *more])


def _walked_whole(plan, kernel, chunks, state):
    """Returns corrected values `(B, V, n, C, D)`, states as `_walked` does, and the last state."""
    batch, heads, _, size = state.shape
    features, values = plan.whole

    def all_of(x):
        block = None, None, *x.shape[2:]
        return pl.BlockSpec(block, lambda b, h, t: (b, h, *(0,) * (x.ndim - 2)))

    def slice_of(x):
        block = None, None, *x.shape[2:-1], plan.narrow
        return pl.BlockSpec(block, lambda b, h, t: (b, h, *(0,) * (x.ndim - 3), t))

    kept = chunks.kept[..., 0]
    kept = jnp.broadcast_to(kept, (*kept.shape[:3], plan.features))
    of_features = [chunks.recalled, chunks.key, kept, chunks.query]
    of_values = [chunks.value, chunks.d_out, _filled(state, features, size)]
    of_features = [_filled(x, features) for x in of_features if x is not None]
    of_values = [_filled(x, values) for x in of_values if x is not None]
    results = [
        jax.ShapeDtypeStruct((batch, heads, plan.blocks, BLOCK, values), jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, plan.blocks + 1, *plan.whole), jnp.float32),
    ]
    corrected, states = _call(
        kernel,
        plan,
        (batch, heads, values // plan.narrow),
        (*of_features, *of_values),
        [*map(all_of, of_features), *map(slice_of, of_values)],
        [x.shape for x in results],
        [*map(slice_of, results)],
        2 if features <= 2 * TILE else 1,  # with more features, two chunks exceed shared memory
    )
    last = states[:, :, 0 if kernel is _correct_back else -1]
    return corrected[..., :size], states, last[..., : plan.features, :size]


def _of_blocks(plan, kernel, heads, arrays, saved, more, axis, dtype=jnp.float32):
    """Runs a parallel kernel; returns `(B, T, heads, F)` for axis 0, `(B, T, heads, D)` for axis 1.

    `saved` is `(states, offset)`: a block reads the state at its start (offset 0) or at its end
    (offset 1).
    """
    states, offset = saved
    share = heads // plan.value_heads
    arrays = [array for array in (*more, *arrays) if array is not None]
    # A program reads one tile of the state along `axis`, and the whole other axis.
    block = (plan.tile[0], plan.whole[1]) if axis == 0 else (plan.whole[0], plan.tile[1])

    def place(b, h, n, t):
        return b, h // share, n + offset, *((t, 0) if axis == 0 else (0, t))

    (found,) = _call(
        kernel,
        plan,
        (plan.batch, heads, plan.blocks, plan.tiles[axis]),
        (*arrays, states),
        (*[None] * len(arrays), pl.BlockSpec((None, None, None, *block), place)),
        [(plan.batch, plan.blocks * BLOCK, heads, plan.whole[axis])],
        [
            pl.BlockSpec(
                (None, BLOCK, None, plan.tile[axis]),
                lambda b, h, n, t: (b, n, h, t),
            )
        ],
        1,  # two stages do not fit in shared memory
        dtype,
    )
    return found[:, : plan.length, :, : (plan.features, plan.values)[axis]]


# Sequential kernels: a program has one tile (f, d) of the state of one value head.


def _walk(plan, key, value, *refs):
    *shared, initial, states = refs
    at, tile = Program(plan, pl.program_id(1), shared), _tile_of_state(plan)
    states[0] = initial[...]

    def block(n, state):
        state = at.state_after(state, n * BLOCK, key, value, *tile)
        states[n + 1] = state
        return state

    lax.fori_loop(0, plan.blocks, block, initial[...])


def _walk_back(plan, query, d_out, *refs):
    *shared, last, co_states = refs
    at, tile = Program(plan, pl.program_id(1), shared), _tile_of_state(plan)
    co_states[plan.blocks] = last[...]

    def block(step, co_state):
        n = plan.blocks - 1 - step
        co_state = at.gradient_before(co_state, n * BLOCK, query, d_out, *tile)
        co_states[n] = co_state
        return co_state

    lax.fori_loop(0, plan.blocks, block, last[...])


def _tile_of_state(plan):
    number, across = pl.program_id(2), plan.tiles[1]
    return number // across, number % across


def _correct(plan, recalled, key, kept, value, initial, corrected, states):
    """Kernel of the delta form; a program has all features of a state, in tiles."""

    def chunk(n, state):
        state = _corrected_chunk(plan, n, recalled, key, kept, value, corrected, state)
        _put_tiles(plan, states, n + 1, state)
        return state

    state = [initial[tile] for tile in plan.slices]
    _put_tiles(plan, states, 0, state)
    lax.fori_loop(0, plan.blocks, chunk, state)


def _correct_back(plan, recalled, key, kept, query, value, d_out, last, corrected, co_states):

    def chunk(step, co_state):
        n = plan.blocks - 1 - step
        co_state = _corrected_chunk(plan, n, recalled, key, kept, value, corrected, co_state)

        def of_head(g, co_state):
            d_read = d_out[n, g]
            return [
                part + plan.dot(query[n, g, :, tile].T, d_read)
                for tile, part in zip(plan.slices, co_state, strict=True)
            ]

        co_state = lax.fori_loop(0, plan.heads // plan.value_heads, of_head, co_state)
        _put_tiles(plan, co_states, n, co_state)
        return co_state

    co_state = [last[tile] for tile in plan.slices]
    _put_tiles(plan, co_states, plan.blocks, co_state)
    lax.fori_loop(0, plan.blocks, chunk, co_state)


def _corrected_chunk(plan, n, recalled, key, kept, value, corrected, state):
    """Writes the corrected values of chunk n; return the state after chunk n, in tiles."""
    found = value[n]
    for tile, part in zip(plan.slices, state, strict=True):
        found -= plan.dot(recalled[n, :, tile], part)
    corrected[n] = found
    return [
        part * kept[n, tile][:, None] + plan.dot(key[n, :, tile].T, found)
        for tile, part in zip(plan.slices, state, strict=True)
    ]


def _put_tiles(plan, states, n, state):
    for tile, part in zip(plan.slices, state, strict=True):
        states[n, tile] = part


# Parallel kernels: a program computes one tile, for one block, of the output or of a gradient.


def _read_block(plan, query, key, value, *refs):
    *shared, states, out = refs
    at, head, start, d = _at_block(plan, plan.heads, shared)

    def of_state(f, read):
        queries = times(at.query(query, start + at.row, head, f), at.since_start(start, f))
        return read + plan.dot(queries, tile_of(states, plan, 0, f))

    weights = at.weights(start, query, key, head)
    within = plan.dot(weights, at.value(value, start + at.row, d))
    put(out, at.over_tiles(0, of_state, within))


def _d_query_block(plan, d_out, query, key, value, *refs):
    *shared, states, d_query = refs
    at, head, start, f = _at_block(plan, plan.heads, shared)

    def of_state(d, gradient):
        d_read = at.output(d_out, start + at.row, head, d)
        return gradient + plan.dot(d_read, tile_of(states, plan, 1, d).T)

    gradient = at.over_tiles(1, of_state, jnp.zeros((BLOCK, plan.tile[0]), jnp.float32))
    gradient = times(gradient, at.since_start(start, f))
    # Products of 16-bit numbers need fewer registers here, but more in `_d_key_block`.
    dtype = value.dtype if value.dtype == d_out.dtype else jnp.float32
    d_weights = at.gradient_of_weights(start, d_out, value, head, dtype)
    put(d_query, gradient + at.mixed(start, d_weights, at.key(key, start + at.row, f), f))


def _d_key_block(plan, d_out, query, key, value, *refs):
    *shared, co_states, d_key = refs
    at, _, first, f = _at_block(plan, plan.value_heads, shared)

    def of_state(d, gradient):
        values = at.value(value, first + at.row, d)
        return gradient + plan.dot(values, tile_of(co_states, plan, 1, d).T)

    def of_head(head, gradient):
        start = _not_before_the_loop(first, head)
        d_weights = at.gradient_of_weights(start, d_out, value, head)
        queries = at.query(query, start + at.row, head, f)
        return gradient + at.mixed(start, d_weights, queries, f, back=True)

    gradient = at.over_tiles(1, of_state, jnp.zeros((BLOCK, plan.tile[0]), jnp.float32))
    put(d_key, at.over_group(of_head, times(gradient, at.until_end(first, f))))


def _d_value_block(plan, d_out, query, key, value, *refs):
    *shared, co_states, d_value = refs
    at, _, first, d = _at_block(plan, plan.value_heads, shared)

    def of_state(f, gradient):
        keys = times(at.key(key, first + at.row, f), at.until_end(first, f))
        return gradient + plan.dot(keys, tile_of(co_states, plan, 0, f))

    def of_head(head, gradient):
        start = _not_before_the_loop(first, head)
        weights = at.weights(start, query, key, head)
        return gradient + plan.dot(weights.T, at.output(d_out, start + at.row, head, d))

    gradient = at.over_tiles(0, of_state, jnp.zeros((BLOCK, plan.tile[1]), jnp.float32))
    put(d_value, at.over_group(of_head, gradient))


def _not_before_the_loop(start, head):
    """Returns `start` in a form that the compiler cannot hoist out of a loop over heads.

    Decays of all levels, computed once before the loop, would not fit in registers.
    """
    return start + jnp.minimum(head, 0)


def _at_block(plan, heads, shared):
    """Returns the `Program`, its head (of `heads`), the first token of its block, and its tile."""
    head = pl.program_id(1)
    at = Program(plan, head // (heads // plan.value_heads), shared)
    return at, head, pl.program_id(2) * BLOCK, pl.program_id(3)
