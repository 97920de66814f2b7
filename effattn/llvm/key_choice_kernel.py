"""Kernel that chooses the keys with the best index scores on CPUs, in float32.

The scores of a token, sum_j w_j relu(p_j . c_s) for each key s that it may see, stay in cache. They
are not sorted: a binary search over the bits of the scores, read as integers, finds the lowest
score that is chosen. The bits are reordered so that integers are in the order of the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effattn.llvm import runtime
from effattn.llvm.key_chunks import CHUNK
from effattn.llvm.tiles import LOWEST, lay_out
from effattn.llvm.token_tasks import TokenTask

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

# Added to a key that is not chosen. The sum is returned as the bits of a float32, which is not NaN.
OTHER = 2**30
_NONE = -(2**31)  # rank of a key without a score, below the ranks of all numbers

_SIZES = "tokens", "heads", "size", "chunks", "count", "has_ids"
_SIGNATURE = runtime.Signature(
    (
        runtime.Array("query", 3),
        runtime.Array("key_chunks", 3),
        runtime.Array("weights", 2),
        runtime.Array("last", 1, "int32"),
        runtime.Array("query_ids", 1, "int32"),
        runtime.Array("key_ids", 1, "int32"),
    ),
    (runtime.Array("chosen", 2),),
    integers=2,
)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key_chunks, weights, last, query_ids, key_ids) -> (chosen,).

    Shapes: query `(*B, T, J, E)`, key_chunks `(*B, S / c, E, c)` for chunks of c keys, weights
    `(*B, T, J)`, last `(*B, T)`, the last key of each query, below S, ids of documents `(*B, T)`
    and `(*B, S)`, and chosen `(*B, T, k)`, whose numbers have the bits of int32: the chosen keys in
    order, then other keys as `OTHER` + key if the query sees fewer. Equal scores go to the earlier
    key. S is a multiple of c. A batch axis of length 1 of an argument is broadcast. The attribute
    `limits` is (k, whether there are ids); `scale` is not used.
    """
    from effattn.llvm.codegen import vectors_at_once, write_product
    from effattn.llvm.handlers import write_handler

    multiply = write_product(module, f"{name}_multiply", lanes, vectors_at_once(lanes), "set")

    def memory_of(code: Code, job: Job) -> dict[str, Any]:
        return {
            "products": code.mul(job["heads"], CHUNK),
            "ranks": code.mul(job["chunks"], CHUNK),
        }

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, heads, size = frame.last_sizes(0, 3)
        chunks, *_ = frame.last_sizes(1, 3)
        for each, found in zip(
            _SIZES, (tokens, heads, size, chunks, *frame.integers(2)), strict=True
        ):
            job[each] = found
        return TokenTask.count(code, job), code.add(*memory_of(code, job).values())

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scratch, _ = lay_out(code, memory, memory_of(code, job))
        task = _Task(multiply, code, job, scratch, number, _SIGNATURE)
        with task.tokens():
            task.rank()
            task.choose()
            task.write_chosen()

    write_handler(module, name, lanes, _SIGNATURE, _SIZES, [], begin, task)


