"""Kernel of the linear equations of a Mesa layer on CPUs, in float32.

For each query q_t, conjugate gradients solve (G_t + diag(r)) x_t = q_t, where

    G_t = exp(log_decay_t) G_(t-1) + w_t k_t^T

is symmetric (w_t is a multiple of k_t). A task is one key head, with its query heads. It goes
through chunks as in `recurrence_kernels`, and takes all steps of a chunk with the state in cache.
For a search direction p_t, a step needs

    p_t (G_t + diag(r)) = exp(g_t) p_t S + sum_(j<=t) E_tj (p_t . w_j) k_j + r * p_t,

where S is G before the chunk, g_t the log decay since then, and E_tj the decay from token j to t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effattn.llvm import runtime
from effattn.llvm.recurrence_scan import Scan, write_products
from effattn.llvm.recurrence_walks import CHUNK, WRITES
from effattn.llvm.tiles import Rows

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

_SIZES = "tokens", "features", "values", "heads", "query_heads", "key_heads", "decays", "steps"
_OPERANDS = (
    *(runtime.Array(name, 3) for name in ("query", "key", "value", "state", "log_decay")),
    runtime.Array("diagonal", 2),
)
_SIGNATURE = runtime.Signature(_OPERANDS, (runtime.Array("out", 3),), integers=1)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key, value, state, log_decay, diagonal) -> (out,).

    Shapes: query and out `(*B, T, N, H)`, key (w) and value (k) `(*B, T, K, H)`, state
    `(*B, K, H, H)`, log_decay `(*B, T, K, 1)` and diagonal `(*B, K, H)`. The attribute `limits` has
    the number of steps. A token ends before them if the square of its residual is at most `scale`
    times that of its query. A batch axis of length 1 of an argument is broadcast.
    """
    from effattn.llvm.handlers import write_handler

    functions = write_products(module, name, lanes)

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, query_heads, features = frame.last_sizes(0, 3)
        key_heads, values = frame.last_sizes(2, 2)
        (steps,) = frame.integers(1)
        one = code.integer(1)
        sizes = tokens, features, values, key_heads, query_heads, key_heads, one, steps
        for each, size in zip(_SIZES, sizes, strict=True):
            job[each] = size
        job["tolerance"] = frame.scale()
        return code.mul(job["batch"], key_heads), code.add(*_memory(code, job).values())

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        names = [array.name for array in _OPERANDS]
        solver = _Solver(code, job, functions, memory, number, names, _memory(code, job))
        solver.read_diagonal()
        solver.read_state("state", "state")
        with solver.chunks():
            solver.read_chunk()
            with solver.heads():
                solver.begin()
                with code.loop(0, job["steps"]), code.when(solver.goes_on()):
                    solver.step()
                solver.write("out", solver.out_head, "solution")
            solver.decay_writes()
            solver.update_state()

    write_handler(module, name, lanes, _SIGNATURE, _SIZES, ["tolerance"], begin, task)


