"""Walk of a linear recurrence over the chunks of a sequence, for Hopper GPUs.

A block has a tile of the state of one head, `(64, 64)`, in the registers of one warpgroup. The
warpgroup saves the state before each chunk in 16 bits, decays it, and adds the products of the
chunk's keys and values with `wgmma`. Another warpgroup copies the next chunks meanwhile, and
multiplies their values by the decay until the end of the chunk.

The same kernel walks from the last chunk to the first for the gradients of the states, with queries
in place of keys and gradients of the output in place of values (`effattn.pallas.recurrence`).

Pieces. One block for each tile of each head can leave most of a GPU empty. The sequence is then cut
into pieces. A first walk over all pieces at once starts with states of zero and returns the state
that each piece adds. The states at the starts of the pieces follow from these, and a second walk
saves the states.
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
    ALONG_ROWS,
    ROWS,
    WIDTH,
    Product,
    down,
    entry,
    i32,
    padded,
    ring,
    shared,
    slot_of,
    transposed,
)

_STAGES = 4  # chunks that are copied ahead


def states(
    plan: Plan,
    left: jax.Array,
    right: jax.Array,
    sums: jax.Array | None,
    scale: jax.Array | None,
    start: jax.Array,
    *,
    reverse: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the states that the walk finds before each chunk, and the state after the last chunk.

    Args:
      plan: sizes of the call.
      left: keys or, in reverse, queries, `(B, T, heads, F)`, bfloat16.
      right: values or, in reverse, gradients of the output, `(B, T, heads, D)`, bfloat16.
      sums: running sums of log decays, see `recurrence_plan`; None without decay.
      scale: `(1,)`, factor of the products of left and right; None for 1.
      start: state before the first chunk of the walk, `(B, heads, F, D)`, float32; its number of
        heads is that of the walk.
      reverse: walk from the last chunk to the first.

    Returns:
      States `(B, heads, chunks, F, D)`, bfloat16, and one state `(B, heads, F, D)`, float32. In
      reverse, the state of a chunk is the gradient of the state after that chunk.
    """
    start, heads = padded(padded(start, 2, WIDTH), 3, WIDTH), start.shape[1]
    of_piece = plan.chunks_of_a_piece(heads)
    pieces = -(-plan.chunks // of_piece)

    def walk(starts, *, saves):
        return _walk(plan, of_piece, (left, right, sums, scale, starts), reverse, saves)

    if pieces == 1:
        saved, last = walk(start[:, :, None], saves=True)
        return saved, last[:, :, 0]
    zeros = jnp.zeros_like(start, shape=(*start.shape[:2], pieces, *start.shape[2:]))
    (added,) = walk(zeros, saves=False)
    kept = (
        jnp.ones((plan.batch, heads, pieces), jnp.float32)
        if sums is None
        else _kept(plan, sums, of_piece)
    )
    kept = jnp.repeat(kept, heads // kept.shape[1], 1)

    def pass_on(state, piece):
        kept, added = piece
        return state * kept[..., None, None] + added, state

    by_piece = jnp.moveaxis(kept, 2, 0), jnp.moveaxis(added, 2, 0)
    last, starts = lax.scan(pass_on, start, by_piece, reverse=reverse)
    saved, _ = walk(jnp.moveaxis(starts, 0, 2), saves=True)
    return saved, last


def _kept(plan, sums, of_piece):
    """Decay of the state over each piece, `(B, V, pieces)`."""
    ends = padded(sums[:, :, CHUNK - 1 :: CHUNK], 2, of_piece)
    return jnp.exp2(ends.reshape(*ends.shape[:2], -1, of_piece).sum(-1))


def _walk(plan, of_piece, operands, reverse, saves):
    batch, heads, pieces, features, values = operands[4].shape
    whole = jax.ShapeDtypeStruct((batch, heads, plan.chunks, features, values), jnp.bfloat16)
    last = jax.ShapeDtypeStruct((batch, heads, pieces, features, values), jnp.float32)
    down_to, across = plan.tiles
    has_factors = operands[2] is not None or operands[3] is not None
    scratch = (
        shared((_STAGES, CHUNK, ROWS), jnp.bfloat16),
        shared((_STAGES, CHUNK, WIDTH), jnp.bfloat16),
        None if operands[2] is None else plgpu.SMEM((_STAGES, CHUNK), jnp.float32),
        plgpu.Barrier(num_arrivals=2 if operands[2] is None else 3, num_barriers=_STAGES),
        plgpu.Barrier(num_barriers=_STAGES) if has_factors else None,
        plgpu.Barrier(num_barriers=_STAGES),
        shared((2, ROWS, WIDTH), jnp.bfloat16) if saves else None,
        shared((ROWS, WIDTH), jnp.float32),
        plgpu.Barrier(),
        Product.scratch(plan.interpreted, CHUNK, jnp.bfloat16, 1),
    )

    def body(operands, outputs, scratch, at):
        number, piece = at["tile"], at["piece"]
        first = piece * np.int32(of_piece)
        count = jnp.minimum(np.int32(of_piece), np.int32(plan.chunks) - first)
        tile = (
            pl.ds(lax.div(number, np.int32(across)) * ROWS, ROWS),
            pl.ds(lax.rem(number, np.int32(across)) * WIDTH, WIDTH),
        )
        at = at["example"], at["head"], piece, *tile
        chunk_of = (lambda i: first + count - 1 - i) if reverse else (lambda i: first + i)
        block = _Block(operands, outputs, scratch, heads, at, count, chunk_of, reverse)
        pl.when(lax.axis_index("warpgroup") == 0)(block.walk)
        pl.when(lax.axis_index("warpgroup") == 1)(block.copy)

    return warpgroups.run(
        "linear_recurrence_walk_back" if reverse else "linear_recurrence_walk",
        body,
        operands,
        [whole, last] if saves else [last],
        scratch,
        grid={"example": batch, "head": heads, "piece": pieces, "tile": down_to * across},
        warpgroups=2,
        interpreted=plan.interpreted,
    )


class _Block:
    """One block of the walk: a tile of the state of one head, over the chunks of one piece."""

    def __init__(self, operands, outputs, scratch, heads, at, count, chunk_of, reverse):
        self.left, self.right, self.sums, self.scale, self.start = operands
        *saved, self.last = outputs
        self.saved = saved[0] if saved else None
        self.lefts, self.rights, self.decays, self.filled, self.ready, self.read = scratch[:6]
        self.staged, self.state, self.loaded, product = scratch[6:]
        self.product = Product.of_worker(product, 0)
        self.heads, self.at, self.count = heads, at, count
        self.chunk_of, self.reverse = chunk_of, reverse
        # Without factors the warpgroup of the state waits for the copies directly.
        self.has_factors = self.ready is not None
        if not self.has_factors:
            self.ready = self.filled

    def copy(self):
        """Copies all chunks and multiplies their values; runs in the copying warpgroup."""
        if self.has_factors:
            ring(self.count, _STAGES, self._put, self.read, _STAGES - 1, self._multiply)
        else:
            ring(self.count, _STAGES, self._put, self.read)

    def _put(self, i, slot):
        tokens = pl.ds(self.chunk_of(i) * CHUNK, CHUNK)
        b, h, _, features, values = self.at
        for array, buffers, part in (
            (self.left, self.lefts, features),
            (self.right, self.rights, values),
        ):
            place = array.at[b, tokens, self._head(array, 2, h), part]
            plgpu.copy_gmem_to_smem(place, buffers.at[slot], self.filled.at[slot])
        if self.sums is not None:
            place = self.sums.at[b, self._head(self.sums, 1, h), tokens]
            plgpu.copy_gmem_to_smem(place, self.decays.at[slot], self.filled.at[slot])

    def _head(self, array, axis, h):
        """The head of an array that head h of the walk reads."""
        return lax.div(h, np.int32(self.heads // array.shape[axis]))

    def _multiply(self, i, slot):
        """Multiplies the values of a chunk in place, once they are there."""
        plgpu.barrier_wait(self.filled.at[slot])
        right = self.rights.at[slot]
        values = right[...].astype(jnp.float32)
        if self.decays is not None:
            sums = plgpu.layout_cast(self.decays.at[slot][...], ALONG_ROWS)
            # In reverse the decay since the start of the chunk, otherwise until its end.
            exponents = sums if self.reverse else self.decays[slot, CHUNK - 1] - sums
            values = values * down(jnp.exp2(exponents), WIDTH)
        if self.scale is not None:
            values = values * entry(self.scale, 0)
        right[...] = values.astype(right.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.ready.at[slot])

    def walk(self):
        """Walks over all chunks; runs in the warpgroup that has the state."""
        plgpu.copy_gmem_to_smem(self.start.at[self.at], self.state, self.loaded)
        plgpu.barrier_wait(self.loaded)
        start = plgpu.layout_cast(self.state[...], plgpu.Layout.WGMMA)
        self.state[...] = lax.fori_loop(0, self.count, self._step, start)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.state, self.last.at[self.at])
        plgpu.wait_smem_to_gmem(0)

    def _step(self, i, state):
        i = i32(i)
        slot = slot_of(i, _STAGES)
        plgpu.barrier_wait(self.ready.at[slot])
        # Read before `commit_smem`, so that a copy into the slot cannot overtake the read.
        kept = None if self.decays is None else jnp.exp2(self.decays[slot, CHUNK - 1])
        if self.saved is not None:
            b, h, _, *tile = self.at
            room = self.staged.at[lax.rem(i, np.int32(2))]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            room[...] = state.astype(room.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(room, self.saved.at[b, h, self.chunk_of(i), *tile])
        elif kept is not None:
            plgpu.commit_smem()
        if kept is not None:
            state = state * kept
        (state,) = self.product.onto(
            (state,), transposed(self.lefts.at[slot]), [self.rights.at[slot]]
        )
        plgpu.barrier_arrive(self.read.at[slot])
        return state
