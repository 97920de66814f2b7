"""Cost of a program without a clock: arithmetic from its jaxpr, and memory as compiled.

A loop's body counts as often as it runs. If the jaxpr does not state a trip count, the index
arithmetic of the jaxpr is run to find it: single integers, and the constant integers of a layout,
are followed exactly; other arrays are only shapes. So the tiles that causality, a window or a
layout skip cost nothing, as when the program runs. Where a kernel runs, the XLA form that other
platforms run in its place is counted.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex_core

# Above this length, counts are extrapolated. It is a power of 4, because strides and segments are
# often the square root of the length.
COUNTED = 16384

# Primitives that do arithmetic on every entry of the output; moving data is not counted.
ELEMENTWISE = frozenset(
    "add sub mul div max min neg exp exp2 expm1 log log1p tanh logistic sqrt rsqrt pow integer_pow "
    "abs sign floor cos sin select_n eq ne lt le gt ge and or not xor clamp add_any rem "
    "shift_left shift_right_logical cumsum cummax cumlogsumexp".split()
)
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min argmax argmin reduce_and reduce_or".split()
)

_EVALUATED: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "div": lambda a, b: np.asarray(np.trunc(a / b)).astype(np.result_type(a)),
    "rem": np.fmod,
    "sign": np.sign,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": lambda a: ~a,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "stop_gradient": lambda a: a,
    "copy": lambda a: a,
    "pvary": lambda a: a,
}
_MOVED: Mapping[str, Callable[..., Any]] = {
    "convert_element_type": lambda a, params, shape: a.astype(params["new_dtype"]),
    "squeeze": lambda a, params, shape: a.reshape(shape),
    "reshape": lambda a, params, shape: a.reshape(shape),
    "broadcast_in_dim": lambda a, params, shape: _broadcast(a, params, shape),
    "reduce_max": lambda a, params, shape: a.max(tuple(params["axes"])),
    "reduce_min": lambda a, params, shape: a.min(tuple(params["axes"])),
}
_UNKNOWN: Any = object()


def operations(closed: Any) -> int:
    """Counts the arithmetic of a program: matrix products, and operations on single entries.

    Args:
      closed: jaxpr of the program, such as `jax.make_jaxpr(function)(*args)`.

    Raises:
      NotImplementedError: the trip count of a loop depends on floating-point data.
    """
    counter: collections.Counter = collections.Counter()
    unknown = [_UNKNOWN] * len(closed.jaxpr.invars)
    _run(closed, unknown, counter, (False,) * len(closed.jaxpr.outvars))
    return counter.total()


def temporary_bytes(traced: Any) -> int:
    """Returns the bytes of temporary buffers of the compiled program, `jax.jit(f).trace(...)`."""
    return traced.lower().compile().memory_analysis().temp_size_in_bytes


def largest(closed: Any) -> int:
    """Returns the number of entries of the largest array that the jaxpr computes anywhere."""
    return max(math.prod(v.aval.shape) for eqn in _equations(closed.jaxpr) for v in eqn.outvars)


def equations(closed: Any) -> int:
    """Returns the number of equations in the whole jaxpr, a measure of the work to compile it."""
    return sum(1 for _ in _equations(closed.jaxpr))


def extrapolated(count: Callable[[int], float], length: int, power: float) -> float:
    """Returns a count at a length, extrapolated above `COUNTED`, where counting takes too long.

    Above, the result is a N^p + b N through the counts of two shorter lengths, or a + b N for a
    power p of at most 1.

    Args:
      count: function of the length.
      length: N.
      power: p, such as `time_exponent` of a mechanism in the registry.
    """
    if length <= COUNTED:
        return count(length)
    short, long = (count(n) for n in (COUNTED // 4, COUNTED))
    power = power if power > 1 else 0.0
    # With u = N / COUNTED, counts are a u^p + b u.
    a = (long - 4 * short) / (1 - 4 * 0.25**power)
    ratio = length / COUNTED
    return a * ratio**power + (long - a) * ratio


def exponent(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """Returns the power of the length with which the costs grow, by least squares."""
    return float(np.polyfit(np.log(lengths), np.log(costs), 1)[0])


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs that an equation runs."""
    # A scatter applies its jaxpr to single entries, which `_work` counts.
    params = [value for name, value in eqn.params.items() if name != "update_jaxpr"]
    for value in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, _JAXPRS)):
        if isinstance(value, jex_core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jex_core.Jaxpr):
            yield value


