"""Memory of a program over time, from its jaxpr: no compilation, no arrays, so any size.

The jaxpr becomes a list of operations on buffers, as a compiler makes it. Nested jaxprs are
inlined, equal equations are computed once, and loops are one operation with temporaries of their
own.
Elementwise operations are fused: a value is a buffer only if a fusion cannot compute it where it is
read. A buffer lives from the operation that writes it to the last operation that reads it.

`jax.checkpoint` puts a barrier before what it recomputes: recomputation starts after the gradient
of its results is there, and shares nothing with the forward pass.

Left out are temporaries inside kernels and libraries, alignment and fragmentation.
"""

import collections
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core

from effattn.analysis.cost import ELEMENTWISE, REDUCTIONS, split_scan

# Moves of data that a fusion computes where it reads them.
_MOVES = frozenset(
    "broadcast_in_dim convert_element_type slice dynamic_slice pad concatenate iota rev split "
    "square is_finite round ceil sign nextafter erf erfc erf_inv cbrt tan real imag".split()
)
# Other names of a buffer. Transposes change the layout that the compiler chooses for it.
_ALIASES = frozenset(
    "reshape squeeze expand_dims transpose stop_gradient copy copy_p name pvary pcast "
    "optimization_barrier sharding_constraint".split()
)
# Functions that fusions do not compute again.
_COSTLY = frozenset(
    "exp expm1 log log1p logistic tanh sqrt rsqrt cbrt pow sin cos tan erf erfc div rem".split()
)
_INLINED = "jaxpr", "call_jaxpr", "fun_jaxpr"
# Operations whose jaxpr is that of a kernel or of single entries.
_OPAQUE = "pallas_call", "reduce"
_BARRIER, _ALLOCATE, _TRANSPOSE = "barrier", "allocate", "transposed copy"


class Compiler(NamedTuple):
    """How a compiler stores and orders values.

    Attributes:
      platform: platform whose branch of platform-dependent code runs; None is the default branch.
      recomputes: a value with several readers is stored only if it is smaller than the buffers that
        it is computed from. If not, it is stored also if one of the readers waits for another.
      breadth_first: operations run as soon as their inputs are there, in breadth-first order, and
        not in the order of the program.
      transposes: a matrix product whose left operand contracts other axes than the last ones copies
        the operand.
      scatters: a device sums and keeps its part of sharded gradients at once (reduce-scatter); if
        not, it has whole gradients until the end of the backward pass.
      overlaps: the weights of the next layer are gathered while a layer is computed.
    """

    platform: str | None
    recomputes: bool
    breadth_first: bool
    transposes: bool
    scatters: bool
    overlaps: bool


# XLA of jaxlib 0.10 to 0.12, as found in its buffer assignments of language models.
CPU = Compiler(
    "cpu", recomputes=False, breadth_first=True, transposes=True, scatters=False, overlaps=False
)
ACCELERATOR = Compiler(
    None, recomputes=True, breadth_first=False, transposes=False, scatters=True, overlaps=True
)


