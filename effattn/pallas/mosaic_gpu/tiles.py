"""How kernels in Mosaic GPU read and write tiles of block attention's arrays.

A block is one warpgroup that copies tiles into shared memory and others that compute, each on 64
rows of the block's tile. Copies go by the bulk copy engine, which reads zeros beyond an array and
writes nothing there: lengths need not be multiples of a tile. Head sizes are padded with zeros to
multiples of 64 numbers, the 128 bytes of a swizzled row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn.arrays import mesh_axes
from effattn.dispatch import device
from effattn.dispatch.refused import refusing
from effattn.pallas import block_tiles
from effattn.pallas.block_tiles import Arrays, At, Plan, Walk

ROWS = 64  # of a product: what a warpgroup multiplies at once
WIDTH = 64  # numbers of 16 bits in a swizzled row
_SWIZZLE, _GROUP = 128, 8  # bytes of a swizzled row, and rows that are swizzled together
STAGES = 2  # tiles in flight: one is copied while the other is multiplied
_REGISTERS = 232, 40  # of a thread that computes, and of one that copies, where there are 2 + 1

_ALONG_ROWS, _ALONG_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_SIDES = "query", "key"


def padded(array: Any, axis: int, multiple: int, value: Any = 0) -> Any:
    """To a multiple of `multiple` along an axis; None of None."""
    if array is None or not (more := -array.shape[axis] % multiple):
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return jnp.pad(array, widths, constant_values=value)


def as_read(plan: Plan, x: Arrays) -> Arrays:
    """The operands as the kernels read them: of positions and ids, whole tiles."""
    t, s = plan.tile
    return x._replace(
        query=tokens(x.query),
        key=tokens(x.key),
        value=tokens(x.value),
        query_positions=padded(x.query_positions, 1, t),
        key_positions=padded(x.key_positions, 1, s),
        query_ids=padded(x.query_ids, 1, t),
        key_ids=padded(x.key_ids, 1, s, block_tiles.NO_KEY),
    )


def tokens(array: jax.Array) -> jax.Array:
    """`(B, L, heads, H)` as the copy engine reads it: whole swizzled rows, in groups of 8."""
    return padded(padded(array, 1, _GROUP), 3, WIDTH)


def by_head(rows: jax.Array, tile: int, value: Any = 0) -> jax.Array:
    """`(B, T, N)` to `(B, N, T')`, whole tiles of them."""
    return padded(jnp.swapaxes(rows, 1, 2), 2, tile, value)


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the copy engine fills it and tensor cores read it."""
    size = _SWIZZLE // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((_GROUP, size))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(_SWIZZLE)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def staging(workers: int, dtype: Any) -> Any:
    """What results pass through, for `put_rows`."""
    return shared((workers, ROWS, _SWIZZLE // jnp.dtype(dtype).itemsize), dtype)


class Product:
    """Products of the warpgroup's registers, or of shared memory, with shared memory.

    Attributes:
      staged: `(ROWS, columns)` in shared memory for the interpreter, which multiplies from there
        alone; None where the kernel is compiled.
    """

    def __init__(self, staged):
        self.staged = staged

    @classmethod
    def of_worker(cls, staged: tuple, worker: Any) -> "Product":
        """Of one warpgroup, from what `scratch` asked for."""
        return cls(staged[0].at[worker] if staged else None)

    @staticmethod
    def scratch(plan: Plan, columns: int, dtype: Any, workers: int) -> tuple:
        """What it needs of shared memory."""
        interpreted = plan.config.implementations.interpreted
        return (shared((workers, ROWS, columns), dtype),) if interpreted else ()

    def add(self, total: Any, left: Any, right: Any) -> None:
        """Adds `left @ right` to an accumulator; done when `wgmma_wait` has returned."""
        if self.staged is not None and isinstance(left, jax.Array):
            self.staged[...] = left
            plgpu.commit_smem()
            left = self.staged
        plgpu.wgmma(total, left, right)

    def of(self, left: Any, right: Any, issued: Callable[[], None] | None = None) -> jax.Array:
        """`left @ right` in float32; calls `issued` while it is being computed."""

        def multiply(total):
            self.add(total, left, right)
            if issued is not None:
                issued()
            return total[...]

        return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))

    def of_both(self, *pairs: tuple[Any, Any]) -> list[jax.Array]:
        """`left @ right` in float32 of each pair in shared memory, the second behind the first."""

        def multiply(*totals):
            for total, (left, right) in zip(totals, pairs, strict=True):
                plgpu.wgmma(total, left, right)
            return [total[...] for total in totals]

        shapes = [(left.shape[0], right.shape[1]) for left, right in pairs]
        return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def constant(shape: tuple[int, ...], value: Any) -> jax.Array:
    """In float32, `(r, columns)` or `(r)`, as products and what is reduced of them lie."""
    return plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA if len(shape) == 2 else _ALONG_ROWS
    )


