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
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from effattn.analysis.cost import ELEMENTWISE, REDUCTIONS, split_scan
from effattn.analysis.fusions import BY_LIBRARY, OF_LIBRARY, TRANSPOSE, Fusions, Operation

# Other names of a buffer. Transposes change the layout that the compiler chooses for it.
_ALIASES = frozenset(
    "reshape squeeze expand_dims transpose stop_gradient copy copy_p name pvary pcast "
    "sharding_constraint".split()
)
_INLINED = "jaxpr", "call_jaxpr", "fun_jaxpr"
# Operations whose jaxpr is that of a kernel or of single entries.
_OPAQUE = "pallas_call", "reduce"
_BARRIER, _ALLOCATE, _BY_WINDOWS, _ALL_REDUCE = "barrier", "allocate", "windows", "all-reduce"
# Reductions that the library of XLA on CPUs computes.
_LIBRARY_REDUCTIONS = "reduce_sum", "reduce_max", "reduce_min"


def _is_in_place(name: str) -> bool:
    return name.startswith("scatter") or name == "dynamic_update_slice"


class Compiler(NamedTuple):
    """How a compiler stores and orders values.

    Attributes:
      platform: platform whose branch of platform-dependent code runs; None is the default branch.
      recomputes: if True, a value with several readers is stored only if it is smaller than the
        buffers that it is computed from. If False, it is stored also if one of the readers waits
        for another.
      breadth_first: operations run as soon as their inputs are there, in breadth-first order, and
        not in the order of the program.
      transposes: a matrix product whose left operand contracts other axes than the last ones copies
        the operand.
      scatters: a device sums and keeps its part of sharded gradients at once (reduce-scatter); if
        not, it has whole gradients until the end of the backward pass.
      overlaps: the weights of the next layer are gathered while a layer is computed.
      library: a library sums floating-point arrays of this many elements or more, or finds their
        extremes. Its inputs are stored, unless nothing else reads them and it can compute them;
        None without a library.
      window: other reductions of more than this number of elements along an axis reduce windows
        first, which are read from a stored array; None if there is no such rule.
      combines: all-reduces of one type that do not wait for one another are one operation.
    """

    platform: str | None
    recomputes: bool
    breadth_first: bool
    transposes: bool
    scatters: bool
    overlaps: bool
    library: int | None
    window: int | None
    combines: bool