_JAXPRS = (jex_core.ClosedJaxpr, jex_core.Jaxpr)


def _integers(value):
    """The value if it holds integers or truth values, else `_UNKNOWN`."""
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic | int) else value
    return np.asarray(array) if array.dtype.kind in "iub" else _UNKNOWN


def _broadcast(array, params, shape):
    sizes = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], array.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(array.reshape(sizes), shape)


def _run(called, args, counter, wanted):
    """Follows the values that loops depend on, and counts the rest; returns the known results.

    Results that are not `wanted` are not computed.
    """
    plan = _plan(called, wanted)
    counter.update(plan.work)
    known = dict(plan.consts)
    known.update(zip(plan.jaxpr.invars, args, strict=True))

    def read(atom):
        if isinstance(atom, jex_core.Literal):
            return _integers(atom.val)
        return known.get(atom, _UNKNOWN)

    for eqn, outputs in plan.steps:
        found = _equation(eqn, [read(atom) for atom in eqn.invars], counter, outputs)
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in plan.jaxpr.outvars]


class _Plan(NamedTuple):
    """Work to do each time that a jaxpr runs.

    Attributes:
      jaxpr: the jaxpr.
      consts: known values of its constants.
      work: operations of the equations that no loop depends on.
      steps: the other equations, each with flags for its wanted outputs.
      inputs: a flag for each input that the steps depend on.
    """

    jaxpr: Any
    consts: dict[Any, Any]
    work: dict[str, int]
    steps: list[tuple[Any, tuple[bool, ...]]]
    inputs: tuple[bool, ...]


@functools.cache
def _plan(called, wanted: tuple[bool, ...]) -> _Plan:
    """Plan of a jaxpr, found backwards from the wanted results and from its loops."""
    closed = isinstance(called, jex_core.ClosedJaxpr)
    jaxpr, consts = (called.jaxpr, called.consts) if closed else (called, ())
    work: collections.Counter = collections.Counter()
    steps: list[tuple[Any, tuple[bool, ...]]] = []
    needed: set[Any] = set()

    def need(atoms, which):
        needed.update(a for a, w in zip(atoms, which, strict=True) if w and _may_be_known(a))

    need(jaxpr.outvars, wanted)
    for eqn in reversed(jaxpr.eqns):
        outputs = tuple(v in needed for v in eqn.outvars)
        if _runs_jaxprs(eqn):
            steps.append((eqn, outputs))
            need(eqn.invars, _inputs(eqn, outputs))
        elif any(outputs):
            steps.append((eqn, outputs))
            need(eqn.invars, [True] * len(eqn.invars))
        else:
            work[eqn.primitive.name] += _work(eqn)
    known = dict(zip(jaxpr.constvars, map(_integers, consts), strict=True))
    inputs = tuple(v in needed for v in jaxpr.invars)
    return _Plan(jaxpr, known, {k: w for k, w in work.items() if w}, steps[::-1], inputs)


def _may_be_known(atom):
    """Returns whether an atom is a variable of integers."""
    return not isinstance(atom, jex_core.Literal) and atom.aval.dtype.kind in "iub"


