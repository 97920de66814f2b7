"""Paged decode attention in the Triton language: the kernel.

A program reads a run of pages of one sequence and one key head. The query heads of the key head,
and the queries, are the rows of one tile, so it reads keys and values once for all of them. int8
pages are widened in registers. A tile is one page, and the compiler overlaps the reads of a page
with the products of the one before.

Arrays: pools `(P, p, K, H)` of keys and `(P, p, K, Hv)` of values, with their scales `(P, p, K)`;
table `(B, room)`, lengths `(B,)`, scale `(B,)`, queries `(B, T, N, H)`, and results for each run of
pages: output `(B, K, runs, R, Hv)` and log-sum-exp `(B, K, runs, R)`. Row r is query head r // T of
its key head and query r % T.
"""

import triton
import triton.language as tl

from effattn.triton.mathematics import tanh

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that no row computes inf - inf


@triton.jit
def paged(
    table, lengths, scale, query, keys, values, key_scales, value_scales, out, lse,
    plan: tl.constexpr,
):  # fmt: skip
    """Attends to the pages of a run. Grid: sequences, key heads, runs."""
    b, head, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, length = tl.arange(0, plan.rows), tl.load(lengths + b)
    position = length - plan.queries + row % plan.queries
    queries = _queries(plan, query, b, head)
    multiplier = tl.load(scale + b)
    first = run * plan.pages_of_run
    last = tl.minimum(first + plan.pages_of_run, tl.cdiv(length, plan.page))
    if plan.left is not None:
        first = tl.maximum(first, tl.maximum(length - plan.queries - plan.left, 0) // plan.page)
    largest = tl.full((plan.rows,), LOWEST, tl.float32)
    total = tl.zeros((plan.rows,), tl.float32)
    mixed = tl.zeros((plan.rows, plan.value_width), tl.float32)
    for m in range(first, last):
        which = tl.load(table + b.to(tl.int64) * plan.room + m)
        at = m * plan.page + tl.arange(0, plan.page)
        key = _page(plan, keys, key_scales, which, at < length, head, plan.size, plan.width)
        key = key.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(key), input_precision=plan.precision) * multiplier
        if plan.soft_cap is not None:
            logits = plan.soft_cap * tanh(logits / plan.soft_cap)
        allowed = at[None, :] <= position[:, None]
        if plan.left is not None:
            allowed &= at[None, :] >= position[:, None] - plan.left
        logits = tl.where(allowed, logits, -float("inf"))
        new = tl.maximum(largest, tl.max(logits, 1))
        weights, kept = tl.exp(logits - new[:, None]), tl.exp(largest - new)
        value = _page(
            plan, values, value_scales, which, at < length, head, plan.value_size, plan.value_width
        ).to(queries.dtype)
        mixed = mixed * kept[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision=plan.precision
        )
        total = total * kept + tl.sum(weights, 1)
        largest = new
    total_or_one = tl.where(total == 0, 1.0, total)
    mixed = mixed / total_or_one[:, None]
    column = tl.arange(0, plan.value_width)
    of_run = ((b * plan.key_heads + head).to(tl.int64) * plan.runs + run) * plan.rows + row
    place = out + of_run[:, None] * plan.value_size + column[None, :]
    tl.store(place, mixed, mask=(column < plan.value_size)[None, :])
    tl.store(lse + of_run, tl.where(total == 0, -float("inf"), largest + tl.log(total_or_one)))


@triton.jit
def _queries(plan: tl.constexpr, query, b, head):
    """Loads `(R, width)`, with zeros past the last row and feature."""
    row, feature = tl.arange(0, plan.rows), tl.arange(0, plan.width)
    token = b.to(tl.int64) * plan.queries + row % plan.queries
    heads = token * (plan.key_heads * plan.group) + head * plan.group + row // plan.queries
    there = (row < plan.group * plan.queries)[:, None] & (feature < plan.size)[None, :]
    return tl.load(query + heads[:, None] * plan.size + feature[None, :], mask=there, other=0.0)


@triton.jit
def _page(
    plan: tl.constexpr, pool, scales, which, present, head, size: tl.constexpr, width: tl.constexpr
):
    """Loads a page `(p, width)`, with zeros past the last token and feature."""
    token, feature = tl.arange(0, plan.page), tl.arange(0, width)
    of_token = (which.to(tl.int64) * plan.page + token) * plan.key_heads + head
    there = present[:, None] & (feature < size)[None, :]
    entries = tl.load(pool + of_token[:, None] * size + feature[None, :], mask=there, other=0)
    if scales is not None:
        scale = tl.load(scales + of_token, mask=present, other=0.0)
        entries = entries.to(tl.float32) * scale[:, None]
    return entries
