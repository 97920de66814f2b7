"""The plain linear recurrence on TPUs: one kernel forward, two kernels backward.

Nothing is gained by blocks in parallel, as a TPU core runs programs one after the other. The state
stays in scratch memory from step to step, so that the forward reads each array once and writes the
output. The backward has two kernels. The first saves the state before each step. The second goes
through the steps in reverse: in each it computes the states before the blocks again, and then goes
through the blocks in reverse, with the gradient of the state in scratch memory. Each kernel reads
each of its arrays once, so that the backward reads keys, values and decays twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from effattn.pallas.mosaic_tpu.recurrence_blocks import Pairs, times, written
from effattn.pallas.mosaic_tpu.recurrence_steps import Steps
from effattn.pallas.recurrence import Arrays, Gradients, How


def forward(how: How, arrays: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the last state; see `effattn.pallas.recurrence.Kernels`."""
    steps = Steps.of(how, arrays)
    plan = steps.plan
    inputs = [
        steps.tokens(scaled(arrays), plan.heads // plan.query_heads, plan.group),
        steps.tokens(arrays.key, plan.value_heads // plan.key_heads),
        steps.tokens(arrays.value),
        *steps.decays(arrays.log_decay),
        steps.once(state),
    ]
    results = [
        steps.result(plan.heads, state.shape[-1], how.dtype, plan.group),
        steps.once(state),
    ]
    out, last = steps.call(_forward, inputs, results, [state.shape[2:]])
    return steps.by_token(out), last


def backward(
    how: How, arrays: Arrays, state: jax.Array, d_out: jax.Array, d_state: jax.Array
) -> Gradients:
    """Returns the gradients; see `effattn.pallas.recurrence.Kernels`."""
    states = _states(Steps.of(how, arrays), arrays, state)
    steps = Steps.of(how, arrays).reversed()
    plan, sizes = steps.plan, d_state.shape[2:]
    log_decay = steps.decays(arrays.log_decay)
    inputs = [
        steps.tokens(d_out, 1, plan.group),
        steps.tokens(scaled(arrays), plan.heads // plan.query_heads, plan.group),
        steps.tokens(arrays.key, plan.value_heads // plan.key_heads),
        steps.tokens(arrays.value),
        *log_decay,
        (states, steps.saved(d_state)[1]),
        steps.once(d_state),
    ]
    results = [
        steps.result(plan.heads, sizes[0], jnp.float32, plan.group),
        steps.result(plan.value_heads, sizes[0]),
        steps.result(plan.value_heads, sizes[1]),
        *[(jax.ShapeDtypeStruct(x.shape, jnp.float32), spec) for x, spec in log_decay],
        steps.once(d_state),
    ]
    scratch = [(steps.blocks + 1, *sizes), sizes]
    d_query, d_key, d_value, *d_log, d_first = steps.call(_backward, inputs, results, scratch)
    d_log_decay = None
    if plan.decay == "feature":
        d_log_decay = steps.by_token(d_log[0])
    elif plan.decay == "token":
        of_tokens = d_log[0].reshape(*d_log[0].shape[:2], -1, 1)
        d_log_decay = steps.by_token(of_tokens)[..., 0]
    d_query, d_key, d_value = map(steps.by_token, (d_query, d_key, d_value))
    return Gradients(d_query, d_key, d_value, d_log_decay, d_first)


def _states(steps, arrays, state):
    """Returns the states before each step, `(B, V, steps, F, D)`."""
    share = steps.plan.value_heads // steps.plan.key_heads
    inputs = [
        steps.tokens(arrays.key, share),
        steps.tokens(arrays.value),
        *steps.decays(arrays.log_decay),
        steps.once(state),
    ]
    (found,) = steps.call(_walk, inputs, [steps.saved(state)], [state.shape[2:]])
    return found


def scaled(arrays: Arrays) -> jax.Array:
    """Returns queries; XLA applies their scale."""
    query, scale = arrays.query, arrays.scale
    return query if scale is None else query.astype(scale.dtype) * scale


def wide(x: jax.Array) -> jax.Array:
    """In float32."""
    return x.astype(jnp.float32)


def _walk(steps: Steps, key, value, *refs):
    *log_decay, initial, saved, state = refs
    _start(initial, state)
    saved[...] = state[...]

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        state[...] = _after(steps.plan, at, state[...], wide(key[rows, :]), wide(value[rows, :]))


def _forward(steps: Steps, query, key, value, *refs):
    *log_decay, initial, out, last, state = refs
    _start(initial, state)
    plan = steps.plan

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        pairs, since_start = Pairs(at), at.since_start()
        keys, values, before = wide(key[rows, :]), wide(value[rows, :]), state[...]

        def of_head(g, carry):
            queries = wide(query[g, rows, :])
            read = plan.dot(times(queries, since_start), before)
            read += plan.dot(pairs.products(queries, keys), values)
            out[g, rows, :] = read.astype(out.dtype)
            return carry

        plan.over_group(of_head, 0)
        state[...] = _after(plan, at, before, keys, values)

    last[...] = state[...]


def _backward(steps: Steps, d_out, query, key, value, *refs):
    plan = steps.plan
    *log_decay, states, d_last = refs[: 2 + (plan.decay is not None)]
    d_query, d_key, d_value, *d_log_decay, d_first, kept, co_state = refs[len(log_decay) + 2 :]
    _start(d_last, co_state)

    # States before the blocks, and after the last block.
    kept[0] = states[...]

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        kept[i + 1] = _after(plan, at, kept[i], wide(key[rows, :]), wide(value[rows, :]))

    @functools.partial(steps.each, in_order=False)
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        pairs, since_start, until_end = Pairs(at), at.since_start(), at.until_end()
        keys, values = wide(key[rows, :]), wide(value[rows, :])
        before, co_after = kept[i], co_state[...]
        d_keys = times(plan.dot(values, co_after, (1, 1)), until_end)
        d_values = plan.dot(times(keys, until_end), co_after)

        def of_head(g, carry):
            d_keys, d_values, own_keys, crossing, co_before = carry
            queries, d_read = wide(query[g, rows, :]), wide(d_out[g, rows, :])
            d_weights = plan.dot(d_read, values, (1, 1))
            d_queries = times(plan.dot(d_read, before, (1, 1)), since_start)
            d_queries += pairs.gradient(d_weights, keys, (1, 0))
            d_keys += pairs.gradient(d_weights, queries, (0, 0))
            d_values += plan.dot(pairs.products(queries, keys), d_read, (0, 0))
            co_before += plan.dot(times(queries, since_start), d_read, (0, 0))
            if log_decay:
                crossing += queries * d_queries
                own = jnp.sum(d_read * values, 1, keepdims=True)
                d_queries += own * keys
                own_keys += own * queries
            d_query[g, rows, :] = d_queries
            return d_keys, d_values, own_keys, crossing, co_before

        none = jnp.zeros_like(keys) if log_decay else jnp.float32(0)
        found = d_keys, d_values, none, none, times(co_after, at.whole())
        d_keys, d_values, own_keys, crossing, co_before = plan.over_group(of_head, found)
        if log_decay:
            at_end = kept[i + 1] * co_after
            gradient = at.gradient(crossing - keys * d_keys, at_end)
            steps.put_decays(d_log_decay[0], i, gradient)
            d_keys += own_keys
        d_key[rows, :], d_value[rows, :] = d_keys, d_values
        co_state[...] = co_before

    d_first[...] = co_state[...]


def _start(given, state):
    """Starts from the given state in the first step of the grid."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = given[...]


def _after(plan, at, before, keys, values):
    """The state after a block."""
    return times(before, at.whole()) + written(plan, at, keys, values)
