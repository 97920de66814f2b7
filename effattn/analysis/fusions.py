"""Stored values of a program, and the fusions that compute others from them."""

import collections
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from effattn.analysis.cost import ELEMENTWISE, REDUCTIONS

# Cheap operations, beside those of `ELEMENTWISE`, that a fusion can compute with their readers.
MOVES = frozenset(
    "broadcast_in_dim convert_element_type reduce_precision slice dynamic_slice pad concatenate "
    "iota rev square is_finite round ceil sign nextafter erf erfc erf_inv cbrt tan real imag "
    "complex conj".split()
)
# Operations of the library to which XLA on CPUs hands reductions.
OF_LIBRARY = frozenset(
    "add sub mul div max min neg exp expm1 log log1p tanh logistic sqrt rsqrt pow integer_pow abs "
    "sign floor ceil round cos sin erf square add_any broadcast_in_dim pad".split()
)
TRANSPOSE, BY_LIBRARY = "transposed copy", "library reduction"
# Functions that fusions do not compute again.
_COSTLY = frozenset(
    "exp expm1 log log1p logistic tanh sqrt rsqrt cbrt pow sin cos tan erf erfc div rem".split()
)
# Operations that read their input at other indices than those of their result.
_INDEXING = frozenset("broadcast_in_dim slice dynamic_slice pad concatenate".split())
# XLA on CPUs computes an element of a pad or a concatenation once in a fusion, and an element of
# other operations but broadcasts at most 15 times.
_BRANCHING, _TIMES = frozenset(["pad", "concatenate"]), 15


class Operation(NamedTuple):
    """An operation on numbered values.

    Attributes:
      name: name of the primitive, or of a kind of operations.
      reads: values that it reads.
      writes: values that it writes.
      inside: bytes of temporaries of a loop's body.
      of_library: whether a library can compute it together with a reduction.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inside: int = 0
    of_library: bool = False

    @property
    def fused(self) -> bool:
        """True if a fusion can compute the operation together with its readers."""
        return self.name in ELEMENTWISE or self.name in MOVES

    @property
    def reads_fused(self) -> bool:
        """True if a fusion can compute what the operation reads."""
        return self.fused or self.name in REDUCTIONS or self.name == TRANSPOSE


class Fusions:
    """Stored values, and the stored values that others are computed from.

    Attributes:
      stored: the values that are buffers, without arguments.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        sizes: Sequence[int],
        held: Mapping[int, int],
        arguments: AbstractSet[int],
        wanted: AbstractSet[int],
        recomputes: bool,
    ):
        """Decides for each value whether it is stored.

        Args:
          operations: the operations of the program, in an order in which they can run.
          sizes: bytes of each value.
          held: the buffer of each value that is in a buffer of another value.
          arguments: values that are there from the start.
          wanted: results of the program.
          recomputes: see `effattn.analysis.liveness.Compiler`.
        """
        self._held = held
        self._graph = graph = _Graph(operations, wanted)
        fixed = {
            x
            for n, op in enumerate(operations)
            for x in op.writes
            if not (op.fused or n in graph.library)
            or x in wanted
            or not all(graph.fuses(n, r) for r in graph.readers[x])
        }
        # A fusion makes numbers and ranges itself.
        fixed -= {x for op in operations if op.fused and not op.reads for x in op.writes} - wanted
        self.stored = fixed
        self._there = {*arguments, *fixed}
        self._repeated: set[int] = set()
        self._known: dict[int, frozenset[int]] = {}
        if recomputes:
            self._store_small(sizes, arguments)
        else:
            self.stored, self._repeated = _shared(graph, sizes, fixed)
            self._there |= self.stored
        self._known.clear()

    def _store_small(self, sizes, arguments):
        """Stores values with several readers that are smaller than the buffers they come from."""
        for op in self._graph.operations:
            for x in op.writes:
                if x in self.stored or len(self._graph.readers[x]) < 2 or not op.reads:
                    continue
                if sizes[x] < sum(sizes[y] for y in self.of(x) if y not in arguments):
                    self.stored.add(x)
                    self._there.add(x)

    def of(self, x: int) -> frozenset[int]:
        """The buffers that a value is in, or that a fusion computes it from."""
        if x in self._held:
            return frozenset({x, self._held[x]})
        if x in self._there or x not in self._graph.writer:
            return frozenset({x} & self._there)
        return self._computed(x)

    def read_by(self, n: int) -> frozenset[int]:
        """The buffers that an operation reads."""
        graph = self._graph
        reads: Iterable[int] = graph.operations[n].reads
        if graph.operations[n].name == TRANSPOSE:
            first, *others = reads
            if first in graph.writer and (writer := graph.operations[graph.writer[first]]).fused:
                # The copy is computed from what the value comes from.
                reads = *writer.reads, *others
        return frozenset().union(
            *(self._computed(x) if self._is_repeated(n, x) else self.of(x) for x in reads)
        )

    def _is_repeated(self, n, x):
        return x in self._repeated and self._graph.fuses(self._graph.writer[x], n)

    def _computed(self, x):
        if x not in self._known:
            self._known[x] = self.read_by(self._graph.writer[x])
        return self._known[x]


