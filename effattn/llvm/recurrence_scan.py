"""Scan of one state of the linear recurrence on CPUs over chunks: see `recurrence_kernels`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from effattn.llvm.recurrence_walks import CHUNK, WRITES, lengths
from effattn.llvm.tiles import Rows, TileOps, lay_out

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Job

_LOG_HALF = -0.6931472  # log decay of a state that keeps half


def write_products(module: ir.Module, name: str, lanes: int) -> dict[str, ir.Function]:
    """Generates the matrix products that set their result, and that add to it: "set", "add"."""
    from effattn.llvm.codegen import vectors_at_once, write_product

    widths = vectors_at_once(lanes)
    return {
        update: write_product(module, f"{name}_{update}", lanes, widths, update)
        for update in ("set", "add")
    }


class Scan:
    """Scan of one state over chunks of tokens.

    Attributes:
      scratch: addresses of the scratch arrays of the task. Rows are `width` or `value_width` long,
        zero beyond the features or values.
      head, key_head: the number of the state, and of its key head.
      query_head, out_head: the current query head, and the head of its output.
      chunk, first, tokens: number of the chunk, its first token, and its number of tokens.
      sets, writes: 1, or 2 if `removed` is given; and rows of writes, `sets` times `tokens`.
      is_delta, has_removed: whether `recalled` and `removed` are given, if they are arguments.
    """

    def __init__(
        self,
        code: Code,
        job: Job,
        functions: dict[str, ir.Function],
        memory: Any,
        number: Any,
        arguments: Iterable[str],
        sizes: dict[str, Any],
    ):
        self.code, self.job, self.functions = code, job, functions
        self.ops = TileOps(code)
        self.scratch, _ = lay_out(code, memory, sizes)
        for name, size in sizes.items():
            if name != "states":
                self.ops.fill(self.scratch[name], size)
        self.example = code.div(number, job["heads"])
        self.examples = {name: job.example_of(name, self.example) for name in arguments}
        self.head = code.rem(number, job["heads"])
        each = code.div(job["heads"], job["key_heads"])
        self.key_head = code.div(self.head, each)
        self.width, self.value_width = (
            code.round_to_lanes(job[size]) for size in ("features", "values")
        )
        self.sets = code.integer(1)
        if "removed" in self.examples:
            self.is_delta = code.less(0, job["recalled_size"])
            self.has_removed = code.less(0, job["removed_size"])
            one_more = code.builder.zext(self.has_removed, code.integer(0).type)
            self.sets = code.add(one_more, 1)
        self.query_head = self.out_head = self.chunk = self.first = code.integer(0)
        self.tokens = self.writes = code.integer(0)
        with code.loop(0, self.width, code.lanes) as f:
            code.store_vector(code.number(1.0), self.scratch["identity"], f)
        for name, rows in (("decay", CHUNK), ("since", CHUNK + 1)):
            self.ops.fill(self.scratch[name], code.mul(rows, self.width), 1.0)

    # Products of scratch arrays

    def multiply(
        self, left: str, count: Any, right: str, columns: Any, to: str, rows: Any = None
    ) -> None:
        """`to (rows, columns) = left (rows, count) right (count, columns)`; rows are tokens."""
        self._product("set", left, count, right, columns, to, rows)

    def add(self, left: str, count: Any, right: str, columns: Any, to: str) -> None:
        """`to (tokens, columns) += left (tokens, count) right (count, columns)`."""
        self._product("add", left, count, right, columns, to, None)

    def add_transposed(self, left: str, rows: Any, right: str, to: str) -> None:
        """`to (rows, D) += left (tokens, rows)^T right (tokens, D)`."""
        self._call_product(
            "add", rows, self.tokens, (self.scratch[left], 1, WRITES), right, self.value_width, to
        )

    def add_to_d_state(self, right: str) -> None:
        """Adds `decayed^T right` to the gradient of the state."""
        left = self.scratch["decayed"], 1, self.width
        self._call_product(
            "add", self.job["features"], self.tokens, left, right, self.value_width, "d_state"
        )

    def _product(self, update, left, count, right, columns, to, rows):
        rows = self.tokens if rows is None else rows
        stride = WRITES if left == "pairs" else self._width(count)
        count = self.job[count] if isinstance(count, str) else count
        self._call_product(
            update, rows, count, (self.scratch[left], stride, 1), right, self._width(columns), to
        )

    def _width(self, size):
        return {"features": self.width, "values": self.value_width}.get(size, size)

    def _call_product(self, update, rows, count, left, right, columns, to):
        right = self.scratch[right] if isinstance(right, str) else right
        target = self.scratch[to]
        self.code.call(
            self.functions[update],
            rows,
            columns,
            count,
            *left,
            right,
            columns,
            target,
            columns,
            target,
        )

    # Parts of a chunk

    def walk(self, kind: str, reads: str, pairs: str) -> None:
        """Decays the writes token by token, and reads them; see `recurrence_walks`."""
        names = "writes", "kept", "decay", reads, pairs
        arrays = [self.scratch[name] for name in names]
        history = self.scratch.get("history", arrays[0])
        self.code.call(self.functions[kind], self.tokens, self.sets, self.width, *arrays, history)

    def walk_back(self, kind: str, reads: str, d_out: str) -> None:
        """Gradient of the walk and of the reads of the state; `d_out` is that of the read values.

        The gradients of the kept rows and of the state's decay are used up: they are zero for the
        next walk.
        """
        self.multiply(d_out, "values", "state_t", "features", "d_decayed")
        names = "decay", "since", "history", reads, "d_pairs", "d_decayed", "d_kept", "d_since"
        arrays = [self.scratch[name] for name in (*names, "d_reads", "d_decay")]
        function = self.functions[f"{kind}_back"]
        self.code.call(function, self.tokens, self.sets, self.width, *arrays)
        rows = Rows(self.scratch["d_kept"], self.width)
        self.ops.copy(
            rows, Rows(self.scratch["d_writes"], self.width), self.writes, self.width, add=True
        )
        self.ops.fill(self.scratch["d_kept"], self.code.mul(self.writes, self.width))
        self.ops.fill(self.scratch["d_since"], self.width)

    def decay_reads(self, reads: str, to: str, later: int) -> None:
        """Multiplies reads by the decay from the start of the chunk to before their token's own.

        With `later=1`, to after it.
        """
        since = self.code.address(self.scratch["since"], self.code.mul(self.width, later))
        self._multiply(self.scratch[reads], since, self.scratch[to], self.tokens)

    def _multiply(self, a, b, to, rows):
        code = self.code
        with code.loop(0, code.mul(rows, self.width), code.lanes) as n:
            factors = code.load_vector(a, n), code.load_vector(b, n)
            code.store_vector(code.builder.fmul(*factors), to, n)

    def decay_writes(self) -> None:
        """Sets `kept` to the writes, decayed until the end of the chunk."""
        code = self.code
        writes, kept, decay = (self.scratch[name] for name in ("writes", "kept", "decay"))
        with code.loop(0, self.sets) as write_set, code.loop(0, self.width, code.lanes) as f:
            until = code.variable(code.number(1.0))
            with code.loop(0, self.tokens) as n:
                token = code.sub(code.sub(self.tokens, 1), n)
                row = code.add(code.mul(write_set, self.tokens), token)
                at = code.add(code.mul(row, self.width), f)
                code.store_vector(
                    code.builder.fmul(code.load_vector(writes, at), code.get(until)), kept, at
                )
                own = code.load_vector(decay, code.add(code.mul(token, self.width), f))
                code.set(until, code.builder.fmul(code.get(until), own))

    def subtract_recalled(self, state: Any) -> None:
        """Completes the writes of the delta form: W_i -= (b_i G_(i-1)) S + sum_j L_ij W_j."""
        code = self.code
        self.read("recalled", self.key_head, "reads")
        self.walk("recall", "reads", "recalled_pairs")
        self.decay_reads("reads", "decayed", 0)
        self.multiply("decayed", "features", state, "values", "recalled_out")
        written, pairs = self.scratch["written"], self.scratch["recalled_pairs"]
        for d, length in code.pieces(self.value_width, lengths(code.lanes, 4)):
            ats = [code.add(d, v * code.lanes) for v in range(length // code.lanes)]
            with code.loop(0, self.tokens) as i:
                row = self._recalling_row(i)
                own = [code.address(self._row(written, row), at) for at in ats]
                out = self._row(self.scratch["recalled_out"], i)
                totals = [
                    code.variable(
                        code.builder.fsub(code.load_vector(to), code.load_vector(out, at))
                    )
                    for to, at in zip(own, ats, strict=True)
                ]
                with self._earlier_rows(i) as earlier:
                    factor = self._negated_pair(pairs, i, earlier)
                    for total, at in zip(totals, ats, strict=True):
                        x = code.load_vector(self._row(written, earlier), at)
                        code.set(total, code.multiply_add(factor, x, code.get(total)))
                for total, to in zip(totals, own, strict=True):
                    code.store_vector(code.get(total), to)

    def pull_back_recalled(self) -> None:
        """Gradient of `subtract_recalled`, last token first; sets `d_recalled_out`.

        `d_written` becomes the gradient of the values that were given.
        """
        code = self.code
        d_written, pairs = self.scratch["d_written"], self.scratch["recalled_pairs"]
        for d, length in code.pieces(self.value_width, lengths(code.lanes, 4)):
            ats = [code.add(d, v * code.lanes) for v in range(length // code.lanes)]
            with code.loop(0, self.tokens) as n:
                i = code.sub(code.sub(self.tokens, 1), n)
                own = self._row(d_written, self._recalling_row(i))
                found = [code.load_vector(own, at) for at in ats]
                for x, at in zip(found, ats, strict=True):
                    negated = code.builder.fsub(code.number(0.0), x)
                    code.store_vector(negated, self._row(self.scratch["d_recalled_out"], i), at)
                with self._earlier_rows(i) as earlier:
                    factor = self._negated_pair(pairs, i, earlier)
                    for x, at in zip(found, ats, strict=True):
                        to = code.address(self._row(d_written, earlier), at)
                        code.store_vector(code.multiply_add(factor, x, code.load_vector(to)), to)

    def _recalling_row(self, token):
        """The row of writes that the recalled value of a token changes: its last."""
        return self.code.add(self.code.mul(self.code.sub(self.sets, 1), self.tokens), token)

    def _row(self, array, row):
        return self.code.address(array, self.code.mul(row, self.value_width))

    def _negated_pair(self, pairs, token, row):
        number = self.code.load(pairs, self.code.add(self.code.mul(token, WRITES), row))
        return self.code.all_lanes(self.code.builder.fsub(self.code.float32(0.0), number))

    @contextlib.contextmanager
    def _earlier_rows(self, token) -> Iterator[Any]:
        """Loops over the rows of writes of earlier tokens."""
        code = self.code
        with code.loop(0, self.sets) as write_set:
            first = code.mul(write_set, self.tokens)
            with code.loop(first, code.add(first, token)) as row:
                yield row

    def decay_state(self, name: str) -> None:
        """Multiplies a state by the decay over the chunk; see `read_decays`."""
        code = self.code
        arrays = self.scratch["factor"], self.scratch["identity"]
        with code.loop(0, self.job["features"]) as f:
            factor, keep = (code.all_lanes(code.load(each, f)) for each in arrays)
            row = code.address(self.scratch[name], code.mul(f, self.value_width))
            with code.loop(0, self.value_width, code.lanes) as d:
                x = code.load_vector(row, d)
                code.store_vector(code.multiply_add(x, factor, code.builder.fmul(x, keep)), row, d)

    def update_state(self) -> None:
        """Replaces the state by the state after the chunk, from `kept` and `written`."""
        self.decay_state("state")
        left = self.scratch["kept"], 1, self.width
        self._call_product(
            "add", self.job["features"], self.writes, left, "written", self.value_width, "state"
        )

    def push_state(self) -> None:
        """Saves the state at the start of the chunk."""
        size = self.code.mul(self.width, self.value_width)
        self.ops.copy(Rows(self.scratch["state"], size), Rows(self.pushed_state(), size), 1, size)

    def pushed_state(self) -> Any:
        """Address of the state at the start of the chunk."""
        return self.code.address(
            self.scratch["states"], self.code.mul(self.chunk, self.width, self.value_width)
        )

    def transpose(self, state: Any, to: str) -> None:
        """Transposes a state into another scratch array."""
        source, target = Rows(state, self.value_width), Rows(self.scratch[to], self.width)
        self.ops.transpose(
            source, target, self.job["features"], self.job["values"], self.code.float32(1.0)
        )

    def sum_products(self, a: str, b: str, to: str) -> None:
        """Sums over D of the products of two transposed states, for each feature."""
        code = self.code
        with code.loop(0, self.width, code.lanes) as f:
            total = code.variable(code.number(0.0))
            with code.loop(0, self.job["values"]) as d:
                at = code.add(code.mul(d, self.width), f)
                x, y = (code.load_vector(self.scratch[name], at) for name in (a, b))
                code.set(total, code.multiply_add(x, y, code.get(total)))
            code.store_vector(code.get(total), self.scratch[to], f)

    # Arguments and results

    @contextlib.contextmanager
    def chunks(self, *, reverse: bool = False) -> Iterator[None]:
        """Loops over the chunks and reads their writes and decays; the body is the `with` block."""
        code, job = self.code, self.job
        count = code.ceil(job["tokens"], CHUNK)
        with code.loop(0, count) as n:
            self.chunk = code.sub(code.sub(count, 1), n) if reverse else n
            self.first = code.mul(self.chunk, CHUNK)
            self.tokens = code.min(code.sub(job["tokens"], self.first), CHUNK)
            self.writes = code.mul(self.sets, self.tokens)
            self.read("key", self.key_head, "writes")
            self.read("value", self.head, "written")
            if "removed" in self.examples:
                self._read_removed()
            with code.when(code.less(0, job["decays"])):
                self.read_decays()
            yield

    def _read_removed(self):
        """Reads the second set of writes, whose values are not known yet, if it is given."""
        code = self.code
        with code.when(self.has_removed):
            self.read("removed", self.key_head, "writes", first=self.tokens)
            second = self._row(self.scratch["written"], self.tokens)
            self.ops.fill(second, code.mul(self.tokens, self.value_width))

    @contextlib.contextmanager
    def heads(self) -> Iterator[None]:
        """Loops over the query heads that read the state; the `with` block is the body."""
        code, job = self.code, self.job
        out_heads = code.max(job["query_heads"], job["heads"])
        group = code.div(out_heads, job["heads"])
        each = code.div(out_heads, job["query_heads"])
        first = code.mul(self.head, group)
        with code.loop(first, code.add(first, group)) as self.out_head:
            self.query_head = code.div(self.out_head, each)
            yield

    def read_decays(self) -> None:
        """Decays of each token, since the start of the chunk, and over the chunk.

        A state x decays to `x * factor + x * identity`. Where it keeps more than half, `identity`
        is 1 and `factor` is the decay less 1: many chunks of a slow decay then do not add up the
        error of a decay near 1. Elsewhere `identity` is 0, and `factor` is the decay.
        """
        code, builder = self.code, self.code.builder
        decay, since, factor, identity = (
            self.scratch[name] for name in ("decay", "since", "factor", "identity")
        )
        is_one = code.builder.icmp_signed("==", self.job["decays"], code.integer(1))
        log_decay = self.scratch["log_decay"]
        self.read("log_decay", self.head, "log_decay")
        width = builder.select(is_one, code.integer(code.lanes), self.width)
        with code.when(is_one), code.loop(0, self.tokens) as token:
            row = code.address(log_decay, code.mul(token, self.width))
            code.store_vector(code.all_lanes(code.load(row)), row)
        with code.loop(0, width, code.lanes) as f:
            total = code.variable(code.number(0.0))
            with code.loop(0, self.tokens) as token:
                at = code.add(code.mul(token, self.width), f)
                own = code.load_vector(log_decay, at)
                code.set(total, builder.fadd(code.get(total), own))
                code.store_vector(code.decay(own), decay, at)
                code.store_vector(code.decay(code.get(total)), since, code.add(at, self.width))
            whole = code.get(total)
            is_slow = builder.fcmp_ordered(">", whole, code.number(_LOG_HALF))
            less_one = code.exp_minus_one(code.minimum(whole, code.number(88.0)))
            code.store_vector(builder.select(is_slow, less_one, code.decay(whole)), factor, f)
            kept = builder.select(is_slow, code.number(1.0), code.number(0.0))
            code.store_vector(kept, identity, f)
        with code.when(is_one):
            for array, rows in (
                (decay, self.tokens),
                (code.address(since, self.width), self.tokens),
                (factor, 1),
                (identity, 1),
            ):
                self._spread(array, rows)

    def _spread(self, array, rows):
        """Copies the first vector of each row to the rest of the row."""
        code = self.code
        with code.loop(0, rows) as row:
            start = code.address(array, code.mul(row, self.width))
            vector = code.load_vector(start)
            with code.loop(code.lanes, self.width, code.lanes) as f:
                code.store_vector(vector, start, f)

    def write_d_decay(self) -> None:
        """Writes the gradient of the log decays, if there are any."""
        code, job = self.code, self.job
        rows = self._rows("d_log_decay", self.head)
        is_one = code.builder.icmp_signed("==", job["decays"], code.integer(1))
        of_tokens = Rows(self.scratch["d_decay"], self.width)
        with code.when(is_one), code.loop(0, self.tokens) as token:
            total = code.variable(code.number(0.0))
            with code.loop(0, self.width, code.lanes) as f:
                more = code.load_vector(of_tokens.at(code, token), f)
                code.set(total, code.builder.fadd(code.get(total), more))
            code.store(code.sum_of_lanes(code.get(total)), rows.at(code, token))
        with code.when(code.less(1, job["decays"])):
            self.ops.copy(of_tokens, rows, self.tokens, job["decays"])

    def read(self, name: str, head: Any, to: str, first: Any = 0) -> None:
        """Reads the chunk of an array into scratch rows, from row `first` on."""
        rows, size = self._rows(name, head), self._size_of(name)
        width = self._width_of(size)
        target = self.code.address(self.scratch[to], self.code.mul(first, width))
        self.ops.copy(rows, Rows(target, width), self.tokens, self.job[size])

    def write(self, name: str, head: Any, source: str, first: Any = 0) -> None:
        """Writes the chunk of an array from scratch rows, from row `first` on."""
        rows, size = self._rows(name, head), self._size_of(name)
        width = self._width_of(size)
        start = self.code.address(self.scratch[source], self.code.mul(first, width))
        self.ops.copy(Rows(start, width), rows, self.tokens, self.job[size])

    def _width_of(self, size):
        return self.value_width if size == "values" else self.width

    def _size_of(self, name):
        kind = name.removeprefix("d_")
        return {"value": "values", "out": "values", "log_decay": "decays"}.get(kind, "features")

    def _heads_of(self, name):
        """Heads of an array; gradients have one for each state, also where states share a head."""
        job = self.job
        if name in ("out", "d_out", "d_query"):
            return self.code.max(job["query_heads"], job["heads"])
        of = {
            "query": "query_heads",
            "key": "key_heads",
            "recalled": "key_heads",
            "removed": "key_heads",
        }
        return job[of.get(name, "heads")]

    def _rows(self, name: str, head: Any) -> Rows:
        """Rows of an array for a head, from the first token of the chunk on."""
        code, job = self.code, self.job
        example = self.examples.get(name, self.example)
        heads, size = self._heads_of(name), job[self._size_of(name)]
        token = code.add(code.mul(example, job["tokens"]), self.first)
        start = code.add(code.mul(token, heads, size), code.mul(head, size))
        return Rows(code.address(job[name], start), code.mul(heads, size))

    def read_state(self, name: str, to: str) -> None:
        """Reads a state from an argument."""
        own = Rows(self.scratch[to], self.value_width)
        self.ops.copy(self._state(name), own, self.job["features"], self.job["values"])

    def write_state(self, source: str, name: str) -> None:
        """Writes a state to a result."""
        own = Rows(self.scratch[source], self.value_width)
        self.ops.copy(own, self._state(name), self.job["features"], self.job["values"])

    def _state(self, name):
        code, (features, values) = self.code, (self.job["features"], self.job["values"])
        example = self.examples.get(name, self.example)
        number = code.add(code.mul(example, self.job["heads"]), self.head)
        return Rows(code.address(self.job[name], code.mul(number, features, values)), values)
