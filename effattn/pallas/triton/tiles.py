"""How kernels in Triton read and write tiles of block attention's arrays.

Arrays stay where and as they are: a tile is loaded by the places of its entries, and what lies
beyond the lengths, or beyond the head size where that is no power of two, is masked.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn.arrays import mesh_axes
from effattn.dispatch import device
from effattn.pallas import block_tiles
from effattn.pallas.block_tiles import Arrays, At, Plan

LEAST = 16  # rows of a product of tensor cores
STAGES = 2  # tiles in flight: one is read while the other is multiplied


def width(size: int) -> int:
    """Features of a tile, a power of two."""
    return max(LEAST, pl.next_power_of_2(size))


class Tile:
    """Reads tiles of one example and query head; `(t, s)`, or if `transposed` `(s, t)`."""

    def __init__(self, plan: Plan, x: Arrays, b, h, *, transposed=False):
        self.plan, self.x, self.b, self.h = plan, x, b, h
        self.key_head = h // plan.group
        self.transposed = transposed
        # Full float32 products for float32: the default would round them to TensorFloat-32.
        exact = x.query.dtype == jnp.float32
        precision = lax.Precision.HIGHEST if exact else plan.config.precision
        self.dot = functools.partial(triton.dot, precision=precision)
        self.scale = None if x.scale is None else x.scale[0]

    def indices(self, n, axis):
        """The places of tile n of queries (axis 0) or keys (1), and which of them there are."""
        size, length = self.plan.tile[axis], self.plan.lengths[axis]
        place = n * size + jnp.arange(size, dtype=jnp.int32)
        return place, (place < length if length % size else None)

    def rows(self, ref, n, axis, head):
        """`(t or s, width)` of `(B, L, heads, H)`, zeros where there is nothing."""
        place, there = self.indices(n, axis)
        feature = jnp.arange(width(ref.shape[-1]), dtype=jnp.int32)
        conditions = [] if there is None else [there[:, None]]
        if len(feature) != ref.shape[-1]:
            conditions.append((feature < ref.shape[-1])[None, :])
        return load(ref, (self.b, place[:, None], head, feature[None, :]), conditions)

    def each(self, ref, n, axis, *head, other=0):
        """`(t or s)` of `(B, L)` or `(B, L, heads)`."""
        place, there = self.indices(n, axis)
        return load(ref, (self.b, place, *head), [] if there is None else [there], other)

    def sums_of_rows(self, lse, shared, n):
        """Of query tile n, as `block_tiles.gradients` takes them; no weight where there is no row.

        There the logits may be anything, as a bias and a score_mod have a say in them.
        """
        each = self.each(lse, n, 0, self.h, other=jnp.inf), self.each(shared, n, 0, self.h)
        return tuple(map(self.down, each))

    def down(self, x):
        """Of queries, along the tile's axis of them."""
        return x[None, :] if self.transposed else x[:, None]

    def across(self, x):
        """The same of keys."""
        return x[:, None] if self.transposed else x[None, :]

    def at(self, n, m):
        """Where the tile of query tile n and key tile m is."""
        x = self.x
        (row, _), (column, _) = self.indices(n, 0), self.indices(m, 1)
        offset = x.offset[self.b if x.offset.shape[0] > 1 else 0]
        i = offset + row if x.query_positions is None else self.each(x.query_positions, n, 0)
        j = column if x.key_positions is None else self.each(x.key_positions, m, 1)
        return At(self.b, self.h, self.down(i), self.across(j), self.across(column))

    def pairs(self, ref, n, m):
        """The tile of `(#B, #N, #T, #S)`; None of None."""
        if ref is None:
            return None
        (row, row_there), (column, column_there) = self.indices(n, 0), self.indices(m, 1)
        batch, heads, queries, keys = ref.shape
        conditions = []
        if queries > 1 and row_there is not None:
            conditions.append(self.down(row_there))
        if keys > 1 and column_there is not None:
            conditions.append(self.across(column_there))
        index = (
            self.b if batch > 1 else 0,
            self.h if heads > 1 else 0,
            self.down(row if queries > 1 else jnp.zeros_like(row)),
            self.across(column if keys > 1 else jnp.zeros_like(column)),
        )
        return load(ref, index, conditions)

    def load(self, table, at):
        """Entries of a table, for `block_tiles.run`."""
        return triton.load(self.x.tables[table].at[at])

    def reads(self, at, products):
        """What the score_mod reads of its tables: see `block_tiles.lookups`."""
        if self.plan.score is None:
            return []
        scalars = products, at.b, at.h, at.i, at.j
        return block_tiles.lookups(self.plan, "score", self.load, *scalars)

    def masked(self, at, n, m, logits, whole):
        """The logits, -inf where a pair may not attend."""
        x = self.x
        query_ids = None if x.query_ids is None else self.down(self.each(x.query_ids, n, 0))
        key_ids = None if x.key_ids is None else self.across(self.each(x.key_ids, m, 1))
        mask = self.pairs(x.mask, n, m)
        ids_and_mask = query_ids, key_ids, mask
        return block_tiles.masked(
            logits, block_tiles.allowed(self.plan, at, *ids_and_mask, self.load, whole=whole)
        )

    def dropped(self, at, weights):
        """The weights after dropout."""
        return block_tiles.dropped(self.plan, at, weights, self.load)

    def walk(self, n, step, carry, *, of_keys=False):
        """Folds `step(m, carry, whole)` over the tiles that tile n visits."""
        walk = block_tiles.walk(
            self.plan, entry, self.x.walk, self.b, self.key_head, n, of_keys=of_keys
        )
        for count, tile, whole in (
            (walk.whole, walk.whole_tile, True),
            (walk.masked, walk.masked_tile, False),
        ):

            def body(m, carry, tile=tile, whole=whole):
                return step(tile(m), carry, whole)

            carry = lax.fori_loop(0, count, body, carry)
        return carry