class _Graph:
    """Operations by number.

    Attributes:
      operations: the operations.
      writer: the operation that writes each value.
      readers: the operations that read each value.
      following: the operations that read a result of each operation.
      library: the library reduction that each operation is computed with, if there is one.
    """

    def __init__(self, operations, wanted):
        self.operations = operations
        self.writer = {x: n for n, op in enumerate(operations) for x in op.writes}
        self.readers: dict[int, list[int]] = collections.defaultdict(list)
        for n, op in enumerate(operations):
            for x in op.reads:
                self.readers[x].append(n)
        self.following = [{r for x in op.writes for r in self.readers[x]} for op in operations]
        self.library: dict[int, int] = {}
        for n in reversed(range(len(operations))):
            if operations[n].name == BY_LIBRARY and n not in self.library:
                self._grow(n, wanted)

    def _grow(self, reduction, wanted):
        """Finds the operations that a library computes together with a reduction.

        XLA adds operations that nothing else reads, and the reader of the result if there is only
        one, as often as it can.
        """
        result, added = reduction, {reduction}
        while added:
            self.library.update(dict.fromkeys(added, reduction))
            inputs = {
                self.writer[x] for n in added for x in self.operations[n].reads if x in self.writer
            }
            added = {
                n
                for n in inputs
                if self._is_free(n)
                and wanted.isdisjoint(self.operations[n].writes)
                and all(self.library.get(r) == reduction for r in self.following[n])
            }
            if len(self.following[result]) == 1 and wanted.isdisjoint(
                self.operations[result].writes
            ):
                (following,) = self.following[result]
                if self._is_free(following):
                    result = following
                    added.add(result)

    def _is_free(self, n):
        return self.operations[n].of_library and n not in self.library

    def fuses(self, n: int, reader: int) -> bool:
        """Returns whether a reader of an operation computes the operation itself."""
        ours, others = self.library.get(n), self.library.get(reader)
        is_plain = ours is None and others is None
        return self.operations[reader].reads_fused if is_plain else ours == others

    def is_costly(self, n: int) -> bool:
        """Returns whether fusions do not compute an operation again."""
        return self.operations[n].name in _COSTLY


def _shared(graph, sizes, fixed):
    """Adds values that XLA stores because several fusions read them.

    XLA repeats cheap operations in all fusions that read their result, if the operation reads no
    more than it writes, or if all paths to the readers can be fused.

    Returns the stored values, and the stored values that some of their readers compute again.
    """
    stored, repeated = set(fixed), set()
    single, usage = _Single(graph, sizes), _Usage(graph)
    roots: dict[int, frozenset[int]] = {}  # the last operations of the fusions of an operation
    for n, op in reversed(list(enumerate(graph.operations))):
        single.add(n)
        fusing = [r for r in graph.following[n] if graph.fuses(n, r)]
        ours = frozenset().union(*(roots[r] for r in fusing))
        if usage.is_too_high(n, [(r, root) for r in fusing for root in roots[r]]):
            single.found.add(n)
        once = n in single.found or (graph.is_costly(n) and len(ours) > 1)
        if op.fused and op.reads and n not in graph.library and once:
            stored.update(op.writes)
        is_root = not ours or not stored.isdisjoint(op.writes)
        if is_root and ours and op.fused and not once and not graph.is_costly(n):
            repeated.update(op.writes)
        elif is_root:
            ours = frozenset()
        roots[n] = ours | {n} if is_root else ours
    return stored, repeated


