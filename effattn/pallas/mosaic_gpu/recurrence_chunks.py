"""Outputs and gradients of all chunks of a linear recurrence in parallel, for Hopper GPUs.

A block computes one chunk of C = 64 tokens for one head of the output, from the state S before the
chunk and, for gradients, the gradient G of the state after the chunk. Let c_i be the running sum of
log decays (`recurrence_plan`), A the weights of the chunk, and dA the gradients of the products
q_i^T k_j; the scale of the queries is left out here:

    A_ij = exp(c_i - c_j) q_i^T k_j         dA_ij = exp(c_i - c_j) dy_i^T v_j         for j <= i

    y  = exp(c) Q S + A V                   dq = exp(c) dY S^T + dA K
    dk = exp(c_C - c) V G^T + dA^T Q        dv = exp(c_C - c) K G + A^T dY

- output: one warpgroup a block, and two blocks or more on a multiprocessor.
- gradients: one warpgroup for each of dq, dk and dv. Each computes three products of the same
  sizes, so they take the same time, and all arrays are read once.

Registers. With three warpgroups a thread has 168 registers. ptxas 13.5 keeps everything in them for
up to 192 features and values. With 256 features or values it spills 188 or 32 bytes per thread.

For the gradient of the log decays the kernel returns sums over features, for each token, of q dq
and k dk, both without the pair of a query and its own token (`effattn.pallas.recurrence`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn.pallas.mosaic_gpu import warpgroups
from effattn.pallas.mosaic_gpu.recurrence_plan import CHUNK, Plan
from effattn.pallas.mosaic_gpu.warpgroups import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    Product,
    down,
    entry,
    put_dots,
    put_rows,
    shared,
    staging,
    swizzled,
    transposed,
    wide,
)
from effattn.pallas.recurrence import Arrays

_GRADIENTS = "query", "key", "value"  # one warpgroup for each


def read(
    plan: Plan, arrays: Arrays, sums: jax.Array | None, states: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Returns the output `(B, T, heads, D)` in `dtype`.

    Args:
      plan: sizes of the call.
      arrays: queries, keys and values in bfloat16; the log decays are not read.
      sums: running sums of the log decays `(B, V, T')`; None without decay.
      states: states before the chunks `(B, V, chunks, F, D)`, bfloat16.
      dtype: dtype of the output.
    """
    batch, length, *_ = arrays.value.shape
    scratch = (
        {name: _room(getattr(arrays, name)) for name in _GRADIENTS},
        _room_of_state(plan),
        None if sums is None else _Decays.room(),
        plgpu.Barrier(num_arrivals=4 if sums is None else 6),
        Product.scratch(plan.interpreted, CHUNK, jnp.bfloat16, 1),
        # The output is stored through the buffer of the values if that has its dtype.
        None if dtype == jnp.bfloat16 else staging(1, swizzled(dtype), dtype),
    )

    def body(operands, outputs, scratch, at):
        arrays, sums, states = operands
        buffers, state, own_sums, loaded, product, staged = scratch
        at = _Place(plan, at)
        at.copy(arrays, buffers, loaded)
        plgpu.copy_gmem_to_smem(states.at[at.of_state], state, loaded)
        at.copy_sums(sums, own_sums, loaded)
        plgpu.barrier_wait(loaded)
        query, key, value = (buffers[name] for name in _GRADIENTS)
        product = Product.of_worker(product, 0)
        decays = _Decays(own_sums)
        weights = decays.masked(product.of(query, transposed(key)))
        total = decays.since_start(product.of(query, state))
        (total,) = product.onto((total,), weights.astype(query.dtype), [value])
        total = _scaled(arrays.scale, total)
        room = value if staged is None else staged.at[0]
        put_rows(room, [total], outputs[0].at[at.b, at.tokens, at.h])

    (out,) = warpgroups.run(
        "linear_recurrence_read",
        body,
        (arrays._replace(log_decay=None), sums, states),
        [jax.ShapeDtypeStruct((batch, length, plan.heads, plan.values), dtype)],
        scratch,
        grid={"example": batch, "head": plan.heads, "chunk": plan.chunks},
        warpgroups=1,
        interpreted=plan.interpreted,
    )
    return out


