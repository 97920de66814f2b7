"""Plan and operands of the block-attention kernels in the Triton language."""

import dataclasses
from typing import Any, NamedTuple

from effattn.pallas import block_tiles
from effattn.pallas.block_tiles import Arrays
from effattn.triton import elementwise, launch


class Operands(NamedTuple):
    """Operands of the kernels, as in `effattn.pallas.block_tiles.Arrays`.

    A kernel never reads an absent operand; another array takes its place. `integers` and `numbers`
    are the tables of the programs. With a layout, the lists of visited tiles are counts of partial
    and of full tiles, `(B or 1, K or 1, rows)`, and the indices of these tiles, with one more axis.
    Without a layout, `partial_counts` has the four numbers of `visited_tiles.walk_arrays`,
    `(B or 1, 1, tiles, 4)`, and the others are absent. `order` is that of
    `visited_tiles.walk_and_order`, with the axes of the counts.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    scale: Any
    offset: Any
    query_positions: Any
    key_positions: Any
    query_ids: Any
    key_ids: Any
    integers: Any
    numbers: Any
    partial_counts: Any
    full_counts: Any
    partial_tiles: Any
    full_tiles: Any
    order: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and rules of the kernels.

    Attributes:
      queries, keys, heads, key_heads, size, value_size: T, S, N, K, H and Hv.
      t, s: queries and keys of a tile.
      scale, soft_cap, left, right, rate: of the configuration; `rate` is that of dropout, and
        `scale` is None if it is an array.
      precision: of products: "tf32", or "tf32x3" for full float32.
      offset_by_example, has_query_positions, has_key_positions, has_query_ids, has_key_ids,
        has_bias, has_mask: which operands are present.
      bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j: strides of bias and mask; 0
        along axes over which they are broadcast.
      has_layout: whether a block-sparse layout lists the visited tiles.
      walk_by_example, walk_by_head, walk_heads, walk_rows: axes of these lists.
      layout_rows, layout_columns: tiles of the kernel in a tile of the layout, along the axis of
        the program's own tile and along the axis of the walk.
      partial_columns, full_columns: lengths of the lists of a layout.
      score, d_score, add_reads, pattern, keep: functions in the Triton language, or None.
      entries: length of the sums that `add_reads` adds to.
      batch: number of examples, for the gradient of the bias; 0 in other kernels.
      examples: number of examples of the call, if functions of pairs read their index; else 1.
      layout_keys: keys of a tile of the layout; without one, `s`.
    """

    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int
    value_size: int
    t: int
    s: int
    scale: float | None
    soft_cap: float | None
    left: int | None
    right: int | None
    rate: float
    precision: str
    offset_by_example: bool
    has_query_positions: bool
    has_key_positions: bool
    has_query_ids: bool
    has_key_ids: bool
    has_bias: bool
    has_mask: bool
    bias_b: int
    bias_h: int
    bias_i: int
    bias_j: int
    mask_b: int
    mask_h: int
    mask_i: int
    mask_j: int
    has_layout: bool
    walk_by_example: bool
    walk_by_head: bool
    walk_heads: int
    walk_rows: int
    layout_rows: int
    layout_columns: int
    partial_columns: int
    full_columns: int
    score: Any
    d_score: Any
    add_reads: Any
    pattern: Any
    keep: Any
    entries: int
    batch: int
    examples: int
    layout_keys: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.key_heads

    @property
    def query_tiles(self) -> int:
        """Number of tiles of queries."""
        return -(-self.queries // self.t)

    @property
    def key_tiles(self) -> int:
        """Number of tiles of keys."""
        return -(-self.keys // self.s)

    @property
    def width(self) -> int:
        """Features of a tile, a power of two."""
        return max(launch.MIN_SIDE, launch.power_of_2(self.size))

    @property
    def value_width(self) -> int:
        """Values of a tile, a power of two."""
        return max(launch.MIN_SIDE, launch.power_of_2(self.value_size))

    @property
    def steps_m(self) -> int:
        """Number of key tiles over which the gradient of the bias is summed."""
        return 1 if self.bias_j else self.key_tiles

    @property
    def steps_n(self) -> int:
        """Number of query tiles over which it is summed."""
        return 1 if self.bias_i else self.query_tiles

    @property
    def steps_h(self) -> int:
        """Number of heads over which it is summed."""
        return 1 if self.bias_h else self.heads

    @property
    def bias_steps(self) -> int:
        """Number of tiles that a program of the gradient of the bias sums."""
        examples = 1 if self.bias_b else self.batch
        return self.steps_m * self.steps_n * self.steps_h * examples

    @property
    def bias_key_tiles(self) -> int:
        """Number of key tiles of the bias."""
        return self.key_tiles if self.bias_j else 1

    @property
    def bias_query_tiles(self) -> int:
        """Number of query tiles of the bias."""
        return self.query_tiles if self.bias_i else 1

    @property
    def kind_columns(self) -> int:
        """Number of tiles in a row of a layout."""
        return -(-self.key_tiles // self.layout_columns)

    @property
    def masks_whole(self) -> bool:
        """True if whole tiles need all masks but the element rule of the pattern."""
        return self.has_layout


def is_per_example(array: Any, batch: int, *, is_large: bool = False) -> bool:
    """Returns whether an array has a part for each example; otherwise all examples share it.

    `jax.vmap` repeats the arrays of examples that are not mapped. A large array therefore counts as
    shared if there is one example.
    """
    return array.shape[0] == batch and not (batch == 1 and is_large)


def plan_of(
    arranged: block_tiles.Plan,
    arrays: Arrays,
    walk: tuple[Any, ...],
    tables: elementwise.Tables,
    *,
    of_keys: bool,
    of_all: bool,
) -> Plan:
    """Returns the plan of a kernel.

    Args:
      arranged: plan that all block-attention kernels share.
      arrays: operands.
      walk: lists of visited tiles.
      tables: tables of the programs of `arranged`.
      of_keys: whether the kernel walks over queries, for a tile of keys.
      of_all: whether a program reads all examples.
    """
    batch = arrays.query.shape[0]
    config, layout = arranged.config, arranged.layout_tile
    rows, columns = 1, 1
    if layout is not None:
        rows, columns = (a // b for a, b in zip(layout, arranged.tile, strict=True))
        rows, columns = (columns, rows) if of_keys else (rows, columns)
    lists = walk[0].shape
    functions = _functions(arranged, tables)
    return Plan(
        queries=arranged.lengths[0],
        keys=arranged.lengths[1],
        heads=arranged.heads[0],
        key_heads=arranged.heads[1],
        size=arranged.sizes[0],
        value_size=arranged.sizes[1],
        t=arranged.tile[0],
        s=arranged.tile[1],
        scale=None if config.scale is None or arrays.scale is not None else float(config.scale),
        soft_cap=config.soft_cap,
        left=config.left,
        right=config.right,
        rate=float(config.dropout_rate or 0),
        precision=launch.precision(arrays.query.dtype, config.precision),
        offset_by_example=is_per_example(arrays.offset, batch),
        has_query_positions=arrays.query_positions is not None,
        has_key_positions=arrays.key_positions is not None,
        has_query_ids=arrays.query_ids is not None,
        has_key_ids=arrays.key_ids is not None,
        has_bias=arrays.bias is not None,
        has_mask=arrays.mask is not None,
        **_strides("bias", arrays.bias),
        **_strides("mask", arrays.mask),
        has_layout=layout is not None,
        walk_by_example=is_per_example(walk[0], batch, is_large=layout is not None),
        walk_by_head=lists[1] > 1,
        walk_heads=lists[1],
        walk_rows=lists[2],
        layout_rows=rows,
        layout_columns=columns,
        partial_columns=walk[2].shape[-1] if layout is not None else 0,
        full_columns=walk[3].shape[-1] if layout is not None else 0,
        **functions,
        entries=_entries(arranged, tables),
        batch=batch if of_all else 0,
        examples=batch if arranged.score is not None or arranged.keep is not None else 1,
        layout_keys=arranged.tile[1] if layout is None else layout[1],
    )


def _strides(name, array):
    sizes = (1, 1, 1, 1) if array is None else array.shape
    found, stride = {}, 1
    for axis, size in zip("jihb", reversed(sizes), strict=True):
        found[f"{name}_{axis}"] = stride if size > 1 else 0
        stride *= size
    return found


def _entries(arranged, tables):
    """Number of entries of `numbers`, a power of two, up to the last table that has a gradient."""
    ends = [0]
    for table in arranged.summed:
        size = arranged.score.tables[table - arranged.first_table["score"]].size
        ends.append(tables.places[table][1] + size)
    return launch.power_of_2(max(1, *ends))


def _functions(arranged, tables):
    """The functions of pairs in the Triton language."""
    found = dict.fromkeys(("score", "d_score", "add_reads", "pattern", "keep"))
    for name, program in arranged.programs.items():
        first = arranged.first_table[name]
        places = tables.places[first : first + len(program.tables)]
        found[name] = elementwise.function(name, program, places)
        if name == "score":
            found["d_score"] = elementwise.function("d_score", program, places, derivative=True)
            if arranged.summed:
                found["add_reads"] = elementwise.function_of_reads(program, places)
    return found
