"""The linear recurrence without decays for CPUs: one key head at a time, with its query heads.

Chunks of `TILE` tokens follow each other, and the state S (F, D) carries what is before them. With
the queries of a chunk in the lanes of vectors, and A^T = K Q^T of the chunk, without what is ahead,

    Y^T = S^T Q^T + V^T A^T,    S += K^T V.

The gradients take two walks. Forward in time, with dA^T = V dY^T without what is ahead,

    dQ^T = S dY^T + K^T dA^T,

and backward in time, with the gradient R (F, D) of the state, which chunks after this one read,

    dV = K R + A^T dY,    dK = V R^T + dA^T Q,    R += Q^T dY.

Where values have a last entry of 1, y is what is before it divided by it, z: then dY is dy / z, and
its last entry -(dy . y) / z. The walk forward leaves both factors of a query for the walk back.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llvmlite import ir

from effattn.llvm.code import FLOAT, INT, POINTER, Code
from effattn.llvm.products import vectors_at_once, write_product
from effattn.llvm.threads import Frame, Job, write_handler
from effattn.llvm.tiles import TILE, Rows, Steps, places

_SIZES = "batch", "tokens", "heads", "features", "key_heads", "values"


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """The handler (query, key, value, state) -> (out, state after).

    Arrays are `(*B, T, heads, size)`, states `(*B, K, F, D)`; where D is one more than the size of
    values, outputs are divided by that entry.
    """
    products = _Products(module, name, lanes)
    arguments, results = ("query", "key", "value", "state"), ("out", "state_after")

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        walk = _Walk(code, job, products, memory, number)
        walk.read_state("state", walk.at["state"])
        with walk.chunks():
            with walk.heads() as head:
                walk.read_queries(head)
                walk.outputs(divide=True)
                out = Rows(walk.at["out"], TILE)
                target = walk.rows("out", head)
                walk.steps.transpose(out, target, job["values"], walk.tokens, FLOAT(1.0))
            walk.update_state()
        walk.write_state(walk.at["state"], "state_after")

    _write(module, name, lanes, arguments, results, task)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """The handler (query, key, value, state, d_out, d_after) -> (d_query, d_key, d_value, d_state).

    Shapes are those of what they are gradients of, which is `d_after` of the state after.
    """
    products = _Products(module, name, lanes)
    arguments = "query", "key", "value", "state", "d_out", "d_after"
    results = "d_query", "d_key", "d_value", "d_state", "factors"

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        walk = _Walk(code, job, products, memory, number)
        steps, at, multiply, one = walk.steps, walk.at, products.multiply, FLOAT(1.0)
        features, values, all_values = job["features"], job["values"], walk.all_values
        width, value_width = walk.width, walk.value_width
        d_out, pairs, d_pairs = at["d_out"], at["pairs"], at["d_pairs"]

        def read_gradients(head):
            """dy of the queries, and their dA^T."""
            steps.fill(d_out, code.mul(all_values, TILE))
            steps.transpose(walk.rows("d_out", head), Rows(d_out, TILE), walk.tokens, values, one)

        def pair_gradients():
            left = at["value"], value_width, 1
            code.call(
                multiply, walk.tokens, TILE, all_values, *left, d_out, TILE, d_pairs, TILE, d_pairs
            )
            steps.hide_ahead(d_pairs, walk.tokens)

        walk.read_state("state", at["state"])
        with walk.chunks():
            with walk.heads() as head:
                walk.read_queries(head)
                read_gradients(head)
                with code.when(walk.is_normalized):
                    walk.outputs(divide=False)
                    steps.differentiate_quotient(at["out"], d_out, values)
                    for n, array in enumerate(("out", "d_out")):
                        row = code.place(at[array], code.mul(values, TILE))
                        factor = walk.factors(head, n)
                        steps.transpose(Rows(row, TILE), factor, 1, walk.tokens, one)
                pair_gradients()
                d_query = at["d_query"], TILE
                left = at["state"], value_width, 1
                code.call(
                    multiply, features, TILE, all_values, *left, d_out, TILE, *d_query, d_pairs
                )
                left = at["key"], 1, features
                code.call(
                    products.accumulate, features, TILE, walk.tokens, *left, d_pairs, TILE,
                    *d_query, d_pairs,
                )
                target = walk.rows("d_query", head)
                steps.transpose(Rows(*d_query), target, features, walk.tokens, one)
            walk.update_state()

        back, turned = at["state"], at["turned"]
        walk.read_state("d_after", back)
        steps.fill(turned, code.mul(all_values, width))
        steps.transpose(Rows(back, value_width), Rows(turned, width), features, all_values, one)
        with walk.chunks(reverse=True):
            for left, count, right, to, columns in (
                ((at["key"], features, 1), features, back, "d_value", value_width),
                ((at["value"], value_width, 1), all_values, turned, "d_key", width),
            ):
                target = at[to], columns, at[to]
                code.call(
                    products.set_rows, walk.tokens, columns, count, *left, right, columns, *target
                )
            with walk.heads() as head:
                walk.read_queries(head)
                read_gradients(head)
                with code.when(walk.is_normalized):
                    for n, array in enumerate(("out", "d_out")):
                        row = code.place(at[array], code.mul(values, TILE))
                        source = walk.factors(head, n)
                        steps.fill(row, TILE)
                        steps.transpose(source, Rows(row, TILE), walk.tokens, 1, one)
                    steps.multiply(d_out, values, code.place(at["out"], code.mul(values, TILE)))
                walk.pairs()
                pair_gradients()
                for source, count, to, columns in (
                    (at["query"], features, "query_rows", width),
                    (d_out, all_values, "d_out_rows", value_width),
                ):
                    in_rows = Rows(at[to], columns)
                    steps.fill(in_rows.start, code.mul(columns, TILE))
                    steps.transpose(Rows(source, TILE), in_rows, count, walk.tokens, one)
                query_rows, d_out_rows = at["query_rows"], at["d_out_rows"]
                for rows, left, right, columns, to in (
                    (walk.tokens, pairs, d_out_rows, value_width, at["d_value"]),
                    (walk.tokens, d_pairs, query_rows, width, at["d_key"]),
                    (features, at["query"], d_out_rows, value_width, back),
                    (all_values, d_out, query_rows, width, turned),
                ):
                    target = to, columns, to
                    code.call(
                        products.accumulate, rows, columns, walk.tokens, left, TILE, 1, right,
                        columns, *target,
                    )
            for array, columns, size in (
                ("d_key", width, features), ("d_value", value_width, values)
            ):
                steps.copy(Rows(at[array], columns), walk.rows(array), walk.tokens, size)
        walk.write_state(back, "d_state")

    _write(module, name, lanes, arguments, results, task)
