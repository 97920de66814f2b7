"""Walk over the chunks of a linear recurrence whose operands XLA has prepared, for Hopper GPUs.

For each chunk one warpgroup computes, with S the state before it and S' the state after it,

    S' = kept S + key^T value

In the delta form (`effattn.pallas.recurrence_delta`) it computes

    X = value - recalled S          S' = kept S + key^T X          (+ query^T dY in reverse)

A corrected value depends on all features of the state, so a block has all features of 64 values of
one head, in registers. Tensor cores read the state and X from shared memory, in 16 bits. Both are
stored to global memory from there. Another warpgroup copies the next chunk meanwhile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn.pallas.mosaic_gpu import warpgroups
from effattn.pallas.mosaic_gpu.recurrence_plan import CHUNK, Plan
from effattn.pallas.mosaic_gpu.warpgroups import (
    ALONG_ROWS,
    ROWS,
    WIDTH,
    Product,
    down,
    i32,
    padded,
    ring,
    shared,
    slot_of,
    transposed,
    wide,
)

_STAGES = 2


def walk(
    plan: Plan, chunks: dict[str, jax.Array], state: jax.Array, *, reverse: bool
) -> tuple[jax.Array, ...]:
    """Returns the states that the walk finds before each chunk, the last one, and corrected values.

    Args:
      plan: sizes of the call.
      chunks: operands of the chunks by name, `(B, heads, chunks, C, size)`, and "kept"
        `(B, heads, chunks, F)`, or `(B, heads, chunks, 1)` if all features decay equally. The delta
        form has "recalled", "key" and "value", and in reverse also "query" and "d_out". Other forms
        have "key" and "value" or, in reverse, "query" and "d_out".
      state: state before the first chunk of the walk, `(B, heads, F, D)`, float32; its heads are
        those of the operands.
      reverse: walk from the last chunk to the first.

    Returns:
      States `(B, heads, chunks, F, D)` in bfloat16, a state `(B, heads, F, D)` in float32 and, in
      the delta form, corrected values `(B, heads, chunks, C, D)` in bfloat16. In reverse, the state
      of a chunk is the gradient of the state after that chunk.
    """
    operands = _prepared(chunks)
    state = padded(padded(state, 2, WIDTH), 3, WIDTH)
    (batch, heads, features, values), count = state.shape, operands["kept"].shape[2]
    results = [
        jax.ShapeDtypeStruct((batch, heads, count, features, values), jnp.bfloat16),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    ]
    if "recalled" in operands:
        of_values = batch, heads, count, CHUNK, values
        results.append(jax.ShapeDtypeStruct(of_values, jnp.bfloat16))

    def room(name):
        if name == "kept":
            return plgpu.SMEM((_STAGES, features), jnp.float32)
        width = WIDTH if name in _OF_VALUES else features
        return shared((_STAGES, CHUNK, width), jnp.bfloat16)

    scratch = (
        {name: room(name) for name in operands},
        plgpu.Barrier(num_arrivals=len(operands), num_barriers=_STAGES),
        plgpu.Barrier(num_barriers=_STAGES),
        shared((features, WIDTH), jnp.bfloat16),
        shared((CHUNK, WIDTH), jnp.bfloat16),
        shared((ROWS, WIDTH), jnp.float32),
        plgpu.Barrier(),
        Product.scratch(plan.interpreted, CHUNK, jnp.bfloat16, 1),
    )

    def body(operands, outputs, scratch, at):
        block = _Block(plan, operands, outputs, scratch, at, reverse)
        pl.when(lax.axis_index("warpgroup") == 0)(block.walk)
        pl.when(lax.axis_index("warpgroup") == 1)(block.copy)

    found = warpgroups.run(
        "linear_recurrence_prepared_back" if reverse else "linear_recurrence_prepared",
        body,
        (operands, state),
        results,
        scratch,
        grid={"example": batch, "head": heads, "tile": values // WIDTH},
        warpgroups=2,
        interpreted=plan.interpreted,
    )
    return tuple(found)


_OF_VALUES = "value", "d_out"


def _prepared(chunks):
    """Returns the operands in 16 bits and padded, and "kept" for each feature in float32."""
    features = max(chunks[name].shape[-1] for name in ("key", "query") if name in chunks)
    narrow = {name: padded(x.astype(jnp.bfloat16), -1, WIDTH) for name, x in chunks.items()}
    kept = jnp.broadcast_to(chunks["kept"], (*chunks["kept"].shape[:3], features))
    return narrow | {"kept": padded(kept.astype(jnp.float32), 3, WIDTH)}


class _Block:
    """One block of the walk: all features of 64 values of one head."""

    def __init__(self, plan, operands, outputs, scratch, at, reverse):
        self.operands, self.start = operands
        self.states, self.last, *corrected = outputs
        self.corrected = corrected[0] if corrected else None
        self.buffers, self.filled, self.read, self.state, self.x, *rest = scratch
        self.whole, self.loaded, product = rest
        self.product = Product.of_worker(product, 0)
        self.count, self.reverse = plan.chunks, reverse
        self.at = at["example"], at["head"]
        self.columns = pl.ds(at["tile"] * WIDTH, WIDTH)
        features = self.start.shape[2]
        self.parts = [pl.ds(first, ROWS) for first in range(0, features, ROWS)]

    def copy(self):
        """Copies all chunks; runs in the copying warpgroup."""

        def put(i, slot):
            for name, array in self.operands.items():
                place: tuple[Any, ...] = (*self.at, self._chunk(i))
                if name in _OF_VALUES:
                    place += slice(None), self.columns
                target = self.buffers[name].at[slot]
                plgpu.copy_gmem_to_smem(array.at[place], target, self.filled.at[slot])

        ring(self.count, _STAGES, put, self.read)

    def walk(self):
        """Walks over all chunks; runs in the warpgroup that has the state."""
        state = tuple(self._load(part) for part in self.parts)
        state = lax.fori_loop(0, self.count, self._step, state)
        for part, rows in zip(self.parts, state, strict=True):
            self.whole[...] = rows
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.whole, self.last.at[(*self.at, part, self.columns)])
            plgpu.wait_smem_to_gmem(0)

    def _load(self, part):
        place = self.start.at[(*self.at, part, self.columns)]
        plgpu.copy_gmem_to_smem(place, self.whole, self.loaded)
        plgpu.barrier_wait(self.loaded)
        rows = plgpu.layout_cast(self.whole[...], plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # the next copy must not overtake the read
        return rows

    def _step(self, i, state):
        i = i32(i)
        slot, n = slot_of(i, _STAGES), self._chunk(i)
        chunk = {name: buffer.at[slot] for name, buffer in self.buffers.items()}
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the chunk before
        for part, rows in zip(self.parts, state, strict=True):
            self.state.at[part][...] = rows.astype(self.state.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            self.state, self.states.at[(*self.at, n, slice(None), self.columns)]
        )
        plgpu.barrier_wait(self.filled.at[slot])
        pairs = [("key", "value"), ("query", "d_out")]
        factors = [(chunk[left], chunk[right]) for left, right in pairs if left in chunk]
        if self.corrected is not None:
            recalled = self.product.of(chunk["recalled"], self.state)
            self.x[...] = (wide(chunk["value"]) - recalled).astype(self.x.dtype)
            factors[0] = chunk["key"], self.x
        kept = [plgpu.layout_cast(chunk["kept"].at[part][...], ALONG_ROWS) for part in self.parts]
        plgpu.commit_smem()  # later copies must not overtake the reads above
        if self.corrected is not None:
            place = self.corrected.at[(*self.at, n, slice(None), self.columns)]
            plgpu.copy_smem_to_gmem(self.x, place)
        state = tuple(
            self._after(factors, *each) for each in zip(self.parts, kept, state, strict=True)
        )
        plgpu.barrier_arrive(self.read.at[slot])
        return state

    def _after(self, factors, part, kept, rows):
        """Rows of the state after a chunk."""
        rows = rows * down(kept, WIDTH)
        for left, right in factors:
            (rows,) = self.product.onto((rows,), transposed(left.at[:, part]), [right])
        return rows

    def _chunk(self, i):
        return np.int32(self.count - 1) - i if self.reverse else i
