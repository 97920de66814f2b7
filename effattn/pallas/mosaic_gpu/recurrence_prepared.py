"""Outputs and gradients of a linear recurrence with decays of features, for Hopper GPUs.

XLA prepares the chunks of C = 64 tokens: the decayed queries and keys, and the weights A of the
tokens of a chunk, whose products decay inside the sum over features. The kernels then compute, with
S the state before a chunk and G the gradient of the state after it:

    y  = Q S + A V          dQ = dY S^T          dA = dY V^T, zero for j > i
                            dK = V G^T           dV = K G + A^T dY

The gradient of the decay of the whole chunk is the sum over values of S times G. XLA computes the
gradients of queries, keys and log decays from these.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn.pallas.mosaic_gpu import warpgroups
from effattn.pallas.mosaic_gpu.recurrence_plan import CHUNK, Plan
from effattn.pallas.mosaic_gpu.warpgroups import (
    WIDTH,
    Product,
    padded,
    put_dots,
    put_rows,
    shared,
    staging,
    swizzled,
    transposed,
)
from effattn.pallas.recurrence import How
from effattn.pallas.recurrence_delta import cut, over_heads
from effattn.xla.recurrent_chunks import decayed_reader


class Prepared(NamedTuple):
    """Chunks, prepared for the kernels; their gradients have the same form.

    Attributes:
      query: `(B, heads, chunks, C, F)`, decayed since the start of the chunk.
      key: `(B, V, chunks, C, F)`, decayed until the end of the chunk.
      weights: `(B, heads, chunks, C, C)`.
      kept: `(B, V, chunks, F)`, decay over the chunk.
    """

    query: Any
    key: Any
    weights: Any
    kept: Any


def prepare(
    how: How, heads: int, query: jax.Array, key: jax.Array, log_decay: jax.Array
) -> Prepared:
    """Returns the chunks in float32.

    Args:
      how: execution options.
      heads: number of heads of the output.
      query: `(B, T, N, F)`, with their scale.
      key: `(B, T, V, F)`.
      log_decay: `(B, T, V, F)`.
    """
    value_heads = key.shape[2]

    def of_head(query, key, log_decay):
        decays: Any = decayed_reader(log_decay, None, CHUNK, True, how.dot)
        weights = jax.vmap(decays.products, (1, None), 1)(query, key)
        return query * decays.since_start[:, None], key * decays.until_end, weights, decays.whole

    queries = cut(CHUNK, query, heads)
    queries = queries.reshape(queries.shape[0], value_heads, -1, *queries.shape[2:])
    keys, decays = (cut(CHUNK, x, value_heads) for x in (key, log_decay))
    queries, keys, weights, kept = over_heads(of_head)(jnp.moveaxis(queries, 2, 3), keys, decays)

    def by_head(x):
        x = jnp.moveaxis(x, 3, 2)
        return x.reshape(x.shape[0], heads, *x.shape[3:])

    return Prepared(by_head(queries), keys, by_head(weights), kept[..., 0])


def read(
    plan: Plan, chunks: Prepared, value: jax.Array, states: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Returns the output `(B, T, heads, D)` in `dtype`.

    Args:
      plan: sizes of the call.
      chunks: prepared chunks.
      value: `(B, T, V, D)`, bfloat16.
      states: states before the chunks `(B, V, chunks, F, D)`, bfloat16.
      dtype: dtype of the output.
    """
    batch, length, *_ = value.shape
    operands = {
        "query": _narrow(chunks.query),
        "weights": _narrow(chunks.weights),
        "value": value,
        "state": states,
    }
    scratch = (
        {name: shared(_shape(array), jnp.bfloat16) for name, array in operands.items()},
        plgpu.Barrier(num_arrivals=len(operands)),
        # The output is stored through the buffer of the values if that has its dtype.
        None if dtype == jnp.bfloat16 else staging(1, swizzled(dtype), dtype),
        Product.scratch(plan.interpreted, CHUNK, jnp.bfloat16, 1),
    )

    def body(operands, outputs, scratch, at):
        buffers, loaded, staged, product = scratch
        at = _Place(plan, at)
        at.copy(operands, buffers, loaded)
        plgpu.barrier_wait(loaded)
        product = Product.of_worker(product, 0)
        total = product.of(buffers["query"], buffers["state"])
        (total,) = product.onto((total,), buffers["weights"], [buffers["value"]])
        room = buffers["value"] if staged is None else staged.at[0]
        put_rows(room, [total], outputs[0].at[at.b, at.tokens, at.h])

    (out,) = warpgroups.run(
        "linear_recurrence_read_prepared",
        body,
        operands,
        [jax.ShapeDtypeStruct((batch, length, plan.heads, plan.values), dtype)],
        scratch,
        grid={"example": batch, "head": plan.heads, "chunk": plan.chunks},
        warpgroups=1,
        interpreted=plan.interpreted,
    )
    return out