def index_of(index):
    """Numbers as arrays: the interpreter asks all for their shapes."""
    return tuple(np.int32(i) if isinstance(i, int) else i for i in index)


def load(ref, index, conditions, other=0):
    """The entries at `index`, `other` where not all conditions hold."""
    index = index_of(index)
    if not conditions:
        return triton.load(ref.at[index])
    mask = functools.reduce(lambda a, b: a & b, conditions)
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return triton.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=other)


def entry(ref, *index):
    """One number."""
    return triton.load(ref.at[index_of(index)])


def store(ref, index, value, there, size=None):
    """Rows `(t, width)` or `(t)`, as far as there are some, at `index(rows' axis, features)`."""
    conditions = [] if there is None else [there if size is None else there[:, None]]
    if size is not None and value.shape[-1] != size:
        feature = jnp.arange(value.shape[-1], dtype=jnp.int32)
        conditions.append((feature < size)[None, :])
    mask = None
    if conditions:
        mask = jnp.broadcast_to(functools.reduce(lambda a, b: a & b, conditions), value.shape)
    triton.store(ref.at[index_of(index)], value.astype(ref.dtype), mask=mask)


def put_rows(tile, ref, n, axis, head, value):
    """Stores `(t or s, width)` as tile n of queries (axis 0) or keys (1), as far as it goes."""
    place, there = tile.indices(n, axis)
    feature = jnp.arange(value.shape[-1], dtype=jnp.int32)
    index = tile.b, place[:, None], head, feature[None, :]
    store(ref, index, value, there, ref.shape[-1])


def call(kernel, plan: Plan, inputs, grid, shapes, warps: int) -> list[jax.Array]:
    """Runs `kernel(plan, structure, *refs)`; the refs are the leaves of `inputs`, then results."""
    leaves, structure = jax.tree.flatten(device.aligned(mesh_axes.vary_alike(inputs)))
    varying = jax.typeof(leaves[0]).manual_axis_type
    return pl.pallas_call(
        functools.partial(kernel, plan, structure),
        grid=grid,
        out_shape=[
            jax.ShapeDtypeStruct(*shape, manual_axis_type=varying) for shape in shapes.values()
        ],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=STAGES),
        interpret=plan.config.implementations.interpreted,
        name=f"block_attention{kernel.__name__.removesuffix('_kernel')}",
    )(*leaves)
