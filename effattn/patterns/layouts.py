"""Block-sparse layouts: counts and indices of the tiles that attention visits.

Make a layout from a pattern (`effattn.patterns`), from a block mask, or from tile indices that a
model selects. A layout is a pytree of int32 arrays, concrete or traced; all layers can share it.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.patterns import characters

Array = jax.Array | np.ndarray

_DATA = ("partial_counts", "partial_indices", "full_counts", "full_indices")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """Block-sparse layout: the key tiles that each query tile visits.

    Tiles that are not listed hold no allowed pair. With tiles of t queries and s keys there are
    nq = ceil(T / t) query tiles and nk = ceil(S / s) key tiles; the last tiles may reach past the
    lengths. The leading axes *L are `()` if all heads share one layout, `(K,)` for one layout a key
    head, or `(*B, K)` if examples differ; axes of size 1 broadcast. In each row of indices, the
    first `counts` entries are distinct and ascend; the other entries are valid indices that are not
    visited.

    Attributes:
      partial_counts: int32 `(*L, nq)`, number of tiles with allowed and forbidden pairs.
      partial_indices: int32 `(*L, nq, p)`.
      full_counts: int32 `(*L, nq)`, number of tiles whose pairs within the lengths are all allowed.
      full_indices: int32 `(*L, nq, f)`.
      tile: (t, s), static.
      lengths: (T, S), static.

    Raises:
      ValueError: arrays that are not int32 or whose shapes do not fit each other or the lengths.
    """

    partial_counts: Array
    partial_indices: Array
    full_counts: Array
    full_indices: Array
    tile: tuple[int, int]
    lengths: tuple[int, int]

    def __post_init__(self):
        object.__setattr__(self, "tile", _pair("tile", self.tile))
        object.__setattr__(self, "lengths", _pair("lengths", self.lengths))
        rows = (*np.shape(self.partial_counts)[:-1], self.grid[0])
        for name in _DATA:
            array = getattr(self, name)
            if not isinstance(array, jax.Array | np.ndarray) or array.dtype != np.int32:
                kind = getattr(array, "dtype", type(array).__name__)
                raise ValueError(f"{name} must be an int32 array, got {kind}")
            shape = array.shape if name.endswith("counts") else array.shape[:-1]
            if shape != rows:
                more = "" if name.endswith("counts") else " and one more axis"
                raise ValueError(
                    f"{name} must have shape {rows}{more}, for {self.grid[0]} query tiles of "
                    f"{self.tile[0]} in {self.lengths[0]} tokens; got {array.shape}"
                )

    @classmethod
    def from_block_mask(
        cls,
        blocks: Array,
        *,
        tile: tuple[int, int],
        lengths: tuple[int, int],
        full: Array | None = None,
    ) -> "BlockLayout":
        """Makes a layout from bool `(*L, nq, nk)`, True at tiles to visit; traceable.

        Without `full`, all visited tiles are full, because there is no rule for single elements.
        `full` is bool of the same shape: tiles that are True in `full` are visited as full tiles,
        and tiles that are True only in `blocks` are partial.
        """
        tile, lengths = _pair("tile", tile), _pair("lengths", lengths)
        grid = _grid(tile, lengths)
        traced = _is_traced(blocks, full)
        if not traced:
            blocks, full = np.asarray(blocks), full if full is None else np.asarray(full)
        whole = blocks if full is None else full
        for name, array in (("blocks", blocks), ("full", whole)):
            if np.ndim(array) < 2 or np.shape(array)[-2:] != grid or array.dtype != bool:
                raise ValueError(
                    f"{name} must be bool of shape (..., {grid[0]}, {grid[1]}) for tiles of {tile} "
                    f"in {lengths} tokens, got {array.dtype} of shape {np.shape(array)}"
                )
        if np.shape(blocks) != np.shape(whole):
            raise ValueError(
                f"full must have the shape of blocks, {np.shape(blocks)}, got {np.shape(whole)}"
            )
        pack = _packed_traced if traced else _packed
        return cls(*pack(blocks & ~whole), *pack(whole), tile, lengths)

    @classmethod
    def from_indices(
        cls,
        indices: Array,
        *,
        tile: tuple[int, int],
        lengths: tuple[int, int],
        partial: Array | None = None,
    ) -> "BlockLayout":
        """Makes a layout from int `(*L, nq, k)`: up to k key tiles of each query tile; traceable.

        -1 means no tile, and a tile that is listed twice is visited once. All tiles are full, as a
        top-k selection by a model needs, except tiles that `partial`, int `(*L, nq, p)`, lists.
        Concrete indices are checked.
        """
        tile, lengths = _pair("tile", tile), _pair("lengths", lengths)
        queries, keys = _grid(tile, lengths)
        xp: Any = jnp if _is_traced(indices, partial) else np
        none = np.full((queries, 1), -1)
        full, some = (xp.asarray(a) for a in (indices, none if partial is None else partial))
        for name, array in (("indices", full), ("partial", some)):
            if not xp.issubdtype(array.dtype, xp.integer) or array.shape[-2:-1] != (queries,):
                raise ValueError(
                    f"{name} must be integers of shape (..., {queries}, k), one row for each query "
                    f"tile of {tile[0]} in {lengths[0]} tokens, got {array.dtype} of shape "
                    f"{array.shape}"
                )
            if xp is np and array.size and (array.min() < -1 or array.max() >= keys):
                raise ValueError(
                    f"{name} must lie in 0 to {keys - 1}, for {keys} key tiles of {tile[1]} in "
                    f"{lengths[1]} tokens, or be -1 for none; got {array.min()} to {array.max()}"
                )
        rows = np.broadcast_shapes(full.shape[:-1], some.shape[:-1])
        full, some = full.astype(np.int32), some.astype(np.int32)
        full, some = (xp.broadcast_to(a, (*rows, a.shape[-1])) for a in (full, some))
        full = xp.where((full[..., None] == some[..., None, :]).any(-1), -1, full)
        halves = _distinct(some, keys, xp), _distinct(full, keys, xp)
        return cls(*halves[0], *halves[1], tile, lengths)

    @property
    def grid(self) -> tuple[int, int]:
        """(nq, nk), the numbers of query tiles and key tiles."""
        return _grid(self.tile, self.lengths)

    @property
    def kept(self) -> Any:
        """Number of visited tiles of all heads together: an int, or traced `()`."""
        total = self.partial_counts.sum() + self.full_counts.sum()
        return total if _is_traced(total) else int(total)

    @property
    def density(self) -> Any:
        """Share of tiles that are visited, equal to the share of the work."""
        return self.kept / (math.prod(self.partial_counts.shape) * self.grid[1])

    def block_mask(self, kind: str | None = None) -> Array:
        """Returns bool `(*L, nq, nk)`, True at visited tiles; traceable.

        `kind` selects only "partial" or only "full" tiles.
        """
        if kind is not None:
            return self._mask(kind)
        return self._mask("partial") | self._mask("full")

    @property
    def is_traced(self) -> bool:
        """True if the tiles are known only when a program runs."""
        return _is_traced(self.partial_indices, self.full_indices)

    def transpose(self) -> "BlockLayout":
        """Returns the transposed layout: the query tiles that visit each key tile.

        The gradient of the keys sums over the transposed layout. Time O(tiles visited) for concrete
        arrays; O(nq nk) for traced arrays, whose index rows then have width nq.
        """
        lengths, tile = self.lengths[::-1], self.tile[::-1]
        if self.is_traced:
            halves = [
                _packed_traced(jnp.swapaxes(self._mask(kind), -1, -2))
                for kind in ("partial", "full")
            ]
        else:
            lead, (queries, keys) = self.partial_counts.shape[:-1], self.grid
            halves = []
            for kind in ("partial", "full"):
                row, key = self.tiles(kind)
                head, query = np.divmod(row, queries)
                order = np.argsort(head * keys + key, kind="stable")
                halves.append(packed((head * keys + key)[order], query[order], (*lead, keys)))
        return BlockLayout(*halves[0], *halves[1], tile, lengths)

    def draw(self, width: int = 64, head: int = 0) -> str:
        """Returns a text picture, at most `width` characters wide: see `effattn.analysis.text`.

        `effattn.analysis.draw` draws a figure of the layout.
        """
        return characters.lines(characters.layout_shades(self, head), width)

    def __repr__(self) -> str:
        (queries, keys), (t, s) = self.lengths, self.tile
        text = f"BlockLayout({queries} x {keys} tokens in tiles of {t} x {s}"
        lead = np.shape(self.partial_counts)[:-1]
        if lead:
            text += f" for {' x '.join(map(str, lead))} heads"
        counts = self.partial_counts, self.full_counts
        if not all(isinstance(array, jax.Array | np.ndarray) for array in counts):
            return text + ")"
        if _is_traced(*counts):
            return text + ", traced)"
        partial, full = (int(array.sum()) for array in counts)
        total = math.prod(self.partial_counts.shape) * self.grid[1]
        share = 100 * (partial + full) / total
        return f"{text}: {partial} partial + {full} full of {total} tiles ({share:.3g} %))"

    def tiles(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (row, key tile) of all tiles of a kind, "partial" or "full"; concrete only.

        Rows count through `*L` and the query tiles.
        """
        counts = np.asarray(getattr(self, f"{kind}_counts")).reshape(-1)
        indices = np.asarray(getattr(self, f"{kind}_indices"))
        indices = indices.reshape(counts.size, indices.shape[-1])
        row, place = np.nonzero(np.arange(indices.shape[-1]) < counts[:, None])
        return row, indices[row, place].astype(np.int64)

    def _mask(self, kind: str) -> Array:
        counts, indices = getattr(self, f"{kind}_counts"), getattr(self, f"{kind}_indices")
        xp: Any = jnp if _is_traced(counts, indices) else np
        counts, indices = xp.asarray(counts), xp.asarray(indices)
        keys = self.grid[1]
        # Unused entries beyond the counts go to an extra column, which is cut off.
        column = xp.where(np.arange(indices.shape[-1]) < counts[..., None], indices, keys)
        mask = xp.zeros((*counts.shape, keys + 1), bool)
        if xp is np:
            np.put_along_axis(mask, column, True, axis=-1)
        else:
            mask = jnp.put_along_axis(mask, column, True, axis=-1, inplace=False)
        return mask[..., :keys]


