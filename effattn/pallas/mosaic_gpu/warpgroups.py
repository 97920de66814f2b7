"""Call, shared memory, products and stores of all kernels in Mosaic GPU.

A block of a kernel has several warpgroups of 128 threads. The bulk copy engine (TMA) copies arrays
into shared memory, where tensor cores read factors of products (`wgmma`). The engine reads zeros
and writes nothing beyond the end of an array, so lengths need not be multiples of a tile. Sizes of
heads are padded with zeros to multiples of 64 numbers, the 128 bytes of a swizzled row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn.arrays import mesh_axes
from effattn.dispatch import device
from effattn.dispatch.refused import refusing

ROWS = 64  # rows of a product of one warpgroup
WIDTH = 64  # 16-bit numbers of a swizzled row
_SWIZZLE, _GROUP = 128, 8  # bytes of a swizzled row; number of rows swizzled together

ALONG_ROWS, ALONG_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def run(
    name: str,
    body: Callable,
    operands: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,
    *,
    grid: dict[str, int],
    warpgroups: int,
    interpreted: Any,
    approximate: bool = True,
) -> list[jax.Array]:
    """Runs `body(operands, outputs, scratch, at)` in each warpgroup of each block.

    `at` has the block's place along each axis of the grid, by name; the last axis is the fastest.
    CUDA sees a grid of one axis, as it limits a second and a third axis to 65,535 blocks.

    Args:
      name: name of the kernel.
      body: the kernel, which gets references in place of arrays.
      operands: pytree of arrays.
      results: shapes and dtypes of the results.
      scratch: sequence of pytrees of shared memory and barriers.
      grid: number of blocks along each named axis.
      warpgroups: number of warpgroups of a block; `lax.axis_index("warpgroup")` gives the index.
      interpreted: whether, or how, the kernel is interpreted.
      approximate: use approximate exponentials; the approximate tanh has only half of the digits.
    """
    leaves, structure = jax.tree.flatten(device.aligned(mesh_axes.vary_alike(operands)))
    if interpreted and not hasattr(plgpu, "InterpretGPUParams"):
        return refusing("Mosaic GPU is interpreted by jax 0.12 and later", results)(*leaves)

    def of_warpgroup(*refs):
        operands, rest = jax.tree.unflatten(structure, refs[: len(leaves)]), refs[len(leaves) :]
        place, at = lax.axis_index("block"), {}
        for name, size in reversed(grid.items()):
            at[name] = lax.rem(place, np.int32(size))
            place = lax.div(place, np.int32(size))
        body(operands, rest[: len(results)], rest[len(results) :], at)

    kernel = plgpu.kernel(
        of_warpgroup,
        out_type=results,
        scratch_types=scratch,
        grid=(math.prod(grid.values()),),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=_params(interpreted),
        kernel_name=name,
    )
    # plgpu.kernel returns types that do not vary over a mesh, so restore the varying axes.
    return [mesh_axes.vary_like(leaves[0], result) for result in kernel(*leaves)]


def _params(how):
    """Returns the parameters of the interpreter, or None if kernels are compiled."""
    if not how or isinstance(how, plgpu.InterpretGPUParams):
        return how or None
    return plgpu.InterpretGPUParams()


def padded(array: Any, axis: int, multiple: int, value: Any = 0) -> Any:
    """Pads an array to a multiple of `multiple` along `axis`; returns None for None."""
    if array is None or not (more := -array.shape[axis] % multiple):
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return jnp.pad(array, widths, constant_values=value)


def tokens(array: jax.Array) -> jax.Array:
    """Pads `(B, L, heads, H)` for the copy engine: whole swizzled rows, in groups of 8 rows."""
    return padded(padded(array, 1, _GROUP), 3, WIDTH)


def swizzled(dtype: Any) -> int:
    """Returns how many numbers a swizzled row holds."""
    return _SWIZZLE // jnp.dtype(dtype).itemsize


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Declares shared memory in the swizzled layout of the copy engine and of tensor cores."""
    size = swizzled(dtype)
    tiling = plgpu.TilingTransform((_GROUP, size))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(_SWIZZLE)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def staging(workers: int, width: int, dtype: Any) -> Any:
    """Declares a staging buffer in shared memory, through which `put_rows` writes results."""
    return shared((workers, ROWS, width), dtype)


