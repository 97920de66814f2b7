"""Walks through the writes of a chunk of the linear recurrence, and their gradients.

Rows are `width` long, the number of features rounded up to whole vectors, and zero beyond the
features. Token j writes row j, and `removed` the row of the second set: `tokens + j`. See
`effattn.llvm.recurrence_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from effattn.llvm.tiles import TileOps

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

CHUNK = 16
WRITES = 2 * CHUNK  # rows of writes: of keys, and of removed vectors


def _arguments(count_of_sizes, count_of_arrays):
    from effattn.llvm.codegen import INT, POINTER

    return [INT] * count_of_sizes + [POINTER] * count_of_arrays


def lengths(lanes: int, vectors: int) -> list[int]:
    """Lengths of the pieces of a row: so many vectors, and one."""
    return [vectors * lanes, lanes]


def write_walk(
    module: ir.Module, name: str, lanes: int, kind: str, *, keep_all: bool = False
) -> ir.Function:
    """Generates the function that decays the writes of a chunk, token by token, and reads them.

    Its arguments are (tokens, sets, width, writes, kept, decay, reads, pairs, history). `pairs`
    receive the product of each token's read with each row: before the decay of the token and
    without its own row ("recall"), or after it and with its own row ("read"). `kept` holds the rows
    after the last token. With `keep_all`, `history` receives the rows after every token.
    """
    from effattn.llvm.codegen import Code

    code = Code(module, f"{name}_{kind}", _arguments(3, 6), lanes)
    tokens, sets, width, writes, kept, decay, reads, pairs, history = code.arguments
    recalls = kind == "recall"

    def row_of(array, row):
        return code.address(array, code.mul(row, width))

    ops = TileOps(code)
    ops.fill(pairs, code.mul(tokens, WRITES))
    with code.loop(0, tokens) as i, code.loop(0, sets) as write_set:
        first = code.mul(write_set, tokens)
        of_token = row_of(decay, i), row_of(reads, i)
        before = code.mul(i, code.mul(sets, tokens))  # rows of the history before this token
        found = code.address(pairs, code.mul(i, WRITES))

        def read_row(row, own, of_token=of_token, before=before, found=found):
            source, target = row_of(writes if own else kept, row), row_of(kept, row)
            past = row_of(history, code.add(before, row))
            totals = [code.variable(code.number(0.0)) for _ in range(4)]
            for f, length in code.pieces(width, lengths(lanes, 4)):
                for v in range(length // lanes):
                    at = code.add(f, v * lanes)
                    x = code.load_vector(source, at)
                    factor, reading = (code.load_vector(each, at) for each in of_token)

                    def accumulate(x, v=v, reading=reading):
                        code.set(totals[v], code.multiply_add(x, reading, code.get(totals[v])))

                    if recalls and not own:
                        accumulate(x)
                    if not own:
                        x = code.builder.fmul(x, factor)
                    if not recalls:
                        accumulate(x)
                    code.store_vector(x, target, at)
                    if keep_all:
                        code.store_vector(x, past, at)
            if not (recalls and own):
                a, b, c, d = map(code.get, totals)
                total = code.builder.fadd(code.builder.fadd(a, b), code.builder.fadd(c, d))
                code.store(code.sum_of_lanes(total), found, row)

        with code.loop(first, code.add(first, i)) as row:
            read_row(row, False)
        read_row(code.add(first, i), True)
    code.builder.ret_void()
    return code.function


def write_walk_back(module: ir.Module, name: str, lanes: int, kind: str) -> ir.Function:
    """Generates the gradient of the walk and of the reads of the state, backward in time.

    Its arguments are (tokens, sets, width, decay, since, history, reads, d_pairs, d_decayed,
    d_kept, d_since, d_reads, d_decay). `since` has the decays since the start of the chunk after
    each token, with a row of ones in front. `d_decayed` is the gradient of the decayed reads, with
    which the state was read. `d_kept` and `d_since` hold the gradients of the rows and of the
    state's decay after the chunk, and then those of the writes and of the start. `d_reads` is set,
    and `d_decay`, the gradient of the log decays, is added to.
    """
    from effattn.llvm.codegen import Code

    code = Code(module, f"{name}_{kind}_back", _arguments(3, 10), lanes)
    tokens, sets, width, *arrays = code.arguments
    decay, since, history, reads, d_pairs, d_decayed, d_kept, d_since, d_reads, d_decay = arrays
    recalls = kind == "recall"
    rows = code.mul(sets, tokens)

    def row_of(array, row):
        return code.address(array, code.mul(row, width))

    with code.loop(0, tokens) as n:
        i = code.sub(code.sub(tokens, 1), n)
        found = code.address(d_pairs, code.mul(i, WRITES))
        after = row_of(history, code.mul(i, rows))
        before = row_of(history, code.mul(code.sub(i, 1), rows))
        for f, length in code.pieces(width, lengths(lanes, 2)):
            ats = [code.add(f, v * lanes) for v in range(length // lanes)]

            def load(array, row, ats=ats):
                return [code.load_vector(row_of(array, row), at) for at in ats]

            factor, reading, d_state_read = load(decay, i), load(reads, i), load(d_decayed, i)
            since_before, since_now = load(since, i), load(since, code.add(i, 1))
            d_past = load(d_since, 0)
            read_with = since_before if recalls else since_now
            d_read = [
                code.variable(code.builder.fmul(a, b))
                for a, b in zip(read_with, d_state_read, strict=True)
            ]
            if not recalls:
                d_past = [
                    code.multiply_add(*each)
                    for each in zip(reading, d_state_read, d_past, strict=True)
                ]
            d_factor = [
                code.variable(code.multiply_add(*each))
                for each in zip(d_past, since_now, load(d_decay, i), strict=True)
            ]
            d_past = [code.builder.fmul(a, b) for a, b in zip(d_past, factor, strict=True)]
            if recalls:
                d_past = [
                    code.multiply_add(*each)
                    for each in zip(reading, d_state_read, d_past, strict=True)
                ]

            def pull(row, own, ats=ats, reading=reading, factor=factor, ups=(d_read, d_factor)):
                d_read, d_factor = ups
                d_pair = code.all_lanes(code.load(found, row))
                for v, at in enumerate(ats):
                    to = code.address(row_of(d_kept, row), at)
                    z = code.load_vector(to)
                    x = code.load_vector(row_of(after, row), at)
                    earlier = code.load_vector(row_of(before, row), at) if recalls else x
                    if not recalls:
                        z = code.multiply_add(d_pair, reading[v], z)
                    if not own:
                        code.set(d_factor[v], code.multiply_add(z, x, code.get(d_factor[v])))
                        z = code.builder.fmul(z, factor[v])
                    if recalls:
                        z = code.multiply_add(d_pair, reading[v], z)
                    code.set(d_read[v], code.multiply_add(d_pair, earlier, code.get(d_read[v])))
                    code.store_vector(z, to)

            with code.loop(0, sets) as write_set:
                first = code.mul(write_set, tokens)
                with code.loop(first, code.add(first, i)) as row:
                    pull(row, False)
                if not recalls:
                    pull(code.add(first, i), True)
            for v, at in enumerate(ats):
                code.store_vector(d_past[v], d_since, at)
                code.store_vector(code.get(d_read[v]), row_of(d_reads, i), at)
                code.store_vector(code.get(d_factor[v]), row_of(d_decay, i), at)
    code.builder.ret_void()
    return code.function
