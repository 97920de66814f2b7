"""Products of small matrices of float32, the work of all kernels here.

C (m, n) = A (m, k) B (k, n). Rows of B and C are read by vectors; numbers of A are read one by one,
wherever they lie, and each multiplies whole vectors. So A may be transposed, and B is a copy.

A block of C stays in registers: `ROWS` rows of a few vectors. Each step along k loads a vector of B
for each of these, and a number of A for each row, for as many multiplications as both together.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from effattn.llvm.code import INT, POINTER, Code

ROWS = 6


def vectors_at_once(lanes: int) -> list[int]:
    """How many vectors of a row are kept, in 16 or 32 registers, and then where fewer are left."""
    return [2, 1] if lanes == 8 else [4, 2, 1]


def write_product(
    module: ir.Module, name: str, lanes: int, widths: Sequence[int], how: str
) -> ir.Function:
    """Writes the function (m, n, k, A, steps of A by row and by column, B, step, C, step, decay).

    Args:
      module: that gets it.
      name: of the function.
      lanes: of a vector.
      widths: how many vectors of a row of C are kept at once: as many of the first as fit, then of
        the next. The last of them, times the lanes, divides n.
      how: "set" for C = A B, "add" for C + A B, "decay" for C decay + A B with `decay (n)`.
    """
    arguments = [INT, INT, INT, POINTER, INT, INT, POINTER, INT, POINTER, INT, POINTER]
    code = Code(module, name, arguments, lanes)
    m, n, k, a, a_row, a_column, b, b_row, c, c_row, decay = code.arguments

    def block(i, j, rows, width):
        totals = [code.variable(code.number(0.0)) for _ in range(rows * width)]
        of_a = [code.place(a, code.mul(code.add(i, r), a_row)) for r in range(rows)]
        of_b = code.place(b, j)
        with code.loop(0, k) as step:
            at = code.mul(step, b_row)
            vectors = [code.load_vector(of_b, code.add(at, v * lanes)) for v in range(width)]
            along = code.mul(step, a_column)
            for r, row in enumerate(of_a):
                number = code.all_lanes(code.load(row, along))
                for v, vector in enumerate(vectors):
                    total = totals[r * width + v]
                    code.set(total, code.multiply_add(number, vector, code.get(total)))
        for r in range(rows):
            to = code.place(c, code.add(code.mul(code.add(i, r), c_row), j))
            for v in range(width):
                total = code.get(totals[r * width + v])
                if how == "decay":
                    factor = code.load_vector(decay, code.add(j, v * lanes))
                    total = code.multiply_add(code.load_vector(to, v * lanes), factor, total)
                elif how == "add":
                    total = code.builder.fadd(code.load_vector(to, v * lanes), total)
                code.store_vector(total, to, v * lanes)

    for j, columns in _pieces(code, n, [width * lanes for width in widths]):
        for i, rows in _pieces(code, m, [ROWS, 4, 2, 1]):
            block(i, j, rows, columns // lanes)
    code.builder.ret_void()
    return code.function


def _pieces(code: Code, size: Any, lengths: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """Splits 0 to `size` into as many of the first length as fit, then of the next.

    For each length, what the caller writes runs in a loop over where the pieces start.
    """
    start: Any = 0
    for length in lengths:
        with code.loop(start, code.sub(size, length - 1), length) as index:
            yield index, length
        whole = code.div(code.sub(size, start), length)
        start = code.add(start, code.mul(whole, length))
