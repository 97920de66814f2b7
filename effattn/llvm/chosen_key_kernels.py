"""Kernels of attention to chosen keys on CPUs, in float32, for a key head with its query heads.

The G query heads of a token attend to the same k keys. A chunk of `CHUNK` of them is gathered into
contiguous memory, the keys transposed, so that both products have right operands whose rows are
read as vectors:

    S = Q K^T (G, chunk),    O += P V (G, Hv),

with an online softmax over the chunks. Backward, with P = exp(S - L), dP = dO V^T,
dS = P * (dP - delta) and delta = rowsum(dO * O) - dL, with dL the gradient of the log-sum-exp L,

    dQ += dS K,    dK = dS^T Q,    dV = P^T dO,

where rows of dK and dV are added to those of the chosen keys. A task has a few tokens
(`token_tasks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from effattn.llvm import runtime
from effattn.llvm.key_chunks import CHUNK
from effattn.llvm.tiles import LOWEST, Rows, lay_out
from effattn.llvm.token_tasks import TokenTask, write_products

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job


_SIZES = "tokens", "heads", "size", "keys", "value_size", "count", "splits"
_OPERANDS = (
    runtime.Array("query", 3),
    runtime.Array("key", 2),
    runtime.Array("value", 2),
    runtime.Array("at", 2, "int32"),
)
_FORWARD = runtime.Signature(
    _OPERANDS,
    (runtime.Array("out", 3), runtime.Array("largest", 2), runtime.Array("total", 2)),
    integers=1,
)
_BACKWARD = runtime.Signature(
    (*_OPERANDS, runtime.Array("lse", 2), runtime.Array("d_out", 3), runtime.Array("delta", 2)),
    (runtime.Array("d_query", 3), runtime.Array("d_key", 3), runtime.Array("d_value", 3)),
    integers=1,
)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key, value, at) -> (out, largest, total).

    Shapes: query `(*B, T, G, H)`, key `(*B, S, H)`, value `(*B, S, Hv)`, at `(*B, T, k)`, the
    chosen keys or -1 for none, out `(*B, T, G, Hv)`, and `(*B, T, G)` for the largest logit and the
    sum of exp(logit - largest). k is a multiple of `CHUNK`, H and Hv are multiples of the lanes. A
    batch axis of length 1 of an argument is broadcast. The attributes are `limits`, the number of
    splits, which only the backward pass reads, and `scale`.
    """
    multiply, accumulate = write_products(module, name, lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scratch, _ = lay_out(code, memory, _forward_memory(code, job))
        task = _Task(code, job, scratch, number, _FORWARD)
        heads, size, value_size = (job[name] for name in ("heads", "size", "value_size"))
        with task.tokens():
            task.read("query", size, job["scale"])
            task.clear("out", value_size)
            with code.loop(0, heads) as head:
                code.store(code.float32(LOWEST), scratch["largest"], head)
                code.store(code.float32(0.0), scratch["total"], head)
            with task.chunks():
                task.gather("key", size, transposed="key_chunk")
                task.gather("value", value_size)
                pairs = scratch["pairs"], CHUNK, scratch["pairs"]
                left = scratch["query"], size, 1
                code.call(multiply, heads, CHUNK, size, *left, scratch["key_chunk"], CHUNK, *pairs)
                task.softmax_step()
                left, right = (scratch["pairs"], CHUNK, 1), (scratch["rows"], value_size)
                to = scratch["out"], value_size, memory
                code.call(accumulate, heads, value_size, CHUNK, *left, *right, *to)
            task.write_out()

    _write(module, name, lanes, _FORWARD, task, _forward_memory)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients.

    (query, key, value, at, lse, d_out, delta) -> (d_query, d_key, d_value), with `lse` and `delta`
    `(*B, T, G)`. The gradients of key and value have a leading axis of splits, which the caller
    sums.
    """
    multiply, accumulate = write_products(module, name, lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scratch, _ = lay_out(code, memory, _backward_memory(code, job))
        task = _Task(code, job, scratch, number, _BACKWARD, is_backward=True)
        heads, size, value_size = (job[name] for name in ("heads", "size", "value_size"))
        pairs, d_pairs = scratch["pairs"], scratch["d_pairs"]
        for array, width in (("d_key", size), ("d_value", value_size)):
            task.ops.fill(task.of_key(array, "keys", 0, width), code.mul(job["keys"], width))

        def add_columns(pairs, source, array, width):
            """Adds P^T X to the rows of the chosen keys, for rows X of the heads."""
            rows = scratch["rows"]
            left, right = (pairs, 1, CHUNK), (source, width)
            code.call(multiply, CHUNK, width, heads, *left, *right, rows, width, rows)
            task.scatter(array, width)

        with task.tokens():
            task.read("query", size, job["scale"])
            task.clear("d_query", size)
            d_out = task.of_token("d_out", code.mul(heads, value_size))
            with task.chunks():
                task.gather("value", value_size, transposed="value_chunk")
                task.gather("key", size, transposed="key_chunk")
                for left, width, chunk, to in (
                    (scratch["query"], size, "key_chunk", pairs),
                    (d_out, value_size, "value_chunk", d_pairs),
                ):
                    right = scratch[chunk], CHUNK, to, CHUNK, to
                    code.call(multiply, heads, CHUNK, width, left, width, 1, *right)
                task.softmax_gradient()
                left, to = (d_pairs, CHUNK, 1), (scratch["d_query"], size, memory)
                code.call(accumulate, heads, size, CHUNK, *left, scratch["rows"], size, *to)
                add_columns(pairs, d_out, "d_value", value_size)
                add_columns(d_pairs, scratch["query"], "d_key", size)
            task.write("d_query", size, job["scale"])

    _write(module, name, lanes, _BACKWARD, task, _backward_memory)


def _write(
    module: ir.Module,
    name: str,
    lanes: int,
    signature: runtime.Signature,
    task: Callable[..., None],
    memory: Callable[[Code, Job], dict[str, Any]],
) -> None:
    from effattn.llvm.handlers import write_handler

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, heads, size = frame.last_sizes(0, 3)
        keys, value_size = frame.last_sizes(2, 2)
        (count,) = frame.last_sizes(3, 1)
        sizes = tokens, heads, size, keys, value_size, count, *frame.integers(1)
        for each, found in zip(_SIZES, sizes, strict=True):
            job[each] = found
        job["scale"] = frame.scale()
        count = TokenTask.count(code, job, is_backward=signature is _BACKWARD)
        return count, code.add(*memory(code, job).values())

    write_handler(module, name, lanes, signature, _SIZES, ["scale"], begin, task)


def _forward_memory(code: Code, job: Job) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task."""
    widest = code.max(job["size"], job["value_size"])
    return {
        "query": code.mul(job["heads"], job["size"]),
        "out": code.mul(job["heads"], job["value_size"]),
        **dict.fromkeys(("largest", "total"), code.round_to_lanes(job["heads"])),
        "key_chunk": code.mul(job["size"], CHUNK),
        "rows": code.mul(widest, CHUNK),
        "pairs": code.mul(job["heads"], CHUNK),
    }


def _backward_memory(code: Code, job: Job) -> dict[str, Any]:
    return {
        **_forward_memory(code, job),
        "d_query": code.mul(job["heads"], job["size"]),
        "value_chunk": code.mul(job["value_size"], CHUNK),
        "d_pairs": code.mul(job["heads"], CHUNK),
    }


class _Task(TokenTask):
    """Generates the work on tokens, chunk by chunk of their keys.

    Attributes:
      chosen: address of the keys of the present chunk, `CHUNK` 32-bit integers.
    """

    @contextlib.contextmanager
    def chunks(self) -> Iterator[None]:
        """Loops over the chunks with a key; the `with` block generates its body."""
        code = self.code
        at = self.of_token("at", self.job["count"])
        with code.loop(0, self.job["count"], CHUNK) as first:
            self.chosen = code.address(at, first)
            with code.when(code.any_of([self._is_key(v) for v in range(0, CHUNK, code.lanes)])):
                yield

    def _is_key(self, v):
        """Returns, as a vector, whether the chunk's entries from `v` on are keys."""
        code = self.code
        at = code.load_vector(self.chosen, v, code.integers)
        return code.builder.icmp_signed(">=", at, code.integer_vector([0] * code.lanes))

    @contextlib.contextmanager
    def _each_key(self):
        """Loops over the places of the chunk; yields the place and its key, or -1."""
        code = self.code
        with code.loop(0, CHUNK) as place:
            yield place, code.wide(code.load(self.chosen, place, code.int32))

    def gather(self, name: str, size: Any, transposed: str | None = None) -> None:
        """Gathers rows of the chunk's keys, zeros for none, also transposed if asked."""
        code, ops = self.code, self.ops
        with self._each_key() as (place, key):
            to = code.address(self.scratch["rows"], code.mul(place, size))
            is_none = code.less(key, 0)
            with code.when(is_none):
                ops.fill(to, size)
            with code.when(code.builder.not_(is_none)):
                ops.copy(Rows(self.of_key(name, "keys", key, size), 0), Rows(to, 0), 1, size)
        if transposed is not None:
            rows, to = Rows(self.scratch["rows"], size), Rows(self.scratch[transposed], CHUNK)
            ops.transpose(rows, to, CHUNK, size, code.float32(1.0))

    def scatter(self, name: str, size: Any) -> None:
        """Adds rows to those of the chunk's keys."""
        code, ops = self.code, self.ops
        with self._each_key() as (place, key), code.when(code.less(-1, key)):
            source = code.address(self.scratch["rows"], code.mul(place, size))
            target = self.of_key(name, "keys", key, size)
            ops.copy(Rows(source, 0), Rows(target, 0), 1, size, add=True)

    # Softmax

    def softmax_step(self) -> None:
        """One step of the online softmax: replaces logits by weights, and rescales the output."""
        code, builder, scratch = self.code, self.code.builder, self.scratch
        value_size, hidden = self.job["value_size"], code.number(float("-inf"))
        columns = range(0, CHUNK, code.lanes)
        is_key = [self._is_key(v) for v in columns]
        with code.loop(0, self.job["heads"]) as head:
            row = code.address(scratch["pairs"], code.mul(head, CHUNK))
            logits = [
                builder.select(shown, code.load_vector(row, v), hidden)
                for v, shown in zip(columns, is_key, strict=True)
            ]
            before = code.load(scratch["largest"], head)
            most = code.all_lanes(before)
            for vector in logits:
                most = code.maximum(most, vector)
            after = code.maximum_of_lanes(most)
            most, sums = code.all_lanes(after), code.number(0.0)
            for vector, v in zip(logits, columns, strict=True):
                weights = code.exp(builder.fsub(vector, most))
                code.store_vector(weights, row, v)
                sums = builder.fadd(sums, weights)
            kept = code.exp(builder.fsub(code.all_lanes(before), most))
            factor = builder.extract_element(kept, code.int32(0))
            total = builder.fmul(code.load(scratch["total"], head), factor)
            code.store(builder.fadd(total, code.sum_of_lanes(sums)), scratch["total"], head)
            code.store(after, scratch["largest"], head)
            with code.when(builder.fcmp_unordered("!=", before, after)):
                start = code.mul(head, value_size)
                with code.loop(start, code.add(start, value_size), code.lanes) as at:
                    vector = builder.fmul(code.load_vector(scratch["out"], at), kept)
                    code.store_vector(vector, scratch["out"], at)

    def write_out(self) -> None:
        """Writes the output, the largest logits and the sums."""
        code, builder, heads = self.code, self.code.builder, self.job["heads"]
        value_size = self.job["value_size"]
        out = self.of_token("out", code.mul(heads, value_size))
        largest, total = (self.of_token(name, heads) for name in ("largest", "total"))
        with code.loop(0, heads) as head:
            code.store(code.load(self.scratch["largest"], head), largest, head)
            sums = code.load(self.scratch["total"], head)
            code.store(sums, total, head)
            is_zero = builder.fcmp_ordered("==", sums, code.float32(0.0))
            divisor = code.all_lanes(builder.select(is_zero, code.float32(1.0), sums))
            start = code.mul(head, value_size)
            with code.loop(start, code.add(start, value_size), code.lanes) as at:
                vector = builder.fdiv(code.load_vector(self.scratch["out"], at), divisor)
                code.store_vector(vector, out, at)

    def softmax_gradient(self) -> None:
        """Replaces logits by weights, and gradients of weights by those of logits."""
        code, builder, scratch = self.code, self.code.builder, self.scratch
        heads, columns = self.job["heads"], range(0, CHUNK, code.lanes)
        lse, delta = (self.of_token(name, heads) for name in ("lse", "delta"))
        is_key, zero = [self._is_key(v) for v in columns], code.number(0.0)
        with code.loop(0, heads) as head:
            rows = [
                code.address(scratch[name], code.mul(head, CHUNK)) for name in ("pairs", "d_pairs")
            ]
            sums, same = (code.all_lanes(code.load(array, head)) for array in (lse, delta))
            for v, shown in zip(columns, is_key, strict=True):
                logits, d_weights = (code.load_vector(row, v) for row in rows)
                weights = builder.select(shown, code.exp(builder.fsub(logits, sums)), zero)
                change = builder.fmul(weights, builder.fsub(d_weights, same))
                code.store_vector(weights, rows[0], v)
                code.store_vector(builder.select(shown, change, zero), rows[1], v)
