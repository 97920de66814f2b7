"""Writes LLVM's intermediate code: loops, vectors, and memory as arrays of numbers.

Integers have 64 bits, numbers are float32, and a vector has as many lanes as a register of the
processor has for them. `print(module)` shows what was written.
"""

import contextlib
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

_OF_LIBC = {
    "malloc": ir.FunctionType(POINTER, [INT]),
    "aligned_alloc": ir.FunctionType(POINTER, [INT, INT]),
    "free": ir.FunctionType(NOTHING, [POINTER]),
    "sched_yield": ir.FunctionType(INT32, []),
}


class Code:
    """The code of a new function, which is written from its start to its end.

    Where values are asked for, Python's numbers are constants.

    Attributes:
      function: that it is of.
      arguments: of the function.
      builder: of llvmlite, for what has no word here.
      lanes: of a vector.
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

    # Integers

    def integer(self, value: Any) -> Any:
        """As LLVM takes it."""
        return INT(value) if isinstance(value, int) else value

    def add(self, *values: Any) -> Any:
        """Their sum."""
        total, *others = map(self.integer, values)
        for other in others:
            total = self.builder.add(total, other)
        return total

    def sub(self, a: Any, b: Any) -> Any:
        """a - b."""
        return self.builder.sub(self.integer(a), self.integer(b))

    def mul(self, *values: Any) -> Any:
        """Their product."""
        product, *others = map(self.integer, values)
        for other in others:
            product = self.builder.mul(product, other)
        return product

    def div(self, a: Any, b: Any) -> Any:
        """a // b, neither negative."""
        return self.builder.udiv(self.integer(a), self.integer(b))

    def ceil(self, a: Any, b: Any) -> Any:
        """a / b rounded up, neither negative."""
        return self.div(self.add(a, self.sub(b, 1)), b)

    def whole(self, size: Any) -> Any:
        """A size in numbers, rounded up to whole vectors."""
        return self.mul(self.ceil(size, self.lanes), self.lanes)

    def rem(self, a: Any, b: Any) -> Any:
        """a % b, neither negative."""
        return self.builder.urem(self.integer(a), self.integer(b))

    def less(self, a: Any, b: Any) -> Any:
        """Whether a < b."""
        return self.builder.icmp_signed("<", self.integer(a), self.integer(b))

    def min(self, a: Any, b: Any) -> Any:
        """The smaller."""
        return self.builder.select(self.less(a, b), self.integer(a), self.integer(b))

    def max(self, a: Any, b: Any) -> Any:
        """The larger."""
        return self.builder.select(self.less(a, b), self.integer(b), self.integer(a))

    # What runs, and how often

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """What is written within runs for each index from `start` up to below `stop`."""
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
        """What is written within runs if the condition holds."""
        return self.builder.if_then(condition)

    def call(self, function: ir.Function | str, *arguments: Any) -> Any:
        """The function of the arguments; by name, of the C library."""
        if isinstance(function, str):
            function = self._declared(function, _OF_LIBC[function])
        return self.builder.call(function, [self.integer(each) for each in arguments])

    def _declared(self, name, kind):
        found = self.module.globals.get(name)
        return ir.Function(self.module, kind, name) if found is None else found

    # Memory

    def place(self, array: Any, index: Any, kind: Any = FLOAT) -> Any:
        """Where number `index` of the array lies."""
        return self.builder.gep(array, [self.integer(index)], source_etype=kind)

    def load(self, array: Any, index: Any = 0, kind: Any = FLOAT) -> Any:
        """Number `index` of the array."""
        align = 8 if kind in (INT, POINTER) else 4
        return self.builder.load(self.place(array, index, kind), typ=kind, align=align)

    def store(self, value: Any, array: Any, index: Any = 0) -> None:
        """Makes it number `index` of the array."""
        value = self.integer(value)
        align = 8 if value.type in (INT, POINTER) else 4
        self.builder.store(value, self.place(array, index, value.type), align=align)

    def load_vector(self, array: Any, index: Any = 0, kind: Any = None) -> Any:
        """The numbers of the array from `index` on."""
        return self.builder.load(self.place(array, index), typ=kind or self.vector, align=4)

    def store_vector(self, value: Any, array: Any, index: Any = 0) -> None:
        """Makes it the numbers of the array from `index` on."""
        self.builder.store(value, self.place(array, index), align=4)

    def slots(self, count: int) -> Any:
        """An array of so many integers, which lives as long as the function runs."""
        with self.builder.goto_entry_block():
            typed = self.builder.alloca(ir.ArrayType(INT, count))
            return self.builder.inttoptr(self.builder.ptrtoint(typed, INT), POINTER)

    def text(self, message: str) -> Any:
        """A constant C string."""
        characters = bytearray(message.encode() + b"\0")
        kind = ir.ArrayType(BYTE, len(characters))
        name = self.module.get_unique_name("text")
        constant = ir.GlobalVariable(self.module, kind, name)
        constant.global_constant, constant.linkage = True, "internal"
        constant.initializer = ir.Constant(kind, characters)
        return constant.bitcast(POINTER)

    def variable(self, start: Any) -> Any:
        """A place for a value that changes: LLVM keeps it in a register."""
        start = self.integer(start)
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(start.type)
        self.builder.store(start, slot)
        return slot

    def get(self, variable: Any) -> Any:
        """The value of a variable."""
        return self.builder.load(variable, typ=variable.allocated_type)

    def set(self, variable: Any, value: Any) -> None:
        """Gives a variable another value."""
        self.builder.store(value, variable)

    # Vectors

    def number(self, value: float) -> ir.Constant:
        """The constant in all lanes."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def all_lanes(self, value: Any) -> Any:
        """The value, a number or an integer of 32 bits, in all lanes."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, value, INT32(0))
        zeros = ir.Constant(self.integers, [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self.call(self._declared(f"llvm.fma.v{self.lanes}f32", kind), a, b, c)

    def larger(self, a: Any, b: Any) -> Any:
        """The larger in each lane; a where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", b, a), b, a)

    def any(self, vector: Any) -> Any:
        """Whether any lane of a vector of truth values is true."""
        kind = ir.FunctionType(ir.IntType(1), [ir.VectorType(ir.IntType(1), self.lanes)])
        name = f"llvm.vector.reduce.or.v{self.lanes}i1"
        return self.call(self._declared(name, kind), vector)

    def exp(self, x: Any) -> Any:
        """e^x for x up to 88, within 2 units in the last place; 0 below -87.3, NaN of NaN.

        With x = n log 2 + r, |r| <= log(2) / 2, it is 2^n e^r, where e^r is a polynomial: Cody and
        Waite's reduction, with the coefficients of Cephes. Below -87.3 float32 has no normal
        number.
        """
        builder, number = self.builder, self.number
        below = builder.fcmp_ordered("<", x, number(-87.33654))
        # Added to 1.5 * 2^23, a number is rounded to an integer, which the lowest bits then are.
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
        power = self.multiply_add(power, builder.fmul(r, r), builder.fadd(r, number(1.0)))
        bits = builder.bitcast(shifted, self.integers)
        exponent = builder.add(bits, ir.Constant(self.integers, [127] * self.lanes))
        exponent = builder.shl(exponent, ir.Constant(self.integers, [23] * self.lanes))
        value = builder.fmul(power, builder.bitcast(exponent, self.vector))
        return builder.select(below, number(0.0), value)
