"""The linear recurrence on TPUs: one kernel forward, two kernels backward.

Nothing is gained by blocks in parallel, as a TPU core runs programs one after the other. The state
stays in scratch memory from step to step, so that the forward reads each array once and writes the
output. The backward has two kernels. The first saves the state before each step. The second goes
through the steps in reverse: in each it computes the states before the blocks again, and then goes
through the blocks in reverse, with the gradient of the state in scratch memory. Each kernel reads
each of its arrays once, so that the backward reads keys, values and decays twice.

In the delta form (`effattn.pallas.recurrence_delta` has the formulas), a kernel corrects the values
of a block before it uses them. The inverse T of a block does not depend on the state, so only two
products of a block wait for the state before it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from effattn.pallas.mosaic_tpu.recurrence_blocks import (
    Corrections,
    Pairs,
    times,
    unit_inverses,
    written,
)
from effattn.pallas.mosaic_tpu.recurrence_steps import Steps
from effattn.pallas.recurrence import Arrays, Gradients, How


def forward(how: How, arrays: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the last state; see `effattn.pallas.recurrence.Kernels`."""
    steps = Steps.of(how, arrays)
    plan = steps.plan
    inputs = [_queries(steps, arrays), *_writes(steps, arrays), steps.once(state)]
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
    steps = Steps.of(how, arrays)
    writes = [*_writes(steps, arrays), steps.once(state)]
    (states,) = steps.call(_walk, writes, [steps.saved(state)], [state.shape[2:]])
    steps = steps.reversed()
    plan, sizes = steps.plan, d_state.shape[2:]
    inputs = [
        steps.tokens(d_out, 1, plan.group),
        _queries(steps, arrays),
        *_writes(steps, arrays),
        (states, steps.saved(d_state)[1]),
        steps.once(d_state),
    ]
    log_decay = steps.decays(arrays.log_decay)
    of_recalled = [steps.result(plan.value_heads, sizes[0])] if plan.has_delta else []
    results = [
        steps.result(plan.heads, sizes[0], jnp.float32, plan.group),
        steps.result(plan.value_heads, sizes[0]),
        steps.result(plan.value_heads, sizes[1]),
        *[(jax.ShapeDtypeStruct(x.shape, jnp.float32), spec) for x, spec in log_decay],
        *of_recalled,
        steps.once(d_state),
    ]
    scratch = [(steps.blocks + 1, *sizes), sizes]
    if plan.has_delta:
        scratch += [(steps.blocks, plan.tokens, size) for size in (sizes[1], plan.tokens)]
    d_query, d_key, d_value, *others = steps.call(_backward, inputs, results, scratch)
    *others, d_first = others
    d_recalled = steps.by_token(others.pop()) if plan.has_delta else None
    d_log_decay = None
    if plan.decay == "feature":
        d_log_decay = steps.by_token(others[0])
    elif plan.decay == "token":
        of_tokens = others[0].reshape(*others[0].shape[:2], -1, 1)
        d_log_decay = steps.by_token(of_tokens)[..., 0]
    d_query, d_key, d_value = map(steps.by_token, (d_query, d_key, d_value))
    return Gradients(d_query, d_key, d_value, d_log_decay, d_first, d_recalled)