def gradients(
    plan: Plan,
    chunks: Prepared,
    value: jax.Array,
    states: jax.Array,
    co_states: jax.Array,
    d_out: jax.Array,
) -> tuple[Prepared, jax.Array]:
    """Returns the gradients of prepared chunks and of values, each for one head of the output.

    Args:
      plan: sizes of the call.
      chunks: prepared chunks.
      value: `(B, T, V, D)`, bfloat16.
      states: states before the chunks `(B, V, chunks, F, D)`, bfloat16.
      co_states: gradients of the states after the chunks `(B, heads, chunks, F, D)`, bfloat16.
      d_out: gradient of the output, `(B, T, heads, D)`, bfloat16.
    """
    batch, length, *_ = value.shape
    operands = {
        "key": _narrow(chunks.key),
        "weights": _narrow(chunks.weights),
        "value": value,
        "d_out": d_out,
        "state": states,
        "co_state": co_states,
    }
    features = batch, plan.heads, plan.chunks, CHUNK, plan.features
    results = {
        "query": jax.ShapeDtypeStruct(features, jnp.bfloat16),
        "key": jax.ShapeDtypeStruct(features, jnp.bfloat16),
        "weights": jax.ShapeDtypeStruct((*features[:4], CHUNK), jnp.bfloat16),
        "kept": jax.ShapeDtypeStruct((*features[:3], plan.features), jnp.float32),
        "value": jax.ShapeDtypeStruct((batch, length, plan.heads, plan.values), jnp.bfloat16),
    }
    scratch = (
        {name: shared(_shape(array), jnp.bfloat16) for name, array in operands.items()},
        plgpu.Barrier(num_arrivals=len(operands)),
        {name: shared((CHUNK, size), jnp.bfloat16) for name, size in _rooms(plan).items()},
        plgpu.SMEM((plan.features,), jnp.float32),
        Product.scratch(plan.interpreted, CHUNK, jnp.bfloat16, 3),
    )

    def body(operands, outputs, scratch, at):
        named = dict(zip(results, outputs, strict=True))
        chunk = _Gradients(operands, named, scratch, _Place(plan, at))
        for worker, compute in enumerate((chunk.queries, chunk.keys, chunk.values)):
            pl.when(lax.axis_index("warpgroup") == worker)(compute)

    found = warpgroups.run(
        "linear_recurrence_gradients_prepared",
        body,
        operands,
        list(results.values()),
        scratch,
        grid={"example": batch, "head": plan.heads, "chunk": plan.chunks},
        warpgroups=3,
        interpreted=plan.interpreted,
    )
    *of_chunks, d_value = found
    return Prepared(*of_chunks), d_value


def _rooms(plan):
    """Numbers of columns of the buffers through which results are stored."""
    return {"query": plan.features, "key": plan.features, "weights": CHUNK, "value": plan.values}


class _Gradients:
    """One block of `gradients`; a method for each warpgroup."""

    def __init__(self, operands, outputs, scratch, at):
        self.operands, self.outputs = operands, outputs
        self.buffers, self.loaded, self.rooms, self.row_of_features, self.staged = scratch
        self.at = at

    def queries(self):
        """Copies all arrays of the block, and computes dQ and dA."""
        self.at.copy(self.operands, self.buffers, self.loaded)
        plgpu.barrier_wait(self.loaded)
        product = Product.of_worker(self.staged, 0)
        d_weights = product.of(self.buffers["d_out"], transposed(self.buffers["value"]))
        layout = plgpu.Layout.WGMMA
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=layout)
            for axis in (0, 1)
        )
        self._put("weights", jnp.where(row >= column, d_weights, 0))
        self._put("query", product.of(self.buffers["d_out"], transposed(self.buffers["state"])))

    def keys(self):
        """Computes dK, and the sums of S times G."""
        plgpu.barrier_wait(self.loaded)
        target = self.outputs["kept"].at[self.at.of_head]
        state, co_state = self.buffers["state"], self.buffers["co_state"]
        put_dots(state, co_state, self.row_of_features, target)
        product = Product.of_worker(self.staged, 1)
        self._put("key", product.of(self.buffers["value"], transposed(co_state)))

    def values(self):
        """Computes dV."""
        plgpu.barrier_wait(self.loaded)
        product = Product.of_worker(self.staged, 2)
        total = product.of(self.buffers["key"], self.buffers["co_state"])
        weights = transposed(self.buffers["weights"])
        (total,) = product.onto((total,), weights, [self.buffers["d_out"]])
        target = self.outputs["value"].at[self.at.b, self.at.tokens, self.at.h]
        put_rows(self.rooms["value"], [total], target)

    def _put(self, name, rows):
        put_rows(self.rooms[name], [rows], self.outputs[name].at[self.at.of_head])


class _Place:
    """Place of a block, and the copies of its arrays."""

    def __init__(self, plan, at):
        self.b, self.h, n = at["example"], at["head"], at["chunk"]
        self.heads, self.tokens = plan.heads, pl.ds(n * CHUNK, CHUNK)
        self.n, self.of_head = n, (self.b, self.h, n)

    def copy(self, operands, buffers, barrier):
        """Starts copying `(B, T, heads, size)` and `(B, heads, chunks, ...)`."""
        for name, array in operands.items():
            axis = 2 if array.ndim == 4 else 1
            head = lax.div(self.h, np.int32(self.heads // array.shape[axis]))
            index = (self.b, self.tokens, head) if axis == 2 else (self.b, head, self.n)
            plgpu.copy_gmem_to_smem(array.at[index], buffers[name], barrier)


def _shape(array):
    """Shape of the part of an operand that a block reads."""
    return (CHUNK, array.shape[3]) if array.ndim == 4 else array.shape[3:]


def _narrow(x):
    return padded(x.astype(jnp.bfloat16), 4, WIDTH)
