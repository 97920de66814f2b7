"""Tiles of the block-attention kernels in Mosaic GPU.

A block has one warpgroup that copies tiles into shared memory, and other warpgroups (the workers)
that compute, each on 64 rows of the block's tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn.interfaces.block_attention import NO_KEY
from effattn.pallas import block_tiles
from effattn.pallas.block_tiles import Arrays, At, Plan
from effattn.pallas.mosaic_gpu import warpgroups
from effattn.pallas.mosaic_gpu.schedule import schedule_of
from effattn.pallas.mosaic_gpu.warpgroups import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    ROWS,
    entry,
    padded,
    shared,
    tokens,
)
from effattn.pallas.visited_tiles import Walk

STAGES = 2  # tiles in flight: one tile is copied while the other tile is multiplied
_REGISTERS = 232, 40  # registers of a computing and a copying thread, for 2 + 1 warpgroups

_SIDES = "query", "key"


def as_read(plan: Plan, x: Arrays) -> Arrays:
    """Pads the operands for the kernels; positions and ids are padded to whole tiles."""
    t, s = plan.tile
    return x._replace(
        query=tokens(x.query),
        key=tokens(x.key),
        value=tokens(x.value),
        query_positions=padded(x.query_positions, 1, t),
        key_positions=padded(x.key_positions, 1, s),
        query_ids=padded(x.query_ids, 1, t),
        key_ids=padded(x.key_ids, 1, s, NO_KEY),
    )


def by_head(rows: jax.Array, tile: int, value: Any = 0) -> jax.Array:
    """Transposes `(B, T, N)` to `(B, N, T')`, with T' padded to whole tiles."""
    return padded(jnp.swapaxes(rows, 1, 2), 2, tile, value)


def of_tokens(x: Any, *names: str) -> dict[str, Any]:
    """Returns the named operands that are not None, by name."""
    found = {name: getattr(x, name) for name in names}
    return {name: array for name, array in found.items() if array is not None}


def _buffers(arrays, lead, rows):
    """Declares buffers `(lead, rows, ...)` for `rows` tokens of each array."""

    def room(array):
        if array.ndim == 4:
            return shared((lead, rows, array.shape[3]), array.dtype)
        return plgpu.SMEM((lead, rows), array.dtype)

    return {name: room(array) for name, array in arrays.items()}


def _copy(arrays, buffers, place, filled, b, head, start):
    """Starts copying tokens from `start` on; `(B, L, heads, H)`, `(B, heads, L)` or `(B, L)`."""
    for name, array in arrays.items():
        buffer = buffers[name]
        tokens = pl.ds(start, buffer.shape[1])
        b_of = b if array.shape[0] > 1 else 0
        index = {4: (b_of, tokens, head), 3: (b_of, head, tokens), 2: (b_of, tokens)}[array.ndim]
        plgpu.copy_gmem_to_smem(array.at[index], buffer.at[place], filled.at[place])


def _at(buffers, place):
    return {name: buffer.at[place] for name, buffer in buffers.items()}


class Own:
    """Tile that a block keeps for its whole run; a worker reads only its `ROWS` rows."""

    def __init__(self, arrays, buffers, filled):
        self.arrays, self.buffers, self.filled = arrays, buffers, filled

    @staticmethod
    def scratch(arrays: dict[str, Any], workers: int) -> tuple:
        """Declares the buffers in shared memory and the barriers."""
        filled = plgpu.Barrier(num_arrivals=len(arrays), num_barriers=workers)
        return _buffers(arrays, workers, ROWS), filled

    def get(self, worker, b, head, start) -> dict[str, Any]:
        """Copies the rows of a worker from token `start` on, and waits for them."""
        _copy(self.arrays, self.buffers, worker, self.filled, b, head, start)
        plgpu.barrier_wait(self.filled.at[worker])
        return _at(self.buffers, worker)


