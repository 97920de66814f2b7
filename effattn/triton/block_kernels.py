"""Block attention in the Triton language: kernels.

- `forward`: a program has one query tile of one head and walks over key tiles with an online
  softmax. The output `(t, Hv)`, the largest logit and the sum of weights stay in registers.
- `d_query`: the same walk; the weights are computed again from the log-sum-exp.
- `d_key_value`: a program has one key tile of one key head and walks over the query tiles of all
  query heads of that key head. Its tiles are transposed, `(s, t)`, so that every product reads its
  operands in the order in which they are stored.

Every sum belongs to one program (no atomics), so results are deterministic bit for bit. Arrays are
contiguous, in the shapes of `effattn.pallas.block_tiles.Arrays`; absent ones are never read. The
first entry of a tile is an offset of 64 bits, so arrays may have any size.

In a walk, whole tiles need no mask. With a block-sparse layout, a whole tile leaves out only the
pattern's rule for pairs (`partial` is False). Causality, windows, documents, masks and lengths
still apply (`masks` is True, as `plan.masks_whole` says).
"""

import triton
import triton.language as tl

from effattn.triton.block_plan import Operands
from effattn.triton.mathematics import tanh

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that no row computes inf - inf


@triton.jit
def _named(given):
    """Returns the operands by name, in the order of `Operands`: jax-triton passes plain tuples."""
    return Operands(
        given[0],
        given[1],
        given[2],
        given[3],
        given[4],
        given[5],
        given[6],
        given[7],
        given[8],
        given[9],
        given[10],
        given[11],
        given[12],
        given[13],
        given[14],
        given[15],
        given[16],
        given[17],
    )


@triton.jit
def forward(given, out, lse, lse_error, plan: tl.constexpr):
    """Computes the output, the log-sum-exp and its rounding error. Grid: heads, query tiles."""
    x = _named(given)
    b, h = tl.program_id(0) // plan.heads, tl.program_id(0) % plan.heads
    k = h // plan.group
    n = _own_tile(x, plan, b, k)
    query = _queries(plan, x.query, b, n, h, plan.size, plan.width)
    largest, total = tl.full((plan.t,), LOWEST, tl.float32), tl.zeros((plan.t,), tl.float32)
    mixed = tl.zeros((plan.t, plan.value_width), tl.float32)
    masked, whole, low, first = _visits(x, plan, b, k, n)
    for step in range(whole):
        m = _whole_tile(x, plan, b, k, n, step, first)
        largest, total, mixed = _with_tile(
            x, plan, query, b, h, k, n, m, largest, total, mixed, plan.masks_whole, False
        )
    for step in range(masked):
        m = _masked_tile(x, plan, b, k, n, step, low, first, whole)
        largest, total, mixed = _with_tile(
            x, plan, query, b, h, k, n, m, largest, total, mixed, True, True
        )
    some = tl.where(total == 0, 1.0, total)
    sum_of = largest + tl.log(some)
    row = n * plan.t + tl.arange(0, plan.t)
    there, at = row < plan.queries, (b.to(tl.int64) * plan.queries + row) * plan.heads + h
    tl.store(lse + at, tl.where(total == 0, -float("inf"), sum_of), mask=there)
    tl.store(lse_error + at, tl.log(some) - (sum_of - largest), mask=there)
    mixed = mixed / some[:, None]
    _store(out, mixed, b, n, plan.t, plan.queries, plan.heads, h, plan.value_size, plan.value_width)


@triton.jit
def _with_tile(
    x, plan: tl.constexpr, query, b, h, k, n, m, largest, total, mixed,
    masks: tl.constexpr, partial: tl.constexpr,
):  # fmt: skip
    """The state of the online softmax after one more key tile."""
    key = _keys(plan, x.key, b, m, k, plan.size, plan.width)
    value = _keys(plan, x.value, b, m, k, plan.value_size, plan.value_width)
    i, j = _positions(x, plan, b, n, m, False)
    logits, _ = _scored(x, plan, _dot(plan, query, tl.trans(key)), b, h, n, m, i, j, False)
    logits = _masked(x, plan, logits, b, h, n, m, i, j, masks, partial, False)
    new = tl.maximum(largest, tl.max(logits, 1))
    weights, kept = tl.exp(logits - new[:, None]), tl.exp(largest - new)
    dropped = _dropped(x, plan, weights, b, h, i, j).to(value.dtype)
    mixed = mixed * kept[:, None] + _dot(plan, dropped, value)
    return new, total * kept + tl.sum(weights, 1), mixed