def _queries(steps, arrays):
    """Queries; XLA applies their scale."""
    plan, query, scale = steps.plan, arrays.query, arrays.scale
    if scale is not None:
        query = query.astype(scale.dtype) * scale
    return steps.tokens(query, plan.heads // plan.query_heads, plan.group)


def _writes(steps, arrays):
    """Operands of the state: keys, values, decays if any, and recalled keys in the delta form."""
    share = steps.plan.value_heads // steps.plan.key_heads
    found = [steps.tokens(arrays.key, share), steps.tokens(arrays.value)]
    found += steps.decays(arrays.log_decay)
    return found + ([steps.tokens(arrays.recalled, share)] if steps.plan.has_delta else [])


def _wide(x: jax.Array) -> jax.Array:
    """In float32."""
    return x.astype(jnp.float32)


class _Block:
    """Arrays of a block, read from the refs of the operands that `_writes` lists.

    Attributes:
      rows: rows of the block in the arrays of a step.
      at: decays.
      keys, values: `(C, F)` and `(C, D)`; in the delta form, values before they are corrected.
      recalled: `(C, F)` in the delta form.
      inverse, solved_reads, solved_values: T, T B and T V in the delta form, set by `_blocks`.
    """

    inverse: jax.Array
    solved_reads: jax.Array
    solved_values: jax.Array

    def __init__(self, steps: Steps, refs: Sequence[Any], i: Any):
        key, value, *others = refs
        recalled = others.pop() if steps.plan.has_delta else None
        self.plan, self.rows, self.at = steps.plan, steps.rows(i), steps.decays_of(others, i)
        self.keys, self.values = _wide(key[self.rows, :]), _wide(value[self.rows, :])
        self.recalled = None if recalled is None else _wide(recalled[self.rows, :])

    def corrections(self) -> Corrections:
        """Corrections of the delta form."""
        assert self.recalled is not None
        return Corrections(self.at, self.recalled)

    def values_after(self, before: jax.Array) -> jax.Array:
        """The values `(C, D)` that the tokens write, given the state `(F, D)` before the block.

        They are X in the delta form, otherwise the values themselves.
        """
        if self.recalled is None:
            return self.values
        return self.solved_values - self.plan.dot(self.solved_reads, before)

    def after(self, before: jax.Array, values: jax.Array) -> jax.Array:
        """The state after the block writes `values`."""
        return times(before, self.at.whole()) + written(self.plan, self.at, self.keys, values)


def _blocks(steps: Steps, refs: Sequence[Any]):
    """Returns the argument `prepare` of `Steps.each`, which loads the blocks of a piece.

    In the delta form, it also computes T, T B and T V of all these blocks together.
    """
    plan = steps.plan

    def of_all(indices):
        blocks = [_Block(steps, refs, i) for i in indices]
        if plan.has_delta:
            corrections = [block.corrections() for block in blocks]
            systems = [
                x.pairs.products(x.recalled, block.keys)
                for x, block in zip(corrections, blocks, strict=True)
            ]
            inverses = unit_inverses(plan, systems)
            for x, block, inverse in zip(corrections, blocks, inverses, strict=True):
                block.inverse = inverse
                block.solved_reads = plan.dot(inverse, x.reads())
                block.solved_values = plan.dot(inverse, block.values)
        return blocks

    return of_all


def _number_of_writes(plan):
    return 2 + (plan.decay is not None) + plan.has_delta


def _walk(steps: Steps, *refs):
    *writes, initial, saved, state = refs
    _start(initial, state)
    saved[...] = state[...]

    @functools.partial(steps.each, prepare=_blocks(steps, writes))
    def _(_, block):
        before = state[...]
        state[...] = block.after(before, block.values_after(before))


def _forward(steps: Steps, query, *refs):
    *writes, initial, out, last, state = refs
    _start(initial, state)
    plan = steps.plan

    @functools.partial(steps.each, prepare=_blocks(steps, writes))
    def _(_, block):
        before = state[...]
        pairs, since_start = Pairs(block.at), block.at.since_start()
        keys, values = block.keys, block.values_after(before)

        def of_head(g, carry):
            queries = _wide(query[g, block.rows, :])
            read = plan.dot(times(queries, since_start), before)
            read += plan.dot(pairs.products(queries, keys), values)
            out[g, block.rows, :] = read.astype(out.dtype)
            return carry

        plan.over_group(of_head, 0)
        state[...] = block.after(before, values)

    last[...] = state[...]


def _backward(steps: Steps, d_out, query, *refs):
    plan = steps.plan
    n, has_decay = _number_of_writes(plan), plan.decay is not None
    writes, (states, d_last, d_query, d_key, d_value, *others) = refs[:n], refs[n:]
    d_log_decay, others = others[:has_decay], others[has_decay:]
    d_recalled, others = others[: plan.has_delta], others[plan.has_delta :]
    d_first, kept, co_state, *of_blocks = others
    _start(d_last, co_state)

    # States before the blocks, and after the last block; in the delta form, also the corrected
    # values of the blocks and the inverses.
    kept[0] = states[...]

    @functools.partial(steps.each, prepare=_blocks(steps, writes))
    def _(i, block):
        before = kept[i]
        values = block.values_after(before)
        if plan.has_delta:
            of_blocks[0][i], of_blocks[1][i] = values, block.inverse
        kept[i + 1] = block.after(before, values)

    @functools.partial(steps.each, in_order=False)
    def _(i, _):
        block, before, co_after = _Block(steps, writes, i), kept[i], co_state[...]
        rows, at, keys, values = block.rows, block.at, block.keys, block.values
        if plan.has_delta:
            values = of_blocks[0][i]
        pairs, since_start, until_end = Pairs(at), at.since_start(), at.until_end()
        d_keys = times(plan.dot(values, co_after, (1, 1)), until_end)
        d_values = plan.dot(times(keys, until_end), co_after)

        def of_head(g, carry):
            d_keys, d_values, own_keys, crossing, co_before = carry
            queries, d_read = _wide(query[g, rows, :]), _wide(d_out[g, rows, :])
            d_weights = plan.dot(d_read, values, (1, 1))
            d_queries = times(plan.dot(d_read, before, (1, 1)), since_start)
            d_queries += pairs.gradient(d_weights, keys, (1, 0))
            d_keys += pairs.gradient(d_weights, queries, (0, 0))
            d_values += plan.dot(pairs.products(queries, keys), d_read, (0, 0))
            co_before += plan.dot(times(queries, since_start), d_read, (0, 0))
            if has_decay:
                crossing += queries * d_queries
                own = jnp.sum(d_read * values, 1, keepdims=True)
                d_queries += own * keys
                own_keys += own * queries
            d_query[g, rows, :] = d_queries
            return d_keys, d_values, own_keys, crossing, co_before

        none = jnp.zeros_like(keys) if has_decay else jnp.float32(0)
        found = d_keys, d_values, none, none, times(co_after, at.whole())
        d_keys, d_values, own_keys, crossing, co_before = plan.over_group(of_head, found)
        read_before = None
        if plan.has_delta:
            inverse, corrections = of_blocks[1][i], block.corrections()
            d_values, of_recalled, more_keys, more_state = corrections.gradients(
                inverse, d_values, values, keys, before
            )
            d_recalled[0][rows, :] = of_recalled
            d_keys, co_before = d_keys + more_keys, co_before + more_state
            read_before = corrections.recalled * of_recalled
        if has_decay:
            at_end = kept[i + 1] * co_after
            gradient = at.gradient(crossing - keys * d_keys, at_end, read_before)
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