class KnownLayout:
    """A layout of NumPy arrays as a static argument: equal to layouts of the same tiles.

    Attributes:
      layout: the layout.
    """

    def __init__(self, layout: BlockLayout):
        self.layout = layout
        arrays = (np.ascontiguousarray(getattr(layout, name)) for name in _DATA)
        held = [(array.shape, array.tobytes()) for array in arrays]
        self._key = (layout.tile, layout.lengths, *held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownLayout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def packed(
    row: np.ndarray, index: np.ndarray, rows: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Packs ascending pairs (row, index) into counts `(*rows)` and indices `(*rows, most)`, int32.

    `row` counts through `rows`. Each row has at least one index slot, so that no array is empty.
    """
    counts = np.bincount(row, minlength=math.prod(rows))
    indices = np.zeros((counts.size, max(1, int(counts.max(initial=0)))), np.int32)
    indices[row, np.arange(row.size) - np.repeat(counts.cumsum() - counts, counts)] = index
    return counts.astype(np.int32).reshape(rows), indices.reshape(*rows, -1)


def _distinct(indices: Array, keys: int, xp: Any) -> tuple[Array, Array]:
    """Returns counts and sorted indices of the distinct entries of each row, without -1."""
    ordered = xp.sort(xp.where(indices < 0, keys, indices), axis=-1)
    again = xp.concatenate([ordered[..., :1] >= keys, ordered[..., 1:] == ordered[..., :-1]], -1)
    ordered = xp.sort(xp.where(again, keys, ordered), axis=-1).astype(np.int32)
    return (ordered < keys).sum(-1, dtype=np.int32), xp.minimum(ordered, keys - 1)


def _packed(blocks: Array) -> tuple[Array, Array]:
    *place, index = np.nonzero(np.asarray(blocks))
    rows = blocks.shape[:-1]
    return packed(np.ravel_multi_index(tuple(place), rows), index, rows)


def _packed_traced(blocks: Array) -> tuple[Array, Array]:
    indices = jnp.argsort(~blocks, axis=-1, stable=True)
    return blocks.sum(-1, dtype=jnp.int32), indices.astype(jnp.int32)


def _is_traced(*arrays: Any) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _grid(tile: tuple[int, int], lengths: tuple[int, int]) -> tuple[int, int]:
    return -(-lengths[0] // tile[0]), -(-lengths[1] // tile[1])


def _pair(name: str, value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, tuple | list)
        or len(value) != 2
        or not all(checks.is_integer(side) and side > 0 for side in value)
    ):
        raise ValueError(f"{name} must be a pair (queries, keys) of positive ints, got {value!r}")
    return int(value[0]), int(value[1])


def _flatten(layout: BlockLayout):
    keys = (jax.tree_util.GetAttrKey(name) for name in _DATA)
    data = tuple(getattr(layout, name) for name in _DATA)
    return tuple(zip(keys, data, strict=True)), (layout.tile, layout.lengths)


def _unflatten(meta, data) -> BlockLayout:
    # Skips the checks: JAX transformations put other leaves (axes, cotangents) in the tree.
    layout = object.__new__(BlockLayout)
    fields = zip((*_DATA, "tile", "lengths"), (*data, *meta), strict=True)
    for name, value in fields:
        object.__setattr__(layout, name, value)
    return layout


jax.tree_util.register_pytree_with_keys(BlockLayout, _flatten, _unflatten)
