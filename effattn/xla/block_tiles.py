"""Tiles of the operands of block attention: reads, writes and matrix products.

In a tile, the G query heads of one key head are stacked as rows, r = G t, so each key head needs
plain matrix products only. Shapes are those of `effattn.xla.block_attention`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.arrays.products import widened
from effattn.interfaces.block_attention import Config, Inputs, softmax_dtype
from effattn.xla import tiling
from effattn.xla.walks import Listed, Whole, Window


def tile_of(config: Config, x: Inputs, kernel: str) -> tuple[int, int]:
    """Tile size of the kernel "forward" or "backward": the tuned one, or the default."""
    lengths = x.query.shape[-3], x.key.shape[-3]
    if tuned := config.implementations.tile("xla", kernel):
        return min(tuned[0], lengths[0]), min(tuned[1], lengths[1])
    rows, smallest = tiling.known_product(x.query.shape[:-3]) * x.query.shape[-2], 64
    if x.additive is not None:
        # Additive scores compute H hidden values for each logit.
        rows, smallest = rows * x.additive.shape[-1], 16
    backward = kernel == "backward"
    return tiling.choose_tile(
        lengths, rows, config.left, config.right, backward=backward, smallest=smallest
    )


class Tiles:
    """Reads and writes the rows of query tile n, and the keys and pairs of a patch.

    Attributes:
      walk: the iteration over tiles and patches.
      dtype: dtype of logits, weights and sums.
      row_shape: `(*B, K, r)`.
      query_scale, logit_scale: factors of the queries and of their products with keys.
    """

    def __init__(self, config: Config, x: Inputs, *, backward: bool = False):
        self.config, self.x = config, x
        self.batch_axes = x.key.ndim - 3
        self.dtype = softmax_dtype(x)
        offset = x.offset if config.offset is None else config.offset
        self.offset = jnp.asarray(offset, jnp.int32)
        self.walk = self._walk(backward)
        heads, key_heads = x.query.shape[-2], x.key.shape[-2]
        self.by_group = (key_heads, heads // key_heads)
        self.row_shape = (*x.key.shape[:-3], key_heads, self.by_group[1] * self.walk.query_tile)
        # In a layout, the keys of a query depend on the query tile that contains the query.
        self.rows_differ = x.layout is not None and self.walk.queries_overlap
        # Scaling a bfloat16 query would round it, so the scale multiplies the logits there.
        scale = 1.0 if config.scale is None else config.scale
        in_query = x.query.dtype == self.dtype
        self.query_scale, self.logit_scale = (scale, 1.0) if in_query else (1.0, scale)

    def _walk(self, backward):
        config, x = self.config, self.x
        lengths = (x.query.shape[-3], x.key.shape[-3])
        tile = config.tile if x.layout is None else x.layout.tile
        if tiling.is_open(*lengths):
            return Whole(lengths, lengths, always_masked=True)
        if tile is None:
            tile = tile_of(config, x, "backward" if backward else "forward")
        masked = any(a is not None for a in (x.mask, x.key_mask, x.segments))
        if x.layout is None:
            masked = masked or config.pattern is not None
            offset: Any = self.offset if config.offset is None else config.offset
            by_pair = x.bias is not None or x.mask is not None
            if x.positions is not None or (self.offset.ndim and by_pair):
                # Bias and mask are read in tiles that are the same for all examples.
                offset = None
            return Window(tile, lengths, masked, config.left, config.right, offset)
        masked = masked or config.left is not None or config.right is not None
        return Listed.of(tile, lengths, masked, x.layout, config.key_tiles)

    def full(self, shape, value, dtype=None):
        """Constant array that starts a loop."""
        return mesh_axes.vary_like(self.x.query, jnp.full(shape, value, dtype or self.dtype))

    def rows(self, array, n, only_new=False):
        """Reads query tile n of `(*B, T, N, ...)` as `(*B, K, r, ...)`.

        The last tile is shifted back to fit the length. With `only_new`, its rows that the previous
        tile covers too are zeros.
        """
        start, size, axis = self.walk.query_start(n), self.walk.query_tile, self.batch_axes
        tile = lax.dynamic_slice_in_dim(array, start, size, axis)
        if only_new and self.walk.queries_overlap:
            new = self._is_new(n).reshape(-1, *(1,) * (tile.ndim - axis - 1))
            tile = jnp.where(new, tile, 0)
        batch, rest = tile.shape[:axis], tile.shape[axis + 2 :]
        tile = tile.reshape(*batch, size, *self.by_group, *rest)
        return jnp.moveaxis(tile, axis, axis + 2).reshape(*self.row_shape, *rest)

    def _is_new(self, n):
        """bool `(t)`, False for rows of the last tile that the previous tile covers too."""
        size = self.walk.query_tile
        return self.walk.query_start(n) + jnp.arange(size, dtype=jnp.int32) >= n * size

    def scaled_query(self, n):
        """Reads the rows of the query, times `query_scale`."""
        query = self.rows(self.x.query, n)
        return query if self.query_scale == 1 else query * self.query_scale

    def put_rows(self, array, n, tile):
        """Writes `(*B, K, r, ...)` as query tile n of `(*B, T, N, ...)`."""
        start, size, axis = self.walk.query_start(n), self.walk.query_tile, self.batch_axes
        batch, rest = tile.shape[:axis], tile.shape[axis + 2 :]
        tile = jnp.moveaxis(tile.reshape(*batch, *self.by_group, size, *rest), axis + 2, axis)
        tile = tile.reshape(*batch, size, array.shape[axis + 1], *rest)
        if self.rows_differ:
            new = self._is_new(n).reshape(-1, *(1,) * (tile.ndim - axis - 1))
            tile = jnp.where(new, tile, lax.dynamic_slice_in_dim(array, start, size, axis))
        return lax.dynamic_update_slice_in_dim(array, tile, start, axis)

    def add_rows(self, array, n, tile):
        """Adds `(*B, K, r, ...)` to query tile n."""
        return self.put_rows(array, n, self.rows(array, n) + tile)

    def part(self, patch, array, axis=None):
        """Slices the rows of the patch from an array of all rows of the query tile."""
        if patch.first_row == 0:
            return array
        axis = self.batch_axes + 1 if axis is None else axis % array.ndim
        by_query = self._groups_apart(array, axis)
        return self._groups_together(
            lax.slice_in_dim(by_query, patch.first_row, None, axis=axis + 1), axis
        )

    def with_part(self, patch, array, part):
        """Replaces the rows of the patch in an array of all rows of the query tile."""
        if patch.first_row == 0:
            return part
        axis = self.batch_axes + 1
        rest = lax.slice_in_dim(self._groups_apart(array, axis), 0, patch.first_row, axis=axis + 1)
        whole = jnp.concatenate([rest, self._groups_apart(part, axis)], axis + 1)
        return self._groups_together(whole, axis)

    def _groups_apart(self, array, axis):
        """Splits the axis of rows r into two axes (G, t)."""
        group = self.by_group[1]
        shape = (*array.shape[:axis], group, array.shape[axis] // group, *array.shape[axis + 1 :])
        return array.reshape(shape)

    @staticmethod
    def _groups_together(array, axis):
        group, queries = array.shape[axis : axis + 2]
        return array.reshape(*array.shape[:axis], group * queries, *array.shape[axis + 2 :])

    def key_rows(self, patch, array):
        """Reads the keys of the patch from `(*B, S, K, H)` as `(*B, K, s, H)`."""
        start, axis = patch.key_start, array.ndim - 3
        if start.ndim == 0:
            return jnp.moveaxis(lax.dynamic_slice_in_dim(array, start, patch.keys, axis), -2, -3)
        size = patch.keys // start.shape[-1]

        def run(start, array):
            return lax.dynamic_slice_in_dim(array, start, size, array.ndim - 2)

        by_head, start = jnp.moveaxis(array, -2, -3), self._by_head(start)
        # Written run by run: XLA's CPU backend concatenates slices element by element.
        rows = jnp.broadcast_shapes(by_head.shape[:-2], start.shape[:-1])
        out = jnp.zeros((*rows, patch.keys, array.shape[-1]), array.dtype)
        for w in range(start.shape[-1]):
            part = _where_it_differs(run, start[..., w], by_head)
            out = lax.dynamic_update_slice_in_dim(out, part, w * size, by_head.ndim - 2)
        return out

    def add_keys(self, patch, array, tile):
        """Adds `(*B, K, H, s)` to `(*B, K, H, S)`."""

        def add(start, array, tile):
            axis = array.ndim - 1
            tile = tile + lax.dynamic_slice_in_dim(array, start, tile.shape[axis], axis)
            return lax.dynamic_update_slice_in_dim(array, tile, start, axis)

        start = patch.key_start
        if start.ndim == 0:
            return add(start, array, tile)
        start = self._by_head(start)
        for w, part in enumerate(jnp.split(tile, start.shape[-1], axis=-1)):
            array = _where_it_differs(add, start[..., w], array, part)
        return array

    def _by_head(self, start):
        """Reshapes `(*L, W)` to `(*#B, #K, W)`."""
        return start.reshape(*(1,) * (self.batch_axes + 2 - start.ndim), *start.shape)

    def of_keys(self, patch, array):
        """Reads the keys of the patch from `(*B, S)` as `(*B, #K, 1, 1, s)`."""
        return self.key_rows(patch, array[..., None, None])[..., None, None, :, 0]

    def pairs(self, patch, array):
        """Reads the patch from `(*#B, #K, #G, #T, #S)` as `(*#B, #K, #G, #t, #s)`."""
        if array is None:
            return None
        return lax.dynamic_slice(array, *self._pairs_at(patch, array))

    def add_pairs(self, patch, array, tile):
        """Adds `(*#B, #K, #G, #t, #s)` to the patch of `(*#B, #K, #G, #T, #S)`."""
        if array is None:
            return None
        starts, sizes = self._pairs_at(patch, array)
        tile = tile.astype(array.dtype) + lax.dynamic_slice(array, starts, sizes)
        return lax.dynamic_update_slice(array, tile, starts)

    @staticmethod
    def _pairs_at(patch, array):
        *leading, queries, keys = array.shape
        query_start = patch.query_start if queries > 1 else 0
        key_start = patch.key_start if keys > 1 else 0
        starts = [jnp.int32(start) for start in (*(0 for _ in leading), query_start, key_start)]
        return starts, [*leading, min(queries, patch.queries), min(keys, patch.keys)]

    def matmul(self, left, right, contract=-2):
        """One matrix product for each key head, accumulated in the dtype of the softmax.

        The product contracts the last axis of `left` with the axis `contract` of `right`.
        """
        axes, batch = (left.ndim - 1, right.ndim + contract), tuple(range(self.batch_axes + 1))
        product = functools.partial(
            lax.dot_general,
            dimension_numbers=(((axes[0],), (axes[1],)), (batch, batch)),
            precision=self.config.precision,
        )
        return widened(product, left, right, self.dtype)

    def _heads_apart(self, array):
        """Reshapes `(*B, K, r, s)` to `(*B, K, G, t, s)`."""
        return self._groups_apart(array, array.ndim - 2)

    def _heads_together(self, array):
        """Reshapes `(*B, K, G, t, s)` to `(*B, K, r, s)`."""
        return self._groups_together(array, array.ndim - 3)

    @staticmethod
    def _slice(array, start, size):
        return lax.dynamic_slice_in_dim(array, start, size, array.ndim - 1)


def _where_it_differs(function, start, *arrays):
    """Maps `function(start, *arrays)` over the leading axes on which `start` is longer than 1.

    The arrays broadcast along these axes.
    """
    axes = [axis for axis, size in enumerate(start.shape) if size > 1]
    for place, axis in reversed(list(enumerate(axes))):
        # Each enclosing vmap has removed one axis.
        at = axis - place
        in_axes = [at if array.shape[axis] > 1 else None for array in arrays]
        function = jax.vmap(function, in_axes=(0, *in_axes), out_axes=at)
    start = start.squeeze([axis for axis in range(start.ndim) if axis not in axes])
    shared = [[axis for axis in axes if array.shape[axis] == 1] for array in arrays]
    return function(start, *(a.squeeze(s) for a, s in zip(arrays, shared, strict=True)))
