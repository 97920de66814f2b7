"""Small kernels for the tests of the interpreter, some of them wrong on purpose."""

import triton
import triton.language as tl

ONE = tl.constexpr(1)


@triton.jit
def _double(x):
    return x + x


@triton.jit
def doubled(x, y, out, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    total = _double(tl.load(x + at))
    if y is not None:
        total += tl.load(y + at)
    tl.store(out + at, total)


@triton.jit
def shifted(out, size: tl.constexpr):
    """Programs whose stores overlap by one."""
    at = tl.program_id(0) * (size - ONE) + tl.arange(0, size)
    tl.store(out + at, at.to(tl.float32))


@triton.jit
def reads_its_neighbour(out, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at, at.to(tl.float32))
    if tl.program_id(0) > 0:
        tl.store(out + at, tl.load(out + at - size))


@triton.jit
def reads_first(out, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at, tl.load(out + at))


@triton.jit
def beyond(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at + ONE))


@triton.jit
def writes_its_operand(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(x + at, tl.load(x + at))
    tl.store(out + at, tl.load(x + at))


@triton.jit
def products(x, y, out, size: tl.constexpr):
    row, column = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    left, right = tl.load(x + row * size + column), tl.load(y + row * size + column)
    total = tl.dot(left, tl.trans(right)) + tl.sum(left.to(tl.float32), 1)[:, None]
    tl.store(out + row * size + column, total + tl.cumsum(total, 0, reverse=True))


@triton.jit
def applied(x, i, integers, numbers, out, slope, size: tl.constexpr, plan: tl.constexpr):
    """Runs the functions of a plan on a tile of logits and positions."""
    at = tl.arange(0, size)
    logit, place = tl.load(x + at), tl.load(i + at)
    tl.store(out + at, plan.f(integers, numbers, logit, place).to(tl.float32))
    tl.store(slope + at, plan.d_f(integers, numbers, logit, place).to(tl.float32) + place * 0)
