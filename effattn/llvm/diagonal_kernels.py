"""Kernels of the diagonal recurrence on CPUs, in float32.

    S_t = exp(A * dt_t) * S_(t-1) + k_t (dt_t * v_t)^T        (F, D), * elementwise
    y_t = S_t^T q_t

A task is `PIECE` values of a key head, as columns of S, with the query heads that read them: no
column depends on another. Forward, it walks over the tokens with its columns in cache. Backward, it
does so once more and saves the columns before every chunk of tokens. From the last chunk to the
first, it computes the columns and decays of all tokens of the chunk from those before it, and then,
backward in time, with the gradient R of the columns after a token and
E = R * exp(A * dt_t) * S_(t-1),

    dq_t = S_t dy_t,  dk_t = R (dt_t * v_t),  dv_t = dt_t * (R^T k_t),
    d(dt_t) = v_t * (R^T k_t) + sum_f A * E,  dA = sum_t dt_t * E.

The gradients of queries and keys are sums over the values: each task writes its part of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effattn.llvm import runtime
from effattn.llvm.tiles import Rows, TileOps, lay_out

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

PIECE = 64  # values of a task
_MOST = 32  # most tokens in a chunk
_PLACES = 2**10  # most tokens times features in a chunk: states and decays take 512 KB

_SIZES = "tokens", "features", "values", "query_heads", "heads", "keeps", "chunk_size"
_OPERANDS = (
    *(runtime.Array(name, 3) for name in ("query", "key", "value", "dt", "A", "state")),
    runtime.Array("keep", 2),
)
_FORWARD = runtime.Signature(_OPERANDS, (runtime.Array("out", 3), runtime.Array("state_after", 3)))
_BACKWARD = runtime.Signature(
    (*_OPERANDS, runtime.Array("d_out", 3), runtime.Array("d_after", 3)),
    (
        runtime.Array("d_query", 4),
        runtime.Array("d_key", 4),
        *(runtime.Array(f"d_{array.name}", 3) for array in _OPERANDS[2:-1]),
    ),
)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key, value, dt, A, state, keep) -> (out, state_after).

    Shapes: query `(*B, T, N, F)`, key `(*B, T, K, F)`, value and dt `(*B, T, K, D)`, A and state
    `(*B, K, F, D)`, and keep `(*B, T, 0 or 1)`, which multiplies the state before a token. A
    batch axis of length 1 of an argument is broadcast.
    """

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scan = _Scan(code, job, memory, number, _FORWARD)
        scan.read_state("A", "A")
        scan.read_state("state", "state")
        with scan.chunks(), code.loop(0, scan.tokens) as token:
            scan.advance(token, scan.scratch["state"], scan.scratch["state"])
            with scan.heads() as head:
                scan.read_out(token, head)
        scan.write_state("state", "state_after")

    _write(module, name, lanes, _FORWARD, task, _forward_memory)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients.

    (query, ..., keep, d_out, d_after) -> (d_query, d_key, d_value, d_dt, d_A, d_state). d_query
    `(*B, T, N, P, F)` and d_key `(*B, T, K, P, F)` have a part for each of the P tasks of a head,
    and d_A has all batch axes.
    """

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scan = _Scan(code, job, memory, number, _BACKWARD)
        scan.read_state("A", "A")
        scan.read_state("state", "state")
        with scan.chunks():
            scan.copy_state(scan.scratch["state"], scan.saved_state())
            with code.loop(0, scan.tokens) as token:
                scan.advance(token, scan.scratch["state"], scan.scratch["state"])
        scan.read_state("d_after", "d_state")
        with scan.chunks(reverse=True):
            scan.copy_state(scan.saved_state(), scan.scratch["history"])
            with code.loop(0, scan.tokens) as token:
                before, after = (scan.in_history(code.add(token, n)) for n in (0, 1))
                scan.advance(token, before, after, scan.decays_of(token))
            with code.loop(0, scan.tokens) as n:
                token = code.sub(code.sub(scan.tokens, 1), n)
                with scan.heads() as head:
                    scan.pull_back_read(token, head)
                scan.pull_back_token(token)
            for array in ("value", "dt"):
                scan.write(f"d_{array}")
        scan.write_state("d_state", "d_state")
        scan.write_state("d_A", "d_A")

    _write(module, name, lanes, _BACKWARD, task, _backward_memory)


def _write(module, name, lanes, signature, task, memory):
    from effattn.llvm.handlers import write_handler

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, query_heads, features = frame.last_sizes(0, 3)
        heads, values = frame.last_sizes(2, 2)
        (keeps,) = frame.last_sizes(6, 1)
        chunk_size = code.min(code.max(code.div(_PLACES, features), 1), _MOST)
        sizes = tokens, features, values, query_heads, heads, keeps, chunk_size
        for each, size in zip(_SIZES, sizes, strict=True):
            job[each] = size
        tasks = code.mul(job["batch"], heads, code.ceil(values, PIECE))
        return tasks, code.add(*memory(code, job).values())

    write_handler(module, name, lanes, signature, _SIZES, [], begin, task)


def _forward_memory(code: Code, job: Job) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task: of tokens, and of states."""
    return {
        **dict.fromkeys(("value", "dt"), code.mul(job["chunk_size"], PIECE)),
        "row": PIECE,
        **dict.fromkeys(("A", "state"), code.mul(job["features"], PIECE)),
    }


