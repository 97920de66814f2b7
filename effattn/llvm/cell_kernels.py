"""Kernels of the recurrence of a cell on CPUs, in float32.

For one head, with the gates' parts u_t of a token, the recurrent matrices R and biases b,

    carry_t = cell(u_t + h_(t-1) R + b, carry_(t-1)),   h_t is part of carry_t

A walk is over the tokens of one head of up to `ROWS` examples. It copies R into panels, which stay
in the cache of the core. If there are at least twice as many threads as walks, a walk of a large
head has several members, each with some of the units and their columns of R: see
`effattn.llvm.teams`. A member reads all of h.

Backward, the caller computes the pre-activations of all tokens, from the outputs h. A walk
computes the carry before every chunk of tokens. Then, from the last chunk to the first, it computes
the carries of the chunk again, and, backward in time, the gradients of the pre-activations. Their
products with R^T give the gradient of h_(t-1).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from effattn.interfaces.cell_recurrence import GATES
from effattn.llvm import teams
from effattn.llvm.cell_walk import (
    BACKWARD,
    CHUNK,
    FORWARD,
    PREACTIVATIONS,
    ROWS,
    Walk,
    memory_of,
    write_product,
)
from effattn.llvm.tiles import TileOps

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

_LEAST = 64  # units of a member of a team; for fewer, waiting takes longer than the products
_SIZES = "tokens", "heads", "size", "marked", "rows", "is_reversed", "members", "units", "numbers"


def write_forward(cell: str, module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (parts, recurrent, bias, carry, marks) -> (out, after).

    Shapes: parts `(*B, T, G N H)`, recurrent `(*B, N, H, G, H)`, bias `(*B, G, N, H)`, carry and
    after `(*B, S, N, H)`, out `(*B, T, N, H)`, and marks `(*B, T, 0 or 2)`: 1 or 0 for whether the
    carry before a token is kept, and for whether the token is valid. The attribute `limits` has 1
    if tokens are read from the last to the first. A batch axis of length 1 of an operand is
    broadcast.
    """

    # Step 0 reads R and the carry; step n + 1 reads token n.
    def step(walk: Walk, number: Any) -> None:
        code = walk.code
        with code.when(code.less(number, 1)):
            walk.pack()
            walk.read_bias()
            walk.read_carry("carry", walk.state(0))
        with code.when(code.less(0, number)):
            before, after = walk.state(code.sub(number, 1)), walk.state(number)
            walk.go_to(code.sub(number, 1))
            walk.multiply(before)
            with walk.rows() as row:
                with code.builder.if_else(walk.is_valid(row)) as (valid, otherwise):
                    with valid:
                        walk.read("parts", row, GATES[cell])
                        walk.join(row)
                        walk.advance(row, before, after)
                    with otherwise:
                        walk.copy_carry(row, before, after)
                walk.write_output(row, after)
        is_last = code.less(code.sub(walk.tokens, 1), number)
        with code.when(is_last):
            walk.write_carry(walk.state(number), "after")
        with code.when(code.builder.not_(is_last)):
            walk.go_to(number)
            with walk.rows() as row:
                walk.restart(row, walk.state(number))

    _write(cell, module, name, lanes, FORWARD, 1, step)


