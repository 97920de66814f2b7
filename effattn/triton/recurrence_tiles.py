"""Linear recurrence in the Triton language: decays, and tiles of tokens and of states.

Shapes are those of `effattn.triton.recurrence_kernels`: b, n and v are the numbers of an example, a
block and a value head, f of a tile of features, and d of a tile of values.
"""

import triton
import triton.language as tl

C = tl.constexpr(64)  # tokens of a block, as `effattn.pallas.recurrence.BLOCK`
LEVELS = tl.constexpr(6)  # log2(C)


# Decays. The decay from one token to another is the exponential of the sum of the log decays
# between them, by a sum of masked log decays or a running sum, never by a difference.


@triton.jit
def load_log_decays(plan: tl.constexpr, array, b, n, v, f):
    """Log decays `(C, f)` of a block, or `(C, 1)` with one for a token; 0 past the last token."""
    if plan.decay == "feature":
        rows = load_rows(plan, array, b, n, plan.value_heads, v, plan.features, f, plan.tile_f)
    else:
        rows = load_rows(plan, array, b, n, plan.value_heads, v, 1, 0, 1)
    return rows.to(tl.float32)


@triton.jit
def _next_log_decays(plan: tl.constexpr, array, b, n, v, f):
    """Log decays of the token after each token of a block; 0 for the last token of the block."""
    row = tl.arange(0, C) + 1
    if plan.decay == "feature":
        place = _pointers(plan, array, b, n, plan.value_heads, v, plan.features, f, plan.tile_f)
        place += plan.value_heads * plan.features
        there = _is_there(plan, n, row, plan.features, f, plan.tile_f)
    else:
        place = _pointers(plan, array, b, n, plan.value_heads, v, 1, 0, 1) + plan.value_heads
        there = _is_there(plan, n, row, 1, 0, 1)
    return tl.load(place, mask=there & (row < C)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_log_decays(plan: tl.constexpr, array, log_decay, b, n, h, f, found):
    """Stores gradients of log decays, `(C, f)` or `(C, 1)`; 0 where the log decay is -inf."""
    logs = load_log_decays(plan, log_decay, b, n, h // plan.group, f)
    found = tl.where(logs == float("-inf"), 0.0, found)
    if plan.decay == "feature":
        store_rows(plan, array, b, n, plan.heads, h, plan.features, f, plan.tile_f, found)
    else:
        store_rows(plan, array, b, n, plan.heads, h, 1, 0, 1, found)


@triton.jit
def since_start(plan: tl.constexpr, array, b, n, v, f, rows):
    """Multiplies row i by the exponential of the sum of the log decays of tokens 0 to i."""
    if plan.decay == "none":
        return rows
    else:
        return rows * tl.exp(tl.cumsum(load_log_decays(plan, array, b, n, v, f), 0))


@triton.jit
def until_end(plan: tl.constexpr, array, b, n, v, f, rows):
    """Multiplies row i by the exponential of the sum of the log decays of tokens i + 1 to C - 1."""
    if plan.decay == "none":
        return rows
    else:
        later = tl.cumsum(_next_log_decays(plan, array, b, n, v, f), 0, reverse=True)
        return rows.to(tl.float32) * tl.exp(later)


@triton.jit
def over_block(plan: tl.constexpr, array, b, n, v, f, state):
    """Returns the rest of a state after the decays of a whole block."""
    if plan.decay == "none":
        return state
    else:
        return state * tl.exp(tl.sum(load_log_decays(plan, array, b, n, v, f), 0))[:, None]


@triton.jit
def decayed(plan: tl.constexpr, array, b, n, v, weights):
    """Multiplies weights `(C, C)` by the decays from tokens j (columns) to tokens i (rows).

    The result is zero where j > i.
    """
    row = tl.arange(0, C)
    if plan.decay != "none":
        logs = load_log_decays(plan, array, b, n, v, 0)
        later = tl.where(row[:, None] > row[None, :], logs, 0.0)
        weights = weights * tl.exp(tl.cumsum(later, 0))
    return tl.where(row[:, None] >= row[None, :], weights, 0.0)


@triton.jit
def decays_of_level(level, since, until):
    """Returns the decays `(C, f)` of the tokens, and a mask `(C, C)` of the pairs of a level.

    In groups of two halves of 2^level tokens, its pairs are a query in the second half of a group
    and a key in the first.
    """
    row = tl.arange(0, C)
    both, second = row >> (level + 1), ((row >> level) & 1) == 1
    pairs = (both[:, None] == both[None, :]) & second[:, None] & (second == 0)[None, :]
    return tl.exp(tl.where(second[:, None], since, until)), pairs


@triton.jit
def doubled(level, since, until):
    """Sums of log decays `(C, f)` for halves of twice 2^level tokens.

    `since` sums from the start of a half to each token, including the token's own log decay, and
    `until` from each token, without its own, to the end of the half.
    """
    row = tl.arange(0, C)[:, None]
    # `since` at the last token of a half is the sum over that half.
    last_of_other = ((row >> level) ^ 1) << level | ((1 << level) - 1)
    of_other = tl.gather(since, tl.broadcast_to(last_of_other, since.shape), 0)
    second = ((row >> level) & 1) == 1
    return since + tl.where(second, of_other, 0.0), until + tl.where(second, 0.0, of_other)


# Tiles of tokens, in the dtype of the array, with zeros past the last token, feature or value.


@triton.jit
def load_queries(plan: tl.constexpr, array, scale, b, n, h, f):
    """Queries with their scale, in float32."""
    return load_given_queries(plan, array, b, n, h, f).to(tl.float32) * load_scale(scale, b)


@triton.jit
def load_scale(scale, b):
    """The scale of the queries of an example; 1 if there is none."""
    if scale is None:
        return 1.0
    else:
        return tl.load(scale + b)


@triton.jit
def load_given_queries(plan: tl.constexpr, array, b, n, h, f):
    """Queries `(C, f)` of a block, for head h of the output, without their scale."""
    h = h // (plan.heads // plan.query_heads)
    return load_rows(plan, array, b, n, plan.query_heads, h, plan.features, f, plan.tile_f)


@triton.jit
def load_keys(plan: tl.constexpr, array, b, n, v, f):
    """Keys `(C, f)` of a block for a value head."""
    k = v // (plan.value_heads // plan.key_heads)
    return load_rows(plan, array, b, n, plan.key_heads, k, plan.features, f, plan.tile_f)


@triton.jit
def load_values(plan: tl.constexpr, array, b, n, v, d):
    """Values `(C, d)` of a block."""
    return load_rows(plan, array, b, n, plan.value_heads, v, plan.values, d, plan.tile_d)


@triton.jit
def load_outputs(plan: tl.constexpr, array, b, n, h, d):
    """Outputs `(C, d)` of a block, or their gradients, for head h of the output."""
    return load_rows(plan, array, b, n, plan.heads, h, plan.values, d, plan.tile_d)


@triton.jit
def load_rows(
    plan: tl.constexpr, array, b, n, heads: tl.constexpr, h, size: tl.constexpr, i,
    width: tl.constexpr,
):  # fmt: skip
    """Loads `(C, width)` of block n of a head from `(B, T, heads, size)`."""
    place = _pointers(plan, array, b, n, heads, h, size, i, width)
    there = _is_there(plan, n, tl.arange(0, C), size, i, width)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def store_rows(
    plan: tl.constexpr, array, b, n, heads: tl.constexpr, h, size: tl.constexpr, i,
    width: tl.constexpr, x,
):  # fmt: skip
    """Stores `(C, width)` of block n of a head in `(B, T, heads, size)`."""
    place = _pointers(plan, array, b, n, heads, h, size, i, width)
    there = _is_there(plan, n, tl.arange(0, C), size, i, width)
    tl.store(place, x.to(array.dtype.element_ty), mask=there)


@triton.jit
def _pointers(
    plan: tl.constexpr, array, b, n, heads: tl.constexpr, h, size: tl.constexpr, i,
    width: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, C), i * width + tl.arange(0, width)
    first = array + ((b.to(tl.int64) * plan.length + n * C) * heads + h) * size
    return first + row[:, None] * (heads * size) + column[None, :]


@triton.jit
def _is_there(plan: tl.constexpr, n, row, size: tl.constexpr, i, width: tl.constexpr):
    column = i * width + tl.arange(0, width)
    return (n * C + row < plan.length)[:, None] & (column < size)[None, :]


@triton.jit
def load_chunk(array, at, size: tl.constexpr, i, width: tl.constexpr):
    """Loads `(C, width)` from `(..., C, size)`, with zeros past the last column."""
    row, column = tl.arange(0, C), i * width + tl.arange(0, width)
    place = array + at.to(tl.int64) * (C * size) + row[:, None] * size + column[None, :]
    return tl.load(place, mask=column[None, :] < size, other=0.0)


# States. The first and the last one, `(B, V, F, D)`, have no padding; saved states have.


@triton.jit
def saved_pointers(plan: tl.constexpr, array, b, v, n, f, d):
    """Pointers to a tile of the saved state of block n."""
    row, column = _of_tile(plan, f, d)
    return _of_states(plan, array, b, v, n) + row[:, None] * plan.whole_d + column[None, :]


@triton.jit
def save(pointers, state):
    """Saves a tile of a state in the dtype of saved states."""
    tl.store(pointers, state.to(pointers.dtype.element_ty))


@triton.jit
def _of_states(plan: tl.constexpr, array, b, v, n):
    at = (b * plan.value_heads + v).to(tl.int64) * plan.blocks + n
    return array + at * (plan.whole_f * plan.whole_d)


@triton.jit
def load_tile(plan: tl.constexpr, array, b, v, f, d):
    """A tile of the first or the last state."""
    row, column = _of_tile(plan, f, d)
    place, there = _of_whole(plan, array, b, v, row, column)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def store_tile(plan: tl.constexpr, array, b, v, f, d, state):
    """Stores a tile of the first or the last state."""
    row, column = _of_tile(plan, f, d)
    place, there = _of_whole(plan, array, b, v, row, column)
    tl.store(place, state, mask=there)


@triton.jit
def load_tiles(plan: tl.constexpr, array, b, v, d):
    """All tiles of these values, in a tuple."""
    state = ()
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        state += (load_tile(plan, array, b, v, f, d),)  # type: ignore[assignment]
    return state


@triton.jit
def store_tiles(plan: tl.constexpr, array, b, v, d, state):
    """Stores all tiles of these values."""
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        store_tile(plan, array, b, v, f, d, state[f])


@triton.jit
def save_tiles(plan: tl.constexpr, array, b, v, n, d, state):
    """Saves all tiles of these values as the state of block n."""
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        save(saved_pointers(plan, array, b, v, n, f, d), state[f])


@triton.jit
def _of_tile(plan: tl.constexpr, f, d):
    return f * plan.tile_f + tl.arange(0, plan.tile_f), d * plan.tile_d + tl.arange(0, plan.tile_d)


@triton.jit
def _of_whole(plan: tl.constexpr, array, b, v, row, column):
    first = array + (b * plan.value_heads + v).to(tl.int64) * (plan.features * plan.values)
    there = (row < plan.features)[:, None] & (column < plan.values)[None, :]
    return first + row[:, None] * plan.values + column[None, :], there


@triton.jit
def dot(plan: tl.constexpr, left, right):
    """A product with float32 sums on tensor cores; factors of two dtypes are cast to float32."""
    if left.dtype != right.dtype:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=plan.precision)