def _backward_memory(code: Code, job: Job) -> dict[str, Any]:
    of_state, size = code.mul(job["features"], PIECE), job["chunk_size"]
    return {
        **_forward_memory(code, job),
        **dict.fromkeys(("d_value", "d_dt"), code.mul(size, PIECE)),
        **dict.fromkeys(("d_state", "d_A"), of_state),
        "history": code.mul(of_state, code.add(size, 1)),
        "decays": code.mul(of_state, size),
        "states": code.mul(code.ceil(job["tokens"], size), of_state),
    }


class _Scan:
    """Walk of one task over chunks of tokens.

    Attributes:
      scratch: addresses of the scratch arrays. Rows are `PIECE` long, zero beyond the values.
      head, piece: the key head, and the number of the piece of its values.
      size, width: number of values of the piece, and the same rounded up to whole vectors.
      chunk, first, tokens: number of the chunk, its first token, and its number of tokens.
    """

    def __init__(
        self, code: Code, job: Job, memory: Any, number: Any, signature: runtime.Signature
    ):
        self.code, self.job, self.ops = code, job, TileOps(code)
        sizes = (_forward_memory if signature is _FORWARD else _backward_memory)(code, job)
        self.scratch, _ = lay_out(code, memory, sizes)
        for name, size in sizes.items():
            if name not in ("history", "decays", "states"):  # set before they are read
                self.ops.fill(self.scratch[name], size)
        self.pieces = code.ceil(job["values"], PIECE)
        self.piece, rest = code.rem(number, self.pieces), code.div(number, self.pieces)
        self.head, self.example = code.rem(rest, job["heads"]), code.div(rest, job["heads"])
        self.examples = {
            array.name: job.example_of(array.name, self.example) for array in signature.arguments
        }
        left = code.sub(job["values"], code.mul(self.piece, PIECE))
        self.size = code.min(left, PIECE)
        self.width = code.round_to_lanes(self.size)
        self.chunk = self.first = self.tokens = code.integer(0)

    # One token

    def advance(self, token: Any, before: Any, after: Any, decays: Any = None) -> None:
        """The state after a token from the state before it; `decays` receive the decays."""
        code = self.code
        keys = self._token("key", self.head, token)
        keep = self._keep(token)
        with self._vectors() as d:
            dt, value = (self._load(name, token, d) for name in ("dt", "value"))
            written = code.builder.fmul(dt, value)
            with code.loop(0, self.job["features"]) as f:
                at = code.add(code.mul(f, PIECE), d)
                log_decay = code.builder.fmul(code.load_vector(self.scratch["A"], at), dt)
                decay = code.builder.fmul(code.decay(log_decay), keep)
                if decays is not None:
                    code.store_vector(decay, decays, at)
                more = code.builder.fmul(code.all_lanes(code.load(keys, f)), written)
                state = code.multiply_add(decay, code.load_vector(before, at), more)
                code.store_vector(state, after, at)

    def read_out(self, token: Any, head: Any) -> None:
        """Writes the output of one query head."""
        code = self.code
        queries, row = self._token("query", head, token), self.scratch["row"]
        with self._vectors() as d:
            total = code.variable(code.number(0.0))
            with code.loop(0, self.job["features"]) as f:
                at = code.add(code.mul(f, PIECE), d)
                number = code.all_lanes(code.load(queries, f))
                state = code.load_vector(self.scratch["state"], at)
                code.set(total, code.multiply_add(number, state, code.get(total)))
            code.store_vector(code.get(total), row, d)
        self.ops.copy(Rows(row, 0), Rows(self._token("out", head, token), 0), 1, self.size)

    def pull_back_read(self, token: Any, head: Any) -> None:
        """Gradient of `read_out`: adds to `d_state`, and writes the gradient of the query."""
        code = self.code
        queries, row = self._token("query", head, token), self.scratch["row"]
        self.ops.copy(Rows(self._token("d_out", head, token), 0), Rows(row, 0), 1, self.size)
        d_query, states = self._token("d_query", head, token), self.in_history(code.add(token, 1))
        with code.loop(0, self.job["features"]) as f:
            number = code.all_lanes(code.load(queries, f))
            total = code.variable(code.number(0.0))
            with self._vectors() as d:
                at = code.add(code.mul(f, PIECE), d)
                d_out, state = code.load_vector(row, d), code.load_vector(states, at)
                code.set(total, code.multiply_add(d_out, state, code.get(total)))
                d_state = code.load_vector(self.scratch["d_state"], at)
                d_state = code.multiply_add(number, d_out, d_state)
                code.store_vector(d_state, self.scratch["d_state"], at)
            code.store(code.sum_of_lanes(code.get(total)), d_query, f)

    def pull_back_token(self, token: Any) -> None:
        """Gradient of `advance`; replaces `d_state` by that of the state before the token."""
        code, builder = self.code, self.code.builder
        keys, d_keys = self._token("key", self.head, token), self._token("d_key", self.head, token)
        decays, before = self.decays_of(token), self.in_history(token)
        at_token = code.mul(token, PIECE)
        for name in ("d_value", "d_dt"):
            self.ops.fill(code.address(self.scratch[name], at_token), PIECE)
        with code.loop(0, self.job["features"]) as f:
            number = code.all_lanes(code.load(keys, f))
            total = code.variable(code.number(0.0))
            with self._vectors() as d:
                at = code.add(code.mul(f, PIECE), d)
                dt, value = (self._load(name, token, d) for name in ("dt", "value"))
                change = code.load_vector(self.scratch["d_state"], at)
                written = builder.fmul(dt, value)
                code.set(total, code.multiply_add(change, written, code.get(total)))
                carried = builder.fmul(change, code.load_vector(decays, at))
                code.store_vector(carried, self.scratch["d_state"], at)
                d_log = builder.fmul(carried, code.load_vector(before, at))
                self._add("d_A", at, d_log, dt)
                A, at_value = code.load_vector(self.scratch["A"], at), code.add(at_token, d)
                self._add("d_dt", at_value, d_log, A)
                self._add("d_value", at_value, change, number)
            code.store(code.sum_of_lanes(code.get(total)), d_keys, f)
        with self._vectors() as d:  # the gradient of dt * v is in d_value
            at = code.add(at_token, d)
            d_written = code.load_vector(self.scratch["d_value"], at)
            dt, value = (self._load(name, token, d) for name in ("dt", "value"))
            self._add("d_dt", at, d_written, value)
            code.store_vector(builder.fmul(d_written, dt), self.scratch["d_value"], at)

    @contextlib.contextmanager
    def _vectors(self) -> Iterator[Any]:
        """Loops over the vectors of a row."""
        with self.code.loop(0, self.width, self.code.lanes) as d:
            yield d

    def _load(self, name, token, d):
        return self.code.load_vector(
            self.scratch[name], self.code.add(self.code.mul(token, PIECE), d)
        )

    def _add(self, name, at, a, b):
        """Adds a * b to a vector of a scratch array."""
        array = self.scratch[name]
        total = self.code.multiply_add(a, b, self.code.load_vector(array, at))
        self.code.store_vector(total, array, at)

    def _keep(self, token):
        code = self.code
        keep = code.variable(code.number(1.0))
        with code.when(code.less(0, self.job["keeps"])):
            start = code.mul(self.examples["keep"], self.job["tokens"])
            at = code.add(start, self.first, token)
            code.set(keep, code.all_lanes(code.load(self.job["keep"], at)))
        return code.get(keep)

    # Chunks, arguments and results

    @contextlib.contextmanager
    def chunks(self, *, reverse: bool = False) -> Iterator[None]:
        """Loops over the chunks and reads their values and dt; the body is the `with` block."""
        code, job = self.code, self.job
        size = job["chunk_size"]
        count = code.ceil(job["tokens"], size)
        with code.loop(0, count) as n:
            self.chunk = code.sub(code.sub(count, 1), n) if reverse else n
            self.first = code.mul(self.chunk, size)
            self.tokens = code.min(code.sub(job["tokens"], self.first), size)
            for name in ("value", "dt"):
                target = Rows(self.scratch[name], PIECE)
                self.ops.copy(self._values(name), target, self.tokens, self.size)
            yield

    @contextlib.contextmanager
    def heads(self) -> Iterator[Any]:
        """Loops over the query heads of the key head; yields the head."""
        code = self.code
        group = code.div(self.job["query_heads"], self.job["heads"])
        first = code.mul(self.head, group)
        with code.loop(first, code.add(first, group)) as head:
            yield head

    def write(self, name: str) -> None:
        """Writes rows of values of the chunk."""
        source = Rows(self.scratch[name], PIECE)
        self.ops.copy(source, self._values(name), self.tokens, self.size)

    def _values(self, name):
        code, job = self.code, self.job
        start = code.add(self._index(name, self.head, 0), code.mul(self.piece, PIECE))
        return Rows(code.address(job[name], start), code.mul(job["heads"], job["values"]))

    def _token(self, name: str, head: Any, token: Any) -> Any:
        """Address of the row of a token and head; of outputs, of the first value of the task."""
        return self.code.address(self.job[name], self._index(name, head, token))

    def _index(self, name, head, token):
        code, job = self.code, self.job
        kind = name.removeprefix("d_")
        heads = job["query_heads"] if kind in ("query", "out") else job["heads"]
        size = job["features"] if kind in ("query", "key") else job["values"]
        if name in ("d_query", "d_key"):
            heads, head = (
                code.mul(heads, self.pieces),
                code.add(code.mul(head, self.pieces), self.piece),
            )
        example = self.examples.get(name, self.example)
        row = code.add(code.mul(example, job["tokens"]), self.first, token)
        index = code.add(code.mul(row, heads, size), code.mul(head, size))
        return code.add(index, code.mul(self.piece, PIECE)) if kind == "out" else index

    def read_state(self, name: str, to: str) -> None:
        """Reads the columns of a state, or of A."""
        target = Rows(self.scratch[to], PIECE)
        self.ops.copy(self._state(name), target, self.job["features"], self.size)

    def write_state(self, source: str, name: str) -> None:
        """Writes the columns of a state, or of dA."""
        own = Rows(self.scratch[source], PIECE)
        self.ops.copy(own, self._state(name), self.job["features"], self.size)

    def _state(self, name):
        code, (features, values) = self.code, (self.job["features"], self.job["values"])
        example = self.examples.get(name, self.example)
        number = code.add(code.mul(example, self.job["heads"]), self.head)
        start = code.add(code.mul(number, features, values), code.mul(self.piece, PIECE))
        return Rows(code.address(self.job[name], start), values)

    # Saved states

    def copy_state(self, source: Any, target: Any) -> None:
        """Copies the columns from one scratch array to another."""
        size = self.code.mul(self.job["features"], PIECE)
        self.ops.copy(Rows(source, 0), Rows(target, 0), 1, size)

    def saved_state(self) -> Any:
        """Address of the columns before the chunk."""
        return self._in("states", self.chunk)

    def in_history(self, token: Any) -> Any:
        """Address of the columns before a token of the chunk."""
        return self._in("history", token)

    def decays_of(self, token: Any) -> Any:
        """Address of the decays of a token of the chunk."""
        return self._in("decays", token)

    def _in(self, name, number):
        size = self.code.mul(self.job["features"], PIECE)
        return self.code.address(self.scratch[name], self.code.mul(number, size))
