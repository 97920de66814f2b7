"""Linear recurrence for Hopper GPUs, lowered by Mosaic GPU.

A sequence is cut into chunks of 64 tokens. A walk over the chunks saves the states between them,
and another kernel then computes the outputs or gradients of all chunks in parallel. Products
multiply numbers of 16 bits, also the saved states, and sum in float32.

- Without decay, or with one decay for each token and head, kernels compute the decays themselves
  (`recurrence_walk`, `recurrence_chunks`).
- With decays of features XLA prepares the chunks (`recurrence_prepared_walk`,
  `recurrence_prepared`).
- In the delta form XLA prepares the chunks of the walk; outputs and gradients come from the kernel
  above for the same kind of decay.
"""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.dispatch import device
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.mosaic_gpu import (
    recurrence_chunks,
    recurrence_prepared,
    recurrence_prepared_walk,
    recurrence_walk,
    warpgroups,
)
from effattn.pallas.mosaic_gpu.recurrence_plan import CHUNK, Plan, running_sums
from effattn.pallas.recurrence import Arrays, Gradients, How
from effattn.pallas.recurrence_delta import Chunks, DeltaKernels, cut, with_delta

LIMITS = dispatch.Limits(
    ("bfloat16",),
    256,
    "Hopper; states of up to 24,576 numbers after padding to multiples of 64; with decays of "
    "features and in the delta form up to 128 features and values",
)
_MOST_ENTRIES = 128 * 192  # of a state: the gradients keep two states in shared memory
_MOST_PREPARED = 128  # features, and values, where XLA prepares chunks


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    for dtype in (config.dtype, *(array.dtype for array in jax.tree.leaves(x.queries))):
        if str(dtype) not in LIMITS.dtypes:
            return f"takes bfloat16 queries and outputs, got {dtype}"
    if recurrence.precision_of(config, x) != lax.Precision.DEFAULT:
        return f"multiplies numbers of 16 bits, got precision {config.precision!r}"
    return (
        recurrence.refusal(config, x)
        or _refusal_of_terms(config, x)
        or device.refusal(lambda major: major == 9, "9.x (Hopper)")
    )


