"""Kernels of block attention on CPUs, in float32, for one query head with its key head at a time.

The queries of a tile are the lanes of vectors, and arrays of pairs are kept transposed, S^T (keys,
queries): so a maximum or a sum over keys is computed on whole vectors, without exchange between
lanes.
With Q^T, dO^T and dQ^T (features, queries), P = exp(S - L), dS = P * (dP - delta) and
delta = rowsum(dO * O) - dL, all matrix products have the same form,

    S^T = K Q^T,  O^T += V^T P^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T,

with right operands whose rows are read as vectors. Several query tiles form a group and visit the
keys together: a chunk of keys and values is copied once for the whole group, into contiguous memory
that stays in the cache of the core.

- Forward: a task is one group of query tiles of one head, with an online softmax.
- Backward: a task is one key head, with all groups of the key head's query heads, so only this task
  adds to the gradients of these keys and values. If there are fewer key heads than threads, the
  groups of a key head are split among several tasks ("splits"), each with its own gradients of keys
  and values, and the caller adds these up. So no sum depends on the order of the threads.

A group visits the chunks between the first and the last one that any of its queries may attend to
or, with a block-sparse layout, the chunks that its steps list (`effattn.llvm.layouts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from effattn.llvm import layouts, runtime
from effattn.llvm.tiles import LOWEST, TILE, WORDS, Range, Rows, TileOps, lay_out

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

# The elements of the attribute `limits`: the window, the position of the first query, whether ids
# are given, the number of query tiles in a group of a layout's steps (0 without a layout), the
# number of rows of these steps, the number of tasks that share the work of a key head, and the bits
# of the soft cap, a float32 (0 for none).
ATTRIBUTES = "left", "right", "offset", "has_ids", "group", "rows", "splits", "cap_bits"
UNLIMITED = 2**40

_SIZES = "queries", "heads", "size", "keys", "key_heads", "value_size", "bias_heads"
_OPERANDS = (
    runtime.Array("query", 3),
    runtime.Array("key", 3),
    runtime.Array("value", 3),
    runtime.Array("bias", 3),
    runtime.Array("query_ids", 1, "int32"),
    runtime.Array("key_ids", 1, "int32"),
    runtime.Array("key_ranges", 1, "int32"),
    runtime.Array("starts", 1, "int32"),
    runtime.Array("steps", 1, "int32"),
    runtime.Array("masks", 1, "int32"),
)
_FORWARD = runtime.Signature(
    _OPERANDS,
    (runtime.Array("out", 3), runtime.Array("largest", 2), runtime.Array("total", 2)),
    len(ATTRIBUTES),
)
_BACKWARD = runtime.Signature(
    (*_OPERANDS, runtime.Array("lse", 2), runtime.Array("d_out", 3), runtime.Array("delta", 2)),
    (runtime.Array("d_query", 3), runtime.Array("d_key", 4), runtime.Array("d_value", 4)),
    len(ATTRIBUTES),
)
MAX_TILES = 8  # most tiles in a group
MAX_FLOATS = 2**17  # most elements in the arrays of a group's tiles: 512 KB

# Sizes of the scratch arrays of a tile, or of a task, by name.
_Sizes = Callable[["Code", "Job"], Mapping[str, Any]]


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of (out, largest, total).

    The arguments are (query, key, value, bias, query_ids, key_ids, key_ranges, starts, steps,
    masks). Arrays are `(*B, L, heads, size)`, the bias `(*B, N or 1, T, S)` or `(*B, 1, 0, 0)`, ids
    `(*B, L)`, ranges those of `block_attention._ranges`, and the last three those of
    `layouts.Steps`, flat.
    `largest` `(*B, T, N)` is the largest logit, and `total` `(*B, T, N)` the sum of
    exp(logit - largest). A batch axis of length 1 of an argument is broadcast. The attributes are
    `limits` and `scale`.
    """
    from effattn.llvm.codegen import vectors_at_once, write_product

    widest = vectors_at_once(lanes)[:1]
    multiply = write_product(module, f"{name}_multiply", lanes, widest, "set")
    mix = write_product(module, f"{name}_mix", lanes, widest, "decay")

    def tile_arrays(code: Code, job: Job) -> Mapping[str, Any]:
        query, out = (code.mul(job[size], TILE) for size in ("size", "value_size"))
        sizes = {"query": query, "out": out, "largest": TILE, "total": TILE}
        return {**sizes, "ids": TILE, "range": TILE}

    def task_arrays(code: Code, job: Job) -> Mapping[str, Any]:
        return {**_chunk_arrays(code, job), "logits": TILE * TILE, "decay": TILE}

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        _read_frame(frame, job)
        rows = code.mul(job["batch"], job["heads"])
        # Groups are small enough for about 4 tasks a thread, if there are that many tiles.
        tiles = code.mul(rows, code.ceil(job["queries"], TILE))
        fair = code.div(tiles, code.mul(frame.threads(), 4))
        _set_group(code, job, code.min(_tiles_per_group(code, tile_arrays(code, job)), fair))
        count = code.mul(rows, _group_count(code, job))
        return count, _floats_per_thread(code, job, tile_arrays, task_arrays)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        count = _group_count(code, job)
        row = code.div(number, count)
        # In causal attention the last tiles have the most keys, so they are started first.
        index = code.sub(code.sub(count, 1), code.rem(number, count))
        example, head = code.div(row, job["heads"]), code.rem(row, job["heads"])
        group = _QueryGroup(
            code, job, example, head, index, memory, tile_arrays, task_arrays, _FORWARD
        )
        ops, scratch, size, value_size = group.ops, group.scratch, job["size"], job["value_size"]
        one = code.float32(1.0)
        with group.tiles() as tile:
            for array, count, value in (
                ("query", code.mul(size, TILE), 0.0),
                ("out", code.mul(value_size, TILE), 0.0),
                ("largest", TILE, LOWEST),
                ("total", TILE, 0.0),
            ):
                ops.fill(tile[array], count, value)
            query = Rows(tile["query"], TILE)
            ops.transpose(group.rows("query", tile.first), query, tile.rows, size, job["scale"])
            group.read_ids(tile)
        with group.chunks() as chunk, group.tiles() as tile, group.visible(tile, chunk) as keys:
            logits = scratch["logits"]
            queries = tile["query"], TILE
            code.call(
                multiply, keys, TILE, size, scratch["key"], size, 1, *queries, logits, TILE, logits
            )
            group.add_bias(logits, tile, chunk, keys)
            with code.when(code.less(0, job["cap_bits"])):
                ops.soft_cap(logits, keys, job["soft_cap"])
            group.mask(logits, tile, chunk, keys)
            ops.softmax_step(logits, keys, tile["largest"], tile["total"], scratch["decay"])
            values = scratch["value"], 1, value_size
            out = tile["out"], TILE, scratch["decay"]
            code.call(mix, value_size, TILE, keys, *values, logits, TILE, *out)
        with group.tiles() as tile:
            ops.divide(tile["out"], value_size, tile["total"])
            for array, count in (("out", value_size), ("largest", 1), ("total", 1)):
                result = group.rows(array, tile.first)
                ops.transpose(Rows(tile[array], TILE), result, count, tile.rows, one)

    _write(module, name, lanes, _FORWARD, begin, task)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients.

    (query, ..., masks, lse, d_out, delta) -> (d_query, d_key, d_value), with `lse` and `delta`
    `(*B, T, N)`. d_key and d_value have a leading axis of splits, which the caller sums. The
    attributes are `limits` and `scale`.
    """
    from effattn.llvm.codegen import vectors_at_once, write_product

    widths = vectors_at_once(lanes)
    multiply = write_product(module, f"{name}_multiply", lanes, widths[:1], "set")
    accumulate = write_product(module, f"{name}_accumulate", lanes, widths, "add")

    def tile_arrays(code: Code, job: Job) -> Mapping[str, Any]:
        found: dict[str, Any] = {"ids": TILE, "range": TILE, "lse": TILE, "delta": TILE}
        for array, size in (("query", job["size"]), ("d_out", job["value_size"])):
            found[array] = code.mul(size, TILE)
            found[f"{array}_rows"] = code.mul(code.round_to_lanes(size), TILE)
        return found | {"d_query": code.mul(job["size"], TILE)}

    def task_arrays(code: Code, job: Job) -> Mapping[str, Any]:
        gradients = {
            f"d_{array}": code.mul(code.round_to_lanes(job[size]), TILE)
            for array, size in (("key", "size"), ("value", "value_size"))
        }
        pairs = dict.fromkeys(("logits", "d_weights", "slopes"), TILE * TILE)
        return {**_chunk_arrays(code, job), **gradients, **pairs}

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        _read_frame(frame, job)
        # Groups are so small that each split has one, if there are as many tiles.
        fair = code.div(code.ceil(job["queries"], TILE), job["splits"])
        _set_group(code, job, code.min(_tiles_per_group(code, tile_arrays(code, job)), fair))
        count = code.mul(job["batch"], job["key_heads"], job["splits"])
        return count, _floats_per_thread(code, job, tile_arrays, task_arrays)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        split, row = code.rem(number, job["splits"]), code.div(number, job["splits"])
        example, key_head = code.div(row, job["key_heads"]), code.rem(row, job["key_heads"])
        heads_per_key = code.div(job["heads"], job["key_heads"])
        head = code.mul(key_head, heads_per_key)
        common = memory, tile_arrays, task_arrays, _BACKWARD, split
        first_group = _QueryGroup(code, job, example, head, 0, *common)
        for array, size in (("d_key", "size"), ("d_value", "value_size")):
            first_group.ops.clear(first_group.rows(array, 0), job["keys"], job[size])
        with (
            code.loop(head, code.add(head, heads_per_key)) as h,
            code.loop(split, _group_count(code, job), job["splits"]) as index,
        ):
            backward_of_group(_QueryGroup(code, job, example, h, index, *common))

    def backward_of_group(group: _QueryGroup) -> None:
        code, job, ops, scratch = group.code, group.job, group.ops, group.scratch
        size, value_size, scale, one = (
            job["size"],
            job["value_size"],
            job["scale"],
            code.float32(1.0),
        )
        width, value_width = code.round_to_lanes(size), code.round_to_lanes(value_size)
        gradients = ("d_key", width, size), ("d_value", value_width, value_size)
        with group.tiles() as tile:
            for array, count, features in (
                ("query", size, width),
                ("d_out", value_size, value_width),
            ):
                source = group.rows(array, tile.first)
                factor = scale if array == "query" else one
                ops.fill(tile[array], code.mul(count, TILE))
                ops.transpose(source, Rows(tile[array], TILE), tile.rows, count, factor)
                in_rows = Rows(tile[f"{array}_rows"], features)
                ops.fill(in_rows.start, code.mul(features, TILE))
                ops.transpose(Rows(tile[array], TILE), in_rows, count, tile.rows, one)
            for array in ("lse", "delta"):
                ops.fill(tile[array], TILE)
                column = Rows(tile[array], TILE)
                ops.transpose(group.rows(array, tile.first), column, tile.rows, 1, one)
            ops.fill(tile["d_query"], code.mul(size, TILE))
            group.read_ids(tile)
        with group.chunks() as chunk:
            for array, features, _ in gradients:
                ops.fill(scratch[array], code.mul(features, TILE))
            with group.tiles() as tile, group.visible(tile, chunk) as keys:
                pairs = scratch["logits"], scratch["d_weights"]
                logits, d_logits = pairs
                for array, count, of_query, to in (
                    ("key", size, "query", logits),
                    ("value", value_size, "d_out", d_logits),
                ):
                    right = tile[of_query], TILE, to, TILE, to
                    code.call(multiply, keys, TILE, count, scratch[array], count, 1, *right)
                group.add_bias(logits, tile, chunk, keys)
                with code.when(code.less(0, job["cap_bits"])):
                    ops.soft_cap(logits, keys, job["soft_cap"], scratch["slopes"])
                group.mask(logits, tile, chunk, keys)
                ops.mask_rows(logits, keys, tile.rows)
                ops.softmax_gradient(logits, d_logits, keys, tile["lse"], tile["delta"])
                with code.when(code.less(0, job["cap_bits"])):
                    ops.multiply(d_logits, scratch["slopes"], keys)
                for left, rows, features, to in (
                    (logits, "d_out_rows", value_width, "d_value"),
                    (d_logits, "query_rows", width, "d_key"),
                ):
                    right = tile[rows], features, scratch[to], features, scratch[to]
                    code.call(accumulate, keys, features, TILE, left, TILE, 1, *right)
                right = d_logits, TILE, tile["d_query"], TILE, d_logits
                code.call(accumulate, size, TILE, keys, scratch["key"], 1, size, *right)
            for array, features, count in gradients:
                target = group.rows(array, chunk.first)
                ops.copy(Rows(scratch[array], features), target, chunk.keys, count, add=True)
        with group.tiles() as tile:
            target = group.rows("d_query", tile.first)
            ops.transpose(Rows(tile["d_query"], TILE), target, size, tile.rows, scale)

    _write(module, name, lanes, _BACKWARD, begin, task)


def _write(module, name, lanes, signature, begin, task):
    from effattn.llvm.handlers import write_handler

    integers = *_SIZES, *ATTRIBUTES, "group_tiles"
    write_handler(module, name, lanes, signature, integers, ["scale", "soft_cap"], begin, task)


def _chunk_arrays(code: Code, job: Job) -> Mapping[str, Any]:
    sizes = {"key": code.mul(job["size"], TILE), "value": code.mul(job["value_size"], TILE)}
    return {**sizes, "bias": TILE * TILE}


def _tiles_per_group(code: Code, tile_arrays: Mapping[str, Any]) -> Any:
    return code.min(code.div(MAX_FLOATS, code.add(*tile_arrays.values())), MAX_TILES)


def _set_group(code: Code, job: Job, tiles: Any) -> None:
    """Sets the number of tiles in a group, which the steps of a layout determine."""
    in_steps = code.less(0, job["group"])
    tiles = code.builder.select(in_steps, job["group"], code.max(tiles, 1))
    job["group_tiles"] = tiles


def _group_count(code: Code, job: Job) -> Any:
    return code.ceil(job["queries"], code.mul(job["group_tiles"], TILE))


def _floats_per_thread(code: Code, job: Job, tile_arrays: _Sizes, task_arrays: _Sizes) -> Any:
    """Size of a thread's scratch memory, in elements."""
    tiles = code.mul(job["group_tiles"], code.add(*tile_arrays(code, job).values()))
    return code.add(tiles, *task_arrays(code, job).values())