def write_backward(cell: str, module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients of the pre-activations, both `(*B, T, 4 N H)`.

    (preactivations, recurrent, carry, marks, d_out, d_after) -> (d_preactivations, d_carry). Tokens
    that are not valid have gradients of zero.
    """

    # Step 0 computes the carries before the chunks. Steps 1 to T each pull the gradients back
    # through one token, T - n in step n. Steps 2 to T + 1 first add the product of R^T and
    # the gradients of the step before; step T + 1 then writes the gradient of the carry.
    def step(walk: Walk, number: Any) -> None:
        code, tokens = walk.code, walk.tokens
        state, d_state = (walk.scratch[name] for name in ("state", "d_state"))

        def again(token: Any, before: Any, after: Any) -> None:
            walk.go_to(token)
            with walk.rows() as row:
                walk.restart(row, before)
                walk.copy_carry(row, before, after)
                with code.when(walk.is_valid(row)):
                    walk.read("preactivations", row, PREACTIVATIONS)
                    walk.advance(row, before, after)

        with code.when(code.less(number, 1)):
            walk.pack_transposed()
            walk.read_carry("carry", state)
            with code.loop(0, code.ceil(tokens, CHUNK)) as chunk:
                walk.copy_carries(state, walk.saved(chunk))
                first = code.mul(chunk, CHUNK)
                with code.loop(first, code.min(code.add(first, CHUNK), tokens)) as token:
                    again(token, state, state)
            walk.read_carry("d_after", d_state)
        with code.when(code.less(1, number)):
            walk.go_to(code.sub(code.add(tokens, 1), number))
            walk.multiply_back(code.sub(number, 1), d_state)
            with walk.rows() as row:
                walk.restart(row, d_state)
        is_token = code.builder.and_(code.less(0, number), code.less(number, code.add(tokens, 1)))
        with code.when(is_token):
            token = code.sub(tokens, number)
            chunk, place = code.div(token, CHUNK), code.rem(token, CHUNK)
            is_last = code.less(code.sub(tokens, 2), token)
            with code.when(code.builder.or_(is_last, code.less(CHUNK - 2, place))):
                walk.copy_carries(walk.saved(chunk), walk.in_history(0))
                with code.loop(0, code.add(place, 1)) as n:
                    before, after = (walk.in_history(code.add(n, more)) for more in (0, 1))
                    again(code.add(code.mul(chunk, CHUNK), n), before, after)
            walk.go_to(token)
            with walk.rows() as row:
                walk.pull_back(row, number, walk.in_history(place), d_state)
        with code.when(code.less(tokens, number)):
            walk.write_carry(d_state, "d_carry")

    _write(cell, module, name, lanes, BACKWARD, 2, step)


# The handlers of each cell.
write_lstm_forward, write_gru_forward, write_slstm_forward, write_slstm_exp_forward = (
    functools.partial(write_forward, cell) for cell in ("lstm", "gru", "slstm", "slstm_exp")
)
write_lstm_backward, write_gru_backward, write_slstm_backward, write_slstm_exp_backward = (
    functools.partial(write_backward, cell) for cell in ("lstm", "gru", "slstm", "slstm_exp")
)


def _write(cell, module, name, lanes, signature, more_steps, step):
    """Generates a handler from the code of a step; a walk has T + `more_steps` steps."""
    from effattn.llvm.codegen import INT, POINTER, Code
    from effattn.llvm.handlers import Job, write_handler

    product = write_product(module, f"{name}_product", lanes)

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, ...]:
        (tokens, _), (heads, size, _, _) = frame.last_sizes(0, 2), frame.last_sizes(1, 4)
        carry = 1 + [array.name for array in signature.arguments].index("carry")
        (marked,) = frame.last_sizes(carry, 1)
        (is_reversed,) = frame.integers(1)
        # Examples share a walk, unless each has its own matrices or threads would be idle. Two
        # threads that share a walk of two examples are faster than two walks: each reads half of R.
        matrices = code.variable(1)
        with code.loop(0, job["batch_axes"]) as axis:
            length = code.load(frame.sizes("arguments", 1), axis, code.int64)
            code.set(matrices, code.mul(code.get(matrices), length))
        most = code.max(code.div(size, _LEAST), 1)
        pairs = code.builder.select(code.less(1, most), code.ceil(job["batch"], 2), job["batch"])
        groups = code.min(code.ceil(frame.threads(), heads), pairs)
        groups = code.max(groups, code.ceil(job["batch"], ROWS))
        is_shared = code.less(code.get(matrices), 2)
        groups = code.max(code.builder.select(is_shared, groups, job["batch"]), 1)
        rows = code.max(code.ceil(job["batch"], groups), 1)
        walks = code.max(code.mul(code.ceil(job["batch"], rows), heads), 1)
        members = code.min(code.div(frame.threads(), walks), most)
        is_alone = code.less(members, 2)
        units = code.ceil(code.ceil(size, code.max(members, 1)), teams.LINE)
        units = code.mul(units, teams.LINE)
        units = code.builder.select(is_alone, code.round_to_lanes(size), units)
        members = code.builder.select(is_alone, code.integer(1), code.ceil(size, units))
        sizes = tokens, heads, size, marked, rows, is_reversed, members, units, 0
        for each, found in zip(_SIZES, sizes, strict=True):
            job[each] = found
        memory = code.add(*memory_of(code, job, cell, signature).values())
        job["numbers"] = code.mul(code.ceil(memory, teams.LINE), teams.LINE)
        one, of_walks = code.integer(1), code.mul(walks, job["numbers"])
        own, shared = (
            code.builder.select(is_alone, *sizes)
            for sizes in ((job["numbers"], one), (one, of_walks))
        )
        return code.mul(walks, members), own, shared

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        members = job["members"]
        walk, member = code.div(number, members), code.rem(number, members)
        is_alone = code.less(members, 2)
        with code.when(is_alone):
            TileOps(code).fill(memory, job["numbers"])
        common = code.address(job.shared, code.mul(walk, job["numbers"]))
        memory = code.builder.select(is_alone, memory, common)
        member_of = write_member(job.kinds)
        team = teams.Team(memory, members, code.add(job["tokens"], more_steps))
        teams.join(
            code, team, member, lambda each: code.call(member_of, job.slots, memory, walk, each)
        )

    def write_member(kinds: Any) -> ir.Function:
        code = Code(module, f"{name}_member", [POINTER, POINTER, INT, INT], lanes)
        slots, memory, number, member = code.arguments
        job = Job(code, slots, kinds)
        walk = Walk(code, job, memory, number, member, cell, signature, product)
        team = teams.Team(memory, job["members"], code.add(job["tokens"], more_steps))
        teams.take_steps(code, team, member, lambda number: step(walk, number))
        code.builder.ret_void()
        return code.function

    write_handler(module, name, lanes, signature, _SIZES, [], begin, task)