def down(rows: jax.Array, columns: int) -> jax.Array:
    """`(r)` as all columns of `(r, columns)`."""
    return lax.broadcast_in_dim(rows, (rows.shape[0], columns), (0,))


def transposed(ref: Any) -> Any:
    """`(a, b)` in shared memory as `(b, a)`."""
    return ref.transpose((1, 0))


def of_tokens(x: Any, *names: str) -> dict[str, Any]:
    """Those of the operands of such names that there are."""
    found = {name: getattr(x, name) for name in names}
    return {name: array for name, array in found.items() if array is not None}


def _buffers(arrays, lead, rows):
    """Room for `rows` tokens of each array."""

    def room(array):
        if array.ndim == 4:
            return shared((lead, rows, array.shape[3]), array.dtype)
        return plgpu.SMEM((lead, rows), array.dtype)

    return {name: room(array) for name, array in arrays.items()}


def _copy(arrays, buffers, place, filled, b, head, start):
    """Some tokens of `(B, L, heads, H)`, `(B, heads, L)` or `(B, L)`, from `start` on."""
    for name, array in arrays.items():
        buffer = buffers[name]
        tokens = pl.ds(start, buffer.shape[1])
        b_of = b if array.shape[0] > 1 else 0
        index = {4: (b_of, tokens, head), 3: (b_of, head, tokens), 2: (b_of, tokens)}[array.ndim]
        plgpu.copy_gmem_to_smem(array.at[index], buffer.at[place], filled.at[place])


def _at(buffers, place):
    return {name: buffer.at[place] for name, buffer in buffers.items()}


class Own:
    """The rows of a block's own tile, `ROWS` to a warpgroup, which alone reads them."""

    def __init__(self, arrays, buffers, filled):
        self.arrays, self.buffers, self.filled = arrays, buffers, filled

    @staticmethod
    def scratch(arrays: dict[str, Any], workers: int) -> tuple:
        """What they take of shared memory, and barriers."""
        filled = plgpu.Barrier(num_arrivals=len(arrays), num_barriers=workers)
        return _buffers(arrays, workers, ROWS), filled

    def get(self, worker, b, head, start) -> dict[str, Any]:
        """Copies them from token `start` on, and waits."""
        _copy(self.arrays, self.buffers, worker, self.filled, b, head, start)
        plgpu.barrier_wait(self.filled.at[worker])
        return _at(self.buffers, worker)


class Stream:
    """Tiles that the warpgroup that copies hands to those that compute, `STAGES` at a time."""

    def __init__(self, arrays, buffers, filled, read):
        self.arrays, self.buffers, self.filled, self.read = arrays, buffers, filled, read

    @staticmethod
    def scratch(arrays: dict[str, Any], rows: int, readers: int) -> tuple:
        """What tiles of `rows` tokens take of shared memory, and barriers."""
        return (
            _buffers(arrays, STAGES, rows),
            plgpu.Barrier(num_arrivals=len(arrays), num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=readers, num_barriers=STAGES),
        )

    def put(self, number, b, head, start):
        """Copies a tile, once there is room for it."""
        slot = _slot(number)
        pl.when(number >= STAGES)(lambda: plgpu.barrier_wait(self.read.at[slot]))
        _copy(self.arrays, self.buffers, slot, self.filled, b, head, start)

    def get(self, number) -> dict[str, Any]:
        """The tile, once it is there."""
        slot = _slot(number)
        plgpu.barrier_wait(self.filled.at[slot])
        return _at(self.buffers, slot)

    def done(self, number):
        """This warpgroup reads it no more."""
        plgpu.barrier_arrive(self.read.at[_slot(number)])

    def finish(self, total):
        """Waits until the last of `total` tiles have been read."""

        def wait(number, _):
            plgpu.barrier_wait(self.read.at[_slot(number)])

        lax.fori_loop(jnp.maximum(total - STAGES, 0), total, wait, None)


def _slot(number):
    return lax.rem(number, np.int32(STAGES))


class Turns:
    """Two warpgroups that take turns: one multiplies while the other computes weights.

    Left alone they would do both at the same time, and tensor cores would wait for exponentials.
    """

    def __init__(self, barrier: Any, worker: Any):
        self.barrier, self.worker = barrier, worker

    @staticmethod
    def scratch(workers: int) -> tuple:
        """The barrier, where there are two."""
        return (plgpu.Barrier(num_arrivals=2),) if workers == 2 else ()

    def change(self) -> None:
        """The other's turn."""
        if self.barrier:
            plgpu.barrier_arrive(self.barrier[0])
            plgpu.barrier_wait(self.barrier[0])

    def start(self) -> None:
        """The second one waits for its first turn."""
        pl.when(self.worker == 1)(self.change)

    def finish(self) -> None:
        """The first one lets the second have its last turn."""
        pl.when(self.worker == 0)(self.change)