def _read_frame(frame: Frame, job: Job) -> None:
    """Reads sizes and attributes from a frame into the job."""
    queries, heads, size = frame.last_sizes(0, 3)
    keys, key_heads, _ = frame.last_sizes(1, 3)
    (value_size,) = frame.last_sizes(2, 1)
    bias_heads, bias_rows, _ = frame.last_sizes(3, 3)
    has_bias = frame.code.less(0, bias_rows)
    bias_heads = frame.code.builder.select(has_bias, bias_heads, frame.code.integer(0))
    sizes = queries, heads, size, keys, key_heads, value_size, bias_heads
    job["scale"] = frame.scale()
    for names, values in ((_SIZES, sizes), (ATTRIBUTES, frame.integers(len(ATTRIBUTES)))):
        for name, value in zip(names, values, strict=True):
            job[name] = value
    job["soft_cap"] = frame.code.float_of_bits(job["cap_bits"])


class _Tile(NamedTuple):
    """A tile of queries: addresses of its arrays, its first query, and its number of queries."""

    arrays: Mapping[str, Any]
    first: Any
    rows: Any

    def __getitem__(self, name: str) -> Any:  # type: ignore[override]
        return self.arrays[name]


class _Chunk(NamedTuple):
    """A chunk of keys: its first key, its number of keys, and the range of their ids.

    With a layout, `step_offset` is the place of its step in the array of steps.
    """

    first: Any
    keys: Any
    ids: Range
    step_offset: Any