@functools.cache
def _inputs(eqn, outputs) -> tuple[bool, ...]:
    """Flags for the inputs that the loops and the wanted outputs of an equation depend on."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        of_cond, of_body, carry = _of_while(eqn, outputs)
        return (*of_cond, *of_body, *carry)
    if name == "scan":
        fixed, carry = _of_scan(eqn, outputs)
        return (*fixed, *carry, *[False] * (len(eqn.invars) - len(fixed) - len(carry)))
    if name == "cond":
        of_branches = [_plan(branch, outputs).inputs for branch in params["branches"]]
        return (True, *map(any, zip(*of_branches, strict=True)))
    return _plan(_callee(eqn), outputs).inputs


@functools.cache
def _of_while(eqn, outputs):
    """Flags for the needed constants of condition and body, and for the needed carry."""
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond = _plan(params["cond_jaxpr"], (True,)).inputs
    carry = _either(cond[num_cond:], outputs)
    while True:
        body = _plan(params["body_jaxpr"], carry).inputs
        more = _either(carry, body[num_body:])
        if more == carry:
            return cond[:num_cond], body[:num_body], carry
        carry = more


@functools.cache
def _of_scan(eqn, outputs):
    """Flags for the needed constants and for the needed carry."""
    num_consts, num_carry = split_scan(eqn)
    body = eqn.params["jaxpr"]
    carry = outputs[:num_carry]
    while True:
        inputs = _plan(body, _carry_alone(body, carry)).inputs
        more = _either(carry, inputs[num_consts : num_consts + num_carry])
        if more == carry:
            return inputs[:num_consts], carry
        carry = more


def _carry_alone(body, carry):
    """The wanted outputs of a scan's body: the carry, and no stacked output."""
    return (*carry, *[False] * (len(body.jaxpr.outvars) - len(carry)))


def _either(these, those):
    return tuple(a or b for a, b in zip(these, those, strict=True))


def _callee(eqn):
    return next(eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params)


@functools.cache
def _runs_jaxprs(eqn) -> bool:
    # A scatter also has a jaxpr, that of adding two numbers, and a kernel has that of its program.
    if eqn.primitive.name == "pallas_call":
        return False
    return bool({"jaxpr", "call_jaxpr", "branches", "body_jaxpr"} & eqn.params.keys())


def _equation(eqn, inputs, counter, outputs):
    if _runs_jaxprs(eqn):
        needed = _inputs(eqn, outputs)
        given = [_frozen(x) if n else None for x, n in zip(inputs, needed, strict=True)]
        work, found = _inside(eqn, outputs, tuple(given))
        counter.update(work)
        return found
    found = _evaluated(eqn, inputs) if all(x is not _UNKNOWN for x in inputs) else _UNKNOWN
    if found is _UNKNOWN or np.ndim(found):
        counter[eqn.primitive.name] += _work(eqn)
    return [_UNKNOWN] * len(eqn.outvars) if found is _UNKNOWN else [np.asarray(found)]


@functools.cache
def _inside(eqn, outputs, given):
    """Work and results of an equation that holds jaxprs, cached because many loops are alike."""
    counter: collections.Counter = collections.Counter()
    inputs = [_UNKNOWN if x is None else np.frombuffer(x[0], x[1]).reshape(x[2]) for x in given]
    if eqn.primitive.name == "while":
        found = _while(eqn, inputs, counter, outputs)
    elif eqn.primitive.name == "scan":
        found = _scan(eqn, inputs, counter, outputs)
    elif eqn.primitive.name == "cond":
        found = _cond(eqn.params, inputs, counter, outputs)
    else:
        found = _run(_callee(eqn), inputs, counter, outputs)
    return dict(counter), found


def _frozen(array):
    return None if array is _UNKNOWN else (array.tobytes(), array.dtype.str, array.shape)


def _evaluated(eqn, inputs):
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name in _EVALUATED:
        return _EVALUATED[name](*inputs)
    if name in _MOVED:
        return _MOVED[name](*inputs, eqn.params, shape)
    if name == "dynamic_slice":
        array, *starts = inputs
        sizes = eqn.params["slice_sizes"]
        starts = [np.clip(s, 0, n - m) for s, n, m in zip(starts, array.shape, sizes, strict=True)]
        return array[tuple(slice(s, s + m) for s, m in zip(starts, sizes, strict=True))]
    return _UNKNOWN