class _Task(TokenTask):
    """Generates the choice of each token.

    Attributes:
      columns: variable, the number of keys that the token may see, in whole vectors.
      lowest: variable, the lowest rank that is chosen.
      quota: variable, how many keys of that rank are chosen.
    """

    def __init__(self, multiply: Any, code: Code, *rest: Any):
        super().__init__(code, *rest)
        self.multiply = multiply
        self.columns, self.lowest, self.quota = (code.variable(0) for _ in range(3))

    def rank(self) -> None:
        """Computes the ranks of the keys: integers in the order of the scores."""
        code, job, builder = self.code, self.job, self.code.builder
        last = code.wide(code.load(self.of_token("last", 1), 0, code.int32))
        stop = code.max(code.add(last, 1), 0)
        query = self.of_token("query", code.mul(job["heads"], job["size"]))
        weights = self.of_token("weights", job["heads"])
        chunk_size = code.mul(job["size"], CHUNK)
        chunks = code.mul(self.examples["key_chunks"], job["chunks"])
        products = self.scratch["products"]
        none = code.integer_vector([_NONE] * code.lanes)
        own = code.variable(code.int32(0))
        has_ids = code.less(0, job["has_ids"])
        with code.when(has_ids):
            code.set(own, code.load(self.of_token("query_ids", 1), 0, code.int32))
        ids = code.mul(self.examples["key_ids"], job["chunks"], CHUNK)
        ids = code.address(job["key_ids"], ids)
        ends = code.all_lanes(builder.trunc(stop, code.int32))
        with code.loop(0, code.ceil(stop, CHUNK)) as chunk:
            place = code.mul(code.add(chunks, chunk), chunk_size)
            keys = code.address(job["key_chunks"], place), CHUNK
            rows = query, job["size"], 1
            sizes = job["heads"], CHUNK, job["size"]
            code.call(self.multiply, *sizes, *rows, *keys, products, CHUNK, products)
            for v in range(0, CHUNK, code.lanes):
                score = code.variable(code.number(0.0))
                with code.loop(0, job["heads"]) as head:
                    product = code.load_vector(products, code.add(code.mul(head, CHUNK), v))
                    is_negative = builder.fcmp_ordered("<", product, code.number(0.0))
                    positive = builder.select(is_negative, code.number(0.0), product)
                    weight = code.all_lanes(code.load(weights, head))
                    code.set(score, code.multiply_add(weight, positive, code.get(score)))
                # The sum with 0 has no -0, whose bits differ from those of 0.
                total = builder.fadd(code.get(score), code.number(0.0))
                is_number = builder.fcmp_ordered(">", total, code.number(LOWEST))
                lane = builder.add(
                    code.integer_vector(range(v, v + code.lanes)),
                    code.all_lanes(builder.trunc(code.mul(chunk, CHUNK), code.int32)),
                )
                sees = builder.and_(is_number, builder.icmp_signed("<", lane, ends))
                at = code.add(code.mul(chunk, CHUNK), v)
                rank = code.variable(builder.select(sees, code.rank_of(total), none))
                with code.when(has_ids):
                    of_keys = code.load_vector(ids, at, code.integers)
                    is_same = builder.icmp_signed("==", of_keys, code.all_lanes(code.get(own)))
                    code.set(rank, builder.select(is_same, code.get(rank), none))
                code.store_vector(code.get(rank), self.scratch["ranks"], at)
        code.set(self.columns, code.round_to_lanes(stop))

    def _count(self, rank):
        """Number of keys whose rank is at least this 32-bit integer."""
        code, builder = self.code, self.code.builder
        least, total = code.all_lanes(rank), code.variable(code.integer_vector([0] * code.lanes))
        with code.loop(0, code.get(self.columns), code.lanes) as at:
            ranks = code.load_vector(self.scratch["ranks"], at, code.integers)
            counts = builder.sext(builder.icmp_signed(">=", ranks, least), code.integers)
            code.set(total, builder.sub(code.get(total), counts))
        return code.wide(code.sum_of_integers(code.get(total)))

    def choose(self) -> None:
        """Finds the lowest rank that is chosen, and how many keys of that rank are."""
        code, job, builder = self.code, self.job, self.code.builder
        low, high = code.variable(_NONE + 1), code.variable(2**31)
        # At least k keys have the rank `low` or a higher one, and fewer than k the rank `high` or a
        # higher one. If at most k keys have a rank, all are chosen.
        above, enough = code.variable(0), code.variable(code.false())
        code.set(enough, code.less(self._count(code.int32(_NONE + 1)), code.add(job["count"], 1)))
        with code.loop(0, 32):
            is_open = code.less(code.add(code.get(low), 1), code.get(high))
            with code.when(builder.and_(is_open, builder.not_(code.get(enough)))):
                middle = code.add(code.get(low), code.get(high))
                middle = builder.ashr(middle, code.integer(1))
                count = self._count(builder.trunc(middle, code.int32))
                is_low = code.less(count, job["count"])
                code.set(high, builder.select(is_low, middle, code.get(high)))
                code.set(above, builder.select(is_low, count, code.get(above)))
                code.set(low, builder.select(is_low, code.get(low), middle))
                code.set(enough, builder.icmp_signed("==", count, job["count"]))
        code.set(self.lowest, code.get(low))
        # If all keys from `low` on are chosen, the quota is no limit.
        quota = code.sub(job["count"], code.get(above))
        code.set(self.quota, builder.select(code.get(enough), job["count"], quota))

    def write_chosen(self) -> None:
        """Writes the chosen keys, in order."""
        code, job, builder = self.code, self.job, self.code.builder
        target = self.of_token("chosen", job["count"])
        lowest = builder.trunc(code.get(self.lowest), code.int32)
        found = code.variable(0)
        with code.loop(0, code.get(self.columns), code.lanes) as first:
            ranks = code.load_vector(self.scratch["ranks"], first, code.integers)
            is_enough = builder.icmp_signed(">=", ranks, code.all_lanes(lowest))
            with code.true_lanes(is_enough) as lane:
                key = code.add(first, lane)
                rank = code.load(self.scratch["ranks"], key, code.int32)
                is_least = builder.icmp_signed("==", rank, lowest)
                has_quota = code.less(0, code.get(self.quota))
                is_more = builder.icmp_signed(">", rank, lowest)
                with code.when(builder.or_(is_more, builder.and_(is_least, has_quota))):
                    code.store(builder.trunc(key, code.int32), target, code.get(found))
                    code.set(found, code.add(code.get(found), 1))
                    used = builder.zext(is_least, code.get(self.quota).type)
                    code.set(self.quota, code.sub(code.get(self.quota), used))
        with code.when(code.less(code.get(found), job["count"])):
            self._fill_up(target, found)

    def _fill_up(self, target, found):
        """Writes keys that the token does not see; among the first k keys there are enough."""
        code, job = self.code, self.job
        with code.loop(0, job["count"]) as key:
            is_chosen = code.variable(code.less(key, code.get(self.columns)))
            with code.when(code.get(is_chosen)):
                rank = code.load(self.scratch["ranks"], key, code.int32)
                code.set(is_chosen, code.builder.icmp_signed("!=", rank, code.int32(_NONE)))
            is_needed = code.less(code.get(found), job["count"])
            is_free = code.builder.not_(code.get(is_chosen))
            with code.when(code.builder.and_(is_needed, is_free)):
                other = code.builder.trunc(code.add(key, OTHER), code.int32)
                code.store(other, target, code.get(found))
                code.set(found, code.add(code.get(found), 1))
