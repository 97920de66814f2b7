"""The linear recurrence without decays for CPUs: one key head at a time, with its query heads.

Chunks of `TILE` tokens follow each other, and the state S (F, D) carries what is before them. With
the queries of a chunk in the lanes of vectors, and A^T = K Q^T of the chunk, without what is ahead,

    Y^T = S^T Q^T + V^T A^T,    S += K^T V.

The gradients take two walks. Forward in time, with dA^T = V dY^T without what is ahead,

    dQ^T = S dY^T + K^T dA^T,

and backward in time, with the gradient R (F, D) of the state, which chunks after this one read,

    dV = K R + A^T dY,    dK = V R^T + dA^T Q,    R += Q^T dY.

Where values have a last entry of 1, y is what is before it divided by it, z: then dY is dy / z, and
its last entry -(dy . y) / z. The walk forward leaves both factors of a query for the walk back.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from effattn.llvm.code import FLOAT, INT, Code
from effattn.llvm.frame import Frame
from effattn.llvm.interface import Array, Signature
from effattn.llvm.products import vectors_at_once, write_product
from effattn.llvm.threads import Job, write_handler
from effattn.llvm.tiles import TILE, Rows, Steps, places

_SIZES = "tokens", "heads", "features", "key_heads", "values", "all_values"
_OPERANDS = Array("query", 3), Array("key", 3), Array("value", 3), Array("state", 3)
_FORWARD = Signature(_OPERANDS, (Array("out", 3), Array("state_after", 3)))
_BACKWARD = Signature(
    (*_OPERANDS, Array("d_out", 3), Array("d_after", 3)),
    (
        Array("d_query", 3),
        Array("d_key", 3),
        Array("d_value", 3),
        Array("d_state", 3),
        Array("factors", 3),
    ),
)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """The handler (query, key, value, state) -> (out, state after).

    Arrays are `(*B, T, heads, size)`, states `(*B, K, F, D)`; where D is one more than the size of
    values, outputs are divided by that entry. A batch axis of an argument may have length 1, for
    all examples.
    """
    products = _write_products(module, name, lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        walk = _Walk(code, job, products, memory, number, _FORWARD)
        walk.read_state("state")
        with walk.chunks(), walk.heads_then(walk.update_state):
            walk.read("query", "features")
            walk.multiply_out()
            with code.when(walk.is_normalized):
                walk.steps.divide_by_row(walk.at["out"], job["values"])
            walk.write("out", "values")
        walk.write_state("state_after")

    _write(module, name, lanes, _FORWARD, task)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """The handler of the gradients.

    (query, key, value, state, d_out, d_after) -> (d_query, d_key, d_value, d_state, factors), of
    shapes as what they are gradients of; `d_after` is that of the state after, and `factors`
    `(2, *B, T, N)` what the first walk leaves to the second.
    """
    products = _write_products(module, name, lanes)
    factors = ("inverse", 0), ("d_total", 1)

    def forward_in_time(code: Code, walk: "_Walk") -> None:
        job, at, steps = walk.job, walk.at, walk.steps
        walk.read_state("state")
        with walk.chunks(), walk.heads_then(walk.update_state):
            walk.read("query", "features")
            walk.read("d_out", "values")
            with code.when(walk.is_normalized):
                walk.multiply_out()
                steps.differentiate_quotient(at["out"], at["d_out"], job["values"])
                for array, (_, which) in zip(("out", "d_out"), factors, strict=True):
                    last = Rows(code.place(at[array], code.mul(job["values"], TILE)), TILE)
                    steps.transpose(last, walk.factor(which), 1, walk.tokens, FLOAT(1.0))
            walk.pair("value", walk.value_width, "all_values", "d_out", "d_pairs")
            of_state = at["state"], walk.value_width, 1
            walk.multiply(job["features"], job["all_values"], of_state, "d_out", "d_query")
            of_keys = at["key"], 1, job["features"]
            walk.add(job["features"], walk.tokens, of_keys, "d_pairs", "d_query")
            walk.write("d_query", "features")

    def backward_in_time(code: Code, walk: "_Walk") -> None:
        """The gradient R of the state is kept as it is and turned, R^T."""
        job, at, steps = walk.job, walk.at, walk.steps
        features, all_values, one = job["features"], job["all_values"], FLOAT(1.0)
        width, value_width = walk.width, walk.value_width
        walk.read_state("d_after")
        turned = Rows(at["turned"], width)
        steps.transpose(Rows(at["state"], value_width), turned, features, all_values, one)
        with walk.chunks(reverse=True):
            of_values, of_keys = (at["value"], value_width, 1), (at["key"], features, 1)
            walk.multiply(walk.tokens, features, of_keys, "state", "d_value", value_width)
            walk.multiply(walk.tokens, all_values, of_values, "turned", "d_key", width)
            with walk.heads():
                walk.read("query", "features")
                walk.read("d_out", "values")
                with code.when(walk.is_normalized):
                    for array, (_, which) in zip(("out", "d_out"), factors, strict=True):
                        last = Rows(code.place(at[array], code.mul(job["values"], TILE)), TILE)
                        steps.transpose(walk.factor(which), last, walk.tokens, 1, one)
                    inverse = code.place(at["out"], code.mul(job["values"], TILE))
                    steps.multiply(at["d_out"], job["values"], inverse)
                walk.pair("key", features, "features", "query", "pairs")
                walk.pair("value", value_width, "all_values", "d_out", "d_pairs")
                for source, rows, size, columns in (
                    ("query", "query_rows", features, width),
                    ("d_out", "d_out_rows", all_values, value_width),
                ):
                    in_rows = Rows(at[rows], columns)
                    steps.transpose(Rows(at[source], TILE), in_rows, size, walk.tokens, one)
                for left, count, right, to, columns in (
                    ("pairs", walk.tokens, "d_out_rows", "d_value", value_width),
                    ("d_pairs", walk.tokens, "query_rows", "d_key", width),
                    ("query", features, "d_out_rows", "state", value_width),
                    ("d_out", all_values, "query_rows", "turned", width),
                ):
                    walk.add(count, walk.tokens, (at[left], TILE, 1), right, to, columns)
            for array, columns, size in (
                ("d_key", width, features),
                ("d_value", value_width, job["values"]),
            ):
                steps.copy(Rows(at[array], columns), walk.rows(array), walk.tokens, size)
        walk.write_state("d_state")

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        walk = _Walk(code, job, products, memory, number, _BACKWARD)
        forward_in_time(code, walk)
        backward_in_time(code, walk)

    _write(module, name, lanes, _BACKWARD, task)


def _write_products(module: ir.Module, name: str, lanes: int) -> tuple[ir.Function, ir.Function]:
    """Those that set, and those that add."""
    widths = vectors_at_once(lanes)
    return (
        write_product(module, f"{name}_multiply", lanes, widths, "set"),
        write_product(module, f"{name}_add", lanes, widths, "add"),
    )


def _write(module, name, lanes, signature, task):
    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, heads, features = frame.last_sizes(0, 3)
        key_heads, _ = frame.last_sizes(1, 2)
        (values,) = frame.last_sizes(2, 1)
        (all_values,) = frame.last_sizes(3, 1)
        sizes = tokens, heads, features, key_heads, values, all_values
        for each, size in zip(_SIZES, sizes, strict=True):
            job[each] = size
        return code.mul(job["batch"], key_heads), code.add(*_memory(code, job).values())

    write_handler(module, name, lanes, signature, dict.fromkeys(_SIZES, INT), begin, task)


def _memory(code: Code, job: Job) -> dict[str, Any]:
    """What a task has for itself: arrays by tokens, of pairs, and by features and values."""
    width, value_width = (code.whole(job[size]) for size in ("features", "all_values"))
    of_features = "key", "query", "query_rows", "d_query", "d_key"
    of_values = "value", "out", "d_out", "d_out_rows", "d_value"
    return {
        **dict.fromkeys(of_features, code.mul(width, TILE)),
        **dict.fromkeys(of_values, code.mul(value_width, TILE)),
        **dict.fromkeys(("pairs", "d_pairs"), TILE * TILE),
        **dict.fromkeys(("state", "turned"), code.mul(width, value_width)),
    }


class _Walk:
    """A key head, chunk by chunk.

    Attributes:
      at: where the arrays of a task lie.
      width, value_width: of rows of features and of values, in whole vectors.
      is_normalized: whether values have a last entry of 1.
      tokens: of the chunk.
    """

    def __init__(
        self,
        code: Code,
        job: Job,
        products: Sequence[Any],
        memory: Any,
        number: Any,
        signature: Signature,
    ):
        self.code, self.job, self.products, self.number = code, job, products, number
        self.steps = Steps(code)
        self.at, _ = places(code, memory, _memory(code, job))
        self.example = code.div(number, job["key_heads"])
        self.examples = {
            array.name: job.example_of(array.name, self.example) for array in signature.arguments
        }
        self.key_head = code.rem(number, job["key_heads"])
        self.width, self.value_width = (code.whole(job[s]) for s in ("features", "all_values"))
        self.is_normalized = code.less(job["values"], job["all_values"])
        self.head = self.first = self.tokens = code.integer(0)
        with code.when(self.is_normalized), code.loop(0, TILE) as token:
            last = code.add(code.mul(token, self.value_width), job["values"])
            code.store(FLOAT(1.0), self.at["value"], last)

    # Products, of arrays with a number for each query unless `columns` says how many

    def multiply(
        self, rows: Any, count: Any, left: Any, right: str, to: str, columns: Any = TILE
    ) -> None:
        """`to (rows, columns) = left (rows, count) right (count, columns)`."""
        self._product(0, rows, count, left, right, to, columns)

    def add(
        self, rows: Any, count: Any, left: Any, right: str, to: str, columns: Any = TILE
    ) -> None:
        """Adds that product."""
        self._product(1, rows, count, left, right, to, columns)

    def _product(self, which, rows, count, left, right, to, columns):
        target = self.at[to], columns, self.at[to]
        arguments = rows, columns, count, *left, self.at[right], columns, *target
        self.code.call(self.products[which], *arguments)

    def pair(self, array: str, width: Any, size: str, of_queries: str, to: str) -> None:
        """Products of keys, or values, and queries; zeros for keys ahead of the query."""
        self.multiply(self.tokens, self.job[size], (self.at[array], width, 1), of_queries, to)
        self.steps.clear_ahead(self.at[to], self.tokens)

    def multiply_out(self) -> None:
        """Y^T, with the sum of the weights as its last row if values have that entry."""
        count, features = self.job["all_values"], self.job["features"]
        self.multiply(count, features, (self.at["state"], 1, self.value_width), "query", "out")
        self.pair("key", features, "features", "query", "pairs")
        self.add(count, self.tokens, (self.at["value"], 1, self.value_width), "pairs", "out")

    def update_state(self) -> None:
        """Takes in the chunk."""
        features = self.job["features"]
        of_keys = self.at["key"], 1, features
        self.add(features, self.tokens, of_keys, "value", "state", self.value_width)

    # Arrays of XLA

    @contextlib.contextmanager
    def chunks(self, *, reverse: bool = False) -> Iterator[None]:
        """What is written within runs for each chunk, with its keys and values."""
        code, job = self.code, self.job
        count = code.ceil(job["tokens"], TILE)
        with code.loop(0, count) as n:
            chunk = code.sub(code.sub(count, 1), n) if reverse else n
            self.first = code.mul(chunk, TILE)
            self.tokens = code.min(code.sub(job["tokens"], self.first), TILE)
            for name, size, width in (
                ("key", "features", job["features"]),
                ("value", "values", self.value_width),
            ):
                to = Rows(self.at[name], width)
                self.steps.copy(self.rows(name), to, self.tokens, job[size])
            yield

    @contextlib.contextmanager
    def heads(self) -> Iterator[None]:
        """What is written within runs for each query head."""
        code, job = self.code, self.job
        group = code.div(job["heads"], job["key_heads"])
        first = code.mul(self.key_head, group)
        with code.loop(first, code.add(first, group)) as self.head:
            yield

    @contextlib.contextmanager
    def heads_then(self, last: Any) -> Iterator[None]:
        """The same, and then `last`."""
        with self.heads():
            yield
        last()

    def read(self, name: str, size: str) -> None:
        """The chunk of an array of queries, turned."""
        to = Rows(self.at[name], TILE)
        self.steps.transpose(self.rows(name), to, self.tokens, self.job[size], FLOAT(1.0))

    def write(self, name: str, size: str) -> None:
        """What has been made of it, turned back."""
        source = Rows(self.at[name], TILE)
        self.steps.transpose(source, self.rows(name), self.job[size], self.tokens, FLOAT(1.0))

    def rows(self, name: str) -> Rows:
        """Of this head of an array, from the chunk on."""
        of_keys = name in ("key", "value", "d_key", "d_value")
        heads, head = (
            (self.job["key_heads"], self.key_head) if of_keys else (self.job["heads"], self.head)
        )
        size = "features" if name in ("query", "key", "d_query", "d_key") else "values"
        return self._rows(name, heads, head, self.job[size])

    def factor(self, which: int) -> Rows:
        """A number for each token of this query head."""
        code, job = self.code, self.job
        found = self._rows("factors", job["heads"], self.head, 1)
        of_one = code.mul(which, job["batch"], job["tokens"], job["heads"])
        return Rows(code.place(found.start, of_one), found.step)

    def _rows(self, name, heads, head, size):
        code, job = self.code, self.job
        example = self.examples.get(name, self.example)
        token = code.add(code.mul(example, job["tokens"]), self.first)
        start = code.add(code.mul(token, heads, size), code.mul(head, size))
        return Rows(code.place(job[name], start), code.mul(heads, size))

    def read_state(self, name: str) -> None:
        """From an array of XLA."""
        self.steps.copy(*self._states(name), self.job["features"], self.job["all_values"])

    def write_state(self, name: str) -> None:
        """To an array of XLA."""
        of_xla, own = self._states(name)
        self.steps.copy(own, of_xla, self.job["features"], self.job["all_values"])

    def _states(self, name: str) -> tuple[Rows, Rows]:
        code, (features, size) = self.code, (self.job["features"], self.job["all_values"])
        example = self.examples.get(name, self.example)
        number = code.add(code.mul(example, self.job["key_heads"]), self.key_head)
        of_xla = code.place(self.job[name], code.mul(number, features, size))
        return Rows(of_xla, size), Rows(self.at["state"], self.value_width)