class Tile:
    """A warpgroup's part of the tiles of one example and query head.

    That is `(ROWS, s)` of its queries and a tile of keys, or if `transposed` `(ROWS, t)` of its
    keys and a tile of queries.
    """

    def __init__(self, plan: Plan, x: Arrays, b, h, *, transposed=False):
        self.plan, self.x, self.b, self.h = plan, x, b, h
        self.transposed = transposed
        self.shape = (ROWS, plan.tile[0]) if transposed else (ROWS, plan.tile[1])
        self.scale = None if x.scale is None else x.scale[0]

    def each(self, tokens, axis):
        """Of one number a query (axis 0) or key (1), as the tile has them; None of None."""
        if tokens is None:
            return None
        place = int(axis != self.transposed)
        found = plgpu.layout_cast(tokens[...], (_ALONG_ROWS, _ALONG_COLUMNS)[place])
        return lax.broadcast_in_dim(found, self.shape, (place,))

    def at(self, first_query, first_key, beside):
        """Where the tile is, all of it as large as the tile; `beside` are arrays of its tokens."""
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
        """Entries of a table: one, or for each of `at` in turn whether it is that."""
        ref = self.x.tables[table]
        if jnp.ndim(at) == 0:
            return ref[at]

        def choose(entry, found):
            return jnp.where(at == entry, ref[entry], found)

        start = plgpu.layout_cast(jnp.zeros(at.shape, ref.dtype), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, ref.shape[0], choose, start)

    def scores(self, at, products):
        """The function from the products to the logits before any mask."""
        plan, values = self.plan, []
        if plan.score is not None:
            reads = block_tiles.lookups(plan, "score", self.load, products, at.b, at.h, at.i, at.j)
            values = [value for *_, value in reads]
        return lambda products: block_tiles.scores(plan, at, products, None, self.scale, values)

    def masked(self, at, logits, beside, whole):
        """The logits, -inf where a pair may not attend."""
        of_query, of_key = (self.each(beside.get(f"{s}_ids"), n) for n, s in enumerate(_SIDES))
        allowed = block_tiles.allowed(self.plan, at, of_query, of_key, None, self.load, whole=whole)
        return block_tiles.masked(logits, allowed)

    def dropped(self, at, weights):
        """The weights after dropout."""
        return block_tiles.dropped(self.plan, at, weights, self.load)


def entry(ref, *index):
    """One number."""
    return ref[tuple(np.int32(i) if isinstance(i, int) else i for i in index)]


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


def put_rows(staged: Any, value: jax.Array, target: Any) -> None:
    """Stores `(r, width)` by way of shared memory, a swizzled row of features at a time."""
    width = staged.shape[1]
    for start in range(0, value.shape[1], width):
        staged[...] = value[:, start : start + width].astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target.at[:, pl.ds(start, width)])
        plgpu.wait_smem_to_gmem(0)


class Block(NamedTuple):
    """Where a block is, and a warpgroup in it.

    Attributes:
      b: example.
      h: head of queries, or of keys.
      n: its tile.
      worker: which warpgroup; the last one copies.
    """

    b: Any
    h: Any
    n: Any
    worker: Any


def call(
    name: str, kernel, plan: Plan, inputs, grid, shapes, scratch, workers: int
) -> list[jax.Array]:
    """Runs `kernel(plan, inputs, outputs, scratch, block)` over a grid of examples, heads, tiles.

    `shapes` and `scratch` are pytrees, and so are what the kernel gets for them.
    """
    leaves, structure = jax.tree.flatten(device.aligned(mesh_axes.vary_alike(inputs)))
    names, count = ("batch", "head", "tile", "warpgroup"), len(leaves)
    how = plan.config.implementations.interpreted
    results = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    if how and not hasattr(plgpu, "InterpretGPUParams"):
        return refusing("Mosaic GPU is interpreted by jax 0.12 and later", results)(*leaves)

    def body(*refs):
        inputs, rest = jax.tree.unflatten(structure, refs[:count]), refs[count:]
        outputs, scratch = rest[: len(results)], rest[len(results) :]
        block = Block(*map(lax.axis_index, names))
        kernel(plan, inputs, outputs, scratch, block)

    run = plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch,
        grid=grid,
        grid_names=names[:3],
        num_threads=workers + 1,
        thread_name=names[3],
        compiler_params=plgpu.CompilerParams(
            # An approximate tanh has half of the digits.
            approx_math=plan.config.soft_cap is None and plan.score is None,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=_params(how),
        kernel_name=f"block_attention_{name}",
    )
    # Its results are of no type that varies over a mesh.
    return [mesh_axes.vary_like(leaves[0], result) for result in run(*leaves)]


def roles(workers: int, worker: Any, compute: Callable, copy: Callable) -> None:
    """Runs `copy()` in the last warpgroup and `compute()` in the others."""
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


def _params(how):
    """What the interpreter takes, if kernels are to run in it."""
    if not how or isinstance(how, plgpu.InterpretGPUParams):
        return how or None
    return plgpu.InterpretGPUParams()
