"""Kernels of native sparse attention on CPUs, in float32, for a key head with its query heads.

The G query heads of a token share all that they attend to: ranges of compressed blocks (those that
have ended), of the keys of selected blocks, and of the keys in the window. A range is read in
chunks of `CHUNK` keys. With the keys of a chunk transposed, K^T (H, chunk), both products have
right operands whose rows are read as vectors,

    S = Q K^T (G, chunk),    O += P V (G, Hv),

and the S of a branch stays in the cache of the core. The sum of P over the heads, for compressed
blocks (their "shares"), gives the scores that select blocks. So the branches of a token are one
pass, without arrays of pairs in memory.

A task has a few tokens (`token_tasks`). Backward, it computes P and the selection once more, so
nothing is saved. With the gate g of a branch, whose gradient is rowsum(P * dP),

    dP = dO V^T,   dS = g P * (dP - rowsum(P * dP)),   dQ += dS K,   dK += dS^T Q,   dV += g P^T dO.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from effattn.llvm import runtime
from effattn.llvm.key_chunks import CHUNK
from effattn.llvm.tiles import LOWEST, lay_out
from effattn.llvm.token_tasks import TokenTask, write_products

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job


class _Piece(NamedTuple):
    """A chunk of keys that a range meets.

    Attributes:
      first: the first key of the chunk.
      begin, end: the keys of the range, counted from the first key of the chunk.
      place: the column of the chunk's first key in the arrays of pairs.
    """

    first: Any
    begin: Any
    end: Any
    place: Any


# The elements of the attribute `limits`: the sizes of the mechanism, the most keys of a branch in
# whole chunks, and the number of tasks that share the work of a key head.
ATTRIBUTES = "compression", "stride", "block", "selected", "window", "most", "splits"
_SIZES = "tokens", "heads", "size", "value_size", "keys", "compressed", *ATTRIBUTES

_QUERY = runtime.Array("query", 3)
_KEYS = tuple(
    runtime.Array(name, axes)
    for prefix in ("", "compressed_")
    for name, axes in ((f"{prefix}key_chunks", 3), (f"{prefix}value", 2))
)
_OTHERS = runtime.Array("gates", 3), runtime.Array("limit", 1, "int32")
_FORWARD = runtime.Signature(
    (_QUERY, *_KEYS, *_OTHERS), (runtime.Array("out", 3),), len(ATTRIBUTES)
)
_BACKWARD = runtime.Signature(
    (
        *_FORWARD.arguments,
        *(
            runtime.Array(name, axes)
            for prefix in ("", "compressed_")
            for name, axes in ((f"{prefix}key", 2), (f"{prefix}value_chunks", 3))
        ),
        runtime.Array("d_out", 3),
    ),
    (
        runtime.Array("d_query", 3),
        *(
            runtime.Array(f"d_{prefix}{name}", 3)
            for prefix in ("", "compressed_")
            for name in ("key", "value")
        ),
        runtime.Array("d_gates", 3),
    ),
    len(ATTRIBUTES),
)

_BRANCHES = _COMPRESSED, _SELECTED, _WINDOW = range(3)  # in the order of the gates


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key_chunks, value, ..., gates, limit) -> (out,).

    Shapes: query `(*B, T, G, H)`, key_chunks `(*B, S / c, H, c)` for chunks of c keys, value `(*B,
    S, Hv)`, compressed_key_chunks and compressed_value likewise with M blocks in place of S keys,
    gates `(*B, T, G, 3)`, limit `(*B, 1)`, the number of valid keys, and out `(*B, T, G, Hv)`. S
    and M are multiples of c, H and Hv multiples of the lanes. A batch axis of length 1 of an
    argument is broadcast. The attributes are `limits` and `scale`.
    """
    products = write_products(module, name, lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scratch, _ = lay_out(code, memory, _forward_memory(code, job))
        task = _Task(products, code, job, scratch, number, _FORWARD)
        with task.tokens():
            task.read("query", job["size"], job["scale"])
            task.clear("out", job["value_size"])
            with task.branches():
                task.weigh()
                task.mix()
            task.write("out", job["value_size"], code.float32(1.0))

    _write(module, name, lanes, _FORWARD, task, _forward_memory)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients.

    (query, ..., limit, key, value_chunks, compressed_key, compressed_value_chunks, d_out) ->
    (d_query, d_key, d_value, d_compressed_key, d_compressed_value, d_gates). The gradients of keys
    and values have a leading axis of splits, which the caller sums.
    """
    products = write_products(module, name, lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scratch, _ = lay_out(code, memory, _backward_memory(code, job))
        task = _Task(products, code, job, scratch, number, _BACKWARD, is_backward=True)
        task.clear_gradients()
        with task.tokens():
            task.read("query", job["size"], job["scale"])
            task.clear("d_query", job["size"])
            with task.branches():
                task.weigh()
                task.pull_back()
            task.write("d_query", job["size"], job["scale"])

    _write(module, name, lanes, _BACKWARD, task, _backward_memory)


def _write(module, name, lanes, signature, task, memory):
    from effattn.llvm.handlers import write_handler

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, heads, size = frame.last_sizes(0, 3)
        keys, value_size = frame.last_sizes(2, 2)
        compressed, _ = frame.last_sizes(4, 2)
        sizes = tokens, heads, size, value_size, keys, compressed, *frame.integers(len(ATTRIBUTES))
        for each, found in zip(_SIZES, sizes, strict=True):
            job[each] = found
        job["scale"] = frame.scale()
        count = TokenTask.count(code, job, is_backward=signature is _BACKWARD)
        return count, code.add(*memory(code, job).values())

    write_handler(module, name, lanes, signature, _SIZES, ["scale"], begin, task)


def _forward_memory(code: Code, job: Job) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task."""
    blocks = code.add(code.div(job["tokens"], job["block"]), 1)
    each = code.mul(blocks, code.div(job["block"], job["stride"]))
    return {
        "query": code.mul(job["heads"], job["size"]),
        **dict.fromkeys(("out", "mixed"), code.mul(job["heads"], job["value_size"])),
        "largest": code.mul(job["heads"], code.lanes),
        "inverse": code.round_to_lanes(job["heads"]),
        "weights": code.mul(job["heads"], job["most"]),
        "shares": code.add(_before(code, job), code.max(each, job["compressed"]), CHUNK),
        "scores": code.round_to_lanes(blocks),
        "ranges": code.round_to_lanes(code.mul(job["selected"], 2)),
    }


def _backward_memory(code: Code, job: Job) -> dict[str, Any]:
    return {
        **_forward_memory(code, job),
        "d_query": code.mul(job["heads"], job["size"]),
        "d_weights": code.mul(job["heads"], job["most"]),
    }


def _before(code, job):
    """Number of zeros before the shares: the first strides read shares of earlier places."""
    return code.round_to_lanes(code.div(job["compression"], job["stride"]))


class _Task(TokenTask):
    """Generates the work on tokens, branch by branch.

    Attributes:
      branch: the present branch.
      last: the last key that the token may see.
      range_count: variable, the number of ranges of the branch.
      columns: variable, the number of keys of the branch in whole chunks.
    """

    def __init__(self, products: Any, code: Code, job: Job, *rest: Any, **options: Any):
        super().__init__(code, job, *rest, **options)
        self.multiply, self.accumulate = products
        self.range_count, self.columns = code.variable(0), code.variable(0)
        limit = code.load(job["limit"], self.examples["limit"], code.int32)
        self.limit = code.wide(limit)

    @contextlib.contextmanager
    def tokens(self) -> Iterator[None]:
        """Loops over the tokens of the task; the `with` block generates its body."""
        with super().tokens():
            self.last = self.code.min(self.token, self.code.sub(self.limit, 1))
            yield

    @contextlib.contextmanager
    def branches(self) -> Iterator[None]:
        """Loops over the branches, with the ranges of each; the `with` block generates its body."""
        code = self.code
        with code.loop(0, len(_BRANCHES)) as self.branch:
            self.is_compressed = self._is(_COMPRESSED)
            with code.when(self.is_compressed):
                self._begin_compressed()
            with code.when(self._is(_SELECTED)):
                self._select()
            with code.when(self._is(_WINDOW)):
                start = code.sub(code.add(self.token, 1), self.job["window"])
                self._set_ranges((code.max(start, 0), code.add(self.last, 1)))
            yield

    def _is(self, branch):
        return self.code.builder.icmp_signed("==", self.branch, self.code.integer(branch))

    # Arrays

    def _of_keys(self, name, key, size):
        """Address of the row of a key of the branch, in one of two arrays of keys.

        In an array of chunks, rows are those of the chunk's first key.
        """
        found = []
        for prefix, count in (("compressed_", "compressed"), ("", "keys")):
            full = f"d_{prefix}{name[2:]}" if name.startswith("d_") else prefix + name
            found.append(self.of_key(full, count, key, self.job[size]))
        return self.code.builder.select(self.is_compressed, *found)

    def clear_gradients(self) -> None:
        """Sets the gradients of keys and values of the split to zero."""
        code, job = self.code, self.job
        for prefix, count in (("", "keys"), ("compressed_", "compressed")):
            for name, size in (("key", "size"), ("value", "value_size")):
                start = self.of_key(f"d_{prefix}{name}", count, 0, job[size])
                self.ops.fill(start, code.mul(job[count], job[size]))

    # Ranges

    def _set_ranges(self, *ranges):
        code = self.code
        for number, (start, stop) in enumerate(ranges):
            self._set_range(number, start, stop)
        code.set(self.range_count, len(ranges))

    def _set_range(self, number, start, stop):
        code = self.code
        for n, end in enumerate((start, stop)):
            place = code.add(code.mul(number, 2), n)
            end = code.builder.trunc(code.integer(end), code.int32)
            code.store(end, self.scratch["ranges"], place)

    @contextlib.contextmanager
    def pieces(self) -> Iterator[_Piece]:
        """Loops over the chunks of the ranges; the `with` block generates its body."""
        code = self.code
        place = code.variable(0)
        with code.loop(0, code.get(self.range_count)) as number:
            start, stop = (
                code.wide(
                    code.load(self.scratch["ranges"], code.add(code.mul(number, 2), n), code.int32)
                )
                for n in range(2)
            )
            with (
                code.when(code.less(start, stop)),
                code.loop(code.div(start, CHUNK), code.ceil(stop, CHUNK)) as chunk,
            ):
                first = code.mul(chunk, CHUNK)
                begin = code.max(code.sub(start, first), 0)
                end = code.min(code.sub(stop, first), CHUNK)
                yield _Piece(first, begin, end, code.get(place))
                code.set(place, code.add(code.get(place), CHUNK))
        code.set(self.columns, code.get(place))

    def _begin_compressed(self):
        """Sets the range of the compressed blocks that have ended, and clears their shares."""
        code, job = self.code, self.job
        seen = code.add(self.last, 1)
        count = code.add(
            code.div(code.max(code.sub(seen, job["compression"]), 0), job["stride"]), 1
        )
        count = code.builder.select(code.less(seen, job["compression"]), code.integer(0), count)
        self._set_ranges((0, count))
        strides = code.mul(self._own_block(), code.div(job["block"], job["stride"]))
        zeros = code.add(_before(code, job), code.max(count, strides), CHUNK)
        self.ops.fill(self.scratch["shares"], code.sub(zeros, code.rem(zeros, code.lanes)))

    def _own_block(self):
        return self.code.div(self.token, self.job["block"])

    def _shares(self):
        return self.code.address(self.scratch["shares"], _before(self.code, self.job))

    def _select(self):
        """Sets the ranges of the selected blocks: the own one, and those with the best scores."""
        code, job, scores = self.code, self.job, self.scratch["scores"]
        own = self._own_block()
        self._score(own)
        stop, block = code.add(self.last, 1), job["block"]

        def set_range(number, index):
            start = code.mul(index, block)
            self._set_range(number, start, code.min(code.add(start, block), stop))

        set_range(0, own)
        code.set(self.range_count, 1)
        with code.loop(0, code.min(own, code.sub(job["selected"], 1))):
            best = code.variable(code.number(-1.0))
            with code.loop(0, own, code.lanes) as n:
                code.set(best, code.maximum(code.get(best), code.load_vector(scores, n)))
            most = code.all_lanes(code.maximum_of_lanes(code.get(best)))
            # The first block with that score; a score that is not a number is never the best.
            none = 2**31 - 1
            found = code.variable(code.integer_vector([none] * code.lanes))
            with code.loop(0, own, code.lanes) as n:
                index = code.builder.add(
                    code.integer_vector(range(code.lanes)),
                    code.all_lanes(code.builder.trunc(n, code.int32)),
                )
                is_best = code.builder.fcmp_ordered("==", code.load_vector(scores, n), most)
                index = code.builder.select(
                    is_best, index, code.integer_vector([none] * code.lanes)
                )
                code.set(found, code.extremes(code.get(found), index)[0])
            index = code.wide(code.extremes_of(code.get(found), code.get(found))[0])
            with code.when(code.less(index, own)):
                code.store(code.float32(-2.0), scores, index)
                set_range(code.get(self.range_count), index)
                code.set(self.range_count, code.add(code.get(self.range_count), 1))

    def _score(self, own):
        """Scores of the blocks before the own one; -1 in the lanes after them."""
        code, job, scores = self.code, self.job, self.scratch["scores"]
        shares = self._shares()
        strides = code.div(job["block"], job["stride"])
        overlaps = code.div(job["compression"], job["stride"])
        with code.loop(0, own) as n:
            total = code.variable(code.float32(0.0))
            first = code.mul(n, strides)
            with code.loop(0, strides) as i, code.loop(0, overlaps) as j:
                share = code.load(shares, code.sub(code.add(first, i), j))
                code.set(total, code.builder.fadd(code.get(total), share))
            code.store(code.get(total), scores, n)
        with code.when(code.less(0, own)):
            for always in (code.integer(0), code.sub(own, 1)):
                code.store(code.float32(-LOWEST), scores, always)
        with code.loop(own, code.round_to_lanes(own)) as n:
            code.store(code.float32(-1.0), scores, n)

    # Attention

    def _row(self, name, head):
        code = self.code
        return code.address(self.scratch[name], code.mul(head, self.job["most"]))

    @contextlib.contextmanager
    def _pairs(self, left, right, size, name):
        """Multiplies the heads' rows by each chunk of the branch; yields the products' address."""
        code, job = self.code, self.job
        with self.pieces() as piece:
            chunk = self._of_keys(right, piece.first, size)
            to = code.address(self.scratch[name], piece.place)
            rows, columns = (left, job[size], 1), (chunk, CHUNK)
            code.call(
                self.multiply,
                job["heads"],
                CHUNK,
                job[size],
                *rows,
                *columns,
                to,
                job["most"],
                to,
            )
            self._mask(to, piece, float("-inf") if name == "weights" else 0.0)
            yield to

    def _mask(self, pairs, piece, value):
        """Sets the pairs of keys outside of a range to a value."""
        code, builder = self.code, self.code.builder
        is_part = builder.or_(code.less(0, piece.begin), code.less(piece.end, CHUNK))
        with code.when(is_part):
            begin, end = (code.all_lanes(builder.trunc(each, code.int32)) for each in piece[1:3])
            for v in range(0, CHUNK, code.lanes):
                lane = code.integer_vector(range(v, v + code.lanes))
                sees = builder.and_(
                    builder.icmp_signed("<=", begin, lane), builder.icmp_signed("<", lane, end)
                )
                with code.loop(0, self.job["heads"]) as head:
                    at = code.add(code.mul(head, self.job["most"]), v)
                    shown = builder.select(sees, code.load_vector(pairs, at), code.number(value))
                    code.store_vector(shown, pairs, at)

    def weigh(self) -> None:
        """Computes the weights exp(S - max S) of the branch, and 1 over their sums."""
        code, job, builder = self.code, self.job, self.code.builder
        self.ops.fill(self.scratch["largest"], code.mul(job["heads"], code.lanes), LOWEST)
        with self._pairs(self.scratch["query"], "key_chunks", "size", "weights") as pairs:
            with code.loop(0, job["heads"]) as head:
                row = code.address(pairs, code.mul(head, job["most"]))
                place = code.mul(head, code.lanes)
                largest = code.load_vector(self.scratch["largest"], place)
                for v in range(0, CHUNK, code.lanes):
                    largest = code.maximum(largest, code.load_vector(row, v))
                code.store_vector(largest, self.scratch["largest"], place)
        columns = code.get(self.columns)
        with code.loop(0, job["heads"]) as head:
            row = self._row("weights", head)
            largest = code.load_vector(self.scratch["largest"], code.mul(head, code.lanes))
            most = code.all_lanes(code.maximum_of_lanes(largest))
            sums = code.variable(code.number(0.0))
            with code.loop(0, columns, code.lanes) as at:
                weight = code.exp(builder.fsub(code.load_vector(row, at), most))
                code.store_vector(weight, row, at)
                code.set(sums, builder.fadd(code.get(sums), weight))
            total = code.sum_of_lanes(code.get(sums))
            is_zero = builder.fcmp_ordered("==", total, code.float32(0.0))
            one = code.float32(1.0)
            inverse = builder.fdiv(one, builder.select(is_zero, one, total))
            code.store(inverse, self.scratch["inverse"], head)
            with code.when(self.is_compressed):
                factor, shares = code.all_lanes(inverse), self._shares()
                with code.loop(0, columns, code.lanes) as at:
                    products = code.load_vector(row, at), factor
                    share = code.multiply_add(*products, code.load_vector(shares, at))
                    code.store_vector(share, shares, at)

    def _gates(self, name):
        return self.of_token(name, self.code.mul(self.job["heads"], len(_BRANCHES)))

    def _gate(self, head):
        return self.code.load(self._gates("gates"), self._gate_place(head))

    def _gate_place(self, head):
        code = self.code
        return code.add(code.mul(head, len(_BRANCHES)), self.branch)

    def mix(self) -> None:
        """Adds the output of the branch, times its gate."""
        code, job, builder = self.code, self.job, self.code.builder
        self.clear("mixed", job["value_size"])
        with self.pieces() as piece:
            self._add_rows("weights", piece, "value", "value_size", self.scratch["mixed"])
        with code.loop(0, job["heads"]) as head:
            inverse = code.load(self.scratch["inverse"], head)
            factor = code.all_lanes(builder.fmul(inverse, self._gate(head)))
            start = code.mul(head, job["value_size"])
            with code.loop(start, code.add(start, job["value_size"]), code.lanes) as at:
                mixed, out = (code.load_vector(self.scratch[x], at) for x in ("mixed", "out"))
                code.store_vector(code.multiply_add(mixed, factor, out), self.scratch["out"], at)

    def _add_rows(self, name, piece, rows, size, to):
        """Adds P X to an array of the heads, for rows X of the keys of a piece."""
        code, job = self.code, self.job
        pairs = code.address(self.scratch[name], code.add(piece.place, piece.begin))
        source = self._of_keys(rows, code.add(piece.first, piece.begin), size)
        keys = code.sub(piece.end, piece.begin)
        width = job[size]
        left, right = (pairs, job["most"], 1), (source, width)
        code.call(self.accumulate, job["heads"], width, keys, *left, *right, to, width, to)

    def _add_columns(self, name, piece, source, size, to):
        """Adds P^T X to the rows of the keys of a piece, for rows X of the heads."""
        code, job = self.code, self.job
        pairs = code.address(self.scratch[name], code.add(piece.place, piece.begin))
        to = self._of_keys(to, code.add(piece.first, piece.begin), size)
        keys = code.sub(piece.end, piece.begin)
        width = job[size]
        left, right = (pairs, 1, job["most"]), (source, width)
        code.call(self.accumulate, keys, width, job["heads"], *left, *right, to, width, to)

    def pull_back(self) -> None:
        """Adds the gradients of the branch, whose weights are given."""
        code, job, builder = self.code, self.job, self.code.builder
        d_out = self.of_token("d_out", code.mul(job["heads"], job["value_size"]))
        with self._pairs(d_out, "value_chunks", "value_size", "d_weights"):
            pass
        with code.loop(0, job["heads"]) as head:
            rows = [self._row(name, head) for name in ("weights", "d_weights")]
            sums = code.variable(code.number(0.0))
            with code.loop(0, code.get(self.columns), code.lanes) as at:
                weights, d_weights = (code.load_vector(row, at) for row in rows)
                code.set(sums, code.multiply_add(weights, d_weights, code.get(sums)))
            inverse = code.load(self.scratch["inverse"], head)
            total = builder.fmul(code.sum_of_lanes(code.get(sums)), inverse)
            code.store(total, self._gates("d_gates"), self._gate_place(head))
            factor = code.all_lanes(builder.fmul(inverse, self._gate(head)))
            total = code.all_lanes(total)
            with code.loop(0, code.get(self.columns), code.lanes) as at:
                weights, d_weights = (code.load_vector(row, at) for row in rows)
                weights = builder.fmul(weights, factor)
                change = builder.fmul(weights, builder.fsub(d_weights, total))
                code.store_vector(weights, rows[0], at)
                code.store_vector(change, rows[1], at)
        with self.pieces() as piece:
            self._add_columns("weights", piece, d_out, "value_size", "d_value")
            self._add_columns("d_weights", piece, self.scratch["query"], "size", "d_key")
            self._add_rows("d_weights", piece, "key", "size", self.scratch["d_query"])