class Timeline(NamedTuple):
    """Memory of a program, step by step, without its arguments.

    Attributes:
      live: bytes of all buffers at each step.
      results: bytes of results among them.
      written: the step that writes each result; -1 for arguments and constants.
    """

    live: tuple[int, ...]
    results: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes at the step that needs most."""
        return max(self.live, default=0)


def timeline(closed: Any, compiler: Compiler) -> Timeline:
    """Returns the memory of a program over time.

    Args:
      closed: jaxpr of the program, such as `jax.make_jaxpr(function)(*args)`, where arguments may
        be `jax.ShapeDtypeStruct`.
      compiler: how values are stored and ordered, `CPU` or `ACCELERATOR`.
    """
    trace = _Trace(compiler)
    arguments = [trace.value(v.aval) for v in closed.jaxpr.invars]
    constants = trace.constants(closed)
    results = trace.run(closed.jaxpr, arguments, constants)
    return _timeline(trace, {*arguments, *constants}, results)


class _Constant(NamedTuple):
    """A scalar that is known, or an array of one such number."""

    value: str


class _Operation(NamedTuple):
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inside: int = 0  # bytes of temporaries of a loop's body

    @property
    def fused(self) -> bool:
        """True if a fusion can compute the operation together with its readers."""
        return self.name in ELEMENTWISE or self.name in _MOVES

    @property
    def reads_fused(self) -> bool:
        """True if a fusion can compute what the operation reads."""
        return self.fused or self.name in REDUCTIONS or self.name == _TRANSPOSE


class _Trace:
    """Operations on values, which are numbered; a known scalar is a `_Constant`."""

    def __init__(self, compiler: Compiler):
        self.compiler = compiler
        self.operations: list[_Operation] = []
        self.sizes: list[int] = []
        self.held: dict[int, int] = {}  # the buffer that a loop writes its result to
        self._found: dict[Any, list[int]] = {}
        self._scattered: dict[Any, list[Any]] = {}  # what zeros with these sums were made of
        self._barrier: tuple[int, ...] = ()

    def value(self, aval: Any, size: int | None = None) -> int:
        """A new value; the size defaults to that of its type."""
        if size is None:
            size = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
        self.sizes.append(size)
        return len(self.sizes) - 1

    def constants(self, closed: Any) -> list[int]:
        return [self.value(jax.typeof(x)) for x in closed.consts]

    def run(self, jaxpr: Any, arguments: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
        """Adds the operations of a jaxpr, and returns its results."""
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom):
            is_literal = isinstance(atom, jex_core.Literal)
            return _Constant(str(atom.val)) if is_literal else known[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn, inputs):
        name, params = eqn.primitive.name, eqn.params
        if name == "platform_index":
            return [_Constant(str(self._platform(params["platforms"])))]
        if name == "cond" and isinstance(inputs[0], _Constant):
            return self._inline(params["branches"][int(float(inputs[0].value))], inputs[1:])
        if name == "scan" and params["length"] == 1:
            return self._inline(params["jaxpr"], inputs)
        if name in ("scan", "while", "cond"):
            return self._loop(eqn, inputs)
        inner = next((params[key] for key in _INLINED if key in params), None)
        if inner is not None and name not in _OPAQUE:
            return self._inline(inner, inputs, barrier=params.get("differentiated", False))
        if name in _ALIASES or self._is_same(eqn, inputs):
            return inputs[: len(eqn.outvars)]
        return self._plain(eqn, name, inputs)

    def _platform(self, platforms):
        named = (n for n, p in enumerate(platforms) if p and self.compiler.platform in p)
        return next(named, next((n for n, p in enumerate(platforms) if p is None), 0))

    def _inline(self, inner, inputs, barrier=False):
        closed = isinstance(inner, jex_core.ClosedJaxpr)
        jaxpr, constants = (inner.jaxpr, self.constants(inner)) if closed else (inner, [])
        if not barrier:
            return self.run(jaxpr, inputs, constants)
        before = self._barrier
        token = self.value(None, size=0)
        self._add(_BARRIER, inputs, [token])
        self._barrier = (token,)
        results = self.run(jaxpr, inputs, constants)
        self._barrier = before
        return results

    @staticmethod
    def _is_same(eqn, inputs):
        """Returns whether the result is its first input under another type, or a number."""
        name, (result, *_) = eqn.primitive.name, eqn.outvars
        if name in ("broadcast_in_dim", "convert_element_type"):
            if isinstance(inputs[0], _Constant):
                return True
            given = eqn.invars[0].aval
            return given.size == result.aval.size and given.dtype == result.aval.dtype
        zero = name in ("add", "add_any", "sub") and inputs[1] in (_Constant("0.0"), _Constant("0"))
        return zero and eqn.invars[0].aval.shape == result.aval.shape

    def _plain(self, eqn, name, inputs):
        if name in ("add", "add_any"):
            for zeros, other in (inputs, inputs[::-1]):
                if scattered := self._scattered.get(zeros):
                    # Compilers scatter to the other summand.
                    given = [other, *scattered]
                    return self._once(("scatter", *given), "scatter", given, [eqn.outvars[0].aval])
        if name in ELEMENTWISE and len(inputs) > 1:
            shape = eqn.outvars[0].aval.shape
            inputs = [
                self._broadcast(x, atom.aval, range(atom.aval.ndim), shape)
                for x, atom in zip(inputs, eqn.invars, strict=True)
            ]
        if name == "broadcast_in_dim":
            dimensions = eqn.params["broadcast_dimensions"]
            shape = eqn.outvars[0].aval.shape
            return [self._broadcast(inputs[0], eqn.invars[0].aval, dimensions, shape)]
        if name == "dot_general" and self.compiler.transposes:
            inputs = [self._with_last_contracted(eqn, inputs[0]), *inputs[1:]]
        key = name, str(sorted(eqn.params.items(), key=lambda item: item[0])), tuple(inputs)
        results = self._once(key, name, inputs, [v.aval for v in eqn.outvars])
        if name == "scatter-add" and inputs[0] == _Constant("0.0"):
            self._scattered[results[0]] = inputs[1:]
        return results

    def _broadcast(self, x, aval, dimensions, shape):
        """The value with this shape."""
        if isinstance(x, _Constant) or aval.size == math.prod(shape):
            return x
        kept = [d for d, size in zip(dimensions, aval.shape, strict=True) if size > 1]
        key = "broadcast_in_dim", tuple(kept), tuple(shape), x
        (result,) = self._once(key, "broadcast_in_dim", [x], [aval.update(shape=tuple(shape))])
        return result

    def _with_last_contracted(self, eqn, x):
        """The left operand of a product, copied if its contracted axes are not the last ones."""
        (contracted, _), _ = eqn.params["dimension_numbers"]
        aval = eqn.invars[0].aval
        if isinstance(x, _Constant) or min(contracted, default=0) >= aval.ndim - len(contracted):
            return x
        return self._once((_TRANSPOSE, x), _TRANSPOSE, [x], [aval])[0]

    def _once(self, key, name, inputs, avals):
        """The results of an operation, which runs once for all equal equations."""
        key = *key, self._barrier
        if key not in self._found:
            self._found[key] = [self.value(aval) for aval in avals]
            self._add(name, inputs, self._found[key])
        return self._found[key]

    def _add(self, name, inputs, writes, inside=0):
        reads = tuple(x for x in inputs if not isinstance(x, _Constant))
        # Constants need not wait for a barrier.
        reads += self._barrier if reads else ()
        self.operations.append(_Operation(name, reads, tuple(writes), inside))

    def _loop(self, eqn, inputs):
        """A loop writes its results to buffers that are allocated before it."""
        params = eqn.params
        jaxprs = params.get("branches") or (
            params["body_jaxpr" if "body_jaxpr" in params else "jaxpr"],
        )
        inside = max(timeline(jaxpr, self.compiler).peak for jaxpr in jaxprs)
        if eqn.primitive.name == "cond":
            results = [self.value(v.aval) for v in eqn.outvars]
            self._add("cond", inputs, results, inside)
            return results
        if eqn.primitive.name == "scan":
            first, carried = split_scan(eqn)
        else:
            first, carried = params["cond_nconsts"] + params["body_nconsts"], len(eqn.outvars)
        initial = [*inputs[first : first + carried], *[None] * (len(eqn.outvars) - carried)]
        buffers, results = [], []
        for variable, start in zip(eqn.outvars, initial, strict=True):
            buffers.append(self.value(variable.aval))
            results.append(self.value(variable.aval, size=0))
            self.held[results[-1]] = buffers[-1]
            given = [] if start is None else [start]
            self._add(_ALLOCATE, given, [buffers[-1]])
        self._add(eqn.primitive.name, [*inputs, *buffers], results, inside)
        return results


def _timeline(trace, arguments, results):
    wanted = {x for x in results if not isinstance(x, _Constant)}
    operations = _needed(trace.operations, wanted)
    stored = _stored(trace, operations, arguments, wanted)
    steps = [op for op in operations if any(x in stored for x in op.writes)]
    sources = _Sources(trace, operations, arguments | stored)
    reads = [sources.read_by(op) for op in steps]
    order = _breadth_first(steps, reads) if trace.compiler.breadth_first else range(len(steps))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, index in enumerate(order):
        for x in steps[index].writes:
            first[x] = last[x] = step
        for x in reads[index]:
            last[x] = step
    end = len(steps)
    kept = set().union(*(sources.of(x) for x in wanted))
    live, of_results = [0] * (end + 2), [0] * (end + 2)
    reused = _reused(trace, steps, reads, order, last, kept)
    for x in stored:
        stop = end if x in kept else last[x] - (x in reused)
        for sizes in [live, of_results] if x in kept else [live]:
            sizes[first[x]] += trace.sizes[x]
            sizes[stop + 1] -= trace.sizes[x]
    inside = [steps[index].inside for index in order] + [0]
    total = [a + b for a, b in zip(itertools.accumulate(live[:-1]), inside, strict=True)]
    written = tuple(
        -1
        if isinstance(x, _Constant)
        else max((first.get(y, -1) for y in sources.of(x)), default=-1)
        for x in results
    )
    return Timeline(tuple(total), tuple(itertools.accumulate(of_results[:-1])), written)


def _reused(trace, steps, reads, order, last, kept) -> set[int]:
    """Buffers that the last operation that reads them overwrites with a result of the same size."""
    found: set[int] = set()
    for step, index in enumerate(order):
        op = steps[index]
        if not op.fused and not op.name.startswith("scatter"):
            continue
        free = {trace.sizes[x]: x for x in reads[index] if last.get(x) == step and x not in kept}
        found.update(free[size] for x in op.writes if (size := trace.sizes[x]) in free and size)
    return found


def _needed(operations: Sequence[_Operation], wanted: Iterable[int]) -> list[_Operation]:
    """The operations that results depend on."""
    needed, found = set(wanted), []
    for op in reversed(operations):
        if not needed.isdisjoint(op.writes):
            needed.update(op.reads)
            found.append(op)
    return found[::-1]


def _stored(trace, operations, arguments, wanted) -> set[int]:
    """The values that are buffers."""
    readers: dict[int, list[_Operation]] = collections.defaultdict(list)
    for op in operations:
        for x in op.reads:
            readers[x].append(op)
    fixed = {
        x
        for op in operations
        for x in op.writes
        if not op.fused or x in wanted or not all(r.reads_fused for r in readers[x])
    }
    # A fusion makes numbers and ranges itself.
    fixed -= {x for op in operations if op.fused and not op.reads for x in op.writes} - wanted
    rule = _small if trace.compiler.recomputes else _shared
    return rule(trace, operations, arguments, fixed, readers)


def _small(trace, operations, arguments, fixed, readers):
    """Adds values with several readers that are smaller than the buffers they come from."""
    sources = _Sources(trace, operations, arguments | fixed)
    for op in operations:
        for x in op.writes:
            if x in fixed or len(readers[x]) < 2 or not op.reads:
                continue
            size = sum(trace.sizes[y] for y in sources.of(x) if y not in arguments)
            if trace.sizes[x] < size:
                fixed.add(x)
                sources.stored.add(x)
    return fixed


def _shared(trace, operations, arguments, fixed, readers):
    """Adds values that several fusions read and none of them computes again.

    XLA repeats cheap operations in all fusions that read their result, but only if no fusion waits
    for another one.
    """
    stored = set(fixed)
    fusion: dict[int, int] = {}  # the last operation of the fusion, by operation
    later: dict[int, int] = {}  # bits of all operations that wait for one
    index = {id(op): n for n, op in enumerate(operations)}
    for n, op in reversed(list(enumerate(operations))):
        following = [index[id(r)] for x in op.writes for r in readers[x]]
        later[n] = functools.reduce(operator.or_, (later[r] | 1 << r for r in following), 0)
        ours = [fusion[r] for r in following if operations[r].reads_fused]
        for x in op.writes:
            if x in fixed or not op.reads:
                continue
            # XLA repeats a broadcast, but stores that of an argument.
            is_repeated = op.name == "broadcast_in_dim" and not arguments.issuperset(op.reads[:1])
            roots = {fusion[index[id(r)]] for r in readers[x]}
            waits = any(later[a] >> b & 1 for a in roots for b in roots)
            if len(roots) > 1 and not is_repeated and (op.name in _COSTLY or waits):
                stored.add(x)
        is_root = not ours or not op.fused or not stored.isdisjoint(op.writes)
        fusion[n] = n if is_root else ours[0]
    return stored


class _Sources:
    """Buffers that values are computed from."""

    def __init__(self, trace, operations, stored):
        self.trace, self.stored = trace, set(stored)
        self._writer = {x: op for op in operations for x in op.writes}
        self._known: dict[int, frozenset[int]] = {}

    def of(self, x: Any) -> frozenset[int]:
        """The buffers that a value is in, or that a fusion computes it from."""
        if isinstance(x, _Constant):
            return frozenset()
        if x in self.trace.held:
            return frozenset({x, self.trace.held[x]})
        if x in self.stored or x not in self._writer:
            return frozenset({x} & self.stored)
        if x not in self._known:
            self._known[x] = frozenset().union(*map(self.of, self._writer[x].reads))
        return self._known[x]

    def read_by(self, op: _Operation) -> frozenset[int]:
        """The buffers that an operation reads."""
        reads: Iterator[int] = iter(op.reads)
        if op.name == _TRANSPOSE and (writer := self._writer.get(op.reads[0])) and writer.fused:
            # The copy is computed from what the value comes from.
            reads = itertools.chain(writer.reads, op.reads[1:])
        return frozenset().union(*map(self.of, reads))


def _breadth_first(steps: Sequence[_Operation], reads: Sequence[frozenset[int]]) -> list[int]:
    """Order of the steps in which each starts as soon as all that it reads is there."""
    writer = {x: index for index, op in enumerate(steps) for x in op.writes}
    before = [{writer[x] for x in read if x in writer} for read in reads]
    after: dict[int, list[int]] = collections.defaultdict(list)
    for index, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(index)
    missing = [len(needed) for needed in before]
    ready = collections.deque(index for index, count in enumerate(missing) if not count)
    order = []
    while ready:
        order.append(ready.popleft())
        for index in after[order[-1]]:
            missing[index] -= 1
            if not missing[index]:
                ready.append(index)
    return order