def _refusal_of_terms(config, x):
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    features, values = x.state.shape[-2:]
    padded = [-(-size // warpgroups.WIDTH) * warpgroups.WIDTH for size in (features, values)]
    if math.prod(padded) > _MOST_ENTRIES:
        return (
            f"takes states of up to {_MOST_ENTRIES:,} numbers after padding to multiples of "
            f"{warpgroups.WIDTH}, got {features} x {values}"
        )
    by_feature = terms.log_decay is not None and terms.log_decay.ndim == terms.key.ndim
    if terms.recalled is None and not by_feature:
        return None
    if max(padded) > _MOST_PREPARED:
        return (
            f"takes up to {_MOST_PREPARED} features and values with decays of features and in the "
            f"delta form, got {features} and {values}"
        )
    return None


def forward(config: Config, x: Inputs):
    """Returns `((output, state), saved)`; see `effattn.pallas.recurrence.forward`."""
    return recurrence.forward(KERNELS, config, x)


def backward(config: Config, x: Inputs, saved, d_output, d_state) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.recurrence.backward`."""
    return recurrence.backward(KERNELS, config, x, saved, d_output, d_state)


def _forward(how: How, arrays: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    call = _call(how, arrays)
    states, last = call.states(state)
    return _of_output(arrays, call.read(states)), recurrence.whole_state(arrays, last)


def _backward(how: How, arrays: Arrays, state, d_out, d_state) -> Gradients:
    call = _call(how, arrays)
    plan, d_out = call.plan, _as_read(d_out)
    states, _ = call.states(state)
    co_states, first = call.states_back(d_out, _of_first_heads(plan.group, d_state))
    query, key, value, log_decay = call.gradients(states, co_states, d_out)
    first = recurrence.whole_state(arrays, recurrence.over_group(plan.group, first, 1))
    value = recurrence.over_group(plan.group, _of_shape(plan, value, arrays.value), 2)
    return Gradients(query, key, value, log_decay, first)


def _read(how: How, arrays: Arrays, states: jax.Array) -> jax.Array:
    return _of_output(arrays, _call(how, arrays).read(states))


def _gradients(how: How, arrays: Arrays, states, co_states, d_out):
    call = _call(how, arrays)
    co_states, d_out = _of_first_heads(call.plan.group, co_states), _as_read(d_out)
    query, key, _, log_decay = call.gradients(states, co_states, d_out, with_value=False)
    return query, key, log_decay


def _as_read(d_out):
    return warpgroups.tokens(d_out.astype(jnp.bfloat16))


def _of_output(arrays, out):
    """Slices the output `(B, T', heads, D')` to `(B, T, heads, D)`."""
    _, length, _, values = arrays.value.shape
    return out[:, :length, :, :values]


def _correct(how: How, arrays: Arrays, chunks: Chunks, state: jax.Array):
    return _corrected(how, arrays, chunks, state, reverse=False)


def _correct_back(how: How, arrays: Arrays, chunks: Chunks, d_state: jax.Array):
    return _corrected(how, arrays, chunks, d_state, reverse=True)


def _corrected(how, arrays, chunks, state, *, reverse):
    plan, (features, values) = Plan.of(how, arrays), state.shape[2:]
    operands = {name: getattr(chunks, name) for name in ("recalled", "key", "value")}
    operands["kept"] = chunks.kept[..., 0]
    if reverse:
        # The walk is linear, so each head of the output can walk with its own queries and output
        # gradients only; the results of a group are added.
        group = plan.group
        operands |= {
            name: jnp.repeat(operands[name], group, 1) for name in ("recalled", "key", "kept")
        }
        operands["value"], state = (_of_first_heads(group, x) for x in (chunks.value, state))
        for name in ("query", "d_out"):
            by_group = jnp.moveaxis(getattr(chunks, name), 3, 2)
            operands[name] = by_group.reshape(len(by_group), -1, *by_group.shape[3:])
    states, last, found = recurrence_prepared_walk.walk(plan, operands, state, reverse=reverse)
    found = found[..., :values].astype(jnp.float32)
    if reverse:
        found, states, last = (recurrence.over_group(group, x, 1) for x in (found, states, last))
    return found, states, last[..., :features, :values]


KERNELS = with_delta(
    recurrence.Kernels(_forward, _backward),
    DeltaKernels(_read, _gradients, _correct, _correct_back),
)


class _ByToken:
    """A call without decay, or with one for each token and head; kernels compute the decays."""

    def __init__(self, how: How, arrays: Arrays):
        self.how, self.arrays, self.plan = how, arrays, Plan.of(how, arrays)
        self.narrow = _narrow(arrays)
        self.sums = None if arrays.log_decay is None else running_sums(arrays.log_decay)

    def states(self, state):
        """The states before the chunks, and the state after the last one."""
        arrays = self.narrow.key, self.narrow.value, self.sums, None, state
        return recurrence_walk.states(self.plan, *arrays, reverse=False)

    def states_back(self, d_out, d_state):
        """The gradients of the states after the chunks and before the first, by output head."""
        narrow = self.narrow
        arrays = narrow.query, d_out, self.sums, narrow.scale, d_state
        return recurrence_walk.states(self.plan, *arrays, reverse=True)

    def read(self, states):
        """The output."""
        dtype = jnp.dtype(self.how.dtype)
        return recurrence_chunks.read(self.plan, self.narrow, self.sums, states, dtype)

    def gradients(self, states, co_states, d_out, *, with_value=True):
        """The gradients of queries, keys, values by output head (None if not asked), and decays."""
        plan, arrays = self.plan, self.arrays
        found, sums_of_pairs = recurrence_chunks.gradients(
            plan,
            self.narrow,
            self.sums,
            states,
            co_states,
            d_out,
            wanted=("query", "key", "value") if with_value else ("query", "key"),
        )
        query = _of_shape(plan, found["query"], arrays.query)
        key = recurrence.over_group(plan.group, _of_shape(plan, found["key"], arrays.key), 2)
        log_decay = None
        if self.sums is not None:
            log_decay = _d_log_decay(plan, arrays.log_decay, self.sums, sums_of_pairs)
        return query, key, found.get("value"), log_decay


class _ByFeature:
    """A call with decays of features; XLA prepares the chunks. Methods are those of `_ByToken`."""

    def __init__(self, how: How, arrays: Arrays):
        self.how, self.arrays, self.plan = how, arrays, Plan.of(how, arrays)
        self.value, self.log_decay = _narrow(arrays).value, cast(jax.Array, arrays.log_decay)
        wide: Any = arrays.widened()
        prepare = functools.partial(recurrence_prepared.prepare, how, self.plan.heads)
        self.chunks, self.pull_back = jax.vjp(prepare, wide.query, wide.key, wide.log_decay)

    def states(self, state):
        value = cut(CHUNK, self.arrays.value, self.plan.value_heads)
        operands = {"key": self.chunks.key, "value": value, "kept": self.chunks.kept}
        return recurrence_prepared_walk.walk(self.plan, operands, state, reverse=False)

    def states_back(self, d_out, d_state):
        plan, chunks = self.plan, self.chunks
        operands = {
            "query": chunks.query,
            "d_out": cut(CHUNK, d_out[:, : plan.length], plan.heads),
            "kept": jnp.repeat(chunks.kept, plan.group, 1),
        }
        return recurrence_prepared_walk.walk(plan, operands, d_state, reverse=True)

    def read(self, states):
        dtype = jnp.dtype(self.how.dtype)
        return recurrence_prepared.read(self.plan, self.chunks, self.value, states, dtype)

    def gradients(self, states, co_states, d_out, *, with_value=True):
        plan, features = self.plan, self.arrays.key.shape[3]
        found, d_value = recurrence_prepared.gradients(
            plan, self.chunks, self.value, states, co_states, d_out
        )
        query, key, weights, kept = (x.astype(jnp.float32) for x in found)
        d_chunks = recurrence_prepared.Prepared(
            query[..., :features],
            recurrence.over_group(plan.group, key[..., :features], 1),
            weights,
            recurrence.over_group(plan.group, kept[..., :features], 1),
        )
        d_query, d_key, d_log_decay = self.pull_back(d_chunks)
        d_log_decay = jnp.where(jnp.isneginf(self.log_decay), 0, d_log_decay)
        return d_query, d_key, d_value if with_value else None, d_log_decay


def _call(how, arrays):
    by_feature = arrays.log_decay is not None and arrays.log_decay.ndim == 4
    return (_ByFeature if by_feature else _ByToken)(how, arrays)


def _narrow(arrays):
    """Returns queries, keys, values and scale as the kernels read them."""
    names = "query", "key", "value"
    of_tokens = {name: getattr(arrays, name).astype(jnp.bfloat16) for name in names}
    narrow = {name: warpgroups.tokens(x) for name, x in of_tokens.items()}
    return arrays._replace(log_decay=None, **narrow)


def _of_shape(plan, gradient, like):
    """Slices a gradient `(B, T', heads, F')` to the length and size of `like`, in float32."""
    return gradient[:, : plan.length, :, : like.shape[3]].astype(jnp.float32)


def _of_first_heads(group, x):
    """Gives an array of each value head, `(B, V, ...)`, to the first output head that reads it.

    The other heads of a group get zeros, so that a sum over the group counts the array once.
    """
    if group == 1:
        return x
    first = jnp.arange(x.shape[1] * group) % group == 0
    of_heads = first.reshape(-1, *(1,) * (x.ndim - 2))
    return jnp.where(of_heads, jnp.repeat(x, group, 1), 0)


def _d_log_decay(plan, log_decay, sums, sums_of_pairs):
    """Gradient of the log decays, see `effattn.pallas.recurrence`; zero where they are -inf."""

    def by_chunk(x):
        return x.reshape(*x.shape[:2], plan.chunks, CHUNK)

    of_queries, of_keys, later, inner = sums_of_pairs
    kept = jnp.repeat(jnp.exp2(by_chunk(sums)[..., -1]), plan.group, 1)
    at_end = kept * inner.sum(-1) + by_chunk(later).sum(-1)
    crossing = lax.cumsum(by_chunk(of_queries - of_keys), axis=3, reverse=True)
    gradient = recurrence.over_group(plan.group, crossing + at_end[..., None], 1)
    gradient = gradient.reshape(*gradient.shape[:2], -1)[..., : plan.length]
    return jnp.where(jnp.isneginf(log_decay), 0, jnp.swapaxes(gradient, 1, 2))
