"""Kernels of the linear recurrence on CPUs, with decays and the delta form, in float32.

A task is one state S (F, D) and its query heads. It goes through chunks of `CHUNK` tokens. A token
*writes* a value for its key k: v, or v - u in the delta form. With `removed`, a, it writes v for k
and -u for a. It *reads* the state with its query q after it writes, and in the delta form with
`recalled`, b, before its own decay. With E_ij the decay from token j to token i and G_i the decay
since the start of the chunk of C tokens, the weights of the writes of the chunk are

    A_ij = q_i . (E_ij k_j)  for j <= i,    L_ij = b_i . (E_(i-1)j k_j)  for j < i.

The rows of W are the values of the writes. In the delta form, each token has

    u_i = (b_i G_(i-1)) S + sum_j L_ij W_j,

and W_i = v_i - u_i; with `removed`, W_i = v_i for the key, and -u_i for the removed vector, and the
sums are over the rows of both. The output and the next state are

    Y = (q G) S + A W,    S' = G_C S + (E_Cj k_j)^T W.

Writes that decay are kept as rows: token by token, each row is multiplied by the decay of the
token. Decays are thus never divided, nor is a sum of log decays subtracted from another.

The gradients go forward in time for the states at the starts of chunks, and backward in time for
the rest. There, each row has a gradient Z_j, to which each token adds its share. The gradient of a
log decay is the sum over the earlier rows of Z_j times the row after the token's decay, and the
same product for the state at the start of the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effattn.llvm import runtime
from effattn.llvm.recurrence_scan import Scan, write_products
from effattn.llvm.recurrence_walks import CHUNK, WRITES, write_walk, write_walk_back
from effattn.llvm.tiles import Rows

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

_SIZES = (
    "tokens",
    "features",
    "values",
    "heads",
    "query_heads",
    "key_heads",
    "decays",  # log decays of a token and head: 0, 1 or F
    "recalled_size",  # 0 or F
    "removed_size",  # 0 or F
)
_OPERANDS = tuple(
    runtime.Array(name, 3)
    for name in ("query", "key", "value", "state", "log_decay", "recalled", "removed")
)
_FORWARD = runtime.Signature(_OPERANDS, (runtime.Array("out", 3), runtime.Array("state_after", 3)))
_BACKWARD = runtime.Signature(
    (*_OPERANDS, runtime.Array("d_out", 3), runtime.Array("d_after", 3)),
    tuple(runtime.Array(f"d_{array.name}", 3) for array in _OPERANDS),
)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key, ..., removed) -> (out, state_after).

    Shapes: query `(*B, T, N, F)`, key `(*B, T, K, F)`, value `(*B, T, V, D)`, state
    `(*B, V, F, D)`, log_decay `(*B, T, V, 0, 1 or F)`, recalled and removed `(*B, T, K, 0 or F)`,
    and out `(*B, T, max(N, V), D)`. A last axis of length 0 stands for an absent array. A batch
    axis of length 1 of an argument is broadcast.
    """
    functions = {
        **write_products(module, name, lanes),
        "read": write_walk(module, name, lanes, "read"),
        "recall": write_walk(module, name, lanes, "recall"),
    }

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scan = _scan(code, job, functions, memory, number, _FORWARD, _forward_memory)
        scan.read_state("state", "state")
        with scan.chunks():
            with code.when(scan.is_delta):
                scan.subtract_recalled(scan.scratch["state"])
            with scan.heads():
                scan.read("query", scan.query_head, "reads")
                scan.walk("read", "reads", "pairs")
                scan.decay_reads("reads", "decayed", 1)
                scan.multiply("decayed", "features", "state", "values", "out")
                scan.add("pairs", scan.writes, "written", "values", "out")
                scan.write("out", scan.out_head, "out")
            scan.update_state()
        scan.write_state("state", "state_after")

    _write(module, name, lanes, _FORWARD, task, _forward_memory)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients.

    (query, key, ..., removed, d_out, d_after) -> (d_query, d_key, ..., d_removed). The gradients of
    query have as many heads as the output, those of key, log_decay, recalled and removed V heads.
    """
    functions = {
        **write_products(module, name, lanes),
        "read": write_walk(module, name, lanes, "read", keep_all=True),
        "recall": write_walk(module, name, lanes, "recall"),
        "read_back": write_walk_back(module, name, lanes, "read"),
        "recall_back": write_walk_back(module, name, lanes, "recall"),
    }

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scan = _scan(code, job, functions, memory, number, _BACKWARD, _backward_memory)
        scan.read_state("state", "state")
        with scan.chunks():
            scan.push_state()
            scan.decay_writes()
            with code.when(scan.is_delta):
                scan.subtract_recalled(scan.scratch["state"])
            scan.update_state()
        scan.read_state("d_after", "d_state")
        with scan.chunks(reverse=True):
            _pull_back_chunk(code, scan)
        scan.write_state("d_state", "d_state")

    _write(module, name, lanes, _BACKWARD, task, _backward_memory)


def _pull_back_chunk(code: Code, scan: Scan) -> None:
    """Gradients of one chunk, given `d_state`, that of the state after it."""
    ops, scratch, job = scan.ops, scan.scratch, scan.job
    state = scan.pushed_state()
    with code.when(scan.is_delta):
        scan.subtract_recalled(state)
    scan.transpose(state, "state_t")
    scan.transpose(scratch["d_state"], "d_state_t")
    one = code.float32(1.0)
    written = Rows(scratch["written"], scan.value_width)
    ops.transpose(written, Rows(scratch["written_t"], WRITES), scan.writes, job["values"], one)
    # Gradients of the writes, and of the decay of the state, through the state after the chunk
    scan.decay_writes()
    scan.multiply("kept", "features", "d_state", "values", "d_written", rows=scan.writes)
    scan.multiply("written", "values", "d_state_t", "features", "d_kept", rows=scan.writes)
    scan.sum_products("state_t", "d_state_t", "d_since")
    scan.decay_state("d_state")
    for name, rows in (("d_writes", WRITES), ("d_decay", CHUNK)):
        ops.fill(scratch[name], code.mul(rows, scan.width))
    with scan.heads():
        scan.read("query", scan.query_head, "reads")
        scan.read("d_out", scan.out_head, "d_reads_out")
        scan.walk("read", "reads", "pairs")
        scan.multiply("d_reads_out", "values", "written_t", WRITES, "d_pairs")
        scan.add_transposed("pairs", scan.writes, "d_reads_out", "d_written")
        scan.walk_back("read", "reads", "d_reads_out")
        scan.write("d_query", scan.out_head, "d_reads")
        scan.decay_reads("reads", "decayed", 1)
        scan.add_to_d_state("d_reads_out")
    with code.when(scan.is_delta):
        scan.pull_back_recalled()
        scan.read("recalled", scan.key_head, "reads")
        scan.multiply("d_recalled_out", "values", "written_t", WRITES, "d_pairs")
        scan.walk_back("recall", "reads", "d_recalled_out")
        scan.write("d_recalled", scan.head, "d_reads")
        scan.decay_reads("reads", "decayed", 0)
        scan.add_to_d_state("d_recalled_out")
    scan.write("d_key", scan.head, "d_writes")
    scan.write("d_value", scan.head, "d_written")
    with code.when(scan.has_removed):
        scan.write("d_removed", scan.head, "d_writes", first=scan.tokens)
    scan.write_d_decay()


def _scan(code, job, functions, memory, number, signature, sizes):
    arguments = (array.name for array in signature.arguments)
    return Scan(code, job, functions, memory, number, arguments, sizes(code, job))


def _write(module, name, lanes, signature, task, memory):
    from effattn.llvm.handlers import write_handler

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, query_heads, features = frame.last_sizes(0, 3)
        key_heads, _ = frame.last_sizes(1, 2)
        heads, values = frame.last_sizes(2, 2)
        others = [frame.last_sizes(number, 1)[0] for number in (4, 5, 6)]
        sizes = tokens, features, values, heads, query_heads, key_heads, *others
        for each, size in zip(_SIZES, sizes, strict=True):
            job[each] = size
        return code.mul(job["batch"], heads), code.add(*memory(code, job).values())

    write_handler(module, name, lanes, signature, _SIZES, [], begin, task)


def _forward_memory(code: Code, job: Job) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task."""
    width, value_width = (code.round_to_lanes(job[size]) for size in ("features", "values"))
    of_tokens = "reads", "decayed", "log_decay", "decay"
    return {
        **dict.fromkeys(("writes", "kept"), code.mul(WRITES, width)),
        **dict.fromkeys(of_tokens, code.mul(CHUNK, width)),
        "since": code.mul(CHUNK + 1, width),
        **dict.fromkeys(("factor", "identity"), width),
        "written": code.mul(WRITES, value_width),
        **dict.fromkeys(("out", "recalled_out"), code.mul(CHUNK, value_width)),
        **dict.fromkeys(("pairs", "recalled_pairs"), CHUNK * WRITES),
        "state": code.mul(width, value_width),
    }


def _backward_memory(code: Code, job: Job) -> dict[str, Any]:
    width, value_width = (code.round_to_lanes(job[size]) for size in ("features", "values"))
    of_state = code.mul(width, value_width)
    return {
        **_forward_memory(code, job),
        "history": code.mul(CHUNK * WRITES, width),
        **dict.fromkeys(("d_writes", "d_kept"), code.mul(WRITES, width)),
        **dict.fromkeys(("d_reads", "d_decayed", "d_decay"), code.mul(CHUNK, width)),
        "d_since": width,
        **dict.fromkeys(("d_written", "written_t"), code.mul(WRITES, value_width)),
        **dict.fromkeys(("d_reads_out", "d_recalled_out"), code.mul(CHUNK, value_width)),
        "d_pairs": CHUNK * WRITES,
        **dict.fromkeys(("state_t", "d_state", "d_state_t"), of_state),
        "states": code.mul(code.ceil(job["tokens"], CHUNK), of_state),
    }
