"""Operations on tiles: copies, transposes, masks, the softmax and its gradient.

A tile has up to `TILE` queries, which are the lanes of vectors, and attends to chunks of up to
`TILE` keys. An array of query-key pairs, such as the logits, has `TILE` elements for each key, one
for each query. Other arrays of a tile are likewise (rows, queries), with `TILE` elements a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from effattn.llvm.codegen import Code

TILE = 64
WORDS = 2 * TILE  # 32-bit words of a mask of a tile: 64 bits for each key
LOWEST = -3.4028234663852886e38  # the lowest float32


class Rows(NamedTuple):
    """Rows of an array in memory.

    Attributes:
      start: address of the first row.
      step: row stride, in elements.
    """

    start: Any
    step: Any

    def at(self, code: Code, row: Any) -> Any:
        """Address of a row."""
        return code.address(self.start, code.mul(row, self.step))


class Range(NamedTuple):
    """The smallest and the largest of some ids, 32-bit integers."""

    least: Any
    most: Any

    def meets(self, code: Code, other: Range) -> Any:
        """Returns whether an id may be in both ranges."""
        starts = code.builder.icmp_signed("<=", self.least, other.most)
        return code.builder.and_(starts, code.builder.icmp_signed("<=", other.least, self.most))

    def is_one(self, code: Code) -> Any:
        """Returns whether all ids are the same."""
        return code.builder.icmp_signed("==", self.least, self.most)


def lay_out(code: Code, start: Any, sizes: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Addresses of consecutive arrays of these sizes from `start`, and the address after them."""
    found = {}
    for name, size in sizes.items():
        found[name] = start
        start = code.address(start, size)
    return found, start


