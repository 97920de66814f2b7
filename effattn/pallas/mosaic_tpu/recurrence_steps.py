"""The plain linear recurrence on TPUs: one kernel forward, and one for all gradients.

A TPU core runs the programs of a grid one after the other, so nothing is gained by blocks in
parallel. A program computes a step of up to 512 tokens of one value head, block by block. The state
stays in scratch memory from step to step, so that the forward reads each array once and writes the
output, and the state before each step: at 128 features and values in bfloat16 an eighth of what it
reads. The backward goes through the steps in reverse. In each step it computes the states before
the blocks again, and then goes through the blocks in reverse, with the gradient of the state in
scratch memory. It reads each array once and writes each gradient once.

Arrays have the axis of heads before the axis of tokens, as a block is tokens by features. A length
that is not a multiple of the tokens of a step is padded.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from effattn.arrays import mesh_axes
from effattn.pallas.mosaic_tpu.recurrence_blocks import (
    FORGETS,
    Decays,
    Pairs,
    Plan,
    times,
    written,
)
from effattn.pallas.recurrence import BLOCK, Arrays, Gradients, How

LANES = 128
# Tokens in a block without decay or with decays of tokens: a whole side of the matrix unit.
WIDE = 128
# Most tokens in a step.
STEP = 512
# Bytes of VMEM for the arrays of a step.
BUFFERS = 2**23


def states(how: How, arrays: Arrays, state: jax.Array) -> jax.Array:
    """Returns the states before each step, `(B, V, steps, F, D)`."""
    steps = _Steps.of(how, arrays)
    share = steps.plan.value_heads // steps.plan.key_heads
    inputs = [
        steps.tokens(arrays.key, share),
        steps.tokens(arrays.value),
        *steps.decays(arrays.log_decay),
        steps.once(state),
    ]
    (found,) = steps.call(_walk, inputs, [steps.saved(state)], [state.shape[2:]])
    return found


def forward(how: How, arrays: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the output `(B, T, heads, D)`, the states before each step, and the last state."""
    steps = _Steps.of(how, arrays)
    plan = steps.plan
    inputs = [
        steps.tokens(_scaled(arrays), plan.heads // plan.query_heads, plan.group),
        steps.tokens(arrays.key, plan.value_heads // plan.key_heads),
        steps.tokens(arrays.value),
        *steps.decays(arrays.log_decay),
        steps.once(state),
    ]
    results = [
        steps.result(plan.heads, state.shape[-1], how.dtype, plan.group),
        steps.saved(state),
        steps.once(state),
    ]
    out, found, last = steps.call(_forward, inputs, results, [state.shape[2:]])
    return steps.by_token(out), found, last


def backward(
    how: How, arrays: Arrays, states: jax.Array, d_out: jax.Array, d_state: jax.Array
) -> Gradients:
    """Returns the gradients, from the states before each step."""
    steps = _Steps.of(how, arrays).reversed()
    plan, sizes = steps.plan, d_state.shape[2:]
    log_decay = steps.decays(arrays.log_decay)
    inputs = [
        steps.tokens(d_out, 1, plan.group),
        steps.tokens(_scaled(arrays), plan.heads // plan.query_heads, plan.group),
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


def _scaled(arrays):
    """Returns queries; XLA applies their scale."""
    query, scale = arrays.query, arrays.scale
    return query if scale is None else query.astype(scale.dtype) * scale


# An operand or a result of a kernel, with the specification of its blocks.
_Placed = tuple[Any, pl.BlockSpec]


@dataclasses.dataclass(frozen=True)
class _Steps:
    """How the tokens are divided into steps.

    Attributes:
      plan: static configuration.
      length: T.
      count: number of steps.
      blocks: blocks in a step.
      is_reversed: whether the grid goes from the last step to the first.
    """

    plan: Plan
    length: int
    count: int
    blocks: int
    is_reversed: bool = False

    @classmethod
    def of(cls, how: How, arrays: Arrays) -> "_Steps":
        """Steps of as many tokens as fit, at most `STEP`, all of the same number of blocks."""
        length, plan = arrays.query.shape[1], Plan.of(how, arrays)
        features, values = (_lanes(x.shape[-1]) for x in (arrays.key, arrays.value))
        # The backward has most arrays: the inputs, their gradients and d_out, all but the inputs in
        # float32, with two buffers each; and the states of all blocks.
        of_token = sum(
            n * _lanes(x.shape[-1]) * (x.dtype.itemsize + 4)
            for x, n in ((arrays.query, plan.group), (arrays.key, 1), (arrays.value, 1))
        )
        of_token += 4 * plan.group * values + 8 * features * (plan.decay == "feature")

        def fitting(tokens):
            """Number of blocks that fit in a step."""
            of_block = 2 * of_token * tokens + 4 * features * values
            return min(BUFFERS // of_block, STEP // tokens)

        if length > BLOCK and plan.decay != "feature" and fitting(WIDE):
            plan = Plan.of(how, arrays, WIDE)
        count = pl.cdiv(plan.blocks, max(fitting(plan.tokens), 1))
        return cls(plan, length, count, pl.cdiv(plan.blocks, count))

    def reversed(self) -> "_Steps":
        """The same steps, from the last to the first."""
        return dataclasses.replace(self, is_reversed=True)

    @property
    def size(self) -> int:
        """Tokens in a step."""
        return self.blocks * self.plan.tokens

    def _at(self, n):
        """The step of a step of the grid."""
        return self.count - 1 - n if self.is_reversed else n

    def tokens(self, x: jax.Array, share: int = 1, group: int | None = None) -> _Placed:
        """`(B, T, heads, size)` as `(B, heads, T', size)`; `share` programs read the same heads."""
        x = jnp.moveaxis(x, 1, 2)
        padding = self.count * self.size - self.length
        x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), (0, 0)])
        return x, self._spec_of_tokens(x.shape[-1], share, group)

    def result(
        self, heads: int, size: int, dtype: Any = jnp.float32, group: int | None = None
    ) -> _Placed:
        """A result `(B, heads, T', size)`."""
        shape = self.plan.batch, heads, self.count * self.size, size
        return jax.ShapeDtypeStruct(shape, dtype), self._spec_of_tokens(size, 1, group)

    def _spec_of_tokens(self, size, share, group):
        def place(b, h, n):
            return b, h // share, self._at(n), 0

        return pl.BlockSpec((None, group, self.size, size), place)

    def by_token(self, x: jax.Array) -> jax.Array:
        """The inverse of `tokens`."""
        return jnp.moveaxis(x[:, :, : self.length], 2, 1)

    def decays(self, log_decay: jax.Array | None) -> list[_Placed]:
        """Decays of features as tokens, decays of tokens as `(B, V, steps, blocks, C)`."""
        if log_decay is None:
            return []
        finite = jnp.maximum(log_decay.astype(jnp.float32), FORGETS)
        if finite.ndim == 4:
            return [self.tokens(finite)]
        rows, _ = self.tokens(finite[..., None])
        rows = rows.reshape(*rows.shape[:2], self.count, self.blocks, self.plan.tokens)
        shape = None, None, None, self.blocks, self.plan.tokens
        return [(rows, pl.BlockSpec(shape, lambda b, h, n: (b, h, self._at(n), 0, 0)))]

    def once(self, state: jax.Array) -> _Placed:
        """A state `(B, V, F, D)`, the same in all steps."""
        return state, pl.BlockSpec((None, None, *state.shape[2:]), lambda b, h, n: (b, h, 0, 0))

    def saved(self, state: jax.Array) -> _Placed:
        """States `(B, V, steps, F, D)`, one for each step."""
        *heads, features, values = state.shape
        spec = pl.BlockSpec(
            (None, None, None, features, values), lambda b, h, n: (b, h, self._at(n), 0, 0)
        )
        shape = *heads, self.count, features, values
        return jax.ShapeDtypeStruct(shape, state.dtype), spec

    def call(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[_Placed],
        results: Sequence[_Placed],
        scratch: Sequence[tuple[int, ...]],
    ) -> Sequence[jax.Array]:
        """Calls a kernel for each value head of each example and each step, in order."""
        plan = self.plan
        arrays = mesh_axes.vary_alike([x for x, _ in inputs])
        varying = jax.typeof(arrays[0]).manual_axis_type
        interpreter = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=(plan.batch, plan.value_heads, self.count),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in results],
            out_shape=[
                jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x, _ in results
            ],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpreter if plan.how.interpreted else False,
            name=f"linear_recurrence{kernel.__name__}",
        )(*arrays)

    # In kernels.

    def each(self, body: Callable[[Any], None], in_order: bool = True) -> None:
        """Calls `body(block)` for each block of the step, in order or in reverse.

        Code of several blocks fills more slots of the bundles, but decays of features have too much
        of it for more than two blocks.
        """
        order: Any = range(self.blocks) if in_order else range(self.blocks - 1, -1, -1)
        if self.plan.decay != "feature" or self.blocks <= 2:
            for at in order:
                body(at)
            return

        together, start = 2 - self.blocks % 2, np.int32(order[0])
        step = np.int32(order[1] - order[0])

        def some(n, carry):
            for more in range(together):
                body(start + step * (n * np.int32(together) + np.int32(more)))
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(self.blocks // together), some, 0)

    def rows(self, block: Any) -> Any:
        """The rows of a block."""
        tokens = self.plan.tokens
        if isinstance(block, int):
            return pl.ds(block * tokens, tokens)
        return pl.ds(pl.multiple_of(block * np.int32(tokens), tokens), tokens)

    def decays_of(self, log_decay: Sequence[Any], block: Any) -> Decays:
        """The decays of a block; `log_decay` is a list of one array or none."""
        if not log_decay:
            return Decays(self.plan, None)
        return Decays(self.plan, log_decay[0][self._of_decays(block), :])

    def put_decays(self, log_decay: Any, block: Any, x: jax.Array) -> None:
        """Stores an array in the shape of the log decays of a block."""
        log_decay[self._of_decays(block), :] = x

    def _of_decays(self, block):
        return self.rows(block) if self.plan.decay == "feature" else pl.ds(block, 1)


def _lanes(size):
    return pl.cdiv(size, LANES) * LANES


def _wide(x):
    return x.astype(jnp.float32)


def _walk(steps: _Steps, key, value, *refs):
    *log_decay, initial, saved, state = refs
    _start(initial, state)
    saved[...] = state[...]

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        state[...] = _after(steps.plan, at, state[...], _wide(key[rows, :]), _wide(value[rows, :]))


def _forward(steps: _Steps, query, key, value, *refs):
    *log_decay, initial, out, saved, last, state = refs
    _start(initial, state)
    saved[...] = state[...]
    plan = steps.plan

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        pairs, since_start = Pairs(at), at.since_start()
        keys, values, before = _wide(key[rows, :]), _wide(value[rows, :]), state[...]

        def of_head(g, carry):
            queries = _wide(query[g, rows, :])
            read = plan.dot(times(queries, since_start), before)
            read += plan.dot(pairs.products(queries, keys), values)
            out[g, rows, :] = read.astype(out.dtype)
            return carry

        plan.over_group(of_head, 0)
        state[...] = _after(plan, at, before, keys, values)

    last[...] = state[...]


def _backward(steps: _Steps, d_out, query, key, value, *refs):
    plan = steps.plan
    *log_decay, states, d_last = refs[: 2 + (plan.decay is not None)]
    d_query, d_key, d_value, *d_log_decay, d_first, kept, co_state = refs[len(log_decay) + 2 :]
    _start(d_last, co_state)

    # States before the blocks, and after the last block.
    kept[0] = states[...]

    @steps.each
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        kept[i + 1] = _after(plan, at, kept[i], _wide(key[rows, :]), _wide(value[rows, :]))

    @functools.partial(steps.each, in_order=False)
    def _(i):
        rows, at = steps.rows(i), steps.decays_of(log_decay, i)
        pairs, since_start, until_end = Pairs(at), at.since_start(), at.until_end()
        keys, values = _wide(key[rows, :]), _wide(value[rows, :])
        before, co_after = kept[i], co_state[...]
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
