"""Generator of LLVM intermediate representation: integers, loops, memory, vectors, matrix products.

Integers have 64 bits, floats are float32, and a vector has as many lanes as a vector register of
the processor. Arrays are pointers to float32 unless a type is given. `print(module)` shows the
generated code.
"""

import contextlib
import functools
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

INT = ir.IntType(64)
INT32 = ir.IntType(32)
BYTE = ir.IntType(8)
FLOAT = ir.FloatType()
POINTER = ir.PointerType()
NOTHING = ir.VoidType()
NULL = ir.Constant(POINTER, None)

_C_LIBRARY = {
    "malloc": ir.FunctionType(POINTER, [INT]),
    "aligned_alloc": ir.FunctionType(POINTER, [INT, INT]),
    "free": ir.FunctionType(NOTHING, [POINTER]),
    "sched_yield": ir.FunctionType(INT32, []),
}
# The instruction by which a thread tells that it waits, on each kind of processor.
_PAUSE: dict[str, tuple[str, list[Any]]] = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    **dict.fromkeys(("aarch64", "arm64"), ("llvm.aarch64.hint", [INT32(1)])),  # yield
}


class Code:
    """Builder of one function; its methods append instructions at the end of the code.

    Every argument that is an integer may be a Python int, which becomes a constant.

    Attributes:
      function: the LLVM function.
      arguments: the function's arguments.
      builder: llvmlite's IRBuilder, for instructions that have no method in this class.
      lanes: number of float32 in a vector.
      vector, integers: the types of a vector of float32 and of a vector of 32-bit integers.
    """

    def __init__(
        self,
        module: ir.Module,
        name: str,
        arguments: Sequence[Any],
        lanes: int,
        result: Any = NOTHING,
    ):
        self.module, self.lanes = module, lanes
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self.arguments = self.function.args
        self.builder = ir.IRBuilder(self.function.append_basic_block("start"))
        self.vector = ir.VectorType(FLOAT, lanes)
        self.integers = ir.VectorType(INT32, lanes)

    # Types for callers that do not import llvmlite

    int32, int64 = INT32, INT

    # Integers

    def integer(self, value: Any) -> Any:
        """Converts a Python int to a constant; returns other values as they are."""
        return INT(value) if isinstance(value, int) else value

    def wide(self, value: Any) -> Any:
        """A 32-bit integer as a 64-bit integer."""
        return self.builder.sext(value, INT)

    def add(self, *values: Any) -> Any:
        """Sum of the values."""
        total, *others = map(self.integer, values)
        for other in others:
            total = self.builder.add(total, other)
        return total

    def sub(self, a: Any, b: Any) -> Any:
        """a - b."""
        return self.builder.sub(self.integer(a), self.integer(b))

    def mul(self, *values: Any) -> Any:
        """Product of the values."""
        product, *others = map(self.integer, values)
        for other in others:
            product = self.builder.mul(product, other)
        return product

    def div(self, a: Any, b: Any) -> Any:
        """a // b for non-negative a and b."""
        return self.builder.udiv(self.integer(a), self.integer(b))

    def ceil(self, a: Any, b: Any) -> Any:
        """a / b rounded up, for non-negative a and b."""
        return self.div(self.add(a, self.sub(b, 1)), b)

    def round_to_lanes(self, size: Any) -> Any:
        """The size rounded up to a multiple of the lanes."""
        return self.mul(self.ceil(size, self.lanes), self.lanes)

    def rem(self, a: Any, b: Any) -> Any:
        """a % b for non-negative a and b."""
        return self.builder.urem(self.integer(a), self.integer(b))

    def less(self, a: Any, b: Any) -> Any:
        """Returns whether a < b."""
        return self.builder.icmp_signed("<", self.integer(a), self.integer(b))

    def min(self, a: Any, b: Any) -> Any:
        """The smaller of a and b."""
        return self.builder.select(self.less(a, b), self.integer(a), self.integer(b))

    def max(self, a: Any, b: Any) -> Any:
        """The larger of a and b."""
        return self.builder.select(self.less(a, b), self.integer(b), self.integer(a))

    # Control flow

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """Loops whose body is the code generated in the `with` block; yields the index.

        The index runs from `start` to `stop`, exclusive, as in `range`.
        """
        builder, before = self.builder, self.builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(INT)
        index.add_incoming(self.integer(start), before)
        builder.cbranch(self.less(index, stop), body, after)
        builder.position_at_end(body)
        yield index
        index.add_incoming(self.add(index, step), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def when(self, condition: Any) -> Any:
        """Conditional whose body is the code generated in the `with` block."""
        return self.builder.if_then(condition)

    def call(self, function: ir.Function | str, *arguments: Any) -> Any:
        """Calls a function; a string names a function of the C library."""
        if isinstance(function, str):
            function = self._declared(function, _C_LIBRARY[function])
        return self.builder.call(function, [self.integer(each) for each in arguments])

    def pause(self) -> None:
        """Tells the processor that this thread waits for another."""
        name, arguments = _PAUSE.get(platform.machine(), _PAUSE["x86_64"])
        kind = ir.FunctionType(NOTHING, [argument.type for argument in arguments])
        self.builder.call(self._declared(name, kind), arguments)

    def _declared(self, name, kind):
        found = self.module.globals.get(name)
        return ir.Function(self.module, kind, name) if found is None else found

    # Memory

    def address(self, array: Any, index: Any, kind: Any = FLOAT) -> Any:
        """Address of element `index` of an array of the given type."""
        return self.builder.gep(array, [self.integer(index)], source_etype=kind)

    def load(self, array: Any, index: Any = 0, kind: Any = FLOAT) -> Any:
        """Loads element `index` of the array."""
        align = 8 if kind in (INT, POINTER) else 4
        return self.builder.load(self.address(array, index, kind), typ=kind, align=align)

    def store(self, value: Any, array: Any, index: Any = 0) -> None:
        """Stores a value as element `index` of the array."""
        value = self.integer(value)
        align = 8 if value.type in (INT, POINTER) else 4
        self.builder.store(value, self.address(array, index, value.type), align=align)

    def load_vector(self, array: Any, index: Any = 0, kind: Any = None) -> Any:
        """Loads a vector: the elements of the array from `index` on."""
        return self.builder.load(self.address(array, index), typ=kind or self.vector, align=4)

    def store_vector(self, value: Any, array: Any, index: Any = 0) -> None:
        """Stores a vector as the elements of the array from `index` on."""
        self.builder.store(value, self.address(array, index), align=4)

    def slots(self, count: int) -> Any:
        """Stack array of `count` 64-bit integers, valid until the function returns."""
        with self.builder.goto_entry_block():
            typed = self.builder.alloca(ir.ArrayType(INT, count))
            return self.builder.inttoptr(self.builder.ptrtoint(typed, INT), POINTER)

    def text(self, message: str) -> Any:
        """Constant C string."""
        characters = bytearray(message.encode() + b"\0")
        kind = ir.ArrayType(BYTE, len(characters))
        name = self.module.get_unique_name("text")
        constant = ir.GlobalVariable(self.module, kind, name)
        constant.global_constant, constant.linkage = True, "internal"
        constant.initializer = ir.Constant(kind, characters)
        return constant.bitcast(POINTER)

    def variable(self, start: Any) -> Any:
        """Mutable variable with a start value; LLVM keeps the variable in a register."""
        start = self.integer(start)
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(start.type)
        self.builder.store(start, slot)
        return slot

    def get(self, variable: Any) -> Any:
        """Current value of a variable."""
        return self.builder.load(variable, typ=variable.allocated_type)

    def set(self, variable: Any, value: Any) -> None:
        """Assigns a value to a variable."""
        self.builder.store(self.integer(value), variable)

    # Vectors

    def number(self, value: float) -> ir.Constant:
        """Constant vector with the value in all lanes."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def float32(self, value: float) -> ir.Constant:
        """Constant float32."""
        return FLOAT(value)

    def integer_vector(self, values: Sequence[int]) -> ir.Constant:
        """Constant vector of 32-bit integers."""
        return ir.Constant(self.integers, list(values))

    def false(self) -> ir.Constant:
        """Constant False, an integer of 1 bit."""
        return ir.IntType(1)(0)

    def all_lanes(self, value: Any) -> Any:
        """Vector with a float32 or a 32-bit integer in all lanes."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, value, INT32(0))
        zeros = ir.Constant(self.integers, [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Fused multiply-add: a * b + c, rounded once."""
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self.call(self._declared(f"llvm.fma.v{self.lanes}f32", kind), a, b, c)

    def maximum(self, a: Any, b: Any) -> Any:
        """Elementwise maximum; a where a or b is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", b, a), b, a)

    def minimum(self, a: Any, b: Any) -> Any:
        """Elementwise minimum; a where a or b is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", b, a), b, a)

    def extremes(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Elementwise minimum and maximum of two vectors of integers, or of two integers."""
        is_less = self.builder.icmp_signed("<", a, b)
        return self.builder.select(is_less, a, b), self.builder.select(is_less, b, a)

    def extremes_of(self, least: Any, most: Any) -> tuple[Any, Any]:
        """The minimum of one vector of integers, and the maximum of another."""
        kind = ir.FunctionType(INT32, [self.integers])
        names = (f"llvm.vector.reduce.{each}.v{self.lanes}i32" for each in ("smin", "smax"))
        reduce = [self._declared(name, kind) for name in names]
        return self.call(reduce[0], least), self.call(reduce[1], most)

    def any(self, vector: Any) -> Any:
        """Returns whether any lane of a vector of booleans is true."""
        kind = ir.FunctionType(ir.IntType(1), [ir.VectorType(ir.IntType(1), self.lanes)])
        name = f"llvm.vector.reduce.or.v{self.lanes}i1"
        return self.call(self._declared(name, kind), vector)

    def any_of(self, vectors: Sequence[Any]) -> Any:
        """Returns whether any lane of any vector of booleans is true."""
        return self.any(functools.reduce(self.builder.or_, vectors))

    @contextlib.contextmanager
    def true_lanes(self, vector: Any) -> Iterator[Any]:
        """Loops over the lanes of a vector of booleans that are true; yields the lane's number."""
        builder, lanes = self.builder, ir.IntType(self.lanes)
        bits = builder.zext(builder.bitcast(vector, lanes), INT)
        left = self.variable(bits)
        kind = ir.FunctionType(INT, [INT])
        with self.loop(0, self.call(self._declared("llvm.ctpop.i64", kind), bits)):
            kind = ir.FunctionType(INT, [INT, ir.IntType(1)])
            first = self._declared("llvm.cttz.i64", kind)
            yield self.call(first, self.get(left), self.false())
            self.set(left, builder.and_(self.get(left), self.sub(self.get(left), 1)))

    def exp(self, x: Any) -> Any:
        """exp(x) for x <= 88, within 2 units in the last place; 0 where exp(x) is subnormal."""
        power, r, scale = self._powers(x)
        square = self.builder.fmul(r, r)
        power = self.multiply_add(power, square, self.builder.fadd(r, self.number(1.0)))
        return self._where_normal(x, self.builder.fmul(power, scale), 0.0)

    def decay(self, x: Any) -> Any:
        """exp(x) for any x; infinite above 88.4."""
        return self.exp(self.minimum(x, self.number(88.73)))

    def exp_minus_one(self, x: Any) -> Any:
        """exp(x) - 1 for x <= 88, which keeps its digits near 0."""
        power, r, scale = self._powers(x)
        less_one = self.multiply_add(power, self.builder.fmul(r, r), r)
        of_scale = self.builder.fsub(scale, self.number(1.0))
        return self._where_normal(x, self.multiply_add(less_one, scale, of_scale), -1.0)

    def negative(self, x: Any) -> Any:
        """0 - x: the negative, and +0 for 0."""
        return self.builder.fsub(self.number(0.0), x)

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + exp(-x))."""
        one = self.number(1.0)
        return self.builder.fdiv(one, self.builder.fadd(one, self.decay(self.negative(x))))

    def tanh(self, x: Any) -> Any:
        """Hyperbolic tangent: with e = exp(-2 |x|) - 1, tanh |x| = -e / (e + 2)."""
        builder = self.builder
        is_negative = builder.fcmp_ordered("<", x, self.number(0.0))
        less = builder.select(is_negative, x, self.negative(x))
        e = self.exp_minus_one(builder.fadd(less, less))
        minus_size = builder.fdiv(e, builder.fadd(e, self.number(2.0)))
        return builder.select(is_negative, minus_size, self.negative(minus_size))

    def log_sigmoid(self, x: Any) -> Any:
        """log(sigmoid(x)) = min(x, 0) - log(1 + y), y = exp(-|x|).

        With s = y / (2 + y), at most 1 / 3, log(1 + y) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...).
        """
        builder = self.builder
        least = self.minimum(x, self.number(0.0))
        y = self.exp(self.minimum(x, self.negative(x)))
        s = builder.fdiv(y, builder.fadd(y, self.number(2.0)))
        square = builder.fmul(s, s)
        series = self.number(1 / 15)
        for term in (13, 11, 9, 7, 5, 3, 1):
            series = self.multiply_add(series, square, self.number(1 / term))
        return builder.fsub(least, builder.fmul(builder.fadd(s, s), series))

    def _powers(self, x):
        """P(r), r and 2^n, with exp(x) = 2^n (1 + r + r^2 P(r)).

        Cody and Waite's range reduction, x = n log 2 + r with |r| <= log(2) / 2, and the polynomial
        of the Cephes library.
        """
        builder, number = self.builder, self.number
        # 1.5 * 2^23 plus a float is rounded to an integer, which is in the lowest bits of the sum.
        shift = number(12582912.0)
        shifted = self.multiply_add(x, number(1.4426950408889634), shift)
        n = builder.fsub(shifted, shift)
        r = self.multiply_add(n, number(-0.693359375), x)
        r = self.multiply_add(n, number(2.12194440e-4), r)
        power = number(1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            0.5,
        ):
            power = self.multiply_add(power, r, number(coefficient))
        bits = builder.bitcast(shifted, self.integers)
        exponent = builder.add(bits, ir.Constant(self.integers, [127] * self.lanes))
        exponent = builder.shl(exponent, ir.Constant(self.integers, [23] * self.lanes))
        return power, r, builder.bitcast(exponent, self.vector)

    def _where_normal(self, x, value, otherwise):
        below = self.builder.fcmp_ordered("<", x, self.number(-87.33654))
        return self.builder.select(below, self.number(otherwise), value)

    def float_of_bits(self, bits: Any) -> Any:
        """The float32 whose bits are the lowest 32 of an integer."""
        return self.builder.bitcast(self.builder.trunc(bits, INT32), FLOAT)

    def rank_of(self, vector: Any) -> Any:
        """Integers in the order of float32 numbers, of which none is -0: their bits, reordered."""
        builder = self.builder
        bits = builder.bitcast(vector, self.integers)
        sign = builder.ashr(bits, ir.Constant(self.integers, [31] * self.lanes))
        all_but_sign = ir.Constant(self.integers, [2**31 - 1] * self.lanes)
        return builder.xor(bits, builder.and_(sign, all_but_sign))

    def sum_of_integers(self, vector: Any) -> Any:
        """Sum of the lanes of a vector of 32-bit integers."""
        kind = ir.FunctionType(INT32, [self.integers])
        return self.call(self._declared(f"llvm.vector.reduce.add.v{self.lanes}i32", kind), vector)

    def sum_of_lanes(self, vector: Any) -> Any:
        """Sum of the lanes of a vector, in any order."""
        kind = ir.FunctionType(FLOAT, [FLOAT, self.vector])
        reduce = self._declared(f"llvm.vector.reduce.fadd.v{self.lanes}f32", kind)
        return self.builder.call(reduce, [FLOAT(0.0), vector], fastmath=["reassoc"])

    def maximum_of_lanes(self, vector: Any) -> Any:
        """Maximum of the lanes of a vector, of those that are numbers."""
        kind = ir.FunctionType(FLOAT, [self.vector])
        return self.call(self._declared(f"llvm.vector.reduce.fmax.v{self.lanes}f32", kind), vector)

    def pieces(self, size: Any, lengths: Sequence[int]) -> Iterator[tuple[Any, int]]:
        """Splits range(size) into as many pieces of the first length as fit, then of the next.

        For each length, the code that the caller generates is the body of a loop over the starts of
        the pieces.
        """
        start: Any = 0
        for length in lengths:
            with self.loop(start, self.sub(size, length - 1), length) as index:
                yield index, length
            whole = self.div(self.sub(size, start), length)
            start = self.add(start, self.mul(whole, length))


# Products of small float32 matrices, C (m, n) = A (m, k) B (k, n): most of the kernels' work.
#
# Rows of B and C are read as vectors. Elements of A are read one at a time, with any strides, and
# each element multiplies whole vectors; so A may be transposed. B has contiguous rows.
#
# A block of C is kept in registers: `ROWS` rows of a few vectors. Each step along k loads as many
# vectors of B as a row has, and one element of A for each row, and does one multiply-add for each
# pair of a vector of B and an element of A.

ROWS = 6


def vectors_at_once(lanes: int) -> list[int]:
    """Numbers of vectors of a row of C to keep in registers, the largest first.

    The largest fits the processor's 16 or 32 vector registers; the others serve the columns that
    remain.
    """
    return [2, 1] if lanes == 8 else [4, 2, 1]


def write_product(
    module: ir.Module, name: str, lanes: int, widths: Sequence[int], update: str
) -> ir.Function:
    """Generates a matrix product of float32.

    The function's arguments are (m, n, k, A, row stride of A, column stride of A, B, row stride of
    B, C, row stride of C, factors).

    Args:
      module: receives the function.
      name: name of the function.
      lanes: number of float32 in a vector.
      widths: numbers of vectors of a row of C that are kept in registers: columns are split into
        as many blocks of the first width as fit, then of the next. The last width times the lanes
        divides n.
      update: "set" for C = A B, "add" for C += A B, "decay" for C = C * factors + A B, with one
        factor for each column.
    """
    arguments = [INT, INT, INT, POINTER, INT, INT, POINTER, INT, POINTER, INT, POINTER]
    code = Code(module, name, arguments, lanes)
    m, n, k, a, a_row, a_column, b, b_row, c, c_row, factors = code.arguments

    def block(i, j, rows, width):
        totals = [code.variable(code.number(0.0)) for _ in range(rows * width)]
        a_rows = [code.address(a, code.mul(code.add(i, r), a_row)) for r in range(rows)]
        b_columns = code.address(b, j)
        with code.loop(0, k) as step:
            at = code.mul(step, b_row)
            vectors = [code.load_vector(b_columns, code.add(at, v * lanes)) for v in range(width)]
            along = code.mul(step, a_column)
            for r, row in enumerate(a_rows):
                number = code.all_lanes(code.load(row, along))
                for v, vector in enumerate(vectors):
                    total = totals[r * width + v]
                    code.set(total, code.multiply_add(number, vector, code.get(total)))
        for r in range(rows):
            to = code.address(c, code.add(code.mul(code.add(i, r), c_row), j))
            for v in range(width):
                total = code.get(totals[r * width + v])
                if update == "decay":
                    factor = code.load_vector(factors, code.add(j, v * lanes))
                    total = code.multiply_add(code.load_vector(to, v * lanes), factor, total)
                elif update == "add":
                    total = code.builder.fadd(code.load_vector(to, v * lanes), total)
                code.store_vector(total, to, v * lanes)

    for j, columns in code.pieces(n, [width * lanes for width in widths]):
        for i, rows in code.pieces(m, [ROWS, 4, 2, 1]):
            block(i, j, rows, columns // lanes)
    code.builder.ret_void()
    return code.function