class TileOps:
    """Generates operations on the tiles of a function."""

    def __init__(self, code: Code):
        self.code, self.lanes = code, code.lanes
        self.vectors = range(0, TILE, code.lanes)

    # Memory

    def fill(self, array: Any, count: Any, value: float = 0.0) -> None:
        """Sets `count` elements, a multiple of the lanes, to the value."""
        with self.code.loop(0, count, self.lanes) as i:
            self.code.store_vector(self.code.number(value), array, i)

    def clear(self, target: Rows, rows: Any, size: Any) -> None:
        """Sets `size` elements of each row to zero."""
        code = self.code
        with code.loop(0, rows) as row, code.loop(0, size) as i:
            code.store(code.float32(0.0), target.at(code, row), i)

    def copy(self, source: Rows, target: Rows, rows: Any, size: Any, *, add: bool = False) -> None:
        """Copies rows from the source to the target, or adds them to the target."""
        code = self.code
        whole = code.mul(code.div(size, self.lanes), self.lanes)
        with code.loop(0, rows) as row:
            given, to = source.at(code, row), target.at(code, row)
            with code.loop(0, whole, self.lanes) as i:
                vector = code.load_vector(given, i)
                if add:
                    vector = code.builder.fadd(code.load_vector(to, i), vector)
                code.store_vector(vector, to, i)
            with code.loop(whole, size) as i:
                number = code.load(given, i)
                if add:
                    number = code.builder.fadd(code.load(to, i), number)
                code.store(number, to, i)

    def transpose(self, source: Rows, target: Rows, rows: Any, size: Any, factor: Any) -> None:
        """target[i, j] = source[j, i] * factor, for all j < rows and i < size."""
        code, lanes = self.code, self.lanes
        factors = code.all_lanes(factor)
        in_blocks = [code.mul(code.div(count, lanes), lanes) for count in (rows, size)]
        with code.loop(0, in_blocks[0], lanes) as j, code.loop(0, in_blocks[1], lanes) as i:
            block = [code.load_vector(source.at(code, code.add(j, n)), i) for n in range(lanes)]
            for n, vector in enumerate(_transpose_block(code, block)):
                product = code.builder.fmul(vector, factors)
                code.store_vector(product, target.at(code, code.add(i, n)), j)
        for first_row, first in ((in_blocks[0], 0), (0, in_blocks[1])):
            last_row = rows if first == 0 else in_blocks[0]
            with code.loop(first_row, last_row) as j, code.loop(first, size) as i:
                number = code.builder.fmul(code.load(source.at(code, j), i), factor)
                code.store(number, target.at(code, i), j)

    # Masks

    def mask_window(
        self, logits: Any, keys: Any, ahead: Any, rows: Any, left: Any, right: Any
    ) -> None:
        """Sets logits to -inf for keys outside a query's window.

        Key j of the chunk is `ahead + j` positions after the first query, and `ahead + j - i`
        positions after query i.
        """
        code, builder = self.code, self.code.builder
        beyond = code.less(right, code.add(ahead, code.sub(keys, 1)))
        before = code.less(ahead, code.sub(code.sub(rows, 1), left))
        with code.when(builder.or_(beyond, before)), code.loop(0, keys) as j:
            # Query i sees key j where ahead + j - right <= i <= ahead + j + left.
            of_key = code.add(ahead, j)
            ends = code.sub(of_key, right), code.add(of_key, left)
            first, last = (code.max(code.min(end, TILE), -1) for end in ends)
            first, last = (
                code.all_lanes(builder.trunc(each, code.int32)) for each in (first, last)
            )
            for v in self.vectors:
                query = code.integer_vector(range(v, v + self.lanes))
                sees = builder.and_(
                    builder.icmp_signed("<=", first, query), builder.icmp_signed("<=", query, last)
                )
                self._mask(logits, j, v, sees)

    def mask_rows(self, logits: Any, keys: Any, rows: Any) -> None:
        """Sets logits to -inf for lanes without a query, whose products with -inf are NaN."""
        code = self.code
        with code.when(code.less(rows, TILE)), code.loop(0, keys) as j:
            count = code.all_lanes(code.builder.trunc(rows, code.int32))
            for v in self.vectors:
                lane = code.integer_vector(range(v, v + self.lanes))
                self._mask(logits, j, v, code.builder.icmp_signed("<", lane, count))

    def mask_ids(self, logits: Any, keys: Any, ids: Any, key_ids: Any) -> None:
        """Sets logits to -inf where the ids of key and query differ."""
        with self.code.loop(0, keys) as j:
            for v, same in zip(self.vectors, self._same(ids, key_ids, j), strict=True):
                self._mask(logits, j, v, same)

    def mask_bits(self, logits: Any, keys: Any, mask: Any) -> None:
        """Sets logits to -inf where the bit of key and query is 0, in a mask of `WORDS` words."""
        code, builder = self.code, self.code.builder
        bits = code.integer_vector([1 << lane for lane in range(self.lanes)])
        nothing = code.integer_vector([0] * self.lanes)
        with code.loop(0, keys) as j:
            for v in self.vectors:
                word = code.load(mask, code.add(code.mul(j, 2), v // 32), code.int32)
                word = code.all_lanes(builder.lshr(word, code.int32(v % 32)))
                self._mask(
                    logits, j, v, builder.icmp_signed("!=", builder.and_(word, bits), nothing)
                )

    def range_of_ids(self, ids: Any, count: Any) -> Range:
        """The range of `count` ids, at least one."""
        code = self.code
        first = code.load(ids, 0, code.int32)
        ends = [code.variable(code.all_lanes(first)) for _ in range(2)]
        whole = code.mul(code.div(count, self.lanes), self.lanes)
        with code.loop(0, whole, self.lanes) as i:
            vector = code.load_vector(ids, i, code.integers)
            for n, end in enumerate(ends):
                code.set(end, code.extremes(code.get(end), vector)[n])
        found = [code.variable(end) for end in code.extremes_of(*map(code.get, ends))]
        with code.loop(whole, count) as i:
            one = code.load(ids, i, code.int32)
            for n, end in enumerate(found):
                code.set(end, code.extremes(code.get(end), one)[n])
        return Range(*map(code.get, found))

    def any_same_id(self, keys: Any, ids: Any, key_ids: Any) -> Any:
        """Returns whether any query of the tile has the same id as any key of the chunk."""
        code = self.code
        found = code.variable(code.false())
        with code.loop(0, keys) as j:
            for same in self._same(ids, key_ids, j):
                code.set(found, code.builder.or_(code.get(found), code.any(same)))
        return code.get(found)

    def _same(self, ids, key_ids, j):
        code = self.code
        key = code.all_lanes(code.load(key_ids, j, code.int32))
        queries = (code.load_vector(ids, v, code.integers) for v in self.vectors)
        return [code.builder.icmp_signed("==", query, key) for query in queries]

    def _mask(self, logits, j, v, sees):
        code = self.code
        at = code.add(code.mul(j, TILE), v)
        hidden = code.number(float("-inf"))
        shown = code.builder.select(sees, code.load_vector(logits, at), hidden)
        code.store_vector(shown, logits, at)

    # Arrays of pairs

    def add(self, pairs: Any, others: Any, keys: Any) -> None:
        """Adds an array of pairs to another."""
        self._combine(self.code.builder.fadd, pairs, others, keys)

    def multiply(self, pairs: Any, others: Any, keys: Any) -> None:
        """Multiplies an array of pairs by another."""
        self._combine(self.code.builder.fmul, pairs, others, keys)

    def _combine(self, operation, pairs, others, keys):
        code = self.code
        with code.loop(0, code.mul(keys, TILE), self.lanes) as at:
            both = code.load_vector(pairs, at), code.load_vector(others, at)
            code.store_vector(operation(*both), pairs, at)

    # Soft cap

    def soft_cap(self, logits: Any, keys: Any, cap: Any, slopes: Any = None) -> None:
        """Replaces logits m by c tanh(m / c); `slopes` receive the derivatives."""
        code, builder = self.code, self.code.builder
        caps = code.all_lanes(cap)
        with code.loop(0, keys) as j:
            for v in self.vectors:
                at = code.add(code.mul(j, TILE), v)
                found = code.tanh(builder.fdiv(code.load_vector(logits, at), caps))
                code.store_vector(builder.fmul(caps, found), logits, at)
                if slopes is not None:
                    slope = code.multiply_add(code.negative(found), found, code.number(1.0))
                    code.store_vector(slope, slopes, at)

    # Softmax

    def softmax_step(self, logits: Any, keys: Any, largest: Any, total: Any, decay: Any) -> None:
        """One step of the online softmax: replaces logits m by weights exp(m - largest).

        `largest` and `total`, the running maximum and the running sum of the weights of each query,
        are updated. `decay` receives the factor that rescales the sums of earlier chunks.
        """
        code, builder = self.code, self.code.builder
        before = [code.load_vector(largest, v) for v in self.vectors]
        most = [code.variable(vector) for vector in before]
        with code.loop(0, keys) as j:
            for found, v in zip(most, self.vectors, strict=True):
                vector = code.load_vector(logits, code.add(code.mul(j, TILE), v))
                code.set(found, code.maximum(code.get(found), vector))
        after = [code.get(found) for found in most]
        sums = [code.variable(code.number(0.0)) for _ in self.vectors]
        with code.loop(0, keys) as j:
            for n, v in enumerate(self.vectors):
                at = code.add(code.mul(j, TILE), v)
                weights = code.exp(builder.fsub(code.load_vector(logits, at), after[n]))
                code.store_vector(weights, logits, at)
                code.set(sums[n], builder.fadd(code.get(sums[n]), weights))
        for n, v in enumerate(self.vectors):
            factor = code.exp(builder.fsub(before[n], after[n]))
            code.store_vector(factor, decay, v)
            code.store_vector(after[n], largest, v)
            earlier = code.load_vector(total, v)
            code.store_vector(code.multiply_add(earlier, factor, code.get(sums[n])), total, v)

    def divide(self, array: Any, rows: Any, total: Any) -> None:
        """Divides the elements of each query by the query's total; a total of 0 divides by 1."""
        code, builder = self.code, self.code.builder
        zero, one = code.number(0.0), code.number(1.0)
        totals = [code.load_vector(total, v) for v in self.vectors]
        totals = [builder.select(builder.fcmp_ordered("==", t, zero), one, t) for t in totals]
        with code.loop(0, rows) as row:
            for divisor, v in zip(totals, self.vectors, strict=True):
                at = code.add(code.mul(row, TILE), v)
                code.store_vector(builder.fdiv(code.load_vector(array, at), divisor), array, at)

    def softmax_gradient(
        self, logits: Any, d_weights: Any, keys: Any, lse: Any, delta: Any
    ) -> None:
        """Replaces logits m by weights w = exp(m - lse), and `d_weights` d by w * (d - delta).

        The latter is the gradient of the logits. `lse` and `delta` have one element for each query.
        """
        code, builder = self.code, self.code.builder
        per_query = [(code.load_vector(lse, v), code.load_vector(delta, v)) for v in self.vectors]
        with code.loop(0, keys) as j:
            for (log_sum, same), v in zip(per_query, self.vectors, strict=True):
                at = code.add(code.mul(j, TILE), v)
                weights = code.exp(builder.fsub(code.load_vector(logits, at), log_sum))
                change = builder.fsub(code.load_vector(d_weights, at), same)
                code.store_vector(weights, logits, at)
                code.store_vector(builder.fmul(weights, change), d_weights, at)


def _transpose_block(code: Code, block: Sequence[Any]) -> list[Any]:
    """Transposes a square block: vector n of the result is lane n of each vector.

    Lanes are exchanged at distance 1, then 2, 4 and so on.
    """
    vectors, lanes, distance = list(block), code.lanes, 1
    while distance < lanes:
        low = [j if not j & distance else lanes + j - distance for j in range(lanes)]
        high = [j + distance if not j & distance else lanes + j for j in range(lanes)]
        for n in range(lanes):
            if not n & distance:
                a, b = vectors[n], vectors[n + distance]
                for to, mask in ((n, low), (n + distance, high)):
                    lane = code.integer_vector(mask)
                    vectors[to] = code.builder.shuffle_vector(a, b, lane)
        distance *= 2
    return vectors