class Stream:
    """Queue of `STAGES` tiles from the copying warpgroup to the workers."""

    def __init__(self, arrays, buffers, filled, read):
        self.arrays, self.buffers, self.filled, self.read = arrays, buffers, filled, read

    @staticmethod
    def scratch(arrays: dict[str, Any], rows: int, readers: int) -> tuple:
        """Declares the buffers in shared memory, for tiles of `rows` tokens, and the barriers."""
        return (
            _buffers(arrays, STAGES, rows),
            plgpu.Barrier(num_arrivals=len(arrays), num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=readers, num_barriers=STAGES),
        )

    def put(self, number, b, head, start):
        """Waits for a free slot, then starts the copy of a tile into that slot."""
        slot = _slot(number)
        pl.when(number >= STAGES)(lambda: plgpu.barrier_wait(self.read.at[slot]))
        _copy(self.arrays, self.buffers, slot, self.filled, b, head, start)

    def wait(self, number):
        """Waits until a tile is filled. Each worker must wait exactly once for each tile."""
        plgpu.barrier_wait(self.filled.at[_slot(number)])

    def at(self, number) -> dict[str, Any]:
        """Returns the buffers of a tile, after `wait`."""
        return _at(self.buffers, _slot(number))

    def get(self, number) -> dict[str, Any]:
        """Waits for a tile and returns its buffers."""
        self.wait(number)
        return self.at(number)

    def done(self, number):
        """Signals that this worker has read the tile."""
        plgpu.barrier_arrive(self.read.at[_slot(number)])

    def finish(self, total):
        """Waits until the last of `total` tiles have been read."""

        def wait(number, _):
            plgpu.barrier_wait(self.read.at[_slot(number)])

        lax.fori_loop(jnp.maximum(total - STAGES, 0), total, wait, None)


def _slot(number):
    return lax.rem(number, np.int32(STAGES))