# XLA of jaxlib 0.10 to 0.12, as found in its buffer assignments of language models.
CPU = Compiler(
    "cpu",
    recomputes=False,
    breadth_first=True,
    transposes=True,
    scatters=False,
    overlaps=False,
    library=4096,
    window=32,
    combines=True,
)
ACCELERATOR = Compiler(
    None,
    recomputes=True,
    breadth_first=False,
    transposes=False,
    scatters=True,
    overlaps=True,
    library=None,
    window=None,
    combines=False,
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


class _Trace:
    """Operations on values, which are numbered; a known scalar is a `_Constant`."""

    def __init__(self, compiler: Compiler):
        self.compiler = compiler
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self.held: dict[int, int] = {}  # the buffer that a loop writes its result to
        self._found: dict[Any, list[int]] = {}
        self._scattered: dict[Any, list[Any]] = {}  # what zeros with these sums were made of
        self._folded: dict[Any, _Constant] = {}
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
        if name == "cond" and isinstance(inputs[0], _Constant) and inputs[0].value.isdigit():
            return self._inline(params["branches"][int(inputs[0].value)], inputs[1:])
        if name == "scan" and params["length"] == 1:
            return self._inline(params["jaxpr"], inputs)
        if name == "scan" and params["length"] == 0:
            first, carried = split_scan(eqn)
            return [
                *inputs[first : first + carried],
                *(self.value(v.aval) for v in eqn.outvars[carried:]),
            ]
        if name in ("scan", "while", "cond"):
            return self._loop(eqn, inputs)
        inner = next((params[key] for key in _INLINED if key in params), None)
        if inner is not None and name not in _OPAQUE:
            return self._inline(inner, inputs, barrier=params.get("differentiated", False))
        if name in _ALIASES or self._is_same(eqn, inputs):
            return inputs[: len(eqn.outvars)]
        if name == "dynamic_update_slice" and eqn.invars[1].aval.shape == eqn.outvars[0].aval.shape:
            return inputs[1:2]
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
        if name == "pad":
            return not any(itertools.chain(*eqn.params["padding_config"]))
        if name in ("slice", "dynamic_slice"):
            return eqn.invars[0].aval.shape == result.aval.shape
        zero = name in ("add", "add_any", "sub") and inputs[1] in (_Constant("0.0"), _Constant("0"))
        return zero and eqn.invars[0].aval.shape == result.aval.shape

    def _plain(self, eqn, name, inputs):
        if name in ("add", "add_any"):
            for zeros, other in (inputs, inputs[::-1]):
                if scattered := self._scattered.get(zeros):
                    # Compilers scatter to the other summand.
                    given = [other, *scattered]
                    return self._once(("scatter", *given), "scatter", given, [eqn.outvars[0].aval])
        if name in ELEMENTWISE and all(isinstance(x, _Constant) for x in inputs):
            key = name, str(eqn.params), *inputs
            return [self._folded.setdefault(key, _Constant(f"constant {len(self._folded)}"))]
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
        if name in ("split", "unstack"):
            avals = [v.aval for v in eqn.outvars]
            each = (self._once((*key, n), "slice", inputs, [aval]) for n, aval in enumerate(avals))
            return list(itertools.chain(*each))
        if _is_in_place(name) and isinstance(inputs[0], _Constant):
            if name == "dynamic_update_slice" and all(isinstance(x, _Constant) for x in inputs[2:]):
                given, result = eqn.invars[1].aval, eqn.outvars[0].aval
                return self._once(key, "pad", inputs[1:2], [result], [given])
            results = self._filled(key, name, inputs, eqn.outvars[0].aval)
        else:
            name = self._reduction(eqn, name)
            of = [[v.aval for v in each] for each in (eqn.outvars, eqn.invars)]
            results = self._once(key, name, inputs, *of)
        if name == "scatter-add" and inputs[0] == _Constant("0.0"):
            self._scattered[results[0]] = inputs[1:]
        return results

    def _reduction(self, eqn, name):
        """The name of an operation, which for a reduction says how the compiler computes it."""
        if name in ("psum", "psum_invariant"):
            return f"{_ALL_REDUCE} {eqn.invars[0].aval.dtype} {eqn.params['axes']}"
        if name not in REDUCTIONS or len(eqn.outvars) > 1:
            return name
        aval, axes = eqn.invars[0].aval, eqn.params["axes"]
        least, window = self.compiler.library, self.compiler.window
        is_known = name in _LIBRARY_REDUCTIONS and jnp.issubdtype(aval.dtype, jnp.floating)
        if least is not None and is_known and aval.size >= least:
            return BY_LIBRARY
        if window is not None and any(aval.shape[axis] > window for axis in axes):
            return name if name in ("argmax", "argmin") else _BY_WINDOWS
        return name

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
        return self._once((TRANSPOSE, x), TRANSPOSE, [x], [aval])[0]

    def _once(self, key, name, inputs, avals, given=()):
        """The results of an operation, which runs once for all equal equations."""
        key = *key, self._barrier
        if key not in self._found:
            self._found[key] = [self.value(aval) for aval in avals]
            of_library = self._of_library(name, avals, given)
            self._add(name, inputs, self._found[key], of_library=of_library)
        return self._found[key]

    def _filled(self, key, name, inputs, aval):
        """The result of an operation that writes to a buffer, filled before the program starts."""
        key = *key, self._barrier
        if key not in self._found:
            result, buffer = self._allocated(aval, [])
            self._found[key] = [result]
            self._add(name, [*inputs, buffer], [result])
        return self._found[key]

    def _allocated(self, aval, given):
        """A result, and the buffer that an operation writes it to."""
        buffer, result = self.value(aval), self.value(aval, size=0)
        self.held[result] = buffer
        self._add(_ALLOCATE, given, [buffer])
        return result, buffer

    def _of_library(self, name, avals, given):
        """Returns whether a library can compute an operation, from the types of its results."""
        least = self.compiler.library
        if name == "pad" and any(
            a == 1 < b for a, b in zip(given[0].shape, avals[0].shape, strict=True)
        ):
            return False  # The library repeats axes of one element.
        return (
            least is not None
            and name in OF_LIBRARY
            and all(
                aval.size >= least and jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals
            )
        )

    def _add(self, name, inputs, writes, inside=0, of_library=False):
        reads = tuple(x for x in inputs if not isinstance(x, _Constant))
        # Constants need not wait for a barrier.
        reads += self._barrier if reads else ()
        self.operations.append(Operation(name, reads, tuple(writes), inside, of_library))

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
            result, buffer = self._allocated(variable.aval, [] if start is None else [start])
            results.append(result)
            buffers.append(buffer)
        self._add(eqn.primitive.name, [*inputs, *buffers], results, inside)
        return results


def _timeline(trace, arguments, results):
    wanted = {x for x in results if not isinstance(x, _Constant)}
    operations = _needed(trace.operations, wanted)
    if trace.compiler.combines:
        operations = _combined(operations)
    fusions = Fusions(
        operations, trace.sizes, trace.held, arguments, wanted, trace.compiler.recomputes
    )
    written = [n for n, op in enumerate(operations) if not fusions.stored.isdisjoint(op.writes)]
    steps, reads = [operations[n] for n in written], [fusions.read_by(n) for n in written]
    order = _breadth_first(steps, reads) if trace.compiler.breadth_first else range(len(steps))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, index in enumerate(order):
        for x in steps[index].writes:
            first[x] = last[x] = step
        for x in reads[index]:
            last[x] = step
    end = len(steps)
    kept = set().union(*(fusions.of(x) for x in wanted))
    live, of_results = [0] * (end + 2), [0] * (end + 2)
    reused = _reused(trace, steps, reads, order, last, kept)
    for x in fusions.stored:
        stop = end if x in kept else last[x] - (x in reused)
        for sizes in [live, of_results] if x in kept else [live]:
            sizes[first[x]] += trace.sizes[x]
            sizes[stop + 1] -= trace.sizes[x]
    inside = [steps[index].inside for index in order] + [0]
    total = [a + b for a, b in zip(itertools.accumulate(live[:-1]), inside, strict=True)]
    last_writes = tuple(
        -1
        if isinstance(x, _Constant)
        else max((first.get(y, -1) for y in fusions.of(x)), default=-1)
        for x in results
    )
    return Timeline(tuple(total), tuple(itertools.accumulate(of_results[:-1])), last_writes)


def _reused(trace, steps, reads, order, last, kept) -> set[int]:
    """Buffers that the last operation that reads them overwrites with a result of the same size."""
    found: set[int] = set()
    for step, index in enumerate(order):
        op = steps[index]
        if not op.fused and not _is_in_place(op.name):
            continue
        free = {trace.sizes[x]: x for x in reads[index] if last.get(x) == step and x not in kept}
        found.update(free[size] for x in op.writes if (size := trace.sizes[x]) in free and size)
    return found


def _needed(operations: Sequence[Operation], wanted: Iterable[int]) -> list[Operation]:
    """The operations that results depend on."""
    needed, found = set(wanted), []
    for op in reversed(operations):
        if not needed.isdisjoint(op.writes):
            needed.update(op.reads)
            found.append(op)
    return found[::-1]


def _combined(operations: Sequence[Operation]) -> list[Operation]:
    """Joins all-reduces of one type, in the order of the program, until one waits for another."""
    found = list(operations)
    left = [op for op in found if op.name.startswith(_ALL_REDUCE)]
    while left:
        group = _independent(found, [op for op in left if op.name == left[0].name])
        left = [op for op in left if op not in group]
        if len(group) > 1:
            reads, writes = (
                tuple(itertools.chain.from_iterable(getattr(op, name) for op in group))
                for name in ("reads", "writes")
            )
            found = [op for op in found if op not in group]
            found = _sorted([*found, Operation(group[0].name, reads, writes)])
    return found


def _independent(operations, candidates):
    """The candidates up to the first one that waits for another one."""
    waiting: set[int] = set()  # values that wait for one of them
    group = []
    for op in operations:
        waits = not waiting.isdisjoint(op.reads)
        if op in candidates:
            if waits:
                break
            group.append(op)
        if waits or op in candidates:
            waiting.update(op.writes)
    return group


def _sorted(operations):
    """Operations in an order in which each follows what it reads, and else in the given order."""
    missing, after = _waiting([op.reads for op in operations], operations)
    ready = [n for n, count in enumerate(missing) if not count]
    found = []
    while ready:
        n = heapq.heappop(ready)
        found.append(operations[n])
        for m in after[n]:
            missing[m] -= 1
            if not missing[m]:
                heapq.heappush(ready, m)
    return found


def _waiting(reads, steps):
    """For each step, the number of steps that write what it reads, and the steps that read it."""
    writer = {x: index for index, op in enumerate(steps) for x in op.writes}
    before = [{writer[x] for x in read if x in writer} for read in reads]
    after: dict[int, list[int]] = collections.defaultdict(list)
    for index, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(index)
    return [len(needed) for needed in before], after


def _breadth_first(steps: Sequence[Operation], reads: Sequence[frozenset[int]]) -> list[int]:
    """Order of the steps in which each starts as soon as all that it reads is there."""
    missing, after = _waiting(reads, steps)
    ready = collections.deque(index for index, count in enumerate(missing) if not count)
    order = []
    while ready:
        order.append(ready.popleft())
        for index in after[order[-1]]:
            missing[index] -= 1
            if not missing[index]:
                ready.append(index)
    return order
