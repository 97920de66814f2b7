r"""Tiled softmax attention in XLA, with memory linear in length, forward and backward.

Each tile is computed as in FlashAttention (Dao et al. 2022, Dao 2023). The forward pass is an
online softmax. The backward pass recomputes the weights P from the saved log-sum-exp L:

    P = exp(logits - L),    dV = P^T dO,    dP = dO V^T,
    d logits = P * (dP - delta),            delta = rowsum(dO * O) - dL

The gradients of query, key, bias and the arrays that `score_mod` closes over follow from d logits.

Both passes visit the same tiles (`effattn.xla.tiling`): for each query tile, the key tiles that
causality, the window or a block-sparse layout leave non-empty. Only tiles at the border of the
allowed region compute a mask. Batch and heads stay axes of every product, so they can be sharded.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K; query length T in tiles of t,
key length S in tiles of s; head dimensions H and Hv. In a tile, the G query heads of one key head
are stacked as rows, r = G t, so each key head needs plain matrix products only.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.arrays import dropout, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.products import widened
from effattn.arrays.segments import positions_from
from effattn.interfaces.block_attention import Config, Inputs, softmax_dtype
from effattn.xla import tiling
from effattn.xla.tiling import Listed, Window

LIMITS = dispatch.Limits()


def refusal(config: Config, x: Inputs) -> str | None:
    """None: XLA accepts every call."""
    return None


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Tile sizes for `effattn.tune` to try: half, equal to and twice the default, per pass."""
    own_choice = dataclasses.replace(config, implementations=dispatch.XLA)
    found = {}
    for kernel in ("forward", "backward"):
        own = _tile(own_choice, x, kernel)
        sides = [
            dict.fromkeys(min(max(size, 16), length) for size in (side // 2, side, 2 * side))
            for side, length in zip(own, (x.query.shape[-3], x.key.shape[-3]), strict=True)
        ]
        found[kernel] = tuple(each for each in itertools.product(*sides) if each != own)
    return found


def _tile(config, x, kernel):
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


def forward(config: Config, x: Inputs, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Forward pass: output in `dtype`, log-sum-exp L, and `lse_error`, the rounding error of L.

    `lse_error` is the exact log-sum-exp minus the rounded L, `(*B, T, N)`. Rows without keys have
    a zero output and L = -inf.
    """
    tiles = _Tiles(config, x)
    rows, size = tiles.row_shape, x.value.shape[-1]

    def query_tile(n, outputs):
        query = tiles.scaled_query(n)

        def key_tile(patch, carry):
            largest, total, mixed = (tiles.part(patch, array) for array in carry)
            keys, values = tiles.key_rows(patch, x.key), tiles.key_rows(patch, x.value)
            products = tiles.products(tiles.part(patch, query), keys)
            bias = tiles.pairs(patch, x.bias)
            logits = tiles.masked(patch, tiles.scores(patch, products, bias, x.scale, x.constants))
            if config.activation is not None:
                weights = tiles.dropped(patch, tiles.activated(logits)).astype(values.dtype)
                mixed = mixed + tiles.matmul(weights, values)
                return *carry[:2], tiles.with_part(patch, carry[2], mixed)
            new = jnp.maximum(largest, logits.max(-1))
            weights = jnp.exp(logits - new[..., None])
            decay = jnp.exp(largest - new)
            total = total * decay + weights.sum(-1)
            weights = tiles.dropped(patch, weights).astype(values.dtype)
            mixed = mixed * decay[..., None] + tiles.matmul(weights, values)
            put = functools.partial(tiles.with_part, patch)
            return tuple(map(put, carry, (new, total, mixed)))

        start = (
            # Finite, so that rows without keys so far never compute inf - inf.
            tiles.full(rows, jnp.finfo(tiles.dtype).min),
            tiles.full(rows, 0),
            tiles.full((*rows, size), 0),
        )
        largest, total, mixed = tiles.walk.over_keys(n, key_tile, start)
        if config.activation is not None:
            total = total + 1
        total_or_one = jnp.where(total == 0, 1, total)
        log_total = jnp.log(total_or_one)
        log_sum = largest + log_total
        new = (
            (mixed / total_or_one[..., None]).astype(dtype),
            jnp.where(total == 0, -jnp.inf, log_sum),
            log_total - (log_sum - largest),
        )
        return tuple(
            tiles.put_rows(array, n, rows) for array, rows in zip(outputs, new, strict=True)
        )

    out = tiles.full((*x.query.shape[:-1], size), 0, dtype)
    of_rows = tiles.full(x.query.shape[:-1], 0)
    return tiles.walk.over_queries(query_tile, (out, of_rows, of_rows))


def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, delta: jax.Array
) -> Inputs:
    """Backward pass: gradients of the inputs.

    Args:
      config: static configuration.
      x: the inputs of the forward pass.
      lse: log-sum-exp `(*B, T, N)`.
      d_out: gradient of the output, `(*B, T, N, Hv)`.
      delta: `(*B, T, N)`, rowsum(dO * O) - dL.
    """
    tiles = _Tiles(config, x, backward=True)
    *batch, keys, heads, size = x.key.shape
    floating, rejoin = _partition(x.constants)

    def query_tile(n, gradients):
        d_query, *others = gradients
        query = tiles.scaled_query(n)
        query_columns = jnp.swapaxes(query, -1, -2)
        d_out_tile = tiles.rows(d_out, n, only_new=True)
        d_out_columns = jnp.swapaxes(d_out_tile, -1, -2)
        delta_tile = tiles.rows(delta, n, only_new=True)[..., None]
        lse_tile = tiles.rows(lse, n)[..., None]
        lse_tile = jnp.where(lse_tile == -jnp.inf, 0, lse_tile)

        def key_tile(patch, carry):
            d_query_tile, d_key, d_value, d_bias, d_additive, d_constants = carry
            part = functools.partial(tiles.part, patch)
            keys, values = tiles.key_rows(patch, x.key), tiles.key_rows(patch, x.value)
            products, gradients_of = tiles.differentiated(
                part(query), part(query_columns, -1), keys, d_additive
            )
            logits, pull_back = jax.vjp(
                lambda products, bias, scale, floating: tiles.scores(
                    patch, products, bias, scale, rejoin(floating)
                ),
                products,
                tiles.pairs(patch, x.bias),
                x.scale,
                floating,
            )
            weights, gradients_of_weights = tiles.weights(
                tiles.masked(patch, logits), part(lse_tile), part(delta_tile)
            )
            dropped = tiles.dropped(patch, weights).astype(x.value.dtype)
            d_value_tile = tiles.matmul(part(d_out_columns, -1), dropped)
            d_weights = tiles.dropped(patch, tiles.matmul(part(d_out_tile), values, contract=-1))
            d_products, d_bias_tile, *d_constants_tile = pull_back(gradients_of_weights(d_weights))
            d_rows, d_key_tile, d_additive = gradients_of(d_products.astype(query.dtype))
            return (
                tiles.with_part(patch, d_query_tile, part(d_query_tile) + d_rows),
                tiles.add_keys(patch, d_key, d_key_tile),
                tiles.add_keys(patch, d_value, d_value_tile),
                tiles.add_pairs(patch, d_bias, d_bias_tile),
                d_additive,
                jax.tree.map(operator.add, d_constants, d_constants_tile),
            )

        start = (tiles.full(query.shape, 0), *others)
        d_query_tile, *others = tiles.walk.over_keys(n, key_tile, start)
        d_query_tile = (d_query_tile * tiles.query_scale).astype(d_query.dtype)
        return (tiles.add_rows(d_query, n, d_query_tile), *others)

    wide = None if x.bias is None else dtypes.common(tiles.dtype, x.bias.dtype)
    # Gradients of keys and values have the key axis last: then each product reads its larger
    # operand, the weights, row by row.
    start = (
        tiles.full(x.query.shape, 0, x.query.dtype),
        tiles.full((*batch, heads, size, keys), 0),
        tiles.full((*batch, heads, x.value.shape[-1], keys), 0),
        None if x.bias is None else tiles.full(x.bias.shape, 0, wide),
        None if x.additive is None else tiles.full(x.additive.shape, 0),
        jax.tree.map(_sum_of, [x.scale, floating]),
    )
    d_query, d_key, d_value, d_bias, d_additive, d_constants = tiles.walk.over_queries(
        query_tile, start
    )
    d_scale, d_floating = jax.tree.map(
        lambda d, c: d.astype(c.dtype), d_constants, [x.scale, floating]
    )
    gradients = Inputs(
        query=d_query,
        key=jnp.moveaxis(d_key, -1, -3).astype(x.key.dtype),
        value=jnp.moveaxis(d_value, -1, -3).astype(x.value.dtype),
        bias=None if x.bias is None else d_bias.astype(x.bias.dtype),
        scale=d_scale,
        additive=None if x.additive is None else d_additive.astype(x.additive.dtype),
        constants=rejoin(d_floating, other=None),
    )
    return gradients


def _sum_of(array):
    """Zeros to accumulate the array's gradient, at least float32: 16-bit sums lose small terms."""
    dtype = dtypes.wide(array.dtype)
    return mesh_axes.vary_like(array, jnp.zeros(array.shape, dtype))


def _partition(constants):
    """Returns the floating-point constants, and a function that merges them with the others.

    The function also merges gradients of the floating-point constants (`other=None`: None for the
    constants without gradients).
    """
    is_floating = [jnp.issubdtype(c.dtype, jnp.inexact) for c in constants]
    floating = [c for c, f in zip(constants, is_floating, strict=True) if f]

    def rejoin(floating, other=constants):
        floating = iter(floating)
        other = (None,) * len(constants) if other is None else other
        return tuple(next(floating) if f else o for f, o in zip(is_floating, other, strict=True))

    return floating, rejoin


def _over_leading(function, axes: int, *arrays):
    """Maps `function` over the first `axes` axes of the arrays, which broadcast."""
    if axes == 0:
        return function(*arrays)
    shared = [array.shape[0] == 1 for array in arrays]
    shared = [False] * len(arrays) if all(shared) else shared
    parts = [array[0] if s else array for array, s in zip(arrays, shared, strict=True)]
    mapped = jax.vmap(
        functools.partial(_over_leading, function, axes - 1),
        in_axes=[None if s else 0 for s in shared],
    )
    return mapped(*parts)


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


class _Tiles:
    """Tile operations: reads and writes rows of query tile n, and scores a patch of pairs."""

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
            return tiling.Whole(tile or (1, 1), lengths, True)
        if tile is None:
            tile = _tile(config, x, "backward" if backward else "forward")
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
        return Listed(tile, lengths, masked, x.layout, config.key_tiles)

    def full(self, shape, value, dtype=None):
        """Constant array that starts a loop."""
        return mesh_axes.vary_like(self.x.query, jnp.full(shape, value, dtype or self.dtype))

    # Tiles of the operands

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
        query = self.rows(self.x.query, n)
        return query if self.query_scale == 1 else query * self.query_scale

    def put_rows(self, array, n, tile):
        start, size, axis = self.walk.query_start(n), self.walk.query_tile, self.batch_axes
        batch, rest = tile.shape[:axis], tile.shape[axis + 2 :]
        tile = jnp.moveaxis(tile.reshape(*batch, *self.by_group, size, *rest), axis + 2, axis)
        tile = tile.reshape(*batch, size, array.shape[axis + 1], *rest)
        if self.rows_differ:
            new = self._is_new(n).reshape(-1, *(1,) * (tile.ndim - axis - 1))
            tile = jnp.where(new, tile, lax.dynamic_slice_in_dim(array, start, size, axis))
        return lax.dynamic_update_slice_in_dim(array, tile, start, axis)

    def add_rows(self, array, n, tile):
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

    # Scores

    def products(self, query, keys):
        """Raw scores `(*B, K, r, s)` of query rows `(*B, K, r, H)` and keys `(*B, K, s, H)`."""
        if self.x.additive is None:
            return self.matmul(query, keys, contract=-1)
        return self._additive(query, keys, self.x.additive)

    def _additive(self, query, keys, weights):
        query, keys, weights = (a.astype(self.dtype) for a in (query, keys, weights))
        hidden = jnp.tanh(query[..., :, None, :] + keys[..., None, :, :])
        return jnp.einsum("...krsh,kh->...krs", hidden, weights, precision=self.config.precision)

    def differentiated(self, query, query_columns, keys, d_additive):
        """Returns the products and their pull-back function.

        The pull-back maps gradients of the products to gradients of the query rows, of the keys
        `(*B, K, H, s)`, and of the additive weights (added to `d_additive`).
        """
        if self.x.additive is None:

            def gradients_of(d_products):
                d_keys = self.matmul(query_columns, d_products)
                return self.matmul(d_products, keys), d_keys, None

            return self.products(query, keys), gradients_of
        products, pull_back = jax.vjp(self._additive, query, keys, self.x.additive)

        def gradients_of_additive(d_products):
            d_rows, d_keys, d_weights = pull_back(d_products.astype(products.dtype))
            d_keys = jnp.swapaxes(d_keys.astype(self.dtype), -1, -2)
            return d_rows.astype(self.dtype), d_keys, d_additive + d_weights

        return products, gradients_of_additive

    def query_positions(self, patch):
        """Query positions `(t)`, or `(*B, t)` if the offset differs by example."""
        return positions_from(self.offset + patch.query_start, patch.queries)

    def key_positions(self, patch):
        """Key positions `(s)`, or `(*L, 1, 1, s)` in a layout that differs by head or example."""
        return self._along_keys(patch, patch.key_start, ahead=1)

    def _along_keys(self, patch, first, ahead=0):
        """Expands one number per run of keys to one per key: key m of a run adds `ahead` * m."""
        size = patch.keys // (first.shape[-1] if first.ndim else 1)
        index = lead(jnp.arange(size, dtype=jnp.int32), first.ndim + 1)
        each = first[..., None] + ahead * index
        each = each.reshape(*first.shape[:-1], patch.keys)
        return each if each.ndim == 1 else each[..., None, None, :]

    def _indices(self, patch):
        """Indices b, h, i and j of the patch's pairs, each `(*#B, #K, #G, #t, #s)`."""
        batch = self.x.key.shape[:-3]
        b = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(*batch, 1, 1, 1, 1)
        h = jnp.arange(math.prod(self.by_group), dtype=jnp.int32).reshape(*self.by_group, 1, 1)
        if self.x.positions is None:
            i, j = self.query_positions(patch), self.key_positions(patch)
        else:
            of_query, of_key = self.x.positions
            i = self._slice(of_query, patch.query_start, patch.queries)
            j = self.of_keys(patch, of_key)
        i = i[..., None, None, :, None]
        return tuple(lead(array, b.ndim) for array in (b, h, i, j))

    def _heads_apart(self, array):
        """Reshapes `(*B, K, r, s)` to `(*B, K, G, t, s)`."""
        return self._groups_apart(array, array.ndim - 2)

    def _heads_together(self, array):
        """Reshapes `(*B, K, G, t, s)` to `(*B, K, r, s)`."""
        return self._groups_together(array, array.ndim - 3)

    def scores(self, patch, products, bias, scale, constants):
        """The logits `(*B, K, r, s)` of a patch, before any mask."""
        scale = self.logit_scale if scale is None else scale.astype(products.dtype)
        logits = products if isinstance(scale, float) and scale == 1 else products * scale
        if bias is not None:
            bias = bias.astype(logits.dtype)
            logits = self._heads_together(self._heads_apart(logits) + bias)
        if self.config.soft_cap is not None:
            logits = self.config.soft_cap * jnp.tanh(logits / self.config.soft_cap)
        if self.config.score_mod is not None:
            logits = self._heads_apart(logits)
            score = functools.partial(self._score_at_origin, constants)
            at = self._indices(patch)
            logits = self._heads_together(_over_leading(score, logits.ndim, logits, *at))
        return logits.astype(products.dtype)

    def _score_at_origin(self, constants, logit, b, h, i, j):
        if self.config.origin is not None:
            b, h, i, j = self.config.origin(b, h, i, j)
        assert self.config.score_mod is not None
        return self.config.score_mod(constants, *mesh_axes.vary_alike((logit, b, h, i, j)))

    def activated(self, logits):
        """Weights by an elementwise activation in place of the softmax."""
        if self.config.activation == "sigmoid":
            return jax.nn.sigmoid(logits)
        return jnp.square(jax.nn.relu(logits))

    def weights(self, logits, lse, delta):
        """Returns the weights and the pull-back from their gradients to those of the logits."""
        if self.config.activation is None:
            weights = jnp.exp(logits - lse)
            return weights, lambda d_weights: weights * (d_weights - delta)
        weights, pull_back = jax.vjp(self.activated, logits)
        return weights, lambda d_weights: pull_back(d_weights)[0]

    def masked(self, patch, logits):
        """Sets the logits to -inf where a pair may not attend."""
        if not patch.masked:
            return logits
        x, config, axes = self.x, self.config, self.batch_axes + 4
        _, h, i, j = self._indices(patch)
        allowed = []
        if config.right is not None:
            allowed.append(j <= i + config.right)
        if config.left is not None:
            allowed.append(j >= i - config.left)
        if config.pattern is not None:
            allowed.append(config.pattern.allows(i, j, h))
        if self.walk.keys_overlap or x.layout is not None:
            index = self._along_keys(patch, patch.key_start, ahead=1)
            of_new = self._along_keys(patch, patch.new_key)
            allowed.append(lead(index, axes) >= lead(of_new, axes))
        if self.rows_differ:
            index = patch.query_start + jnp.arange(patch.queries, dtype=jnp.int32)
            allowed.append((index >= patch.new_query)[:, None])
        if x.key_mask is not None:
            allowed.append(self.of_keys(patch, x.key_mask))
        if x.segments is not None:
            of_query, of_key = x.segments
            of_query = self._slice(of_query, patch.query_start, patch.queries)
            allowed.append(of_query[..., None, None, :, None] == self.of_keys(patch, of_key))
        if x.mask is not None:
            allowed.append(self.pairs(patch, x.mask))
        if not allowed:
            return logits
        all_allow = functools.reduce(operator.and_, (lead(each, axes) for each in allowed))
        if config.pattern is not None:
            # Computed once for all heads; without the barrier XLA recomputes the mask at each use.
            all_allow = lax.optimization_barrier(all_allow)
        return self._heads_together(jnp.where(all_allow, self._heads_apart(logits), -jnp.inf))

    @staticmethod
    def _slice(array, start, size):
        return lax.dynamic_slice_in_dim(array, start, size, array.ndim - 1)

    def dropped(self, patch, weights):
        """Dropout of weights. Dropout is linear, so this is also its own pull-back."""
        rate = self.config.dropout_rate
        if rate == 0 or self.x.seed is None:
            return weights
        b, h, i, j = self._indices(patch)
        if self.config.origin is not None:
            b, h, i, j = self.config.origin(b, h, i, j)
        keep = dropout.keep(self.x.seed, rate, b, h, i, j)
        return self._heads_together(jnp.where(keep, self._heads_apart(weights) / (1 - rate), 0))