def _memory(code: Code, job: Job) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task."""
    width = code.round_to_lanes(job["features"])
    of_tokens = "log_decay", "decay", "decayed", "solution", "residual", "reads", "image"
    return {
        **dict.fromkeys(("writes", "kept", "written"), code.mul(WRITES, width)),
        **dict.fromkeys(of_tokens, code.mul(CHUNK, width)),
        "since": code.mul(CHUNK + 1, width),
        **dict.fromkeys(("factor", "identity", "diagonal"), width),
        "writes_t": code.mul(width, WRITES),
        **dict.fromkeys(("pairs", "between"), CHUNK * WRITES),
        **dict.fromkeys(("squares", "limits"), CHUNK),
        "state": code.mul(width, width),
    }


class _Solver(Scan):
    """Scan whose chunks solve linear equations; `reads` are the search directions."""

    def read_diagonal(self) -> None:
        """Reads the diagonal of the key head."""
        code, features = self.code, self.job["features"]
        example = code.mul(self.examples["diagonal"], self.job["heads"])
        start = code.mul(code.add(example, self.head), features)
        source = Rows(code.address(self.job["diagonal"], start), 0)
        self.ops.copy(source, Rows(self.scratch["diagonal"], 0), 1, features)

    def read_chunk(self) -> None:
        """Prepares the transposed writes, and the decays between the tokens of a chunk."""
        code = self.code
        source, target = (
            Rows(self.scratch["writes"], self.width),
            Rows(self.scratch["writes_t"], WRITES),
        )
        self.ops.transpose(source, target, self.tokens, self.job["features"], code.float32(1.0))
        between, log_decay = self.scratch["between"], self.scratch["log_decay"]
        self.ops.fill(between, CHUNK * WRITES, float("-inf"))
        with code.loop(0, self.tokens) as i:
            row = code.address(between, code.mul(i, WRITES))
            total = code.variable(code.float32(0.0))
            with code.loop(0, code.add(i, 1)) as n:
                j = code.sub(i, n)
                code.store(code.get(total), row, j)
                own = code.load(log_decay, code.mul(j, self.width))
                code.set(total, code.builder.fadd(code.get(total), own))
            with code.loop(0, WRITES, code.lanes) as j:
                code.store_vector(code.decay(code.load_vector(row, j)), row, j)

    def begin(self) -> None:
        """Starts from x = 0: the residual and the first search direction are the query."""
        self.read("query", self.query_head, "reads")
        self.read("query", self.query_head, "residual")
        code = self.code
        self.ops.fill(self.scratch["solution"], code.mul(self.tokens, self.width))
        tolerance = self.job["tolerance"]
        with code.loop(0, self.tokens) as i:
            square = self._dot(self._token("residual", i), self._token("residual", i))
            code.store(square, self.scratch["squares"], i)
            limit = code.builder.fmul(square, tolerance)
            is_finite = code.builder.fcmp_ordered("<", limit, code.float32(3e38))
            limit = code.builder.select(is_finite, limit, code.float32(3e38))
            code.store(limit, self.scratch["limits"], i)

    def goes_on(self) -> Any:
        """Returns whether a residual is above its limit."""
        code = self.code
        found = code.variable(code.false())
        with code.loop(0, self.tokens) as i:
            code.set(found, code.builder.or_(code.get(found), self._is_above(i)))
        return code.get(found)

    def _is_above(self, i):
        code = self.code
        square, limit = (code.load(self.scratch[name], i) for name in ("squares", "limits"))
        return code.builder.fcmp_unordered(">", square, limit)

    def step(self) -> None:
        """One step of conjugate gradients for the tokens of the chunk that are not solved yet.

        A token stops at its own limit, so that no token depends on later ones.
        """
        code = self.code
        self.decay_reads("reads", "decayed", 1)
        self.multiply("decayed", "features", "state", "values", "image")
        self.multiply("reads", "features", "writes_t", WRITES, "pairs")
        pairs, between = self.scratch["pairs"], self.scratch["between"]
        with code.loop(0, code.mul(self.tokens, WRITES), code.lanes) as n:
            factors = code.load_vector(pairs, n), code.load_vector(between, n)
            code.store_vector(code.builder.fmul(*factors), pairs, n)
        self.add("pairs", self.tokens, "written", "values", "image")
        with code.loop(0, self.tokens) as i, code.when(self._is_above(i)):
            self._step_of_token(i)

    def _step_of_token(self, i):
        code, builder = self.code, self.code.builder
        direction, image, residual, solution = (
            self._token(name, i) for name in ("reads", "image", "residual", "solution")
        )
        with code.loop(0, self.width, code.lanes) as f:
            regularised = (
                code.load_vector(self.scratch["diagonal"], f),
                code.load_vector(direction, f),
            )
            code.store_vector(code.multiply_add(*regularised, code.load_vector(image, f)), image, f)
        square = code.load(self.scratch["squares"], i)
        length = self._ratio(square, self._dot(direction, image))
        back = code.all_lanes(builder.fsub(code.float32(0.0), length))
        along = code.all_lanes(length)
        with code.loop(0, self.width, code.lanes) as f:
            for factor, source, target in ((along, direction, solution), (back, image, residual)):
                more = code.load_vector(source, f)
                code.store_vector(
                    code.multiply_add(factor, more, code.load_vector(target, f)), target, f
                )
        after = self._dot(residual, residual)
        code.store(after, self.scratch["squares"], i)
        keep = code.all_lanes(self._ratio(after, square))
        with code.loop(0, self.width, code.lanes) as f:
            old, new = code.load_vector(direction, f), code.load_vector(residual, f)
            code.store_vector(code.multiply_add(keep, old, new), direction, f)

    def _token(self, name, token):
        return self.code.address(self.scratch[name], self.code.mul(token, self.width))

    def _dot(self, a, b):
        code = self.code
        total = code.variable(code.number(0.0))
        with code.loop(0, self.width, code.lanes) as f:
            factors = code.load_vector(a, f), code.load_vector(b, f)
            code.set(total, code.multiply_add(*factors, code.get(total)))
        return code.sum_of_lanes(code.get(total))

    def _ratio(self, a, b):
        """a / b; 0 for b of zero or less, the residual of a solved equation."""
        builder, zero = self.code.builder, self.code.float32(0.0)
        positive = builder.fcmp_ordered(">", b, zero)
        quotient = builder.fdiv(a, builder.select(positive, b, self.code.float32(1.0)))
        return builder.select(positive, quotient, zero)
