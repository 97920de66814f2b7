"""The delta form of the linear recurrence on TPUs; `effattn.pallas.recurrence_delta` has the rest.

`_correct` goes from the first chunk to the last, and `_correct_back` from the last to the first.
The state, or its gradient, stays in scratch memory and is saved before each chunk. The grid has one
more step, without tokens, for the state at the end of the sequence: the last step of `_correct`,
and the first of `_correct_back`. The other kernels compute chunks in any order, from the saved
states.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from effattn.pallas.mosaic_tpu.recurrence_blocks import Pairs, times
from effattn.pallas.mosaic_tpu.recurrence_plain import scaled, wide
from effattn.pallas.mosaic_tpu.recurrence_steps import Steps
from effattn.pallas.recurrence import Arrays, How, whole_state
from effattn.pallas.recurrence_delta import Chunks


def read(how: How, arrays: Arrays, states: jax.Array) -> jax.Array:
    """Returns the output; see `effattn.pallas.recurrence.Kernels`."""
    steps = Steps.of_chunks(how, arrays)
    plan = steps.plan
    inputs = [*_of_tokens(steps, arrays), steps.chunks(states)]
    results = [steps.result(plan.heads, states.shape[-1], how.dtype, plan.group)]
    return steps.by_token(*steps.call(_read_chunks, inputs, results))


def d_query(how: How, arrays: Arrays, states: jax.Array, d_out: jax.Array) -> jax.Array:
    """The gradient of the queries; see `effattn.pallas.recurrence.gradients_of_blocks`."""
    steps = Steps.of_chunks(how, arrays)
    plan = steps.plan
    of_output = steps.tokens(d_out, 1, plan.group)
    inputs = [of_output, *_of_tokens(steps, arrays), steps.chunks(states)]
    results = [steps.result(plan.heads, states.shape[-2], group=plan.group)]
    return steps.by_token(*steps.call(_d_query_chunks, inputs, results))


def d_key(how: How, arrays: Arrays, co_states: jax.Array, d_out: jax.Array) -> jax.Array:
    """The gradient of the keys; see `effattn.pallas.recurrence.gradients_of_blocks`."""
    steps = Steps.of_chunks(how, arrays)
    plan = steps.plan
    inputs = [
        steps.tokens(d_out, 1, plan.group),
        *_of_tokens(steps, arrays),
        steps.chunks(co_states),
        steps.next_step(co_states),
    ]
    results = [steps.result(plan.value_heads, co_states.shape[-2])]
    return steps.by_token(*steps.call(_d_key_chunks, inputs, results))


def correct(how: How, arrays: Arrays, chunks: Chunks, state: jax.Array):
    """Returns corrected values and states; see `effattn.pallas.recurrence.Kernels`."""
    steps = Steps.of_chunks(how, arrays)
    found, states = _corrected(steps, _correct, chunks, state)
    return found, states, whole_state(arrays, states[:, :, -1])


def correct_back(how: How, arrays: Arrays, chunks: Chunks, d_state: jax.Array):
    """Returns the same for gradients, from the last chunk to the first."""
    steps = Steps.of_chunks(how, arrays).reversed()
    found, co_states = _corrected(steps, _correct_back, chunks, d_state)
    return found, co_states, whole_state(arrays, co_states[:, :, 0])


def _of_tokens(steps, arrays):
    plan = steps.plan
    return [
        steps.tokens(scaled(arrays), plan.heads // plan.query_heads, plan.group),
        steps.tokens(arrays.key, plan.value_heads // plan.key_heads),
        steps.tokens(arrays.value),
        *steps.decays(arrays.log_decay),
    ]


def _corrected(steps, kernel, chunks, state):
    steps = steps.with_end()
    *heads, features, values = state.shape
    saved = jax.ShapeDtypeStruct((*heads, steps.plan.blocks + 1, features, values), jnp.float32)
    inputs = [*(steps.chunks(x) for x in chunks if x is not None), steps.once(state)]
    like = jax.ShapeDtypeStruct(chunks.value.shape, jnp.float32)
    return steps.call(kernel, inputs, [steps.chunks(like), steps.at_ends(saved)], [state.shape[2:]])


def _loaded(steps, i, log_decay, key, value):
    """The rows of a chunk, its pairs, the decays since its start, and its keys and values."""
    rows, at = steps.rows(i), steps.decays_of(log_decay, i)
    return rows, Pairs(at), at.since_start(), wide(key[rows, :]), wide(value[rows, :])


def _read_chunks(steps: Steps, query, key, value, *refs):
    *log_decay, states, out = refs
    plan = steps.plan

    @steps.each
    def _(i):
        rows, pairs, since_start, keys, values = _loaded(steps, i, log_decay, key, value)

        def of_head(g, carry):
            queries = wide(query[g, rows, :])
            found = plan.dot(times(queries, since_start), states[i])
            found += plan.dot(pairs.products(queries, keys), values)
            out[g, rows, :] = found.astype(out.dtype)
            return carry

        plan.over_group(of_head, 0)


def _d_query_chunks(steps: Steps, d_out, query, key, value, *refs):
    *log_decay, states, found = refs
    plan = steps.plan

    @steps.each
    def _(i):
        rows, pairs, since_start, keys, values = _loaded(steps, i, log_decay, key, value)

        def of_head(g, carry):
            d_read = wide(d_out[g, rows, :])
            across = times(plan.dot(d_read, states[i], (1, 1)), since_start)
            d_weights = plan.dot(d_read, values, (1, 1))
            found[g, rows, :] = across + pairs.gradient(d_weights, keys, (1, 0))
            return carry

        plan.over_group(of_head, 0)


def _d_key_chunks(steps: Steps, d_out, query, key, value, *refs):
    *log_decay, co_states, co_state_after, found = refs
    plan = steps.plan

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        pairs, values = Pairs(at), wide(value[rows, :])
        co_after = _after(steps, i, co_states, co_state_after)
        across = times(plan.dot(values, co_after, (1, 1)), at.until_end())

        def of_head(g, total):
            queries, d_read = wide(query[g, rows, :]), wide(d_out[g, rows, :])
            return total + pairs.gradient(plan.dot(d_read, values, (1, 1)), queries, (0, 0))

        found[rows, :] = plan.over_group(of_head, across)


def _after(steps, i, states, after):
    """The state after a chunk, from those before the chunks and the one after the step."""
    last = steps.blocks - 1
    if isinstance(i, int):
        return after[...] if i == last else states[i + 1]
    return jnp.where(i == last, after[...], states[jnp.minimum(i + 1, last)])


def _correct(steps: Steps, recalled, key, value, kept, initial, corrected, states, state):
    def chunk(i):
        before = states[i] = state[...]
        corrected[i], state[...] = _of_chunk(steps, i, recalled, key, value, kept, before)

    _in_order(steps, initial, state, states, chunk)


def _correct_back(
    steps: Steps, recalled, key, value, kept, query, d_out, last, corrected, co_states, co_state
):
    plan = steps.plan

    def chunk(i):
        corrected[i], before = _of_chunk(steps, i, recalled, key, value, kept, co_state[...])

        def of_head(g, before):
            return before + plan.dot(query[i, g], d_out[i, g], (0, 0))

        co_state[...] = co_states[i] = plan.over_group(of_head, before)

    _in_order(steps, last, co_state, co_states, chunk)


def _of_chunk(steps, i, recalled, key, value, kept, state):
    """Returns the corrected values of a chunk, and the state after it."""
    plan = steps.plan
    found = value[i] - plan.dot(recalled[i], state)
    return found, kept[i] * state + plan.dot(key[i], found, (0, 0))


def _in_order(steps, given, state, states, chunk):
    """Calls `chunk` for each chunk, from the given state on, and saves the state at the end."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = given[...]

    is_end = steps.is_end()

    @pl.when(is_end)
    def _():
        states[0] = state[...]

    @pl.when(jnp.logical_not(is_end))
    def _():
        steps.each(chunk, in_order=not steps.is_reversed)