class _QueryGroup:
    """A group of query tiles of one head, and the chunks of keys that they attend to.

    Attributes:
      scratch: addresses of the arrays that all tiles share.
      tile_memory: address of the arrays of the first tile.
      first, row_count: first query of the group, and number of queries.
      ids: variables with the range of the ids of the tiles that `read_ids` has read.
    """

    def __init__(
        self,
        code: Code,
        job: Job,
        example: Any,
        head: Any,
        index: Any,
        memory: Any,
        tile_arrays: _Sizes,
        task_arrays: _Sizes,
        signature: runtime.Signature,
        split: Any = 0,
    ):
        self.code, self.job, self.ops = code, job, TileOps(code)
        self.example, self.head, self.split = example, head, split
        self.examples = {
            array.name: job.example_of(array.name, example) for array in signature.arguments
        }
        self.key_head = code.div(head, code.div(job["heads"], job["key_heads"]))
        self.index, self.first = index, code.mul(index, job["group_tiles"], TILE)
        left = code.sub(job["queries"], self.first)
        self.row_count = code.min(left, code.mul(job["group_tiles"], TILE))
        self.scratch, self.tile_memory = lay_out(code, memory, task_arrays(code, job))
        self.tile_arrays = tile_arrays(code, job)
        self.ids = Range(code.variable(code.int32(2**31 - 1)), code.variable(code.int32(0)))

    def rows(self, name: str, first: Any) -> Rows:
        """Rows of an array for this head, from a token on."""
        code, job = self.code, self.job
        of_keys = name in ("key", "value", "d_key", "d_value")
        length, heads = (
            job["keys" if of_keys else "queries"],
            job["key_heads" if of_keys else "heads"],
        )
        head, size = self.key_head if of_keys else self.head, code.integer(1)
        if name in ("query", "key", "d_query", "d_key"):
            size = job["size"]
        elif name in ("value", "out", "d_out", "d_value"):
            size = job["value_size"]
        example = self.examples.get(name, self.example)
        if name in ("d_key", "d_value"):
            example = code.add(code.mul(self.split, job["batch"]), example)
        step = code.mul(heads, size)
        start = code.add(
            code.mul(code.add(code.mul(example, length), first), step), code.mul(head, size)
        )
        return Rows(code.address(job[name], start), step)

    @contextlib.contextmanager
    def tiles(self) -> Iterator[_Tile]:
        """Loops over the tiles; the `with` block generates its body."""
        code = self.code
        numbers = code.add(*self.tile_arrays.values())
        with code.loop(0, self.row_count, TILE) as start:
            memory = code.address(self.tile_memory, code.mul(code.div(start, TILE), numbers))
            arrays, _ = lay_out(code, memory, self.tile_arrays)
            rows = code.min(code.sub(self.row_count, start), TILE)
            yield _Tile(arrays, code.add(self.first, start), rows)

    @contextlib.contextmanager
    def chunks(self) -> Iterator[_Chunk]:
        """Loops over the chunks that any tile may attend to; the `with` block generates its body.

        The keys and values of the chunk are copied to the scratch memory first.
        """
        code, job = self.code, self.job
        start, stop = self._range(self.first, self.row_count)
        near = code.variable(code.false())
        ids = Range(code.variable(code.int32(0)), code.variable(code.int32(0)))
        bounds = (
            code.variable(code.div(start, TILE)),
            code.variable(code.ceil(code.max(stop, 0), TILE)),
        )
        with code.when(self._has_steps()):
            row = code.div(code.mul(self.head, job["rows"]), job["heads"])
            place = code.add(code.mul(row, code.add(_group_count(code, job), 1)), self.index)
            for n, variable in enumerate(bounds):
                code.set(variable, self._entry("starts", code.add(place, n)))
        chunk = code.variable(0)
        with code.loop(*map(code.get, bounds)) as number:
            step_offset = code.mul(number, code.add(job["group_tiles"], 1))
            code.set(chunk, number)
            with code.when(self._has_steps()):
                code.set(chunk, self._entry("steps", step_offset))
            first = code.mul(code.get(chunk), TILE)
            keys = code.min(code.sub(job["keys"], first), TILE)
            code.set(near, code.builder.not_(self._has_ids()))
            with code.when(self._has_ids()):
                of_chunk = self._ids_of_chunk(code.div(first, TILE))
                for variable, end in zip(ids, of_chunk, strict=True):
                    code.set(variable, end)
                of_group = Range(*map(code.get, self.ids))
                code.set(near, of_chunk.meets(code, of_group))
            with code.when(code.get(near)):
                for name, size in (("key", job["size"]), ("value", job["value_size"])):
                    target = Rows(self.scratch[name], size)
                    self.ops.copy(self.rows(name, first), target, keys, size)
                yield _Chunk(first, keys, Range(*map(code.get, ids)), step_offset)

    @contextlib.contextmanager
    def visible(self, tile: _Tile, chunk: _Chunk) -> Iterator[Any]:
        """Conditional on a tile attending to a chunk; yields the number of keys to visit."""
        code, builder = self.code, self.code.builder
        start, stop = self._range(tile.first, tile.rows)
        after = code.less(chunk.first, start)
        near = builder.and_(code.less(chunk.first, stop), builder.not_(after))
        keys = code.min(code.sub(stop, chunk.first), chunk.keys)
        sees = code.variable(near)
        with code.when(builder.and_(near, self._has_steps())):
            code.set(sees, code.less(layouts.SKIPPED, self._in_step(tile, chunk)))
        with code.when(builder.and_(code.get(sees), self._has_ids())):
            code.set(sees, self._ids_of(tile).meets(code, chunk.ids))
        with code.when(builder.and_(code.get(sees), self._mixes_ids(tile, chunk))):
            key_ids = self._key_ids(chunk.first)
            code.set(sees, self.ops.any_same_id(keys, tile["ids"], key_ids))
        with code.when(code.get(sees)):
            yield keys

    def _range(self, first, rows):
        """The first chunk and the end of the keys that any of these queries may attend to."""
        code, job = self.code, self.job
        position = code.add(first, job["offset"])
        start = code.max(code.sub(position, job["left"]), 0)
        stop = code.min(code.add(position, rows, job["right"]), job["keys"])
        return code.mul(code.div(start, TILE), TILE), stop

    def add_bias(self, logits: Any, tile: _Tile, chunk: _Chunk, keys: Any) -> None:
        """Adds the bias of each pair to its logit, if there is one."""
        code, job, ops = self.code, self.job, self.ops
        with code.when(code.less(0, job["bias_heads"])):
            row = code.mul(self.examples["bias"], job["bias_heads"])
            # The heads of the bias are all heads, or one for all.
            each = code.div(job["heads"], job["bias_heads"])
            row = code.add(
                code.mul(code.add(row, code.div(self.head, each)), job["queries"]), tile.first
            )
            start = code.add(code.mul(row, job["keys"]), chunk.first)
            source = Rows(code.address(job["bias"], start), job["keys"])
            target = Rows(self.scratch["bias"], TILE)
            ops.transpose(source, target, tile.rows, keys, code.float32(1.0))
            ops.add(logits, self.scratch["bias"], keys)

    def mask(self, logits: Any, tile: _Tile, chunk: _Chunk, keys: Any) -> None:
        """Sets logits to -inf for pairs that may not attend."""
        code, job = self.code, self.job
        ahead = code.sub(chunk.first, code.add(tile.first, job["offset"]))
        self.ops.mask_window(logits, keys, ahead, tile.rows, job["left"], job["right"])
        with code.when(self._has_steps()):
            number = self._in_step(tile, chunk)
            with code.when(code.less(layouts.WHOLE, number)):
                mask = code.address(job["masks"], code.mul(number, WORDS))
                self.ops.mask_bits(logits, keys, mask)
        with code.when(self._mixes_ids(tile, chunk)):
            self.ops.mask_ids(logits, keys, tile["ids"], self._key_ids(chunk.first))

    def read_ids(self, tile: _Tile) -> None:
        """Copies the ids of the tile's queries, if ids are given."""
        code, job = self.code, self.job
        with code.when(self._has_ids()):
            start = code.add(code.mul(self.examples["query_ids"], job["queries"]), tile.first)
            ids = Rows(code.address(job["query_ids"], start), 0)
            self.ops.fill(tile["ids"], TILE)  # id 0 where there is no query: no key has id 0
            self.ops.copy(ids, Rows(tile["ids"], 0), 1, tile.rows)
            ends = self.ops.range_of_ids(tile["ids"], tile.rows)
            for n, (variable, end) in enumerate(zip(self.ids, ends, strict=True)):
                code.store(end, tile["range"], n)
                code.set(variable, code.extremes(code.get(variable), end)[n])

    def _has_steps(self):
        return self.code.less(0, self.job["group"])

    def _in_step(self, tile, chunk):
        """The entry of a tile in the step of a chunk: see `layouts.Steps`."""
        code = self.code
        place = code.div(code.sub(tile.first, self.first), TILE)
        return self._entry("steps", code.add(chunk.step_offset, 1, place))

    def _entry(self, name, index):
        """Entry of an array of 32-bit integers."""
        code = self.code
        return code.wide(code.load(self.job[name], index, code.int32))

    def _has_ids(self):
        return self.code.less(0, self.job["has_ids"])

    def _ids_of(self, tile):
        """The range of the ids of a tile."""
        code = self.code
        return Range(*(code.load(tile["range"], n, code.int32) for n in range(2)))

    def _ids_of_chunk(self, number):
        """The range of the ids of a chunk."""
        code, example = self.code, self.examples["key_ranges"]
        number = code.add(code.mul(example, code.ceil(self.job["keys"], TILE)), number)
        array = self.job["key_ranges"]
        ends = (code.add(code.mul(number, 2), n) for n in range(2))
        return Range(*(code.load(array, end, code.int32) for end in ends))

    def _mixes_ids(self, tile, chunk):
        """Returns whether ids are given, and differ within the tile or within the chunk."""
        code, builder = self.code, self.code.builder
        mixed = code.variable(code.false())
        with code.when(self._has_ids()):
            is_one = (ids.is_one(code) for ids in (self._ids_of(tile), chunk.ids))
            code.set(mixed, builder.not_(builder.and_(*is_one)))
        return code.get(mixed)

    def _key_ids(self, first):
        example = self.examples["key_ids"]
        start = self.code.add(self.code.mul(example, self.job["keys"]), first)
        return self.code.address(self.job["key_ids"], start)