# Gradients. With P = exp(logits - lse), that of the logits is P * (dropout(dO V^T) - delta), where
# delta = rowsum(dO * O) minus the gradient of the log-sum-exp.


@triton.jit
def d_query(given, lse, d_out, delta, gradient, d_scale, d_numbers, plan: tl.constexpr):
    """Computes the gradient of the queries. Grid: heads, query tiles.

    `d_scale` `(B, T, N)` has the parts of the gradient of the scale, if it is an array, and
    `d_numbers` `(B, query tiles, N, entries)` those of the tables of the score_mod. Otherwise
    nothing writes them.
    """
    x = _named(given)
    b, h = tl.program_id(0) // plan.heads, tl.program_id(0) % plan.heads
    k = h // plan.group
    n = _own_tile(x, plan, b, k)
    query = _queries(plan, x.query, b, n, h, plan.size, plan.width)
    d_rows = _queries(plan, d_out, b, n, h, plan.value_size, plan.value_width)
    total = tl.zeros((plan.t, plan.width), tl.float32)
    of_scale = tl.zeros((plan.t,), tl.float32)
    of_numbers = tl.zeros((plan.entries,), tl.float32)
    masked, whole, low, first = _visits(x, plan, b, k, n)
    for step in range(whole):
        m = _whole_tile(x, plan, b, k, n, step, first)
        total, of_scale, of_numbers = _d_query_of(
            x, plan, query, d_rows, lse, delta, b, h, k, n, m, total, of_scale, of_numbers,
            plan.masks_whole, False,
        )  # fmt: skip
    for step in range(masked):
        m = _masked_tile(x, plan, b, k, n, step, low, first, whole)
        total, of_scale, of_numbers = _d_query_of(
            x, plan, query, d_rows, lse, delta, b, h, k, n, m, total, of_scale, of_numbers,
            True, True,
        )  # fmt: skip
    total = total * _scale(x, plan)
    _store(gradient, total, b, n, plan.t, plan.queries, plan.heads, h, plan.size, plan.width)
    if plan.scale is None:
        row = n * plan.t + tl.arange(0, plan.t)
        at = (b.to(tl.int64) * plan.queries + row) * plan.heads + h
        tl.store(d_scale + at, of_scale, mask=row < plan.queries)
    if plan.add_reads is not None:
        at = ((b * plan.query_tiles + n).to(tl.int64) * plan.heads + h) * plan.entries
        tl.store(d_numbers + at + tl.arange(0, plan.entries), of_numbers)


@triton.jit
def _d_query_of(
    x, plan: tl.constexpr, query, d_rows, lse, delta, b, h, k, n, m, total, of_scale, of_numbers,
    masks: tl.constexpr, partial: tl.constexpr,
):  # fmt: skip
    """Adds the parts of the gradients from one key tile; `total` lacks the scale."""
    key = _keys(plan, x.key, b, m, k, plan.size, plan.width)
    value = _keys(plan, x.value, b, m, k, plan.value_size, plan.value_width)
    products, d_weights = _dot(plan, query, tl.trans(key)), _dot(plan, d_rows, tl.trans(value))
    _, d_logits, d_scaled = _pulled_back(
        x, plan, products, d_weights, lse, delta, b, h, n, m, masks, partial, False
    )
    total += _dot(plan, d_scaled.to(key.dtype), key)
    if plan.scale is None:
        of_scale += tl.sum(d_scaled * products, 1)
    if plan.add_reads is not None:
        i, j = _positions(x, plan, b, n, m, False)
        logits = _before_score(x, plan, products, b, h, n, m, False)[0]
        of_numbers = plan.add_reads(
            x.integers, x.numbers, of_numbers, d_logits, logits, b % plan.examples, h, i, j
        )  # fmt: skip
    return total, of_scale, of_numbers


