"""The walk of the kernels of a cell: products with R, tokens, carries and places in arrays.

A walk is over the tokens of one head of up to `ROWS` examples. Its members are those of a team, and
each has some of the units: see `effattn.llvm.teams`. R is copied into panels, which stay in the
cache of the core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effattn.interfaces.cell_recurrence import GATES, OUTPUT, STATES
from effattn.llvm import runtime, teams
from effattn.llvm.cells import CELLS
from effattn.llvm.tiles import Rows, TileOps, lay_out

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Job

ROWS = 8  # most examples of a walk
_VECTORS = 4  # vectors in a row of a panel
PREACTIVATIONS = 4  # of every cell
CHUNK = 32  # tokens in a chunk of the backward pass

_RECURRENT = runtime.Array("recurrent", 4)
_CARRY = runtime.Array("carry", 3), runtime.Array("marks", 2)
FORWARD = runtime.Signature(
    (runtime.Array("parts", 2), _RECURRENT, runtime.Array("bias", 3), *_CARRY),
    (runtime.Array("out", 3), runtime.Array("after", 3)),
    integers=1,
)
BACKWARD = runtime.Signature(
    (
        runtime.Array("preactivations", 2),
        _RECURRENT,
        *_CARRY,
        runtime.Array("d_out", 3),
        runtime.Array("d_after", 3),
    ),
    (runtime.Array("d_preactivations", 2), runtime.Array("d_carry", 3)),
    integers=1,
)


def memory_of(code: Code, job: Job, cell: str, signature: runtime.Signature) -> dict[str, Any]:
    """Sizes of the arrays of a walk."""
    rows, width, members = job["rows"], code.round_to_lanes(job["size"]), job["members"]
    gates, carry = code.mul(width, GATES[cell]), code.mul(rows, width, STATES[cell])
    columns, progress = _columns(code, job, cell, signature), code.mul(members, teams.LINE)
    if signature is FORWARD:
        return {
            "progress": progress,
            "matrix": code.mul(columns, job["size"], members),
            "product": code.mul(rows, columns, members),
            "parts": gates,
            "bias": code.mul(rows, gates),
            "preactivations": code.mul(width, PREACTIVATIONS),
            "state": code.mul(carry, 2),
        }
    return {
        "progress": progress,
        "matrix": code.mul(columns, gates, members),
        "product": code.mul(rows, columns, members),
        "d_products": code.mul(rows, gates, 2),
        **dict.fromkeys(("preactivations", "d_preactivations"), code.mul(width, PREACTIVATIONS)),
        "d_out": width,
        **dict.fromkeys(("state", "d_state"), carry),
        "history": code.mul(carry, CHUNK + 1),
        "saved": code.mul(carry, code.ceil(job["tokens"], CHUNK)),
    }


def _columns(code, job, cell, signature):
    """Number of columns of the panels of a member."""
    columns = code.mul(job["units"], GATES[cell] if signature is FORWARD else 1)
    return _in_whole_panels(code, columns)


def _in_whole_panels(code, columns):
    """Number of columns of the panels that have at least these columns."""
    width = _VECTORS * code.lanes
    return code.mul(code.ceil(columns, width), width)


def write_product(module, name, lanes):
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


class Walk:
    """One member of a walk over the tokens.

    A carry is an array `(S, rows, width)`, where the width is H rounded up to whole vectors. The
    arrays are in memory that the members share; each writes its own units.

    Attributes:
      scratch: addresses of the arrays.
      tokens: number of tokens.
      token: the present token.
    """

    token: Any

    def __init__(
        self,
        code: Code,
        job: Job,
        memory: Any,
        number: Any,
        member: Any,
        cell: str,
        signature: runtime.Signature,
        product: ir.Function,
    ):
        self.code, self.job, self.ops = code, job, TileOps(code)
        self.name, self.cell, self.product = cell, CELLS[cell], product
        self.tokens = job["tokens"]
        self.size, self.width = job["size"], code.round_to_lanes(job["size"])
        sizes = memory_of(code, job, cell, signature)
        self.scratch, _ = lay_out(code, memory, sizes)
        for name in ("matrix", "product"):  # each member has its own
            own = code.mul(member, code.div(sizes[name], job["members"]))
            self.scratch[name] = code.address(self.scratch[name], own)
        self.columns = _columns(code, job, cell, signature)
        self.lowest = code.mul(member, job["units"])
        self.highest = code.min(code.add(self.lowest, job["units"]), self.width)
        self.own_size = code.sub(code.min(self.highest, self.size), self.lowest)
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
        """Loops over the examples of the walk; yields the number of the example in the walk."""
        with self.code.loop(0, self.count) as row:
            yield row

    @contextlib.contextmanager
    def _vectors(self) -> Iterator[Any]:
        """Loops over the member's units; yields the first unit of each vector."""
        with self.code.loop(self.lowest, self.highest, self.code.lanes) as j:
            yield j

    def go_to(self, number: Any) -> None:
        """Goes to the token that is read after `number` others."""
        last = self.code.sub(self.code.sub(self.job["tokens"], 1), number)
        is_reversed = self.code.less(0, self.job["is_reversed"])
        self.token = self.code.builder.select(is_reversed, last, self.code.integer(number))

    # Products with R. A panel has some columns of a matrix, row after row. A member has the columns
    # of its units.

    def pack(self) -> None:
        """Copies R, `(H, G units)`, into panels."""
        code, units = self.code, self.job["units"]
        with code.loop(0, self.size) as i:
            for gate in range(GATES[self.name]):
                row = code.address(self._row_of_matrix(i, gate), self.lowest)
                with code.loop(0, self.own_size, code.lanes) as j:
                    target = self._in_panels(i, code.add(code.mul(units, gate), j), self.size)
                    some = code.min(code.sub(self.own_size, j), code.lanes)
                    self.ops.copy(Rows(code.address(row, j), 0), Rows(target, 0), 1, some)

    def pack_transposed(self) -> None:
        """Copies the transpose of R, `(G width, units)`, into panels."""
        code, rows = self.code, self.code.mul(self.width, GATES[self.name])
        with code.loop(0, self.own_size) as i:
            for gate in range(GATES[self.name]):
                row = self._row_of_matrix(code.add(self.lowest, i), gate)
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
        self._multiply(self._of_carry(carry, OUTPUT[self.name], 0), self.width, self.size)

    def multiply_back(self, step: Any, d_carry: Any) -> None:
        """Adds the gradients of the products h R of a step, times R^T, to the gradients of h."""
        code, gates = self.code, self.code.mul(self.width, GATES[self.name])
        self._multiply(self._d_products(step, 0), gates, gates)
        with self.rows() as row:
            h = self._of_carry(d_carry, OUTPUT[self.name], row)
            more = self._product(row)
            with self._vectors() as j:
                own = code.load_vector(more, code.sub(j, self.lowest))
                code.store_vector(code.builder.fadd(code.load_vector(h, j), own), h, j)

    def _multiply(self, source, step, size):
        panels = self.code.div(self.columns, _VECTORS * self.code.lanes)
        arrays = source, step, self.scratch["matrix"], self.scratch["product"], self.columns
        self.code.call(self.product, self.count, panels, size, *arrays)

    def _product(self, row):
        return self.code.address(self.scratch["product"], self.code.mul(row, self.columns))

    def _d_products(self, step, row):
        """Gradients of the products of a row, `(G, width)`; steps write two arrays in turn."""
        place = self.code.add(self.code.mul(self.code.rem(step, 2), self.job["rows"]), row)
        size = self.code.mul(self.width, GATES[self.name])
        return self.code.address(self.scratch["d_products"], self.code.mul(place, size))

    # The present token of one example

    def restart(self, row: Any, carry: Any) -> None:
        """Sets a carry to zero if the carry before the token is not kept."""
        with self.code.when(self.code.builder.not_(self._mark(row, 0))):
            nothing = [self.code.number(0.0)] * STATES[self.name]
            with self._vectors() as j:
                self._store_carry(nothing, carry, row, j)

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
        products, units = self._product(row), self.job["units"]
        parts, preactivations = self.scratch["parts"], self.scratch["preactivations"]
        bias = code.address(self.scratch["bias"], code.mul(row, self.width, gates))
        with self._vectors() as j:
            at = [code.add(code.mul(self.width, number), j) for number in range(PREACTIVATIONS)]
            of_token, biases = (
                [code.load_vector(array, at[gate]) for gate in range(gates)]
                for array in (parts, bias)
            )
            own = code.sub(j, self.lowest)
            of_state = [
                code.load_vector(products, code.add(code.mul(units, gate), own))
                for gate in range(gates)
            ]
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

    def pull_back(self, row: Any, step: Any, before: Any, d_carry: Any) -> None:
        """Replaces gradients of the carry after the token by those of the carry before it.

        They lack the path through the products h R, whose gradients go to `d_products` of the step.
        Writes the gradients of the pre-activations.
        """
        code, gates = self.code, GATES[self.name]
        d_products, d_preactivations = self._d_products(step, row), self.scratch["d_preactivations"]
        self.read("d_out", row, 1)
        h = self._of_carry(d_carry, OUTPUT[self.name], row)
        with self._vectors() as j:
            d_out = code.load_vector(self.scratch["d_out"], j)
            code.store_vector(code.builder.fadd(code.load_vector(h, j), d_out), h, j)
            for array, count in ((d_products, gates), (d_preactivations, PREACTIVATIONS)):
                for number in range(count):
                    at = code.add(code.mul(self.width, number), j)
                    code.store_vector(code.number(0.0), array, at)
        with code.when(self.is_valid(row)):
            self.read("preactivations", row, PREACTIVATIONS)
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
        self._write("d_preactivations", row, PREACTIVATIONS)

    def _load_preactivations(self, j):
        code, preactivations = self.code, self.scratch["preactivations"]
        places = (code.add(code.mul(self.width, number), j) for number in range(PREACTIVATIONS))
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
        """Copies the carries of all examples of the walk."""
        with self.rows() as row:
            self.copy_carry(row, source, target)

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

    def state(self, step: Any) -> Any:
        """Address of the carry after a step; steps write two arrays in turn."""
        place = self.code.mul(self.code.rem(step, 2), self._numbers())
        return self.code.address(self.scratch["state"], place)

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
        """Copies the member's units of a row."""
        source, target = (self.code.address(row, self.lowest) for row in (source, target))
        self.ops.copy(Rows(source, 0), Rows(target, 0), 1, self.own_size)
