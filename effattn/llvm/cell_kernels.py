"""Kernels of the recurrence of a cell on CPUs, in float32.

For one head, with the gates' parts u_t of a token, the recurrent matrices R and biases b,

    carry_t = cell(u_t + h_(t-1) R + b, carry_(t-1)),   h_t is part of carry_t

A task is one head of up to `ROWS` examples. It copies R into panels, which stay in the cache of the
core, and walks over the tokens.

Backward, the caller computes the pre-activations of all tokens, from the outputs h. A task
computes the carries before every chunk of tokens. From the last chunk to the first, it computes all
carries of the chunk from the one before it, and then, backward in time, the gradients of the
pre-activations, from which R^T gives the gradient of the h before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effattn.interfaces.cell_recurrence import GATES, OUTPUT, STATES
from effattn.llvm import runtime
from effattn.llvm.cells import CELLS
from effattn.llvm.tiles import Rows, TileOps, lay_out

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

ROWS = 8  # most examples of a task
_VECTORS = 4  # vectors in a row of a panel
_PREACTIVATIONS = 4  # of every cell
_CHUNK = 32  # tokens in a chunk of the backward pass

_SIZES = "tokens", "heads", "size", "marked", "rows", "is_reversed"
_RECURRENT = runtime.Array("recurrent", 4)
_CARRY = runtime.Array("carry", 3), runtime.Array("marks", 2)
_FORWARD = runtime.Signature(
    (runtime.Array("parts", 4), _RECURRENT, runtime.Array("bias", 3), *_CARRY),
    (runtime.Array("out", 3), runtime.Array("after", 3)),
    integers=1,
)
_BACKWARD = runtime.Signature(
    (
        runtime.Array("preactivations", 4),
        _RECURRENT,
        *_CARRY,
        runtime.Array("d_out", 3),
        runtime.Array("d_after", 3),
    ),
    (runtime.Array("d_preactivations", 4), runtime.Array("d_carry", 3)),
    integers=1,
)


def write_forward(cell: str, module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (parts, recurrent, bias, carry, marks) -> (out, after).

    Shapes: parts `(*B, T, G, N, H)`, recurrent `(*B, N, H, G, H)`, bias `(*B, G, N, H)`, carry and
    after `(*B, S, N, H)`, out `(*B, T, N, H)`, and marks `(*B, T, 0 or 2)`: 1 or 0 for whether the
    carry before a token is kept, and for whether the token is valid. The attribute `limits` has 1
    if tokens are read from the last to the first. A batch axis of length 1 of an operand is
    broadcast.
    """
    product = _write_product(module, f"{name}_product", lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        walk = _Walk(code, job, memory, number, cell, _FORWARD, product)
        state = walk.scratch["state"]
        walk.pack()
        walk.read_bias()
        walk.read_carry("carry", state)
        with code.loop(0, job["tokens"]) as n:
            walk.go_to(n)
            with walk.rows() as row:
                walk.restart(row, state)
            walk.multiply(state)
            with walk.rows() as row:
                with code.when(walk.is_valid(row)):
                    walk.read("parts", row, GATES[cell])
                    walk.join(row)
                    walk.advance(row, state, state)
                walk.write_output(row, state)
        walk.write_carry(state, "after")

    _write(cell, module, name, lanes, _FORWARD, task)


def write_backward(cell: str, module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients of the pre-activations `(*B, T, 4, N, H)`.

    (preactivations, recurrent, carry, marks, d_out, d_after) -> (d_preactivations, d_carry). Tokens
    that are not valid have gradients of zero.
    """
    product = _write_product(module, f"{name}_product", lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        walk = _Walk(code, job, memory, number, cell, _BACKWARD, product)
        state, d_state = (walk.scratch[name] for name in ("state", "d_state"))
        chunks = code.ceil(job["tokens"], _CHUNK)

        def again(token: Any, before: Any, after: Any) -> None:
            walk.go_to(token)
            with walk.rows() as row:
                walk.restart(row, before)
                walk.copy_carry(row, before, after)
                with code.when(walk.is_valid(row)):
                    walk.read("preactivations", row, _PREACTIVATIONS)
                    walk.advance(row, before, after)

        walk.pack_transposed()
        walk.read_carry("carry", state)
        with code.loop(0, chunks) as chunk:
            walk.copy_carries(state, walk.saved(chunk))
            first = code.mul(chunk, _CHUNK)
            last = code.min(code.add(first, _CHUNK), job["tokens"])
            with code.loop(first, last) as token:
                again(token, state, state)
        walk.read_carry("d_after", d_state)
        with code.loop(0, chunks) as n:
            chunk = code.sub(code.sub(chunks, 1), n)
            walk.copy_carries(walk.saved(chunk), walk.in_history(0))
            first = code.mul(chunk, _CHUNK)
            count = code.min(code.sub(job["tokens"], first), _CHUNK)
            with code.loop(0, count) as token:
                before, after = (walk.in_history(code.add(token, n)) for n in (0, 1))
                again(code.add(first, token), before, after)
            with code.loop(0, count) as back:
                token = code.sub(code.sub(count, 1), back)
                walk.go_to(code.add(first, token))
                with walk.rows() as row:
                    walk.pull_back(row, walk.in_history(token), d_state)
                walk.multiply_back(d_state)
                with walk.rows() as row:
                    walk.restart(row, d_state)
        walk.write_carry(d_state, "d_carry")

    _write(cell, module, name, lanes, _BACKWARD, task)


# The handlers of each cell.
write_lstm_forward, write_gru_forward, write_slstm_forward, write_slstm_exp_forward = (
    functools.partial(write_forward, cell) for cell in ("lstm", "gru", "slstm", "slstm_exp")
)
write_lstm_backward, write_gru_backward, write_slstm_backward, write_slstm_exp_backward = (
    functools.partial(write_backward, cell) for cell in ("lstm", "gru", "slstm", "slstm_exp")
)


def _write(cell, module, name, lanes, signature, task):
    from effattn.llvm.handlers import write_handler

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, _, heads, size = frame.last_sizes(0, 4)
        carry = 1 + [array.name for array in signature.arguments].index("carry")
        (marked,) = frame.last_sizes(carry, 1)
        (is_reversed,) = frame.integers(1)
        # Examples share a task, unless each has its own matrices or threads would be idle.
        matrices = code.variable(1)
        with code.loop(0, job["batch_axes"]) as axis:
            length = code.load(frame.sizes("arguments", 1), axis, code.int64)
            code.set(matrices, code.mul(code.get(matrices), length))
        groups = code.max(code.ceil(frame.threads(), heads), code.ceil(job["batch"], ROWS))
        is_shared = code.less(code.get(matrices), 2)
        groups = code.max(code.builder.select(is_shared, groups, job["batch"]), 1)
        rows = code.max(code.ceil(job["batch"], groups), 1)
        sizes = tokens, heads, size, marked, rows, is_reversed
        for each, found in zip(_SIZES, sizes, strict=True):
            job[each] = found
        memory = _memory(code, job, cell, signature)
        return code.mul(code.ceil(job["batch"], rows), heads), code.add(*memory.values())

    write_handler(module, name, lanes, signature, _SIZES, [], begin, task)


def _memory(code: Code, job: Job, cell: str, signature: runtime.Signature) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task."""
    rows, width = job["rows"], code.round_to_lanes(job["size"])
    gates, carry = code.mul(width, GATES[cell]), code.mul(rows, width, STATES[cell])
    if signature is _FORWARD:
        columns = _in_whole_panels(code, gates)
        return {
            "matrix": code.mul(columns, job["size"]),
            "product": code.mul(rows, columns),
            "parts": gates,
            "bias": code.mul(rows, gates),
            "preactivations": code.mul(width, _PREACTIVATIONS),
            "state": carry,
        }
    columns = _in_whole_panels(code, width)
    return {
        "matrix": code.mul(columns, gates),
        "product": code.mul(rows, columns),
        "d_products": code.mul(rows, gates),
        **dict.fromkeys(("preactivations", "d_preactivations"), code.mul(width, _PREACTIVATIONS)),
        "d_out": width,
        **dict.fromkeys(("state", "d_state"), carry),
        "history": code.mul(carry, _CHUNK + 1),
        "saved": code.mul(carry, code.ceil(job["tokens"], _CHUNK)),
    }


def _in_whole_panels(code, columns):
    """Number of columns of the panels that have at least these columns."""
    width = _VECTORS * code.lanes
    return code.mul(code.ceil(columns, width), width)


def _write_product(module, name, lanes):
    """Generates C = A B, for B in panels.

    The function's arguments are (rows of A, panels, rows of B, A, row stride of A, B, C, row stride
    of C).
    """
    from effattn.llvm.codegen import INT, POINTER, Code

    code = Code(module, name, [INT, INT, INT, POINTER, INT, POINTER, POINTER, INT], lanes)
    m, panels, k, a, a_row, b, c, c_row = code.arguments
    width = _VECTORS * lanes
    with code.loop(0, panels) as panel:
        own, columns = code.address(b, code.mul(panel, k, width)), code.mul(panel, width)
        for i, rows in code.pieces(m, [2, 1] if lanes == 8 else [4, 2, 1]):
            a_rows = [code.address(a, code.mul(code.add(i, r), a_row)) for r in range(rows)]
            totals = [[code.variable(code.number(0.0)) for _ in range(_VECTORS)] for _ in a_rows]
            with code.loop(0, k) as step:
                at = code.mul(step, width)
                vectors = [code.load_vector(own, code.add(at, v * lanes)) for v in range(_VECTORS)]
                for row, of_row in zip(a_rows, totals, strict=True):
                    number = code.all_lanes(code.load(row, step))
                    for vector, total in zip(vectors, of_row, strict=True):
                        code.set(total, code.multiply_add(number, vector, code.get(total)))
            for r, of_row in enumerate(totals):
                to = code.address(c, code.add(code.mul(code.add(i, r), c_row), columns))
                for v, total in enumerate(of_row):
                    code.store_vector(code.get(total), to, v * lanes)
    code.builder.ret_void()
    return code.function


class _Walk:
    """Walk of one task over the tokens.

    A carry is an array `(S, rows, width)`, where the width is H rounded up to whole vectors.

    Attributes:
      scratch: addresses of the scratch arrays.
      token: the present token.
    """

    token: Any

    def __init__(
        self,
        code: Code,
        job: Job,
        memory: Any,
        number: Any,
        cell: str,
        signature: runtime.Signature,
        product: ir.Function,
    ):
        self.code, self.job, self.ops = code, job, TileOps(code)
        self.name, self.cell, self.product = cell, CELLS[cell], product
        self.size, self.width = job["size"], code.round_to_lanes(job["size"])
        sizes = _memory(code, job, cell, signature)
        self.scratch, _ = lay_out(code, memory, sizes)
        for name, size in sizes.items():
            if name not in ("product", "history", "saved"):  # set before they are read
                self.ops.fill(self.scratch[name], size)
        self.head, group = code.rem(number, job["heads"]), code.div(number, job["heads"])
        self.first = code.mul(group, job["rows"])
        self.count = code.min(job["rows"], code.sub(job["batch"], self.first))
        self._arguments = [array.name for array in signature.arguments]
        self._examples = code.slots(ROWS * len(self._arguments))
        for place, name in enumerate(self._arguments):
            with self.rows() as row:
                example = job.example_of(name, code.add(self.first, row))
                code.store(example, self._slot(place, row))

    def _slot(self, place, row):
        at = self.code.add(row, place * ROWS)
        return self.code.address(self._examples, at, self.code.int64)

    @contextlib.contextmanager
    def rows(self) -> Iterator[Any]:
        """Loops over the examples of the task; yields the number of the example in the task."""
        with self.code.loop(0, self.count) as row:
            yield row

    @contextlib.contextmanager
    def _vectors(self) -> Iterator[Any]:
        with self.code.loop(0, self.width, self.code.lanes) as j:
            yield j

    def go_to(self, number: Any) -> None:
        """Goes to the token that is read after `number` others."""
        last = self.code.sub(self.code.sub(self.job["tokens"], 1), number)
        is_reversed = self.code.less(0, self.job["is_reversed"])
        self.token = self.code.builder.select(is_reversed, last, self.code.integer(number))

    # Products with R. A panel has some columns of a matrix, row after row.

    def pack(self) -> None:
        """Copies R, `(H, G width)`, into panels."""
        code = self.code
        with code.loop(0, self.size) as i:
            for gate in range(GATES[self.name]):
                row = self._row_of_matrix(i, gate)
                with code.loop(0, self.size, code.lanes) as j:
                    column = code.add(code.mul(self.width, gate), j)
                    target = self._in_panels(i, column, self.size)
                    some = code.min(code.sub(self.size, j), code.lanes)
                    self.ops.copy(Rows(code.address(row, j), 0), Rows(target, 0), 1, some)

    def pack_transposed(self) -> None:
        """Copies the transpose of R, `(G width, H)`, into panels."""
        code, rows = self.code, self.code.mul(self.width, GATES[self.name])
        with code.loop(0, self.size) as i:
            for gate in range(GATES[self.name]):
                row = self._row_of_matrix(i, gate)
                target = self._in_panels(code.mul(self.width, gate), i, rows)
                with code.loop(0, self.size) as j:
                    code.store(code.load(row, j), target, code.mul(j, _VECTORS * code.lanes))

    def _row_of_matrix(self, i, gate):
        code, size, gates = self.code, self.size, GATES[self.name]
        head = code.add(code.mul(self._example("recurrent", 0), self.job["heads"]), self.head)
        row = code.add(code.mul(code.add(code.mul(head, size), i), gates), gate)
        return code.address(self.job["recurrent"], code.mul(row, size))

    def _in_panels(self, row, column, rows):
        code, width = self.code, _VECTORS * self.code.lanes
        panel, within = code.div(column, width), code.rem(column, width)
        at = code.add(code.mul(code.add(code.mul(panel, rows), row), width), within)
        return code.address(self.scratch["matrix"], at)

    def multiply(self, carry: Any) -> None:
        """The products h R of the gates, for h in the carry."""
        h = self._of_carry(carry, OUTPUT[self.name], 0)
        self._multiply(h, self.width, self.size, self.code.mul(self.width, GATES[self.name]))

    def multiply_back(self, d_carry: Any) -> None:
        """Adds the gradients of the products h R, times R^T, to the gradients of h."""
        code, gates = self.code, self.code.mul(self.width, GATES[self.name])
        self._multiply(self.scratch["d_products"], gates, gates, self.width)
        with self.rows() as row:
            h = self._of_carry(d_carry, OUTPUT[self.name], row)
            more = self._product(row, self.width)
            with self._vectors() as j:
                total = code.builder.fadd(code.load_vector(h, j), code.load_vector(more, j))
                code.store_vector(total, h, j)

    def _multiply(self, source, step, size, columns):
        code, width = self.code, _in_whole_panels(self.code, columns)
        panels = code.div(width, _VECTORS * code.lanes)
        arrays = source, step, self.scratch["matrix"], self.scratch["product"], width
        code.call(self.product, self.count, panels, size, *arrays)

    def _product(self, row, columns):
        step = _in_whole_panels(self.code, columns)
        return self.code.address(self.scratch["product"], self.code.mul(row, step))

    # The present token of one example

    def restart(self, row: Any, carry: Any) -> None:
        """Sets a carry to zero if the carry before the token is not kept."""
        with self.code.when(self.code.builder.not_(self._mark(row, 0))):
            for number in range(STATES[self.name]):
                self.ops.fill(self._of_carry(carry, number, row), self.width)

    def is_valid(self, row: Any) -> Any:
        """Returns whether the token is valid."""
        return self._mark(row, 1)

    def _mark(self, row, number):
        code, marked = self.code, self.job["marked"]
        found = code.variable(code.float32(1.0))
        with code.when(code.less(0, marked)):
            at = code.add(code.mul(self._place("marks", row), marked), number)
            code.set(found, code.load(self.job["marks"], at))
        return code.builder.fcmp_ordered("!=", code.get(found), code.float32(0.0))

    def read(self, name: str, row: Any, count: int) -> None:
        """Reads `count` arrays `(N, H)` of the token into a scratch array `(count, width)`."""
        for number in range(count):
            self._copy(self._of_token(name, row, number, count), self._in_scratch(name, number))

    def _write(self, name, row, count):
        for number in range(count):
            self._copy(self._in_scratch(name, number), self._of_token(name, row, number, count))

    def write_output(self, row: Any, carry: Any) -> None:
        """Writes h."""
        h = self._of_carry(carry, OUTPUT[self.name], row)
        self._copy(h, self._of_token("out", row, 0, 1))

    def join(self, row: Any) -> None:
        """The pre-activations, from the token's parts, the products h R and the biases."""
        code, gates = self.code, GATES[self.name]
        products = self._product(row, code.mul(self.width, gates))
        parts, preactivations = self.scratch["parts"], self.scratch["preactivations"]
        bias = code.address(self.scratch["bias"], code.mul(row, self.width, gates))
        with self._vectors() as j:
            at = [code.add(code.mul(self.width, number), j) for number in range(_PREACTIVATIONS)]
            of_token, of_state, biases = (
                [code.load_vector(array, at[gate]) for gate in range(gates)]
                for array in (parts, products, bias)
            )
            of_state = list(map(code.builder.fadd, of_state, biases))
            for place, preactivation in zip(
                at, self.cell.join(code, of_token, of_state), strict=True
            ):
                code.store_vector(preactivation, preactivations, place)

    def advance(self, row: Any, before: Any, after: Any) -> None:
        """The carry after the token, from the pre-activations and the carry before it."""
        code = self.code
        with self._vectors() as j:
            preactivations = self._load_preactivations(j)
            found = self.cell.forward(code, preactivations, self._load_carry(before, row, j))
            self._store_carry(found, after, row, j)

    def pull_back(self, row: Any, before: Any, d_carry: Any) -> None:
        """Replaces gradients of the carry after the token by those of the carry before it.

        They lack the path through the products h R, whose gradients go to `d_products`. Writes the
        gradients of the pre-activations.
        """
        code, gates = self.code, GATES[self.name]
        d_products = code.address(self.scratch["d_products"], code.mul(row, self.width, gates))
        d_preactivations = self.scratch["d_preactivations"]
        self.read("d_out", row, 1)
        h = self._of_carry(d_carry, OUTPUT[self.name], row)
        self.ops.copy(Rows(self.scratch["d_out"], 0), Rows(h, 0), 1, self.width, add=True)
        self.ops.fill(d_products, code.mul(self.width, gates))
        self.ops.fill(d_preactivations, code.mul(self.width, _PREACTIVATIONS))
        with code.when(self.is_valid(row)):
            self.read("preactivations", row, _PREACTIVATIONS)
            with self._vectors() as j:
                preactivations = self._load_preactivations(j)
                carries = (self._load_carry(carry, row, j) for carry in (before, d_carry))
                of_preactivations, of_carry = self.cell.backward(code, preactivations, *carries)
                self._store_carry(of_carry, d_carry, row, j)
                of_products = self.cell.of_products(of_preactivations)
                for vectors, array in (
                    (of_preactivations, d_preactivations),
                    (of_products, d_products),
                ):
                    for number, vector in enumerate(vectors):
                        at = code.add(code.mul(self.width, number), j)
                        code.store_vector(vector, array, at)
        self._write("d_preactivations", row, _PREACTIVATIONS)

    def _load_preactivations(self, j):
        code, preactivations = self.code, self.scratch["preactivations"]
        places = (code.add(code.mul(self.width, number), j) for number in range(_PREACTIVATIONS))
        return [code.load_vector(preactivations, place) for place in places]

    def read_bias(self) -> None:
        """Reads the biases of all examples."""
        code, gates = self.code, GATES[self.name]
        with self.rows() as row:
            for gate in range(gates):
                place = code.add(code.mul(self._example("bias", row), gates), gate)
                place = code.mul(code.add(code.mul(place, self.job["heads"]), self.head), self.size)
                at = code.mul(code.add(code.mul(row, gates), gate), self.width)
                target = code.address(self.scratch["bias"], at)
                self._copy(code.address(self.job["bias"], place), target)

    # Carries

    def _of_carry(self, carry, number, row):
        at = self.code.add(self.code.mul(self.job["rows"], number), row)
        return self.code.address(carry, self.code.mul(at, self.width))

    def _load_carry(self, carry, row, j):
        rows = (self._of_carry(carry, number, row) for number in range(STATES[self.name]))
        return [self.code.load_vector(of_row, j) for of_row in rows]

    def _store_carry(self, vectors, carry, row, j):
        for number, vector in enumerate(vectors):
            self.code.store_vector(vector, self._of_carry(carry, number, row), j)

    def copy_carry(self, row: Any, source: Any, target: Any) -> None:
        """Copies the carry of one example."""
        with self._vectors() as j:
            self._store_carry(self._load_carry(source, row, j), target, row, j)

    def copy_carries(self, source: Any, target: Any) -> None:
        """Copies the carries of all examples of the task."""
        self.ops.copy(Rows(source, 0), Rows(target, 0), 1, self._numbers())

    def read_carry(self, name: str, to: Any) -> None:
        """Reads a carry of all examples."""
        for source, target in self._all_of_carry(name, to):
            self._copy(source, target)

    def write_carry(self, source: Any, name: str) -> None:
        """Writes a carry of all examples."""
        for target, own in self._all_of_carry(name, source):
            self._copy(own, target)

    def _all_of_carry(self, name, carry):
        """Generates a loop; yields the addresses of each row in the array and in the carry."""
        code, states = self.code, STATES[self.name]
        with self.rows() as row:
            for number in range(states):
                place = code.add(code.mul(self._example(name, row), states), number)
                place = code.add(code.mul(place, self.job["heads"]), self.head)
                address = code.address(self.job[name], code.mul(place, self.size))
                yield address, self._of_carry(carry, number, row)

    def saved(self, chunk: Any) -> Any:
        """Address of the carry before a chunk."""
        return self.code.address(self.scratch["saved"], self.code.mul(chunk, self._numbers()))

    def in_history(self, token: Any) -> Any:
        """Address of the carry before a token of the chunk."""
        return self.code.address(self.scratch["history"], self.code.mul(token, self._numbers()))

    def _numbers(self):
        return self.code.mul(self.job["rows"], self.width, STATES[self.name])

    # Places in arrays

    def _example(self, name, row):
        """Index of an example in an array."""
        if name not in self._arguments:
            return self.code.add(self.first, row)
        return self.code.load(self._slot(self._arguments.index(name), row), kind=self.code.int64)

    def _place(self, name, row):
        """Index of the token in an array."""
        tokens = self.code.mul(self._example(name, row), self.job["tokens"])
        return self.code.add(tokens, self.token)

    def _of_token(self, name, row, number, count):
        """Address of row `number` of the token and head, in an array `(*B, T, count, N, H)`."""
        code = self.code
        place = code.add(code.mul(self._place(name, row), count), number)
        place = code.add(code.mul(place, self.job["heads"]), self.head)
        return code.address(self.job[name], code.mul(place, self.size))

    def _in_scratch(self, name, number):
        return self.code.address(self.scratch[name], self.code.mul(self.width, number))

    def _copy(self, source, target):
        self.ops.copy(Rows(source, 0), Rows(target, 0), 1, self.size)