@triton.jit
def d_key_value(given, lse, d_out, delta, d_key, d_value, plan: tl.constexpr):
    """Computes the gradients of keys and values. Grid: key heads, key tiles."""
    x = _named(given)
    b, k = tl.program_id(0) // plan.key_heads, tl.program_id(0) % plan.key_heads
    m = _own_tile(x, plan, b, k)
    key = _keys(plan, x.key, b, m, k, plan.size, plan.width)
    value = _keys(plan, x.value, b, m, k, plan.value_size, plan.value_width)
    of_key = tl.zeros((plan.s, plan.width), tl.float32)
    of_value = tl.zeros((plan.s, plan.value_width), tl.float32)
    masked, whole, low, first = _visits(x, plan, b, k, m)
    for g in range(plan.group):
        h = k * plan.group + g
        for step in range(whole):
            n = _whole_tile(x, plan, b, k, m, step, first)
            of_key, of_value = _d_key_of(
                x, plan, key, value, lse, d_out, delta, b, h, n, m, of_key, of_value,
                plan.masks_whole, False,
            )  # fmt: skip
        for step in range(masked):
            n = _masked_tile(x, plan, b, k, m, step, low, first, whole)
            of_key, of_value = _d_key_of(
                x, plan, key, value, lse, d_out, delta, b, h, n, m, of_key, of_value, True, True
            )
    _store(d_key, of_key, b, m, plan.s, plan.keys, plan.key_heads, k, plan.size, plan.width)
    _store(
        d_value, of_value, b, m, plan.s, plan.keys, plan.key_heads, k,
        plan.value_size, plan.value_width,
    )  # fmt: skip


@triton.jit
def _d_key_of(
    x, plan: tl.constexpr, key, value, lse, d_out, delta, b, h, n, m, of_key, of_value,
    masks: tl.constexpr, partial: tl.constexpr,
):  # fmt: skip
    """Adds the parts of the gradients from one query tile."""
    query = _queries(plan, x.query, b, n, h, plan.size, plan.width)
    d_rows = _queries(plan, d_out, b, n, h, plan.value_size, plan.value_width)
    products, d_weights = _dot(plan, key, tl.trans(query)), _dot(plan, value, tl.trans(d_rows))
    weights, _, d_scaled = _pulled_back(
        x, plan, products, d_weights, lse, delta, b, h, n, m, masks, partial, True
    )
    of_value += _dot(plan, weights.to(d_rows.dtype), d_rows)
    of_key += _dot(plan, (d_scaled * _scale(x, plan)).to(query.dtype), query)
    return of_key, of_value


@triton.jit
def d_bias(given, kinds, lse, d_out, delta, gradient, plan: tl.constexpr):
    """Computes the gradient of the bias, in its shape. Grid: examples and tiles, heads of the bias.

    A program sums over the axes along which the bias is broadcast, so a bias for all examples and
    heads needs no array of each. `kinds` `(B or 1, K or 1, ...)` has 0 for the tiles of a layout
    that are skipped, 1 for partial and 2 for full ones.
    """
    x = _named(given)
    own_m, rest = tl.program_id(0) % plan.bias_key_tiles, tl.program_id(0) // plan.bias_key_tiles
    own_n, own_b = rest % plan.bias_query_tiles, rest // plan.bias_query_tiles
    own_h = tl.program_id(1)
    total = tl.zeros((plan.t, plan.s), tl.float32)
    for step in range(plan.bias_steps):
        m, rest = own_m + step % plan.steps_m, step // plan.steps_m
        n, rest = own_n + rest % plan.steps_n, rest // plan.steps_n
        h, b = own_h + rest % plan.steps_h, own_b + rest // plan.steps_h
        total += _d_bias_of(x, plan, kinds, lse, d_out, delta, b, h, n, m)
    row, column = own_n * plan.t + tl.arange(0, plan.t), own_m * plan.s + tl.arange(0, plan.s)
    place = gradient + own_b.to(tl.int64) * plan.bias_b + own_h.to(tl.int64) * plan.bias_h
    if plan.bias_i == 0:
        sums = tl.sum(total, 0)
        if plan.bias_j == 0:
            tl.store(place, tl.sum(sums, 0))
        else:
            tl.store(place + column, sums, mask=column < plan.keys)
    else:
        place += row.to(tl.int64) * plan.bias_i
        if plan.bias_j == 0:
            tl.store(place, tl.sum(total, 1), mask=row < plan.queries)
        else:
            there = (row < plan.queries)[:, None] & (column < plan.keys)[None, :]
            tl.store(place[:, None] + column[None, :], total, mask=there)


