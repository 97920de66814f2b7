"""What a program costs, with no clock: its arithmetic by its jaxpr, its memory as compiled.

A loop's body counts as often as it runs. Trip counts that are not written in the jaxpr are found by
running the part of it that is index arithmetic: single integers, and the constant integers of a
layout, are followed exactly; other arrays are only shapes. So the tiles that causality, a window or
a layout skip cost nothing, as when the program runs.
"""

import collections
import functools
import math

import jax
import numpy as np
from jax.extend import core as jex_core

# Arithmetic on every entry of the output; moving data is not counted.
_ELEMENTWISE = frozenset(
    "add sub mul div max min neg exp exp2 expm1 log log1p tanh logistic sqrt rsqrt pow integer_pow "
    "abs sign floor cos sin select_n eq ne lt le gt ge and or not xor clamp add_any rem "
    "shift_left shift_right_logical cumsum cummax cumlogsumexp".split()
)
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min argmax argmin reduce_and reduce_or".split()
)

_EVALUATED = {
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
_MOVED = {
    "convert_element_type": lambda a, params, shape: a.astype(params["new_dtype"]),
    "squeeze": lambda a, params, shape: a.reshape(shape),
    "reshape": lambda a, params, shape: a.reshape(shape),
    "broadcast_in_dim": lambda a, params, shape: _broadcast(a, params, shape),
    "reduce_max": lambda a, params, shape: a.max(tuple(params["axes"])),
    "reduce_min": lambda a, params, shape: a.min(tuple(params["axes"])),
}
_UNKNOWN = object()


def operations(closed) -> int:
    """Multiplications and additions of matrix products, and arithmetic on single entries."""
    counter: collections.Counter = collections.Counter()
    unknown = [_UNKNOWN] * len(closed.jaxpr.invars)
    _run(closed.jaxpr, [_integers(c) for c in closed.consts], unknown, counter)
    return counter.total()


def temporary_bytes(traced, **options) -> int:
    """Bytes of temporary buffers of the compiled program."""
    return traced.lower().compile(**options).memory_analysis().temp_size_in_bytes


def largest(closed) -> int:
    """Entries of the largest array that is computed anywhere in the jaxpr."""
    return max(math.prod(v.aval.shape) for eqn in _equations(closed.jaxpr) for v in eqn.outvars)


def equations(closed) -> int:
    """Equations of the whole jaxpr: what there is to compile."""
    return sum(1 for _ in _equations(closed.jaxpr))


def exponent(lengths, costs) -> float:
    """The power of length that the costs grow by."""
    return float(np.polyfit(np.log(lengths), np.log(costs), 1)[0])


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _inner(eqn):
            yield from _equations(inner)


def _inner(eqn):
    for value in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: isinstance(x, _JAXPRS)
    ):
        if isinstance(value, jex_core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jex_core.Jaxpr):
            yield value


_JAXPRS = (jex_core.ClosedJaxpr, jex_core.Jaxpr)


def _integers(value):
    """Integers or truth values, or that it is neither."""
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic | int) else value
    return np.asarray(array) if array.dtype.kind in "iub" else _UNKNOWN


def _broadcast(array, params, shape):
    sizes = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], array.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(array.reshape(sizes), shape)