class Turns:
    """Turns of two workers: one worker multiplies while the other computes exponentials.

    Without turns both workers would compute exponentials at the same time, and tensor cores would
    wait for them.
    """

    def __init__(self, barrier: Any, worker: Any):
        self.barrier, self.worker = barrier, worker

    @staticmethod
    def scratch(workers: int) -> tuple:
        """Declares the barrier if there are two workers."""
        return (plgpu.Barrier(num_arrivals=2),) if workers == 2 else ()

    def change(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Ends the turn of this worker, calls `meanwhile`, and waits for its next turn."""
        if self.barrier:
            plgpu.barrier_arrive(self.barrier[0])
        if meanwhile is not None:
            meanwhile()
        if self.barrier:
            plgpu.barrier_wait(self.barrier[0])

    def start(self) -> None:
        """Lets the second worker wait for its first turn."""
        pl.when(self.worker == 1)(self.change)

    def finish(self) -> None:
        """Lets the first worker give the second worker its last turn."""
        pl.when(self.worker == 0)(self.change)


class Tile:
    """Part of a tile, for one example and query head, that one worker computes.

    The part is `(ROWS, s)`: the worker's queries and a tile of keys. If `transposed`, the part is
    `(ROWS, t)`: the worker's keys and a tile of queries.
    """

    def __init__(self, plan: Plan, x: Arrays, b, h, *, transposed=False):
        self.plan, self.x, self.b, self.h = plan, x, b, h
        self.transposed = transposed
        self.shape = (ROWS, plan.tile[0]) if transposed else (ROWS, plan.tile[1])
        self.scale = None if x.scale is None else x.scale[0]

    def each(self, tokens, axis):
        """Broadcasts one number per query (axis 0) or key (1) to the tile; None for None."""
        if tokens is None:
            return None
        place = int(axis != self.transposed)
        found = plgpu.layout_cast(tokens[...], (ALONG_ROWS, ALONG_COLUMNS)[place])
        return lax.broadcast_in_dim(found, self.shape, (place,))

    def at(self, first_query, first_key, beside):
        """Returns indices and positions as arrays of the tile's shape.

        `beside` holds the arrays of the tile's tokens, by name.
        """
        layout = plgpu.Layout.WGMMA
        index = [
            plgpu.broadcasted_iota(jnp.int32, self.shape, place, layout=layout)
            for place in (int(self.transposed), int(not self.transposed))
        ]
        column = first_key + index[1]
        i, j = (self.each(beside.get(f"{s}_positions"), n) for n, s in enumerate(_SIDES))
        if i is None:
            offset = self.x.offset[self.b if self.x.offset.shape[0] > 1 else 0]
            i = offset + first_query + index[0]
        return At(self.b, self.h, i, column if j is None else j, column)

    def load(self, table, at):
        """Loads entries of a table; an array `at` costs one comparison per table entry."""
        ref = self.x.tables[table]
        if jnp.ndim(at) == 0:
            return ref[at]

        def choose(entry, found):
            return jnp.where(at == entry, ref[entry], found)

        start = plgpu.layout_cast(jnp.zeros(at.shape, ref.dtype), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, ref.shape[0], choose, start)

    def scores(self, at, products):
        """Returns the function from products to logits before any mask."""
        plan, values = self.plan, []
        if plan.score is not None:
            reads = block_tiles.lookups(plan, "score", self.load, products, at.b, at.h, at.i, at.j)
            values = [value for *_, value in reads]
        return lambda products: block_tiles.scores(plan, at, products, None, self.scale, values)

    def masked(self, at, logits, beside, whole):
        """Logits with -inf for pairs that may not attend."""
        of_query, of_key = (self.each(beside.get(f"{s}_ids"), n) for n, s in enumerate(_SIDES))
        allowed = block_tiles.allowed(self.plan, at, of_query, of_key, None, self.load, whole=whole)
        return block_tiles.masked(logits, allowed)

    def dropped(self, at, weights):
        """Weights after dropout."""
        return block_tiles.dropped(self.plan, at, weights, self.load)


def fold(walk: Walk, step: Callable, carry: Any, first: Any = 0) -> Any:
    """Folds `step(number, tile, carry, whole)` over the tiles of a walk, numbered from `first`."""
    for before, count, tile, whole in (
        (0, walk.whole, walk.whole_tile, True),
        (walk.whole, walk.masked, walk.masked_tile, False),
    ):

        def body(m, carry, before=before, tile=tile, whole=whole):
            return step(first + before + m, tile(m), carry, whole)

        carry = lax.fori_loop(0, count, body, carry)
    return carry


class Block(NamedTuple):
    """Indices of a block, and of a warpgroup in the block.

    Attributes:
      b: index of the example.
      h: index of the query head or, in the gradients of keys and values, of the key head.
      n: index of the tile.
      worker: index of the warpgroup; the last warpgroup copies.
    """

    b: Any
    h: Any
    n: Any
    worker: Any


def call(
    name: str, kernel, plan: Plan, x: Arrays, rows, shapes, scratch, *, of_keys: bool
) -> list[jax.Array]:
    """Runs `kernel(plan, x, rows, outputs, scratch, block)` for all blocks.

    `x`, `rows` and `scratch` are pytrees; the kernel gets pytrees of references of the same
    structure. A block has a tile of queries or, if `of_keys`, of keys.
    """
    schedule = schedule_of(plan, x, rows, of_keys=of_keys)
    workers = plan.tile[of_keys] // ROWS

    def body(operands, outputs, scratch, at):
        x, rows = operands
        b, key_head, number, rank = schedule.at(at["block"])
        own = b if x.order.shape[0] > 1 else 0, key_head if x.order.shape[1] > 1 else 0
        head = key_head * np.int32(schedule.group) + number
        block = Block(b, head, entry(x.order, *own, rank), lax.axis_index("warpgroup"))
        kernel(plan, x, rows, outputs, scratch, block)

    return warpgroups.run(
        f"block_attention_{name}",
        body,
        (x, rows),
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        scratch,
        grid={"block": schedule.size},
        warpgroups=workers + 1,
        interpreted=plan.config.implementations.interpreted,
        approximate=plan.config.soft_cap is None and plan.score is None,
    )


def roles(workers: int, worker: Any, compute: Callable, copy: Callable) -> None:
    """Runs `copy()` in the last warpgroup and `compute()` in the other warpgroups."""
    computing, copying = _REGISTERS

    @pl.when(worker < workers)
    def _():
        if workers == 2:
            plgpu.set_max_registers(computing, action="increase")
        compute()

    @pl.when(worker == workers)
    def _():
        if workers == 2:
            plgpu.set_max_registers(copying, action="decrease")
        copy()