@triton.jit
def _d_bias_of(x, plan: tl.constexpr, kinds, lse, d_out, delta, b, h, n, m):
    k = h // plan.group
    query = _queries(plan, x.query, b, n, h, plan.size, plan.width)
    d_rows = _queries(plan, d_out, b, n, h, plan.value_size, plan.value_width)
    key = _keys(plan, x.key, b, m, k, plan.size, plan.width)
    value = _keys(plan, x.value, b, m, k, plan.value_size, plan.value_width)
    products, d_weights = _dot(plan, query, tl.trans(key)), _dot(plan, d_rows, tl.trans(value))
    found = _pulled_back(
        x, plan, products, d_weights, lse, delta, b, h, n, m, True, True, False
    )[2]  # fmt: skip
    if plan.has_layout:
        row, column = n // plan.layout_rows, m // plan.layout_columns
        at = (_walk_example(plan, b, k) * plan.walk_rows + row) * plan.kind_columns + column
        kind = tl.load(kinds + at)
        if plan.pattern is not None:
            whole = _pulled_back(
                x, plan, products, d_weights, lse, delta, b, h, n, m, True, False, False
            )[2]  # fmt: skip
            found = tl.where(kind == 2, whole, found)
        found = tl.where(kind == 0, 0.0, found)
    return found


@triton.jit
def _pulled_back(
    x, plan: tl.constexpr, products, d_weights, lse, delta, b, h, n, m,
    masks: tl.constexpr, partial: tl.constexpr, transposed: tl.constexpr,
):  # fmt: skip
    """Returns the weights after dropout, and the gradients of the logits and scaled products.

    All are `(t, s)`, or `(s, t)` if transposed. `d_weights` is dO V^T.
    """
    i, j = _positions(x, plan, b, n, m, transposed)
    logits, slope = _scored(x, plan, products, b, h, n, m, i, j, transposed)
    logits = _masked(x, plan, logits, b, h, n, m, i, j, masks, partial, transposed)
    if plan.score is not None:
        # A score_mod may be NaN at padding, or have an infinite slope where nothing is attended to.
        logits = tl.where(_within(plan, n, m, transposed), logits, -float("inf"))
        slope = tl.where(logits == -float("inf"), 0.0, slope)
    row = n * plan.t + tl.arange(0, plan.t)
    there, at = row < plan.queries, (b.to(tl.int64) * plan.queries + row) * plan.heads + h
    # Rows of padding get weights of 0.
    sums = _down(tl.load(lse + at, mask=there, other=float("inf")), transposed)
    weights = tl.exp(logits - sums)
    d_sums = _down(tl.load(delta + at, mask=there, other=0.0), transposed)
    d_logits = weights * (_dropped(x, plan, d_weights, b, h, i, j) - d_sums)
    return _dropped(x, plan, weights, b, h, i, j), d_logits, d_logits * slope


# The tiles that a tile visits: key tiles for a query tile, or in `d_key_value` the other way round


@triton.jit
def _own_tile(x, plan: tl.constexpr, b, k):
    """Returns the tile of a program: those that visit the most tiles start first, in all heads."""
    tiles = tl.num_programs(1)
    return tl.load(x.order + _walk_example(plan, b, k) * tiles + tl.program_id(1))


@triton.jit
def _visits(x, plan: tl.constexpr, b, k, n):
    """Returns the numbers of masked and whole tiles, the first tile and the first whole tile.

    With a layout, nothing reads the last two.
    """
    at = _walk_row(plan, b, k, n)
    if plan.has_layout:
        masked = tl.load(x.partial_counts + at) * plan.layout_columns
        whole = tl.load(x.full_counts + at) * plan.layout_columns
        return masked, whole, masked, whole
    else:
        low, high = tl.load(x.partial_counts + at * 4), tl.load(x.partial_counts + at * 4 + 1)
        first, stop = tl.load(x.partial_counts + at * 4 + 2), tl.load(x.partial_counts + at * 4 + 3)
        return high - low - (stop - first), stop - first, low, first


@triton.jit
def _masked_tile(x, plan: tl.constexpr, b, k, n, step, low, first, whole):
    if plan.has_layout:
        return _listed(plan, x.partial_tiles, b, k, n, plan.partial_columns, step)
    else:
        return tl.where(low + step < first, low + step, low + step + whole)