def _run(jaxpr, consts, args, counter):
    """Follows the scalars through, counts the rest; returns what is known of the results."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        if isinstance(atom, jex_core.Literal):
            return _integers(atom.val)
        return known.get(atom, _UNKNOWN)

    work, others = _of_arrays(jaxpr)
    counter.update(work)
    for eqn in others:
        inputs = [read(atom) for atom in eqn.invars]
        outputs = _equation(eqn, inputs, counter)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


@functools.cache
def _of_arrays(jaxpr):
    """The work of the arrays that no loop depends on, and the other equations."""
    work, others, used = collections.Counter(), [], set(map(id, jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        told = any(_may_be_known(v.aval) and id(v) in used for v in eqn.outvars)
        if told or _holds_jaxprs(eqn) or any(v.aval.shape == () for v in eqn.outvars):
            others.append(eqn)
            used.update(map(id, eqn.invars))
        else:
            work[eqn.primitive.name] += _work(eqn)
    return work, others[::-1]


@functools.cache
def _holds_jaxprs(eqn) -> bool:
    return any(True for _ in _inner(eqn))


def _may_be_known(aval):
    return aval.dtype.kind in "iub" and len(aval.shape) < 4


def _equation(eqn, inputs, counter):
    name, params = eqn.primitive.name, eqn.params
    unknown = [_UNKNOWN] * len(eqn.outvars)
    if name == "while":
        return _while(params, inputs, counter)
    if name == "scan":
        return _scan(eqn, inputs, counter)
    if name == "cond":
        return _cond(params, inputs, counter, unknown)
    if _holds_jaxprs(eqn):
        closed = next(params[k] for k in ("jaxpr", "call_jaxpr") if k in params)
        if isinstance(closed, jex_core.ClosedJaxpr):
            return _run(closed.jaxpr, [_integers(c) for c in closed.consts], inputs, counter)
        return _run(closed, [], inputs, counter)
    found = _evaluated(eqn, inputs) if all(x is not _UNKNOWN for x in inputs) else _UNKNOWN
    if found is _UNKNOWN or np.ndim(found):
        counter[name] += _work(eqn)
    return unknown if found is _UNKNOWN else [np.asarray(found)]


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
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    if name in _ELEMENTWISE:
        return math.prod(eqn.outvars[0].aval.shape)
    if name in _REDUCTIONS:
        return math.prod(eqn.invars[0].aval.shape)
    if name == "sort":
        size = math.prod(eqn.invars[0].aval.shape)
        return size * max(1, math.ceil(math.log2(max(eqn.invars[0].aval.shape))))
    return 0


def _while(params, inputs, counter):
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    cond_consts, body_consts = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
    carry = inputs[of_cond + of_body :]
    while True:
        consts = [_integers(c) for c in cond.consts]
        (goes_on,) = _run(cond.jaxpr, consts, [*cond_consts, *carry], counter)
        if goes_on is _UNKNOWN:
            raise NotImplementedError("the trip count of a loop depends on the data")
        if not goes_on:
            return carry
        consts = [_integers(c) for c in body.consts]
        carry = _run(body.jaxpr, consts, [*body_consts, *carry], counter)


def _scan(eqn, inputs, counter):
    """Every step where scalars are carried, as loop counters are; else one step, many times."""
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    consts = [_integers(c) for c in closed.consts]
    # What is stacked over the steps has one axis more outside of the loop.
    stacked_in = _stacked(eqn.invars, closed.jaxpr.invars)
    stacked_out = _stacked(eqn.outvars, closed.jaxpr.outvars)
    num_carry = len(stacked_out) - sum(stacked_out)
    num_consts = len(stacked_in) - sum(stacked_in) - num_carry
    fixed, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    stacked = [_UNKNOWN] * sum(stacked_in)
    if all(x is _UNKNOWN for x in carry):
        once = collections.Counter()
        _run(closed.jaxpr, consts, [*fixed, *carry, *stacked], once)
        counter.update({name: work * length for name, work in once.items()})
    else:
        for _ in range(length):
            results = _run(closed.jaxpr, consts, [*fixed, *carry, *stacked], counter)
            carry = results[:num_carry]
    return [*carry, *[_UNKNOWN] * sum(stacked_out)]


def _stacked(outside, inside):
    return [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(outside, inside, strict=True)]


def _cond(params, inputs, counter, unknown):
    """The dearest branch, where it is not known which is taken."""
    which, *operands = inputs
    branches = params["branches"]
    if which is not _UNKNOWN:
        branches = [branches[int(np.clip(which, 0, len(branches) - 1))]]
    counts = []
    for branch in branches:
        counts.append(collections.Counter())
        _run(branch.jaxpr, [_integers(c) for c in branch.consts], operands, counts[-1])
    counter.update(max(counts, key=lambda count: count.total()))
    return unknown