def _work(eqn) -> int:
    """Number of operations of an equation; single integers count as none."""
    if all(v.aval.shape == () and v.aval.dtype.kind in "iub" for v in eqn.outvars):
        return 0
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    if name == "ragged_dot_general":  # each row is multiplied by one group
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        left, right = (each.aval.shape for each in eqn.invars[:2])
        others = {*range(len(right))} - {*contracted, *batch, *numbers.rhs_group_dimensions}
        return 2 * math.prod(left) * math.prod(right[axis] for axis in others)
    if name in ELEMENTWISE:
        return math.prod(eqn.outvars[0].aval.shape)
    if name in REDUCTIONS:
        return math.prod(eqn.invars[0].aval.shape)
    if name == "scatter-add":
        return math.prod(eqn.invars[2].aval.shape)
    if name == "fft":
        length = math.prod(eqn.params["fft_lengths"])
        return math.ceil(5 * math.prod(eqn.invars[0].aval.shape) * math.log2(length))
    if name == "sort":
        size = math.prod(eqn.invars[0].aval.shape)
        return size * max(1, math.ceil(math.log2(max(eqn.invars[0].aval.shape))))
    return 0


def _while(eqn, inputs, counter, outputs):
    params = eqn.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    cond_consts, body_consts = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
    carry = inputs[of_cond + of_body :]
    *_, wanted = _of_while(eqn, outputs)
    while True:
        (goes_on,) = _run(cond, [*cond_consts, *carry], counter, (True,))
        if goes_on is _UNKNOWN:
            raise NotImplementedError("the trip count of a loop depends on the data")
        if not goes_on:
            return carry
        carry = _run(body, [*body_consts, *carry], counter, wanted)


def _scan(eqn, inputs, counter, outputs):
    """Runs every step if loops depend on the carry; else runs one step and multiplies."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    num_consts, num_carry = split_scan(eqn)
    fixed, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    stacked = [_UNKNOWN] * (len(inputs) - num_consts - num_carry)
    _, carried = _of_scan(eqn, outputs)
    wanted = _carry_alone(body, carried)
    if not any(carried):
        once: collections.Counter = collections.Counter()
        _run(body, [*fixed, *carry, *stacked], once, wanted)
        counter.update({name: work * length for name, work in once.items()})
        carry = [_UNKNOWN] * num_carry
    else:
        for _ in range(length):
            results = _run(body, [*fixed, *carry, *stacked], counter, wanted)
            carry = results[:num_carry]
    return [*carry, *[_UNKNOWN] * (len(eqn.outvars) - num_carry)]


def split_scan(eqn: Any) -> tuple[int, int]:
    """Number of constant inputs of a scan, and number of carried inputs."""
    jaxpr = eqn.params["jaxpr"].jaxpr
    # Outside of the loop, an array that is stacked over the steps has one more axis.
    num_carry = len(eqn.outvars) - sum(_stacked(eqn.outvars, jaxpr.outvars))
    num_stacked = sum(_stacked(eqn.invars, jaxpr.invars))
    return len(eqn.invars) - num_stacked - num_carry, num_carry


def _stacked(outside, inside):
    return [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(outside, inside, strict=True)]


def _cond(params, inputs, counter, outputs):
    """Runs the branch that is taken, or counts the most expensive branch if that is unknown."""
    which, *operands = inputs
    branches = params["branches"]
    if which is not _UNKNOWN:
        branches = [branches[int(np.clip(which, 0, len(branches) - 1))]]
    counts: list[collections.Counter] = []
    for branch in branches:
        counts.append(collections.Counter())
        _run(branch, operands, counts[-1], outputs)
    counter.update(max(counts, key=lambda count: count.total()))
    return [_UNKNOWN] * len(outputs)