class Product:
    """Matrix products of a warpgroup: registers or shared memory times shared memory.

    Attributes:
      staged: `(ROWS, columns)` in shared memory for the interpreter, which can only multiply from
        shared memory and stages up to as many columns there; None for a compiled kernel.
    """

    def __init__(self, staged):
        self.staged = staged

    @classmethod
    def of_worker(cls, staged: tuple, worker: Any) -> "Product":
        """Returns the `Product` of one worker, from the buffers that `scratch` declares."""
        return cls(staged[0].at[worker] if staged else None)

    @staticmethod
    def scratch(interpreted: Any, columns: int, dtype: Any, workers: int) -> tuple:
        """Declares the shared memory of all workers; empty for a compiled kernel."""
        return (shared((workers, ROWS, columns), dtype),) if interpreted else ()

    def add(self, total: Any, left: Any, right: Any) -> None:
        """Starts adding `left @ right` to an accumulator; `wgmma_wait` waits for the sum."""
        if self.staged is not None and isinstance(left, jax.Array):
            room = self.staged.at[:, pl.ds(0, left.shape[1])]
            room[...] = left
            plgpu.commit_smem()
            left = room
        plgpu.wgmma(total, left, right)

    def of(self, left: Any, right: Any, meanwhile: Callable[[], None] | None = None) -> jax.Array:
        """Returns `left @ right` in float32; `meanwhile` is called while it is being computed."""

        def multiply(total):
            self.add(total, left, right)
            if meanwhile is not None:
                meanwhile()
            return read(total)

        return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))

    def onto(
        self,
        totals: tuple,
        left: Any,
        rights: list,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[jax.Array, ...]:
        """Returns `total + left @ right` for each pair of `totals` and `rights`.

        The tensor cores add to the totals in place. `meanwhile` is called while they do.
        """
        if self.staged is not None:  # the interpreter has no accumulators with a first value
            found = tuple(
                total + self.of(left, right) for total, right in zip(totals, rights, strict=True)
            )
            meanwhile()
            return found

        def multiply(sums):
            for total, right in zip(sums, rights, strict=True):
                plgpu.wgmma(total, left, right)
            meanwhile()

        sums = pl.run_state(multiply)(tuple(plgpu.ACC.init(total) for total in totals))
        return lax.optimization_barrier(sums)

    def of_both(
        self, *pairs: tuple[Any, Any], between: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `between(first)` and `second`, the products of two pairs in shared memory.

        `between` is computed while the tensor cores compute the second product.
        """

        def multiply(*totals):
            for total, (left, right) in zip(totals, pairs, strict=True):
                plgpu.wgmma(total, left, right)
            return between(read(totals[0], in_flight=1)), read(totals[1])

        shapes = [(left.shape[0], right.shape[1]) for left, right in pairs]
        return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def read(total: Any, in_flight: int = 0) -> jax.Array:
    """Returns the value of an accumulator, once at most `in_flight` products are being computed.

    The optimization barrier makes every use of the value depend on the wait. Without it the
    compiler may move a use before the wait, and read zeros.
    """
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(total, wait_n=in_flight))


def constant(shape: tuple[int, ...], value: Any) -> jax.Array:
    """Returns a float32 constant `(r, columns)` or `(r)` in the register layout of products."""
    return plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA if len(shape) == 2 else ALONG_ROWS
    )


def down(rows: jax.Array, columns: int) -> jax.Array:
    """Broadcasts `(r)` to all columns of `(r, columns)`."""
    return lax.broadcast_in_dim(rows, (rows.shape[0], columns), (0,))


def transposed(ref: Any) -> Any:
    """Views `(a, b)` in shared memory as `(b, a)`."""
    return ref.transpose((1, 0))


def ring(
    count: Any,
    stages: int,
    put: Callable[[Any, Any], None],
    read: Any,
    ahead: int = 0,
    then: Any = None,
) -> None:
    """Copies `count` tiles into the slots of a ring, each as soon as its slot has been read.

    Args:
      count: number of tiles.
      stages: number of slots.
      put: `(number, slot)`, starts copying a tile.
      read: barriers of the slots, at which a reader arrives when it has read the slot.
      ahead: number of tiles that are copied before `then` of the first.
      then: `(number, slot)`, is called for each tile after its copy has started; None for nothing.
    """

    def step(i, _):
        i = i32(i)

        def copy():
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(read.at[slot_of(i, stages)]))
            put(i, slot_of(i, stages))

        pl.when(i < count)(copy)
        if then is not None:
            pl.when(i >= ahead)(lambda: then(i - ahead, slot_of(i - ahead, stages)))

    lax.fori_loop(0, count + (0 if then is None else ahead), step, None)

    # The interpreter asks that each arrival at a barrier is waited for.
    def finish(i, _):
        plgpu.barrier_wait(read.at[slot_of(i32(i), stages)])

    lax.fori_loop(jnp.maximum(count - stages, 0), count, finish, None)


def slot_of(number: Any, stages: int) -> Any:
    """Returns the slot of a tile in a ring."""
    return lax.rem(number, np.int32(stages))


def i32(number: Any) -> Any:
    """Converts the counter of a loop, which has 64 bits if JAX has 64-bit types."""
    return lax.convert_element_type(number, np.int32)


def entry(ref, *index):
    """Loads one number."""
    return ref[tuple(np.int32(i) if isinstance(i, int) else i for i in index)]


def put_rows(staged: Any, parts: Sequence[jax.Array], target: Any) -> None:
    """Stores `(r, width)`, given in parts of its features, through a buffer in shared memory.

    If the buffer is narrower than the parts together, one swizzled row is stored at a time. Returns
    when the buffer has been read.
    """
    width, columns = staged.shape[1], sum(part.shape[1] for part in parts)
    start = 0
    for part in parts:
        size = part.shape[1] if width == columns else width
        for first in range(0, part.shape[1], size):
            at = pl.ds(start if width == columns else 0, size)
            room = staged if size == width else staged.at[:, at]
            room[...] = part[:, first : first + size].astype(staged.dtype)
            if width < columns:
                _store(staged, target.at[:, pl.ds(start + first, size)])
        start += part.shape[1]
    if width == columns:
        _store(staged, target)


def _store(staged, target):
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def put_dots(left: Any, right: Any, row: Any, target: Any) -> None:
    """Starts storing the dot products of the rows of two `(rows, columns)` in shared memory.

    Wait for the store (`put_rows` does) before the block ends.

    Args:
      left: factors.
      right: factors.
      row: float32 `(rows,)` in shared memory, through which the products are stored.
      target: float32 `(rows,)` in global memory.
    """
    rows, columns = left.shape
    for first in range(0, rows, ROWS):
        part = pl.ds(first, ROWS)
        tiles = [(part, pl.ds(start, ROWS)) for start in range(0, columns, ROWS)]
        first_products, *products = (wide(left.at[tile]) * wide(right.at[tile]) for tile in tiles)
        row.at[part][...] = jnp.sum(sum(products, first_products), 1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(row, target)


def wide(ref: Any) -> jax.Array:
    """Loads `(r, columns)` in float32, in the register layout of products."""
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA).astype(jnp.float32)