class _Single:
    """Operations that XLA computes once.

    `add` finds those that read more than they write, unless all paths to their readers can be
    fused.

    Attributes:
      found: the operations.
    """

    def __init__(self, graph, sizes):
        self.graph, self.sizes = graph, sizes
        self.found: set[int] = set()
        self._later = [0] * len(graph.operations)  # bits of all operations that wait for one
        self._fused: dict[int, bool] = {}

    def add(self, n: int) -> None:
        """Adds an operation whose readers have been added."""
        following = self.graph.following[n]
        bits = (self._later[r] | 1 << r for r in following)
        self._later[n] = functools.reduce(operator.or_, bits, 0)
        self._fused = {n: True}
        if self._is_wide(n) and not all(self._all_paths(n, r) for r in following):
            self.found.add(n)

    def _all_paths(self, n, reader):
        """Returns whether all paths from an operation to another one can be fused."""
        if reader not in self._fused:
            writers = (self.graph.writer.get(x) for x in self.graph.operations[reader].reads)
            between = {m for m in writers if m is not None}
            self._fused[reader] = all(
                m not in self.found and self._may_fuse(m, reader) and self._all_paths(n, m)
                for m in between
                if m == n or self._later[n] >> m & 1
            )
        return self._fused[reader]

    def _may_fuse(self, n, reader):
        is_costly = self.graph.is_costly(n) and len(self.graph.following[n]) > 1
        return self.graph.operations[n].fused and self.graph.fuses(n, reader) and not is_costly

    def _is_wide(self, n):
        """True if it reads two operands that are no broadcasts, and more bytes than it writes."""
        op, made = self.graph.operations[n], ("broadcast_in_dim", "iota")
        writers = {x: self.graph.writer.get(x) for x in op.reads}
        wide = [
            x
            for x in (op.reads if op.name in ELEMENTWISE else op.reads[:1])
            if (m := writers[x]) is None or self.graph.operations[m].name not in made
        ]
        read = sum(self.sizes[x] for x in writers)
        return len(wide) > 1 and read > sum(self.sizes[x] for x in op.writes)


class _Usage:
    """How often a fusion computes an element of a value, for each fusion that computes it.

    XLA computes an element once for all readers that read it at the same index.
    """

    def __init__(self, graph):
        self.graph = graph
        # By operation and fusion: the operations that read the result at indices of their own, and
        # how often an element of the result is computed.
        self._indexed: dict[tuple[int, int], frozenset[int]] = {}
        self._times: dict[tuple[int, int], int] = {}

    def is_too_high(self, n: int, readers: Sequence[tuple[int, int]]) -> bool:
        """Adds an operation; returns whether a fusion would compute an element too often.

        Args:
          n: the operation.
          readers: readers that are fused with it, each with a fusion that computes the reader.
        """
        name = self.graph.operations[n].name
        indexed: dict[int, set[int]] = collections.defaultdict(set)
        for reader, root in readers:
            op = self.graph.operations[reader]
            is_same = op.fused and op.name not in _INDEXING
            indexed[root] |= self._indexed.get((reader, root), {root}) if is_same else {reader}
        for root, ops in indexed.items():
            self._indexed[n, root] = frozenset(ops)
            self._times[n, root] = sum(self._times.get((m, root), 1) for m in ops)
        times = max((self._times[n, root] for root in indexed), default=0)
        if name in _BRANCHING:
            return times > 1 or len({reader for reader, _ in readers}) > 1
        return name != "broadcast_in_dim" and times > _TIMES
