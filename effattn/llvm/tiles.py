"""What kernels of block attention do with a tile, beside products.

A tile has up to `TILE` queries, the lanes of as many vectors as that takes, and meets chunks of up
to `TILE` keys: what it has for pairs is an array of `TILE` numbers for each key, one a query.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from effattn.llvm.code import INT32, Code

TILE = 64
LOWEST, SMALLEST = -3.4028234663852886e38, 2.0**-126  # normal numbers of float32


class Rows(NamedTuple):
    """Rows of an array.

    Attributes:
      start: the first number of the first.
      step: from one row to the next.
    """

    start: Any
    step: Any

    def at(self, code: Code, row: Any) -> Any:
        """The first number of a row."""
        return code.place(self.start, code.mul(row, self.step))


def places(code: Code, start: Any, sizes: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Where arrays of these sizes lie, one after the other, and what follows."""
    found = {}
    for name, size in sizes.items():
        found[name] = start
        start = code.place(start, size)
    return found, start


class Steps:
    """Writes what a function does with its tiles."""

    def __init__(self, code: Code):
        self.code, self.lanes = code, code.lanes
        self.vectors = range(0, TILE, code.lanes)

    # Memory

    def fill(self, array: Any, count: Any, value: float = 0.0) -> None:
        """Gives that many numbers, a multiple of the lanes, the value."""
        with self.code.loop(0, count, self.lanes) as i:
            self.code.store_vector(self.code.number(value), array, i)

    def clear(self, target: Rows, rows: Any, size: Any) -> None:
        """Zeros in rows."""
        code = self.code
        with code.loop(0, rows) as row, code.loop(0, size) as i:
            code.store(ir.Constant(ir.FloatType(), 0.0), target.at(code, row), i)

    def copy(self, source: Rows, target: Rows, rows: Any, size: Any, *, add: bool = False) -> None:
        """Makes rows those of the source, or adds those to them."""
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
            for n, vector in enumerate(_transposed(code, block)):
                product = code.builder.fmul(vector, factors)
                code.store_vector(product, target.at(code, code.add(i, n)), j)
        for first_row, first in ((in_blocks[0], 0), (0, in_blocks[1])):
            last_row = rows if first == 0 else in_blocks[0]
            with code.loop(first_row, last_row) as j, code.loop(first, size) as i:
                number = code.builder.fmul(code.load(source.at(code, j), i), factor)
                code.store(number, target.at(code, i), j)

    # Which pairs may attend

    def hide_far(
        self, logits: Any, keys: Any, ahead: Any, rows: Any, left: Any, right: Any
    ) -> None:
        """-inf for keys out of a query's window.

        Key j of the chunk is `ahead + j` positions ahead of the first query, and i less ahead of
        query i.
        """
        code, builder = self.code, self.code.builder
        beyond = code.less(right, code.add(ahead, code.sub(keys, 1)))
        before = code.less(ahead, code.sub(code.sub(rows, 1), left))
        with code.when(builder.or_(beyond, before)), code.loop(0, keys) as j:
            # Query i sees key j where ahead + j - right <= i <= ahead + j + left.
            of_key = code.add(ahead, j)
            ends = code.sub(of_key, right), code.add(of_key, left)
            first, last = (code.max(code.min(end, TILE), -1) for end in ends)
            first, last = (code.all_lanes(builder.trunc(each, INT32)) for each in (first, last))
            for v in self.vectors:
                query = ir.Constant(code.integers, list(range(v, v + self.lanes)))
                sees = builder.and_(
                    builder.icmp_signed("<=", first, query), builder.icmp_signed("<=", query, last)
                )
                self._hide(logits, j, v, sees)

    def hide_others(self, logits: Any, keys: Any, ids: Any, ids_of_keys: Any) -> None:
        """-inf for keys of other ids than the query's."""
        with self.code.loop(0, keys) as j:
            for v, same in zip(self.vectors, self._same(ids, ids_of_keys, j), strict=True):
                self._hide(logits, j, v, same)

    def meet(self, keys: Any, ids: Any, ids_of_keys: Any) -> Any:
        """Whether any query has the id of any key."""
        code = self.code
        found = code.variable(ir.IntType(1)(0))
        with code.loop(0, keys) as j:
            for same in self._same(ids, ids_of_keys, j):
                code.set(found, code.builder.or_(code.get(found), code.any(same)))
        return code.get(found)

    def _same(self, ids, ids_of_keys, j):
        code = self.code
        key = code.all_lanes(code.load(ids_of_keys, j, INT32))
        queries = (code.load_vector(ids, v, code.integers) for v in self.vectors)
        return [code.builder.icmp_signed("==", query, key) for query in queries]

    def _hide(self, logits, j, v, sees):
        code = self.code
        at = code.add(code.mul(j, TILE), v)
        hidden = code.number(float("-inf"))
        shown = code.builder.select(sees, code.load_vector(logits, at), hidden)
        code.store_vector(shown, logits, at)

    def clear_ahead(self, pairs: Any, keys: Any) -> None:
        """Zeros for keys of the same tokens that come after the query."""
        code, builder = self.code, self.code.builder
        with code.loop(0, keys) as j:
            key = code.all_lanes(builder.trunc(j, INT32))
            for v in self.vectors:
                at = code.add(code.mul(j, TILE), v)
                query = ir.Constant(code.integers, list(range(v, v + self.lanes)))
                sees = builder.icmp_signed("<=", key, query)
                shown = builder.select(sees, code.load_vector(pairs, at), code.number(0.0))
                code.store_vector(shown, pairs, at)

    # Softmax

    def soften(self, logits: Any, keys: Any, largest: Any, total: Any, decay: Any) -> None:
        """Makes logits m weights exp(m - largest), and takes them into the sums of their queries.

        `largest` and `total` have an entry a query; `decay` gets what earlier weights are to be
        multiplied by.
        """
        code, builder = self.code, self.code.builder
        before = [code.load_vector(largest, v) for v in self.vectors]
        most = [code.variable(vector) for vector in before]
        with code.loop(0, keys) as j:
            for found, v in zip(most, self.vectors, strict=True):
                vector = code.load_vector(logits, code.add(code.mul(j, TILE), v))
                code.set(found, code.larger(code.get(found), vector))
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
        """Divides the numbers of each query by its total, unless that is 0."""
        code, builder = self.code, self.code.builder
        zero, one = code.number(0.0), code.number(1.0)
        totals = [code.load_vector(total, v) for v in self.vectors]
        totals = [builder.select(builder.fcmp_ordered("==", t, zero), one, t) for t in totals]
        with code.loop(0, rows) as row:
            for divisor, v in zip(totals, self.vectors, strict=True):
                at = code.add(code.mul(row, TILE), v)
                code.store_vector(builder.fdiv(code.load_vector(array, at), divisor), array, at)

    def differentiate(self, logits: Any, d_weights: Any, keys: Any, lse: Any, shared: Any) -> None:
        """Makes logits m weights w = exp(m - lse), and gradients of weights d those of logits.

        These are w * (d - shared), with an `lse` and `shared` for each query.
        """
        code, builder = self.code, self.code.builder
        of_queries = [(code.load_vector(lse, v), code.load_vector(shared, v)) for v in self.vectors]
        with code.loop(0, keys) as j:
            for (log_sum, same), v in zip(of_queries, self.vectors, strict=True):
                at = code.add(code.mul(j, TILE), v)
                weights = code.exp(builder.fsub(code.load_vector(logits, at), log_sum))
                change = builder.fsub(code.load_vector(d_weights, at), same)
                code.store_vector(weights, logits, at)
                code.store_vector(builder.fmul(weights, change), d_weights, at)

    # Quotients

    def multiply(self, array: Any, rows: Any, factors: Any) -> None:
        """Multiplies the numbers of each query by its factor."""
        code = self.code
        of_queries = [code.load_vector(factors, v) for v in self.vectors]
        with code.loop(0, rows) as row:
            for factor, v in zip(of_queries, self.vectors, strict=True):
                at = code.add(code.mul(row, TILE), v)
                code.store_vector(code.builder.fmul(code.load_vector(array, at), factor), array, at)

    def divide_by_row(self, array: Any, rows: Any) -> None:
        """Divides rows by the row after them, which becomes its inverse: see `normalize`."""
        last = self.code.place(array, self.code.mul(rows, TILE))
        self._invert(last)
        self.multiply(array, rows, last)

    def differentiate_quotient(self, out: Any, d_out: Any, rows: Any) -> None:
        """Of y = u / z, u being rows of `out` and z the row after, makes dy du, and adds dz to it.

        du = dy / z is in `d_out`, dz = -(dy . y) / z in the row after, and 1 / z in that of `out`.
        """
        code, builder = self.code, self.code.builder
        last, d_last = (code.place(a, code.mul(rows, TILE)) for a in (out, d_out))
        self._invert(last)
        self.multiply(d_out, rows, last)
        totals = [code.variable(code.number(0.0)) for _ in self.vectors]
        with code.loop(0, rows) as row:
            for total, v in zip(totals, self.vectors, strict=True):
                at = code.add(code.mul(row, TILE), v)
                factors = code.load_vector(out, at), code.load_vector(d_out, at)
                code.set(total, code.multiply_add(*factors, code.get(total)))
        for total, v in zip(totals, self.vectors, strict=True):
            change = builder.fmul(code.get(total), code.load_vector(last, v))
            code.store_vector(builder.fsub(code.number(0.0), change), d_last, v)

    def _invert(self, array):
        """Of what is as small as a subnormal number, zero: it has too few bits to divide by."""
        code, builder = self.code, self.code.builder
        zero, one = code.number(0.0), code.number(1.0)
        for v in self.vectors:
            number = code.load_vector(array, v)
            size = code.larger(number, builder.fsub(zero, number))
            small = builder.fcmp_ordered("<", size, code.number(SMALLEST))
            inverse = builder.fdiv(one, builder.select(small, one, number))
            code.store_vector(builder.select(small, zero, inverse), array, v)


def _transposed(code: Code, block: Sequence[Any]) -> list[Any]:
    """Vector n of the result is lane n of each: neighbours are exchanged, then pairs, and so on."""
    vectors, lanes, distance = list(block), code.lanes, 1
    while distance < lanes:
        low = [j if not j & distance else lanes + j - distance for j in range(lanes)]
        high = [j + distance if not j & distance else lanes + j for j in range(lanes)]
        for n in range(lanes):
            if not n & distance:
                a, b = vectors[n], vectors[n + distance]
                for to, mask in ((n, low), (n + distance, high)):
                    lane = ir.Constant(code.integers, mask)
                    vectors[to] = code.builder.shuffle_vector(a, b, lane)
        distance *= 2
    return vectors
