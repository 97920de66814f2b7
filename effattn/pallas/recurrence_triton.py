"""The linear recurrence for GPUs, lowered by Triton (Ampere and later).

A program holds one tile of the state, at most 64 features by 64 values, in registers, as float32:
16 KB, and no operand of its products is larger. Triton keeps up to four of them in shared memory,
so that every kernel fits in the 99 KB of small cards. All that is computed is a sum over tiles:
over those of features what is read and the gradients of values, over those of values the gradients
of queries and keys. Each program gives its share, and shares are added after: there are no atomics,
and the order of every sum is fixed.

There are two kinds of kernel. `_walk` and `_walk_back` go through the sequence by blocks of 64
tokens, and save the state, or its gradient, between them: 16 KB of it to the 32 KB of keys and
values that they read. They do one product a block and are alone in being sequential, so nothing
else is in them. `_correct` and `_correct_back` are the same for the delta form, where a value
depends on all features of the state before: a program has all of them, in tiles, and the fewer
values, so that they are as many numbers. The others (`_read_block`, `_d_query_block`,
`_d_key_value_block`) take one block each, all at once, and walk over its chunks from what was saved
at its start, or end.

With no decay, or one of each token, a chunk is one masked product of 32 tokens: for 64 the backward
would have two products of 64 x 64 and four operands alive at a time, all the shared memory of a
small card and more registers than there are. With decays of features, products decay inside the sum
over features: a chunk is halved down to single tokens, and the pairs that one of these five levels
parts are a product of queries since their half's start with keys until the end of theirs. That is
five exponentials for each token and feature, none of whose logarithms is a difference, and all else
is on tensor cores.

The decay from one token to another is the exponential of the sum of what lies between, by a scan of
masked log decays or a running sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn import dispatch
from effattn.cores.linear_recurrence import Operands, Rule
from effattn.pallas import device, recurrence
from effattn.pallas.recurrence import BLOCK, Arrays
from effattn.pallas.recurrence_triton_tiles import CHUNK, TILE, Program, plan_of, times
from effattn.xla import mesh_axes

LIMITS = dispatch.Limits(
    ("float32", "bfloat16", "float16"), 256, "Ampere or later; causal and packed calls"
)


def refusal(rule: Rule, x: Operands) -> str | None:
    """Why it does not take these, if so."""
    return recurrence.refusal(rule, x) or device.triton_refusal()


def forward(rule: Rule, x: Operands):
    """As all implementations of the core."""
    return recurrence.forward(KERNELS, rule, x)


def backward(rule: Rule, x: Operands, saved, d_output, d_state) -> Operands:
    """As all implementations of the core."""
    return recurrence.backward(KERNELS, rule, x, saved, d_output, d_state)


def _states(how, arrays: Arrays, state):
    plan = plan_of(how, arrays)
    return _walked(plan, _walk, (arrays.key, arrays.value, arrays.log_decay), state)


def _gradients_of_states(how, arrays: Arrays, d_out, d_state):
    plan = plan_of(how, arrays)
    return _walked(plan, _walk_back, (arrays.query, d_out, arrays.log_decay), d_state)


def _read(how, arrays: Arrays, states):
    plan = plan_of(how, arrays)
    (out,) = _of_blocks(plan, _read_block, plan.heads, arrays, (states, 0), (), (1,))
    return out


def _d_query(how, arrays: Arrays, states, d_out):
    plan = plan_of(how, arrays)
    (d_query,) = _of_blocks(plan, _d_query_block, plan.heads, arrays, (states, 0), (d_out,), (0,))
    return d_query


def _d_key_value(how, arrays: Arrays, co_states, d_out):
    plan = plan_of(how, arrays)
    saved = co_states, 1
    return _of_blocks(plan, _d_key_value_block, plan.value_heads, arrays, saved, (d_out,), (0, 1))


def _corrected(how, arrays: Arrays, chunks, state):
    return _walked_whole(plan_of(how, arrays), _correct, chunks, state)


def _corrected_back(how, arrays: Arrays, chunks, d_state):
    return _walked_whole(plan_of(how, arrays), _correct_back, chunks, d_state)


KERNELS = recurrence.Kernels(
    _states,
    _gradients_of_states,
    _read,
    _d_query,
    _d_key_value,
    _corrected,
    _corrected_back,
)


# Calls. All arrays of tokens are read by index and mask, so that no length or size is padded;
# results are in whole blocks and tiles.


def _call(kernel, plan, grid, inputs, specs, shapes, out_specs, stages=2):
    inputs = mesh_axes.vary_alike(inputs)
    varying = jax.typeof(inputs[0]).manual_axis_type
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=grid,
        in_specs=[whole if spec is None else spec for spec in specs],
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying) for shape in shapes
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=stages),
        interpret=plan.how.interpreted,
        name=f"linear_recurrence{kernel.__name__}",
    )(*inputs)


def _walked(plan, kernel, arrays, state):
    """`(B, V, n + 1, F', D')`, of whole tiles, with zeros in what fills them up."""
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
    """With zeros after the last axes, up to so much of each."""
    kept = x.ndim - len(whole)
    more = [(0, size - there) for there, size in zip(x.shape[kept:], whole, strict=True)]
    return jnp.pad(x, [*[(0, 0)] * kept, *more])


def _walked_whole(plan, kernel, chunks, state):
    """`X (B, V, n, C, D)`, and states as `_walked` gives them."""
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
        2 if features <= 2 * TILE else 1,  # of more, two chunks do not fit in shared memory
    )
    return corrected[..., :size], states


def _of_blocks(plan, kernel, heads, arrays, saved, more, results):
    """Of all blocks: `(B, T, heads, F)` for each 0 in `results`, `(B, T, heads, D)` for each 1.

    `saved` are states and which of those around a block it is for, the first or the second.
    """
    states, offset = saved
    across, share = plan.tiles[1], heads // plan.value_heads
    arrays = [array for array in (*more, *arrays) if array is not None]
    place = [
        # A share for each tile of the other axis.
        lambda b, h, n, t: (t % across, b, n, h, t // across),
        lambda b, h, n, t: (t // across, b, n, h, t % across),
    ]
    found = _call(
        kernel,
        plan,
        (plan.batch, heads, plan.blocks, plan.tiles[0] * across),
        (*arrays, states),
        (
            *[None] * len(arrays),
            pl.BlockSpec(
                (None, None, None, *plan.tile),
                lambda b, h, n, t: (b, h // share, n + offset, t // across, t % across),
            ),
        ),
        [
            (plan.tiles[1 - axis], plan.batch, plan.blocks * BLOCK, heads, plan.whole[axis])
            for axis in results
        ],
        [pl.BlockSpec((None, None, BLOCK, None, plan.tile[axis]), place[axis]) for axis in results],
    )
    sizes = plan.features, plan.values
    shares = [
        x[:, :, : plan.length, :, : sizes[axis]] for x, axis in zip(found, results, strict=True)
    ]
    return [x[0] if len(x) == 1 else x.sum(0) for x in shares]


# Kernels: one tile (f, d) of the state of one value head.


def _walk(plan, key, value, *refs):
    *log_decay, initial, states = refs
    at = Program(plan, BLOCK, 2, pl.program_id(1), log_decay)
    states[0] = initial[...]

    def block(n, state):
        state = at.state_after(state, n * BLOCK, key, value)
        states[n + 1] = state
        return state

    lax.fori_loop(0, plan.blocks, block, initial[...])


def _walk_back(plan, query, d_out, *refs):
    *log_decay, last, co_states = refs
    at = Program(plan, BLOCK, 2, pl.program_id(1), log_decay)
    co_states[plan.blocks] = last[...]

    def block(step, co_state):
        n = plan.blocks - 1 - step
        co_state = at.gradient_before(co_state, n * BLOCK, query, d_out)
        co_states[n] = co_state
        return co_state

    lax.fori_loop(0, plan.blocks, block, last[...])


def _correct(plan, recalled, key, kept, value, initial, corrected, states):
    """All features of a state, in tiles."""

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
    """The state after chunk n, in tiles, of which the corrected values are written."""
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


def _read_block(plan, query, key, value, *refs):
    *log_decay, states, out = refs
    head = pl.program_id(1)
    at = Program(plan, CHUNK, 3, head // (plan.heads // plan.value_heads), log_decay)

    def chunk(c, state):
        start = at.start(c)
        queries, keys = at.query(query, start + at.row, head), at.key(key, start + at.row)
        if plan.decay == "feature":
            weights = at.products(start, queries, keys)
        else:
            weights = plan.dot(queries, keys.T) * at.decays(start, at.row)
        read = plan.dot(times(queries, at.since_start(start)), state)
        at.put(out, c, at.row, read + plan.dot(weights, at.value(value, start + at.row)))
        return at.state_after(state, start, key, value)

    at.chunks(chunk, states[...])


def _d_query_block(plan, d_out, query, key, value, *refs):
    *log_decay, states, d_query = refs
    head = pl.program_id(1)
    at = Program(plan, CHUNK, 3, head // (plan.heads // plan.value_heads), log_decay)

    def chunk(c, state):
        start = at.start(c)
        d_read = at.output(d_out, start + at.row, head)
        d_weights = at.of_others(plan.dot(d_read, at.value(value, start + at.row).T), at.row)
        gradient = times(plan.dot(d_read, state.T), at.since_start(start))
        keys = at.key(key, start + at.row)
        if plan.decay == "feature":
            for decay, pairs in at.levels(start):
                gradient += decay * plan.dot(jnp.where(pairs, d_weights, 0), keys * decay)
        else:
            gradient += plan.dot(d_weights * at.decays(start, at.row), keys)
        at.put(d_query, c, at.row, gradient)
        return at.state_after(state, start, key, value)

    at.chunks(chunk, states[...])


def _d_key_value_block(plan, d_out, query, key, value, *refs):
    """Rows of keys and values are from the last of a chunk to the first, unless features decay."""
    *log_decay, co_states, d_key, d_value = refs
    at = Program(plan, CHUNK, 3, pl.program_id(1), log_decay)
    by_feature = plan.decay == "feature"
    rows = at.row if by_feature else at.back

    def chunk(step, co_state):
        c = BLOCK // CHUNK - 1 - step
        start = at.start(c)
        keys, values = at.key(key, start + rows), at.value(value, start + rows)
        until_end = at.until_end_in_order(start) if by_feature else at.until_end(start)
        gradients = (
            times(plan.dot(values, co_state.T), until_end),
            plan.dot(times(keys, until_end), co_state),
        )

        def of_head(head, gradients):
            d_keys, d_values = gradients
            queries = at.query(query, start + at.row, head)
            d_read = at.output(d_out, start + at.row, head)
            d_weights = at.of_others(plan.dot(d_read, values.T), rows)
            if by_feature:
                weights = at.products(start, queries, keys)
                for decay, pairs in at.levels(start):  # again: what is kept would fill registers
                    d_keys += decay * plan.dot(jnp.where(pairs, d_weights, 0).T, queries * decay)
            else:
                decays = at.decays(start, rows)
                weights = plan.dot(queries, keys.T) * decays
                d_keys += plan.dot((d_weights * decays).T, queries)
            return d_keys, d_values + plan.dot(weights.T, d_read)

        d_keys, d_values = at.over_group(of_head, gradients)
        at.put(d_key, c, rows, d_keys)
        at.put(d_value, c, rows, d_values)
        return at.gradient_before(co_state, start, query, d_out)

    at.chunks(chunk, co_states[...])