@triton.jit
def _whole_tile(x, plan: tl.constexpr, b, k, n, step, first):
    if plan.has_layout:
        return _listed(plan, x.full_tiles, b, k, n, plan.full_columns, step)
    else:
        return first + step


@triton.jit
def _walk_row(plan: tl.constexpr, b, k, n):
    """Row of the lists of tiles; one tile of a layout covers several tiles of the kernel."""
    return _walk_example(plan, b, k) * plan.walk_rows + n // plan.layout_rows


@triton.jit
def _walk_example(plan: tl.constexpr, b, k):
    """Number of the example and head in the lists, which may be those of all examples or heads."""
    if plan.walk_by_head:
        head = k
    else:
        head = 0
    if plan.walk_by_example:
        return b * plan.walk_heads + head
    else:
        return head


@triton.jit
def _listed(plan: tl.constexpr, tiles, b, k, n, length: tl.constexpr, step):
    place = tiles + _walk_row(plan, b, k, n).to(tl.int64) * length + step // plan.layout_columns
    return tl.load(place) * plan.layout_columns + step % plan.layout_columns


# Logits and masks of a tile. i are positions of queries, and j of keys.


@triton.jit
def _positions(x, plan: tl.constexpr, b, n, m, transposed: tl.constexpr):
    row, column = n * plan.t + tl.arange(0, plan.t), m * plan.s + tl.arange(0, plan.s)
    if plan.has_query_positions:
        i = tl.load(
            x.query_positions + b.to(tl.int64) * plan.queries + row,
            mask=row < plan.queries,
            other=0,
        )
    else:
        i = tl.load(x.offset + (b if plan.offset_by_example else 0)) + row
    if plan.has_key_positions:
        j = tl.load(
            x.key_positions + b.to(tl.int64) * plan.keys + column, mask=column < plan.keys, other=0
        )
    else:
        j = column
    return _down(i, transposed), _across(j, transposed)


@triton.jit
def _scored(x, plan: tl.constexpr, products, b, h, n, m, i, j, transposed: tl.constexpr):
    """Logits before any mask, and their derivatives by the scaled products."""
    logits, slope = _before_score(x, plan, products, b, h, n, m, transposed)
    if plan.score is not None:
        # Under `jax.vmap` the programs count the examples of all calls.
        example = b % plan.examples
        slope = slope * plan.d_score(x.integers, x.numbers, logits, example, h, i, j)
        scored = plan.score(x.integers, x.numbers, logits, example, h, i, j)
        logits = tl.zeros(products.shape, tl.float32) + scored  # which may differ by query alone
    return logits, slope


@triton.jit
def _before_score(x, plan: tl.constexpr, products, b, h, n, m, transposed: tl.constexpr):
    """The same without the score_mod."""
    logits, slope = products * _scale(x, plan), tl.full([], 1.0, tl.float32)
    if plan.has_bias:
        at = _pairs(
            plan, b, h, n, m, plan.bias_b, plan.bias_h, plan.bias_i, plan.bias_j, transposed
        )
        there = _within(plan, n, m, transposed)
        logits += tl.load(x.bias + at, mask=there, other=0.0).to(tl.float32)
    if plan.soft_cap is not None:
        bounded = tanh(logits / plan.soft_cap)
        logits, slope = plan.soft_cap * bounded, slope * (1 - bounded * bounded)
    return logits, slope


@triton.jit
def _scale(x, plan: tl.constexpr):
    if plan.scale is None:
        return tl.load(x.scale)
    else:
        return tl.full([], plan.scale, tl.float32)


