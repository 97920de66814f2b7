"""Block attention for CPUs: one query head with its key head at a time.

The queries of a tile are the lanes of vectors. So pairs are kept as S^T (keys, queries): a maximum
or a sum over keys is one of whole vectors, and no query meets another. With Q^T, dO^T and dQ^T
(features, queries), P = exp(S - L) and dS = P * (dP - shared), all products are of one kind,

    S^T = K Q^T,  O^T += V^T P^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T,

whose right operands lie in vectors. Some tiles go through the keys together: a chunk of keys and
values is copied for all of them at once, to lie together in the nearest memory.

- Forward, a task is such a group of tiles of one head, with an online softmax.
- Backward, it is a key head, with every so many groups of its query heads: it alone adds to the
  gradients of its keys and values. Where that leaves threads without a task, groups are dealt to
  several tasks with gradients of their own, which the caller adds up. So no sum depends on which
  thread comes first.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from llvmlite import ir

from effattn.llvm.code import FLOAT, INT, Code
from effattn.llvm.frame import Frame
from effattn.llvm.interface import Array, Signature
from effattn.llvm.products import vectors_at_once, write_product
from effattn.llvm.threads import Job, write_handler
from effattn.llvm.tiles import LOWEST, TILE, Rows, Steps, places

# The entries of the attribute `limits`: how far a query sees, the position of the first, whether
# ids are given, and by how many tasks the work of a key head is shared.
LIMITS = "left", "right", "offset", "has_ids", "splits"
UNLIMITED = 2**40

_SIZES = "queries", "heads", "size", "keys", "key_heads", "value_size"
_OPERANDS = (
    Array("query", 3),
    Array("key", 3),
    Array("value", 3),
    Array("query_ids", 1, "int32"),
    Array("key_ids", 1, "int32"),
)
_FORWARD = Signature(
    _OPERANDS, (Array("out", 3), Array("largest", 2), Array("total", 2)), len(LIMITS)
)
_BACKWARD = Signature(
    (*_OPERANDS, Array("lse", 2), Array("d_out", 3), Array("shared", 2)),
    (Array("d_query", 3), Array("d_key", 4), Array("d_value", 4)),
    len(LIMITS),
)
_TOGETHER = 8  # tiles, at most,
_NUMBERS = 2**17  # and numbers of theirs: 512 KB

_Sizes = Callable[[Code, Job], Mapping[str, Any]]


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """The handler (query, key, value, ids, ids) -> (out, largest, total).

    Arrays are `(*B, L, heads, size)`, ids `(*B, L)`, and the largest logit and the sum of the
    exponentials of what is left of it `(*B, T, N)`. A batch axis of an argument may have length 1,
    for all examples. Attributes are `limits` and `scale`.
    """
    widest = vectors_at_once(lanes)[:1]
    multiply = write_product(module, f"{name}_multiply", lanes, widest, "set")
    mix = write_product(module, f"{name}_mix", lanes, widest, "decay")

    def of_tile(code: Code, job: Job) -> Mapping[str, Any]:
        query, out = (code.mul(job[size], TILE) for size in ("size", "value_size"))
        return {"query": query, "out": out, "largest": TILE, "total": TILE, "ids": TILE}

    def of_task(code: Code, job: Job) -> Mapping[str, Any]:
        return {**_of_chunk(code, job), "logits": TILE * TILE, "decay": TILE}

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        _read(frame, job)
        rows = code.mul(job["batch"], job["heads"])
        # A few tasks for each thread, where there are so many tiles.
        tiles = code.mul(rows, code.ceil(job["queries"], TILE))
        fair = code.div(tiles, code.mul(frame.threads(), 4))
        job["together"] = code.max(code.min(_together(code, of_tile(code, job)), fair), 1)
        count = code.mul(rows, _groups(code, job))
        return count, _numbers(code, job, of_tile, of_task)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        groups = _groups(code, job)
        row = code.div(number, groups)
        # Of causal attention the last tiles have the most to do, and come first.
        group = code.sub(code.sub(groups, 1), code.rem(number, groups))
        example, head = code.div(row, job["heads"]), code.rem(row, job["heads"])
        walk = _Walk(code, job, example, head, group, memory, of_tile, of_task, _FORWARD)
        steps, at, size, value_size = walk.steps, walk.at, job["size"], job["value_size"]
        one = FLOAT(1.0)
        with walk.tiles() as tile:
            for array, count, value in (
                ("query", code.mul(size, TILE), 0.0),
                ("out", code.mul(value_size, TILE), 0.0),
                ("largest", TILE, LOWEST),
                ("total", TILE, 0.0),
            ):
                steps.fill(tile[array], count, value)
            query = Rows(tile["query"], TILE)
            steps.transpose(walk.rows("query", tile.first), query, tile.rows, size, job["scale"])
            walk.read_ids(tile)
        with walk.chunks() as chunk, walk.tiles() as tile, walk.seen(tile, chunk) as keys:
            logits = at["logits"]
            queries = tile["query"], TILE
            code.call(
                multiply, keys, TILE, size, at["key"], size, 1, *queries, logits, TILE, logits
            )
            walk.hide(logits, tile, chunk, keys)
            steps.soften(logits, keys, tile["largest"], tile["total"], at["decay"])
            values = at["value"], 1, value_size
            out = tile["out"], TILE, at["decay"]
            code.call(mix, value_size, TILE, keys, *values, logits, TILE, *out)
        with walk.tiles() as tile:
            steps.divide(tile["out"], value_size, tile["total"])
            for array, count in (("out", value_size), ("largest", 1), ("total", 1)):
                result = walk.rows(array, tile.first)
                steps.transpose(Rows(tile[array], TILE), result, count, tile.rows, one)

    _write(module, name, lanes, _FORWARD, begin, task)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """The handler (query, key, value, ids, ids, lse, d_out, shared) -> (d_query, d_key, d_value).

    `lse` and `shared` are `(*B, T, N)`; d_key and d_value have an axis before the others, over
    which they are to be added up. Attributes are `limits` and `scale`.
    """
    widths = vectors_at_once(lanes)
    multiply = write_product(module, f"{name}_multiply", lanes, widths[:1], "set")
    accumulate = write_product(module, f"{name}_accumulate", lanes, widths, "add")

    def of_tile(code: Code, job: Job) -> Mapping[str, Any]:
        found: dict[str, Any] = {"ids": TILE, "lse": TILE, "shared": TILE}
        for array, size in (("query", job["size"]), ("d_out", job["value_size"])):
            found[array] = code.mul(size, TILE)
            found[f"{array}_rows"] = code.mul(code.whole(size), TILE)
        return found | {"d_query": code.mul(job["size"], TILE)}

    def of_task(code: Code, job: Job) -> Mapping[str, Any]:
        gradients = {
            f"d_{array}": code.mul(code.whole(job[size]), TILE)
            for array, size in (("key", "size"), ("value", "value_size"))
        }
        pairs = {"logits": TILE * TILE, "d_weights": TILE * TILE}
        return {**_of_chunk(code, job), **gradients, **pairs}

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        _read(frame, job)
        job["together"] = code.max(_together(code, of_tile(code, job)), 1)
        count = code.mul(job["batch"], job["key_heads"], job["splits"])
        return count, _numbers(code, job, of_tile, of_task)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        split, row = code.rem(number, job["splits"]), code.div(number, job["splits"])
        example, key_head = code.div(row, job["key_heads"]), code.rem(row, job["key_heads"])
        together = code.div(job["heads"], job["key_heads"])
        head = code.mul(key_head, together)
        of_all = memory, of_tile, of_task, _BACKWARD, split
        of_key_head = _Walk(code, job, example, head, 0, *of_all)
        for array, size in (("d_key", "size"), ("d_value", "value_size")):
            of_key_head.steps.clear(of_key_head.rows(array, 0), job["keys"], job[size])
        with (
            code.loop(head, code.add(head, together)) as h,
            code.loop(split, _groups(code, job), job["splits"]) as group,
        ):
            differentiate(_Walk(code, job, example, h, group, *of_all))

    def differentiate(walk: "_Walk") -> None:
        code, job, steps, at = walk.code, walk.job, walk.steps, walk.at
        size, value_size, scale, one = job["size"], job["value_size"], job["scale"], FLOAT(1.0)
        width, value_width = code.whole(size), code.whole(value_size)
        gradients = ("d_key", width, size), ("d_value", value_width, value_size)
        with walk.tiles() as tile:
            for array, count, features in (
                ("query", size, width),
                ("d_out", value_size, value_width),
            ):
                source = walk.rows(array, tile.first)
                factor = scale if array == "query" else one
                steps.fill(tile[array], code.mul(count, TILE))
                steps.transpose(source, Rows(tile[array], TILE), tile.rows, count, factor)
                in_rows = Rows(tile[f"{array}_rows"], features)
                steps.fill(in_rows.start, code.mul(features, TILE))
                steps.transpose(Rows(tile[array], TILE), in_rows, count, tile.rows, one)
            for array in ("lse", "shared"):
                steps.fill(tile[array], TILE)
                column = Rows(tile[array], TILE)
                steps.transpose(walk.rows(array, tile.first), column, tile.rows, 1, one)
            steps.fill(tile["d_query"], code.mul(size, TILE))
            walk.read_ids(tile)
        with walk.chunks() as chunk:
            for array, features, _ in gradients:
                steps.fill(at[array], code.mul(features, TILE))
            with walk.tiles() as tile, walk.seen(tile, chunk) as keys:
                pairs = at["logits"], at["d_weights"]
                logits, d_logits = pairs
                for array, count, of_query, to in (
                    ("key", size, "query", logits),
                    ("value", value_size, "d_out", d_logits),
                ):
                    right = tile[of_query], TILE, to, TILE, to
                    code.call(multiply, keys, TILE, count, at[array], count, 1, *right)
                walk.hide(logits, tile, chunk, keys)
                steps.differentiate(logits, d_logits, keys, tile["lse"], tile["shared"])
                for left, rows, features, to in (
                    (logits, "d_out_rows", value_width, "d_value"),
                    (d_logits, "query_rows", width, "d_key"),
                ):
                    right = tile[rows], features, at[to], features, at[to]
                    code.call(accumulate, keys, features, TILE, left, TILE, 1, *right)
                right = d_logits, TILE, tile["d_query"], TILE, d_logits
                code.call(accumulate, size, TILE, keys, at["key"], 1, size, *right)
            for array, features, count in gradients:
                target = walk.rows(array, chunk.first)
                steps.copy(Rows(at[array], features), target, chunk.keys, count, add=True)
        with walk.tiles() as tile:
            target = walk.rows("d_query", tile.first)
            steps.transpose(Rows(tile["d_query"], TILE), target, size, tile.rows, scale)

    _write(module, name, lanes, _BACKWARD, begin, task)


def _write(module, name, lanes, signature, begin, task):
    kinds = dict.fromkeys((*_SIZES, *LIMITS, "together"), INT) | {"scale": FLOAT}
    write_handler(module, name, lanes, signature, kinds, begin, task)


def _of_chunk(code: Code, job: Job) -> Mapping[str, Any]:
    return {"key": code.mul(job["size"], TILE), "value": code.mul(job["value_size"], TILE)}


def _together(code: Code, of_tile: Mapping[str, Any]) -> Any:
    return code.min(code.div(_NUMBERS, code.add(*of_tile.values())), _TOGETHER)


def _groups(code: Code, job: Job) -> Any:
    return code.ceil(job["queries"], code.mul(job["together"], TILE))


def _numbers(code: Code, job: Job, of_tile: _Sizes, of_task: _Sizes) -> Any:
    """What a thread needs."""
    tiles = code.mul(job["together"], code.add(*of_tile(code, job).values()))
    return code.add(tiles, *of_task(code, job).values())


def _read(frame: Frame, job: Job) -> None:
    """Fills in the sizes and attributes of a frame."""
    queries, heads, size = frame.last_sizes(0, 3)
    keys, key_heads, _ = frame.last_sizes(1, 3)
    (value_size,) = frame.last_sizes(2, 1)
    sizes = queries, heads, size, keys, key_heads, value_size
    job["scale"] = frame.scale()
    for names, values in ((_SIZES, sizes), (LIMITS, frame.integers(len(LIMITS)))):
        for name, value in zip(names, values, strict=True):
            job[name] = value


class _Tile(NamedTuple):
    """Where its arrays lie, its first query, and how many it has."""

    arrays: Mapping[str, Any]
    first: Any
    rows: Any

    def __getitem__(self, name: str) -> Any:  # type: ignore[override]
        return self.arrays[name]


class _Chunk(NamedTuple):
    """Its first key, and how many it has."""

    first: Any
    keys: Any


class _Walk:
    """A group of tiles of a query head, and the chunks of keys that they see.

    Attributes:
      at: where the arrays lie that all tiles share.
    """

    def __init__(
        self,
        code: Code,
        job: Job,
        example: Any,
        head: Any,
        group: Any,
        memory: Any,
        of_tile: _Sizes,
        of_task: _Sizes,
        signature: Signature,
        split: Any = 0,
    ):
        self.code, self.job, self.steps = code, job, Steps(code)
        self.example, self.head, self.split = example, head, split
        self.examples = {
            array.name: job.example_of(array.name, example) for array in signature.arguments
        }
        self.key_head = code.div(head, code.div(job["heads"], job["key_heads"]))
        self.first = code.mul(group, job["together"], TILE)
        left = code.sub(job["queries"], self.first)
        self.rows_of_all = code.min(left, code.mul(job["together"], TILE))
        self.at, self.of_tiles = places(code, memory, of_task(code, job))
        self.of_tile = of_tile(code, job)

    def rows(self, name: str, first: Any) -> Rows:
        """Of this head of an array, from a token on."""
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
        return Rows(code.place(job[name], start), step)

    @contextlib.contextmanager
    def tiles(self) -> Iterator[_Tile]:
        """What is written within runs for each tile."""
        code = self.code
        numbers = code.add(*self.of_tile.values())
        with code.loop(0, self.rows_of_all, TILE) as start:
            memory = code.place(self.of_tiles, code.mul(code.div(start, TILE), numbers))
            arrays, _ = places(code, memory, self.of_tile)
            rows = code.min(code.sub(self.rows_of_all, start), TILE)
            yield _Tile(arrays, code.add(self.first, start), rows)

    @contextlib.contextmanager
    def chunks(self) -> Iterator[_Chunk]:
        """What is written within runs for each chunk that a tile may see, when it is copied."""
        code, job = self.code, self.job
        start, stop = self._range(self.first, self.rows_of_all)
        with code.loop(start, stop, TILE) as first:
            keys = code.min(code.sub(job["keys"], first), TILE)
            for name, size in (("key", job["size"]), ("value", job["value_size"])):
                self.steps.copy(self.rows(name, first), Rows(self.at[name], size), keys, size)
            yield _Chunk(first, keys)

    @contextlib.contextmanager
    def seen(self, tile: _Tile, chunk: _Chunk) -> Iterator[Any]:
        """What is written within runs if the tile sees the chunk, for so many of its keys."""
        code, builder = self.code, self.code.builder
        start, stop = self._range(tile.first, tile.rows)
        after = code.less(chunk.first, start)
        near = builder.and_(code.less(chunk.first, stop), builder.not_(after))
        keys = code.min(code.sub(stop, chunk.first), chunk.keys)
        sees = code.variable(near)
        with code.when(builder.and_(near, self._has_ids())):
            code.set(sees, self.steps.meet(keys, tile["ids"], self._key_ids(chunk)))
        with code.when(code.get(sees)):
            yield keys

    def _range(self, first, rows):
        """From which chunk to which key a query of these sees."""
        code, job = self.code, self.job
        position = code.add(first, job["offset"])
        start = code.max(code.sub(position, job["left"]), 0)
        stop = code.min(code.add(position, rows, job["right"]), job["keys"])
        return code.mul(code.div(start, TILE), TILE), stop

    def hide(self, logits: Any, tile: _Tile, chunk: _Chunk, keys: Any) -> None:
        """-inf for pairs that may not attend."""
        code, job = self.code, self.job
        ahead = code.sub(chunk.first, code.add(tile.first, job["offset"]))
        self.steps.hide_far(logits, keys, ahead, tile.rows, job["left"], job["right"])
        with code.when(self._has_ids()):
            self.steps.hide_others(logits, keys, tile["ids"], self._key_ids(chunk))

    def read_ids(self, tile: _Tile) -> None:
        """Ids of the tile's queries, if there are any."""
        code, job = self.code, self.job
        with code.when(self._has_ids()):
            start = code.add(code.mul(self.examples["query_ids"], job["queries"]), tile.first)
            ids = Rows(code.place(job["query_ids"], start), 0)
            self.steps.fill(tile["ids"], TILE)  # 0, which no key has, where there is no query
            self.steps.copy(ids, Rows(tile["ids"], 0), 1, tile.rows)

    def _has_ids(self):
        return self.code.less(0, self.job["has_ids"])

    def _key_ids(self, chunk):
        example = self.examples["key_ids"]
        start = self.code.add(self.code.mul(example, self.job["keys"]), chunk.first)
        return self.code.place(self.job["key_ids"], start)