def gradients(
    plan: Plan,
    arrays: Arrays,
    sums: jax.Array | None,
    states: jax.Array,
    co_states: jax.Array,
    d_out: jax.Array,
    *,
    wanted: tuple[str, ...] = _GRADIENTS,
) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Returns gradients of queries, keys and values, and sums for those of the log decays.

    Args:
      plan: sizes of the call.
      arrays: queries, keys and values in bfloat16; the log decays are not read.
      sums: running sums of the log decays `(B, V, T')`; None without decay.
      states: states before the chunks `(B, V, chunks, F, D)`, bfloat16.
      co_states: gradients of the states after the chunks `(B, heads, chunks, F, D)`, bfloat16.
      d_out: gradient of the output, `(B, T, heads, D)`, bfloat16.
      wanted: names of the gradients.

    Returns:
      Gradients by name, `(B, T, heads, F)` or for values `(B, T, heads, D)`, each for one head of
      the output. The list is empty without decay. Otherwise it has sums for each token
      `(B, heads, T')`, of q dq, of k dk, and of the part of k dk from later chunks, and
      `(B, heads, chunks, F)`, the sums over values of S times G.
    """
    batch, length, *_ = arrays.value.shape
    given = {"query": plan.query_heads, "key": plan.value_heads, "value": plan.value_heads}
    # Gradients that are summed over heads afterwards are not rounded.
    dtypes = {name: jnp.bfloat16 if given[name] == plan.heads else jnp.float32 for name in wanted}
    sizes = {"query": plan.features, "key": plan.features, "value": plan.values}
    results = [
        jax.ShapeDtypeStruct((batch, length, plan.heads, sizes[name]), dtypes[name])
        for name in wanted
    ]
    has_decay = sums is not None
    if has_decay:
        of_tokens = batch, plan.heads, plan.chunks * CHUNK
        results += 3 * [jax.ShapeDtypeStruct(of_tokens, jnp.float32)]
        of_features = batch, plan.heads, plan.chunks, plan.features
        results.append(jax.ShapeDtypeStruct(of_features, jnp.float32))
    scratch = (
        {name: _room(getattr(arrays, name)) for name in _GRADIENTS} | {"d_out": _room(d_out)},
        (_room_of_state(plan), _room_of_state(plan)),
        _Decays.room() if has_decay else None,
        plgpu.Barrier(num_arrivals=8 if has_decay else 6),
        plgpu.Barrier(num_arrivals=len(_GRADIENTS)),
        Product.scratch(plan.interpreted, max(CHUNK, plan.values), jnp.bfloat16, len(_GRADIENTS)),
        {
            name: None if dtype == jnp.bfloat16 else staging(1, swizzled(dtype), dtype)
            for name, dtype in dtypes.items()
        },
        plgpu.SMEM((3, CHUNK), jnp.float32) if has_decay else None,
        plgpu.SMEM((plan.features,), jnp.float32) if has_decay else None,
    )

    def body(operands, outputs, scratch, at):
        chunk = _Gradients(wanted, operands, outputs, scratch, _Place(plan, at))
        for worker, name in enumerate(_GRADIENTS):
            pl.when(lax.axis_index("warpgroup") == worker)(getattr(chunk, name))

    found = warpgroups.run(
        "linear_recurrence_gradients",
        body,
        (arrays._replace(log_decay=None), sums, states, co_states, d_out),
        results,
        scratch,
        grid={"example": batch, "head": plan.heads, "chunk": plan.chunks},
        warpgroups=len(_GRADIENTS),
        interpreted=plan.interpreted,
    )
    return dict(zip(wanted, found, strict=False)), found[len(wanted) :]


class _Gradients:
    """One block of `gradients`; a method for each warpgroup."""

    def __init__(self, wanted, operands, outputs, scratch, at):
        self.arrays, self.sums, self.states, self.co_states, self.d_out = operands
        self.outputs, sums = dict(zip(wanted, outputs, strict=False)), outputs[len(wanted) :]
        self.sums_of_rows, self.inner = sums[:3], sums[3:]
        self.buffers, self.of_states, self.own_sums, self.loaded, self.finished = scratch[:5]
        self.staged, self.rooms, self.rows, self.row_of_features = scratch[5:]
        self.at = at
        self.scale = self.arrays.scale
        self.decays = _Decays(self.own_sums)

    def query(self):
        """Copies all arrays of the block, and computes dq."""
        self.at.copy(self.arrays, self.buffers, self.loaded)
        self.at.copy_output(self.d_out, self.buffers["d_out"], self.loaded)
        state, co_state = self.of_states
        plgpu.copy_gmem_to_smem(self.states.at[self.at.of_state], state, self.loaded)
        plgpu.copy_gmem_to_smem(self.co_states.at[self.at.of_co_state], co_state, self.loaded)
        self.at.copy_sums(self.sums, self.own_sums, self.loaded)
        query, key, value, d_out = self._wait()
        product = Product.of_worker(self.staged, 0)
        d_weights = product.of(d_out, transposed(value))
        own, d_weights = self._apart(self.decays.masked(d_weights))
        total = self.decays.since_start(product.of(d_out, transposed(state)))
        (total,) = product.onto((total,), d_weights.astype(key.dtype), [key])
        if own is not None:
            self._put_sums(0, _scaled(self.scale, _dots(query, total)))
            total += _times_rows(own, key)
        self._finish("query", total)

    def key(self):
        """Computes dk."""
        query, key, value, d_out = self._wait()
        product = Product.of_worker(self.staged, 1)
        d_weights = product.of(value, transposed(d_out))
        own, d_weights = self._apart(self.decays.masked(d_weights, transposed=True))
        # Weights are rounded as in `query`, before the scale, so that the contributions of pairs
        # within the chunk to q dq and to k dk cancel.
        total = _scaled(self.scale, product.of(d_weights.astype(query.dtype), query))
        within = None if own is None else _dots(key, total)
        left = value
        if own is not None:
            left = self.decays.until_end(wide(value)).astype(value.dtype)
        (total,) = product.onto((total,), left, [transposed(self.of_states[1])])
        if own is not None:
            products = _dots(key, total)
            self._put_sums(1, products)
            self._put_sums(2, products - within)
            total += _times_rows(_scaled(self.scale, own), query)
        self._finish("key", total)

    def value(self):
        """Computes dv, and the sums of S times G."""
        query, key, _, d_out = self._wait()
        if "value" not in self.outputs:
            self._put_inner()
            plgpu.barrier_arrive(self.finished)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return
        product = Product.of_worker(self.staged, 2)
        weights = self.decays.masked(product.of(key, transposed(query)), transposed=True)
        weights = _scaled(self.scale, weights)
        total = self.decays.until_end(product.of(key, self.of_states[1]))
        (total,) = product.onto((total,), weights.astype(d_out.dtype), [d_out])
        self._put_inner()
        self._finish("value", total)

    def _wait(self):
        plgpu.barrier_wait(self.loaded)
        return *(self.buffers[name] for name in _GRADIENTS), self.buffers["d_out"]

    def _apart(self, weights):
        """Returns the diagonal of weights `(C, C)`, and the rest; without decay None and all."""
        if self.own_sums is None:
            return None, weights
        row, column = _indices()
        own = jnp.sum(jnp.where(row == column, weights, 0), 1)
        return own, jnp.where(row == column, 0, weights)

    def _put_sums(self, number, sums):
        room = self.rows.at[number]
        room[...] = sums
        plgpu.commit_smem()
        place = self.sums_of_rows[number].at[self.at.b, self.at.h, self.at.tokens]
        plgpu.copy_smem_to_gmem(room, place)

    def _put_inner(self):
        if not self.inner:
            return
        state, co_state = self.of_states
        target = self.inner[0].at[self.at.of_co_state]
        put_dots(state, co_state, self.row_of_features, target)

    def _finish(self, name, total):
        """Stores a gradient through the buffer of its array, once all warpgroups have read it."""
        plgpu.barrier_arrive(self.finished)
        plgpu.barrier_wait(self.finished)
        room = self.buffers[name] if self.rooms[name] is None else self.rooms[name].at[0]
        put_rows(room, [total], self.outputs[name].at[self.at.b, self.at.tokens, self.at.h])


class _Place:
    """Place of a block, and the copies of its arrays."""

    def __init__(self, plan, at):
        self.b, self.h, self.n = at["example"], at["head"], at["chunk"]
        self.plan, self.tokens = plan, pl.ds(self.n * CHUNK, CHUNK)
        self.v = self._shared(plan.value_heads)

    def _shared(self, heads):
        return lax.div(self.h, np.int32(self.plan.heads // heads))

    @property
    def of_state(self):
        return self.b, self.v, self.n

    @property
    def of_co_state(self):
        return self.b, self.h, self.n

    def copy(self, arrays, buffers, barrier):
        """Starts copying queries, keys and values."""
        for name in _GRADIENTS:
            array = getattr(arrays, name)
            head = self._shared(array.shape[2])
            plgpu.copy_gmem_to_smem(array.at[self.b, self.tokens, head], buffers[name], barrier)

    def copy_output(self, array, buffer, barrier):
        """Starts copying an array of the heads of the output."""
        plgpu.copy_gmem_to_smem(array.at[self.b, self.tokens, self.h], buffer, barrier)

    def copy_sums(self, sums, buffer, barrier):
        """Starts copying the sums of log decays, if there are any."""
        if sums is not None:
            for room in buffer:
                plgpu.copy_gmem_to_smem(sums.at[self.b, self.v, self.tokens], room, barrier)


class _Decays:
    """Decays within a chunk, from the running sums `(C)` in shared memory; None without decay.

    There are two copies of the sums, one to be read along the rows of products and one along the
    columns. Two loads of one copy would become one load, which has one layout.
    """

    def __init__(self, sums):
        self.sums = sums

    @staticmethod
    def room():
        """Declares the shared memory."""
        return [plgpu.SMEM((CHUNK,), jnp.float32) for _ in range(2)]

    def masked(self, products, transposed=False):
        """Decays products `(C, C)` of tokens i (rows) and j (columns), with 0 for j > i.

        If `transposed`, j are the rows and i the columns.
        """
        row, column = _indices()
        seen = row <= column if transposed else row >= column
        if self.sums is None:
            return jnp.where(seen, products, 0)
        columns = plgpu.layout_cast(self.sums[1][...], ALONG_COLUMNS)
        rows = down(self._rows(), CHUNK)
        columns = lax.broadcast_in_dim(columns, (CHUNK, CHUNK), (1,))
        exponents = columns - rows if transposed else rows - columns
        return jnp.where(seen, products * jnp.exp2(exponents), 0)

    def since_start(self, rows):
        """Decays rows `(C, size)` since the start of the chunk."""
        return rows if self.sums is None else rows * down(jnp.exp2(self._rows()), rows.shape[1])

    def until_end(self, rows):
        """Decays rows `(C, size)` until the end of the chunk."""
        if self.sums is None:
            return rows
        return rows * down(jnp.exp2(self.sums[0][CHUNK - 1] - self._rows()), rows.shape[1])

    def _rows(self):
        return plgpu.layout_cast(self.sums[0][...], ALONG_ROWS)


def _room(array):
    """Declares shared memory for one chunk of an array `(B, T, heads, size)`."""
    return shared((CHUNK, array.shape[3]), array.dtype)


def _room_of_state(plan):
    return shared((plan.features, plan.values), jnp.bfloat16)


def _indices():
    """Row and column of each entry of `(C, C)`."""
    layout = plgpu.Layout.WGMMA
    return [plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), n, layout=layout) for n in (0, 1)]


def _scaled(scale, array):
    return array if scale is None else array * entry(scale, 0)


def _dots(ref, total):
    """Dot product of each row of an array in shared memory with that of `total`."""
    return jnp.sum(wide(ref) * total, 1)


def _times_rows(factors, ref):
    return down(factors, ref.shape[1]) * wide(ref)