@triton.jit
def _masked(
    x, plan: tl.constexpr, logits, b, h, n, m, i, j,
    masks: tl.constexpr, partial: tl.constexpr, transposed: tl.constexpr,
):  # fmt: skip
    """Logits with -inf for pairs that may not attend."""
    row, column = n * plan.t + tl.arange(0, plan.t), m * plan.s + tl.arange(0, plan.s)
    if masks:
        if plan.right is not None:
            logits = tl.where(j <= i + plan.right, logits, -float("inf"))
        if plan.left is not None:
            logits = tl.where(j >= i - plan.left, logits, -float("inf"))
        if plan.has_key_ids:
            of_key = tl.load(
                x.key_ids + b.to(tl.int64) * plan.keys + column, mask=column < plan.keys, other=0
            )
            of_query = tl.full((plan.t,), 1, tl.int32)
            if plan.has_query_ids:
                place = x.query_ids + b.to(tl.int64) * plan.queries + row
                of_query = tl.load(place, mask=row < plan.queries, other=0)
            same = _across(of_key, transposed) == _down(of_query, transposed)
            logits = tl.where(same, logits, -float("inf"))
        if plan.has_mask:
            at = _pairs(
                plan, b, h, n, m, plan.mask_b, plan.mask_h, plan.mask_i, plan.mask_j, transposed
            )
            there = _within(plan, n, m, transposed)
            allowed = tl.load(x.mask + at, mask=there, other=0)
            logits = tl.where(allowed != 0, logits, -float("inf"))
        if plan.keys % plan.layout_keys:
            logits = tl.where(_across(column < plan.keys, transposed), logits, -float("inf"))
    if partial:
        if plan.pattern is not None:
            allowed = plan.pattern(x.integers, x.numbers, i, j, h)
            logits = tl.where(allowed, logits, -float("inf"))
    return logits


@triton.jit
def _dropped(x, plan: tl.constexpr, weights, b, h, i, j):
    """Weights after dropout. Dropout is linear: its pull-back is the same function."""
    if plan.keep is not None:
        kept = plan.keep(x.integers, x.numbers, b % plan.examples, h, i, j)
        return tl.where(kept, weights / (1 - plan.rate), 0.0)
    else:
        return weights


# Reads and writes. Loads give zeros past the last token and feature.


@triton.jit
def _queries(plan: tl.constexpr, array, b, n, h, size: tl.constexpr, width: tl.constexpr):
    return _load(array, b, n, plan.t, plan.queries, plan.heads, h, size, width)


@triton.jit
def _keys(plan: tl.constexpr, array, b, m, k, size: tl.constexpr, width: tl.constexpr):
    return _load(array, b, m, plan.s, plan.keys, plan.key_heads, k, size, width)


@triton.jit
def _load(
    array, b, n, rows: tl.constexpr, length: tl.constexpr, heads: tl.constexpr, h,
    size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, rows), tl.arange(0, width)
    first = array + ((b.to(tl.int64) * length + n * rows) * heads + h) * size
    place = first + row[:, None] * (heads * size) + column[None, :]
    there = (n * rows + row < length)[:, None] & (column < size)[None, :]
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _store(
    array, x, b, n, rows: tl.constexpr, length: tl.constexpr, heads: tl.constexpr, h,
    size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, rows), tl.arange(0, width)
    first = array + ((b.to(tl.int64) * length + n * rows) * heads + h) * size
    place = first + row[:, None] * (heads * size) + column[None, :]
    there = (n * rows + row < length)[:, None] & (column < size)[None, :]
    tl.store(place, x.to(array.dtype.element_ty), mask=there)


@triton.jit
def _pairs(
    plan: tl.constexpr, b, h, n, m, by_b: tl.constexpr, by_h: tl.constexpr, by_i: tl.constexpr,
    by_j: tl.constexpr, transposed: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile of an array of pairs, with strides of 0 along broadcast axes."""
    row, column = n * plan.t + tl.arange(0, plan.t), m * plan.s + tl.arange(0, plan.s)
    first = b.to(tl.int64) * by_b + h.to(tl.int64) * by_h
    return first + _down(row.to(tl.int64) * by_i, transposed) + _across(column * by_j, transposed)


@triton.jit
def _within(plan: tl.constexpr, n, m, transposed: tl.constexpr):
    row, column = n * plan.t + tl.arange(0, plan.t), m * plan.s + tl.arange(0, plan.s)
    return _down(row < plan.queries, transposed) & _across(column < plan.keys, transposed)


@triton.jit
def _down(x, transposed: tl.constexpr):
    """Numbers of queries `(t,)` as `(t, 1)`, or as `(1, t)` if the tile is transposed."""
    if transposed:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _across(x, transposed: tl.constexpr):
    """Numbers of keys `(s,)` as `(1, s)`, or as `(s, 1)` if the tile is transposed."""
    if transposed:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def _dot(plan: tl.constexpr, left, right):
    return tl.dot(left, right, input_precision=plan.precision)
