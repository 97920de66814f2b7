"""Loads and stores of tiles for the block-attention kernels in Triton.

Arrays are neither transposed nor padded. A tile is loaded by the indices of its entries. Loads are
masked beyond the lengths, and beyond the head size if the head size is not a power of two.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn.arrays import mesh_axes
from effattn.dispatch import device
from effattn.pallas import block_tiles, visited_tiles
from effattn.pallas.block_tiles import Arrays, At, Plan
from effattn.pallas.triton import products

LEAST = 16  # smallest side of a product on tensor cores
STAGES = 2  # tiles in flight: one tile is read while the other tile is multiplied


def width(size: int) -> int:
    """Returns the number of features of a tile, a power of two."""
    return max(LEAST, pl.next_power_of_2(size))


class Tile:
    """Reader of tiles `(t, s)`, or `(s, t)` if `transposed`, of one example and query head."""

    def __init__(self, plan: Plan, x: Arrays, b, h, *, transposed=False):
        self.plan, self.x, self.b, self.h = plan, x, b, h
        self.key_head = h // plan.group
        self.transposed = transposed
        # Full float32 products for float32: the default precision rounds to TensorFloat-32.
        exact = x.query.dtype == jnp.float32
        precision = lax.Precision.HIGHEST if exact else plan.config.precision
        interpreted = plan.config.implementations.interpreted
        self.dot = functools.partial(products.dot, precision=precision, interpreted=interpreted)
        self.scale = None if x.scale is None else x.scale[0]

    def indices(self, n, axis):
        """Token indices of tile n of queries (axis 0) or keys (1), and a mask of valid indices.

        The mask is None if all indices are within the length.
        """
        size, length = self.plan.tile[axis], self.plan.lengths[axis]
        place = n * size + jnp.arange(size, dtype=jnp.int32)
        return place, (place < length if length % size else None)

    def rows(self, ref, n, axis, head):
        """Loads `(t or s, width)` from `(B, L, heads, H)`, with zeros as padding."""
        place, there = self.indices(n, axis)
        feature = jnp.arange(width(ref.shape[-1]), dtype=jnp.int32)
        conditions = [] if there is None else [there[:, None]]
        if len(feature) != ref.shape[-1]:
            conditions.append((feature < ref.shape[-1])[None, :])
        return load(ref, (self.b, place[:, None], head, feature[None, :]), conditions)

    def each(self, ref, n, axis, *head, other=0):
        """Loads `(t or s)` from `(B, L)` or `(B, L, heads)`, with `other` as padding."""
        place, there = self.indices(n, axis)
        return load(ref, (self.b, place, *head), [] if there is None else [there], other)

    def sums_of_rows(self, lse, delta, n):
        """Loads log-sum-exp and delta of query tile n for `block_tiles.gradients`.

        Rows of padding get a log-sum-exp of +inf, so that their weights are 0: a bias or a
        score_mod can make the logits of these rows arbitrary.
        """
        each = self.each(lse, n, 0, self.h, other=jnp.inf), self.each(delta, n, 0, self.h)
        return tuple(map(self.down, each))

    def down(self, x):
        """Broadcasts one number per query along the query axis of the tile."""
        return x[None, :] if self.transposed else x[:, None]

    def across(self, x):
        """Broadcasts one number per key along the key axis of the tile."""
        return x[:, None] if self.transposed else x[None, :]

    def at(self, n, m):
        """Indices and positions of the tile at query tile n and key tile m."""
        x = self.x
        (row, _), (column, _) = self.indices(n, 0), self.indices(m, 1)
        offset = x.offset[self.b if x.offset.shape[0] > 1 else 0]
        i = offset + row if x.query_positions is None else self.each(x.query_positions, n, 0)
        j = column if x.key_positions is None else self.each(x.key_positions, m, 1)
        return At(self.b, self.h, self.down(i), self.across(j), self.across(column))

    def pairs(self, ref, n, m):
        """Loads the tile (n, m) of an array `(#B, #N, #T, #S)`; None if `ref` is None."""
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
        """Loads entries of a table, for `block_tiles.run`."""
        return triton.load(self.x.tables[table].at[at])

    def reads(self, at, products):
        """Table reads of the score_mod, see `block_tiles.lookups`; an empty list without one."""
        if self.plan.score is None:
            return []
        scalars = products, at.b, at.h, at.i, at.j
        return block_tiles.lookups(self.plan, "score", self.load, *scalars)

    def masked(self, at, n, m, logits, whole):
        """Logits with -inf for pairs that may not attend."""
        x = self.x
        query_ids = None if x.query_ids is None else self.down(self.each(x.query_ids, n, 0))
        key_ids = None if x.key_ids is None else self.across(self.each(x.key_ids, m, 1))
        mask = self.pairs(x.mask, n, m)
        ids_and_mask = query_ids, key_ids, mask
        return block_tiles.masked(
            logits, block_tiles.allowed(self.plan, at, *ids_and_mask, self.load, whole=whole)
        )

    def dropped(self, at, weights):
        """Weights after dropout."""
        return block_tiles.dropped(self.plan, at, weights, self.load)

    def walk(self, n, step, carry, *, of_keys=False):
        """Folds `step(m, carry, whole)` over the tiles that tile n visits, whole tiles first."""
        walk = visited_tiles.walk(
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


def own_tile(plan: Plan, x: Arrays, *, of_keys: bool) -> tuple[Any, Any, Any]:
    """Returns the example, head and tile of a program.

    The tiles that visit the most others start first, in all heads. The head is a query head or, if
    `of_keys`, a key head. Grid: heads of all examples, tiles.
    """
    place, rank = pl.program_id(0), pl.program_id(1)
    heads = plan.heads[of_keys]
    b, head = place // heads, place % heads
    key_head = head if of_keys else head // plan.group
    of_examples, of_heads, _ = x.order.shape
    at = b if of_examples > 1 else 0, key_head if of_heads > 1 else 0
    return b, head, entry(x.order, *at, rank)


def index_of(index):
    """Converts ints of an index to arrays: the interpreter reads the shape of every index."""
    return tuple(np.int32(i) if isinstance(i, int) else i for i in index)


def load(ref, index, conditions, other=0):
    """Loads the entries at `index`, with `other` where a condition is false."""
    index = index_of(index)
    if not conditions:
        return triton.load(ref.at[index])
    mask = functools.reduce(lambda a, b: a & b, conditions)
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return triton.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=other)


def entry(ref, *index):
    """Loads one number."""
    return triton.load(ref.at[index_of(index)])


def store(ref, index, value, there, size=None):
    """Stores rows `(t, width)` or `(t)` at `index`, without padding.

    `there` is the mask of valid rows, or None. `size` is the number of valid features of
    `(t, width)`; it is None for `(t)`.
    """
    conditions = [] if there is None else [there if size is None else there[:, None]]
    if size is not None and value.shape[-1] != size:
        feature = jnp.arange(value.shape[-1], dtype=jnp.int32)
        conditions.append((feature < size)[None, :])
    mask = None
    if conditions:
        mask = jnp.broadcast_to(functools.reduce(lambda a, b: a & b, conditions), value.shape)
    triton.store(ref.at[index_of(index)], value.astype(ref.dtype), mask=mask)


def put_rows(tile, ref, n, axis, head, value):
    """Stores `(t or s, width)` as tile n of queries (axis 0) or keys (1), without padding."""
    place, there = tile.indices(n, axis)
    feature = jnp.arange(value.shape[-1], dtype=jnp.int32)
    index = tile.b, place[:, None], head, feature[None, :]
    store(ref, index, value, there, ref.shape[-1])


def call(kernel, plan: Plan, inputs, grid, shapes, warps: int) -> list[jax.Array]:
    """Runs `kernel(plan, structure, *refs)`; refs are the leaves of `inputs`, then the results."""
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
