"""Linear recurrence in the Triton language: kernels.

The state is cut into tiles of at most 64 features by 64 values, and the sequence into blocks of
C = 64 tokens. There are no atomics, and the order of every sum is fixed. There are two kinds of
kernel:

- Walks go through the sequence block by block and save the state, or its gradient, between blocks.
  A program has one tile of the state in registers (`walk`, `walk_back`), or in the delta form all
  features of a few values (`correct`, `correct_back`), as a corrected value depends on all
  features of the state before.
- Kernels of blocks compute the output or a gradient of all blocks in parallel, from the saved
  states. A program computes one tile `(C, f)` or `(C, d)` of its result.

Without decay, or with one decay for a token, the weights of a block are one masked product. With
decays of features, the products decay inside the sum over features: a block is halved again and
again, down to single tokens, which gives six levels. Each pair of tokens is separated at one level.
The pairs of a level are one product of queries, decayed since the start of their half, with keys,
decayed until the end of their half. No exponent is a difference of sums.

Arrays are contiguous: queries `(B, T, N, F)`, keys `(B, T, K, F)`, values `(B, T, V, D)`, log
decays `(B, T, V)` or `(B, T, V, F)`, a scale of the queries `(B,)`, output and its gradient
`(B, T, heads, D)`, states `(B, V, n + 1, F', D')` with F' and D' whole tiles. The first token of a
tile is an offset of 64 bits, so arrays may have any size. The index f names a tile of features, and
d a tile of values.
"""

import triton
import triton.language as tl

C = tl.constexpr(64)  # tokens of a block, as `effattn.pallas.recurrence.BLOCK`
LEVELS = tl.constexpr(6)  # log2(C)


# Walks. Grid: examples, value heads, tiles of the state.


@triton.jit
def walk(key, value, log_decay, initial, states, plan: tl.constexpr):
    """Saves the state before each block and after the last block, from keys and values."""
    b, v, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    f, d = tile // plan.tiles_d, tile % plan.tiles_d
    state = _load_initial(plan, initial, b, v, f, d)
    tl.store(_state_pointers(plan, states, b, v, 0, f, d), state)
    for n in range(plan.blocks):
        # The state after the block: what is left of it, and what the tokens of the block write.
        keys = _until_end(plan, log_decay, b, n, v, f, _keys(plan, key, b, n, v, f))
        written = _dot(plan, tl.trans(keys), _values(plan, value, b, n, v, d))
        state = _over_block(plan, log_decay, b, n, v, f, state) + written
        tl.store(_state_pointers(plan, states, b, v, n + 1, f, d), state)


@triton.jit
def walk_back(query, scale, d_out, log_decay, last, co_states, plan: tl.constexpr):
    """Saves the gradients of the states that `walk` saves, from queries and output gradients."""
    b, v, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    f, d = tile // plan.tiles_d, tile % plan.tiles_d
    co_state = _load_initial(plan, last, b, v, f, d)
    tl.store(_state_pointers(plan, co_states, b, v, plan.blocks, f, d), co_state)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        co_state = _over_block(plan, log_decay, b, n, v, f, co_state)
        for g in range(plan.group):
            h = v * plan.group + g
            queries = _queries(plan, query, scale, b, n, h, f)
            queries = _since_start(plan, log_decay, b, n, v, f, queries)
            co_state += _dot(plan, tl.trans(queries), _outputs(plan, d_out, b, n, h, d))
        tl.store(_state_pointers(plan, co_states, b, v, n, f, d), co_state)


# Walks of the delta form, see `effattn.pallas.recurrence_delta`: X = value - recalled S and
# S' = kept S + key^T X. Grid: examples, value heads, slices of values.


@triton.jit
def correct(recalled, key, kept, value, initial, corrected, states, plan: tl.constexpr):
    """Writes corrected values `(B, V, n, C, D)`, and saves the states as `walk` does."""
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = _load_slice(plan, initial, b, v, d)
    _store_slice(plan, states, b, v, 0, d, state)
    for n in range(plan.blocks):
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
        _store_slice(plan, states, b, v, n + 1, d, state)


@triton.jit
def correct_back(
    recalled, key, kept, query, value, d_out, last, corrected, co_states, plan: tl.constexpr
):
    """Writes gradients of corrected values, and saves those of the states, backwards.

    The gradient of the state before a block also gets query^T d_out.
    """
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = _load_slice(plan, last, b, v, d)
    _store_slice(plan, co_states, b, v, plan.blocks, d, state)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
        for g in range(plan.group):
            at = ((b * plan.value_heads + v) * plan.blocks + n) * plan.group + g
            queries = _chunk(query, at, plan.features, 0, plan.all_f)
            d_read = _chunk(d_out, at, plan.values, d, plan.narrow)
            state += _dot(plan, tl.trans(queries), d_read)
        _store_slice(plan, co_states, b, v, n, d, state)


@triton.jit
def _corrected(plan: tl.constexpr, recalled, key, kept, value, corrected, b, v, n, d, state):
    """Writes the corrected values of a block; returns the state after it."""
    at = (b * plan.value_heads + v) * plan.blocks + n
    recalls = _chunk(recalled, at, plan.features, 0, plan.all_f)
    found = _chunk(value, at, plan.values, d, plan.narrow) - _dot(plan, recalls, state)
    row, column = tl.arange(0, C), d * plan.narrow + tl.arange(0, plan.narrow)
    place = corrected + at.to(tl.int64) * (C * plan.values)
    place += row[:, None] * plan.values + column[None, :]
    tl.store(place, found, mask=column[None, :] < plan.values)
    if plan.kept_features == 1:
        left = state * tl.load(kept + at)
    else:
        feature = tl.arange(0, plan.all_f)
        place = kept + at.to(tl.int64) * plan.features + feature
        left = state * tl.load(place, mask=feature < plan.features, other=0.0)[:, None]
    keys = _chunk(key, at, plan.features, 0, plan.all_f)
    return left + _dot(plan, tl.trans(keys), found)


# Kernels of blocks. Grid: examples times blocks, heads, tiles.


@triton.jit
def read(query, scale, key, value, log_decay, states, out, plan: tl.constexpr):
    """Computes the output."""
    b, n, h, d = _place(plan)
    v = h // plan.group
    weights = _weights(plan, query, scale, key, log_decay, b, n, v, h)
    total = _dot(plan, weights, _values(plan, value, b, n, v, d))
    for f in range(plan.tiles_f):
        queries = _queries(plan, query, scale, b, n, h, f)
        queries = _since_start(plan, log_decay, b, n, v, f, queries)
        total += _dot(plan, queries, tl.load(_state_pointers(plan, states, b, v, n, f, d)))
    _store_rows(plan, out, b, n, plan.heads, h, plan.values, d, plan.tile_d, total)


@triton.jit
def d_query(d_out, query, scale, key, value, log_decay, states, gradient, plan: tl.constexpr):
    """Computes gradients of the queries; with decays, without each query's own token."""
    b, n, h, f = _place(plan)
    v = h // plan.group
    total = tl.zeros((C, plan.tile_f), tl.float32)
    for d in range(plan.tiles_d):
        state = tl.load(_state_pointers(plan, states, b, v, n, f, d))
        total += _dot(plan, _outputs(plan, d_out, b, n, h, d), tl.trans(state))
    total = _since_start(plan, log_decay, b, n, v, f, total)
    d_weights = _d_weights(plan, d_out, value, b, n, v, h)
    keys = _keys(plan, key, b, n, v, f)
    total += _mixed(plan, log_decay, b, n, v, f, d_weights, keys, back=False)
    _store_rows(plan, gradient, b, n, plan.heads, h, plan.features, f, plan.tile_f, total)


@triton.jit
def d_key(d_out, query, scale, key, value, log_decay, co_states, gradient, plan: tl.constexpr):
    """Computes gradients of the keys; with decays, without the query of the same token."""
    b, n, v, f = _place(plan)
    total = tl.zeros((C, plan.tile_f), tl.float32)
    for d in range(plan.tiles_d):
        state = tl.load(_state_pointers(plan, co_states, b, v, n + 1, f, d))
        total += _dot(plan, _values(plan, value, b, n, v, d), tl.trans(state))
    total = _until_end(plan, log_decay, b, n, v, f, total)
    for g in range(plan.group):
        h, n = v * plan.group + g, _not_before_the_loop(n, g)
        d_weights = _d_weights(plan, d_out, value, b, n, v, h)
        queries = _queries(plan, query, scale, b, n, h, f)
        total += _mixed(plan, log_decay, b, n, v, f, d_weights, queries, back=True)
    _store_rows(plan, gradient, b, n, plan.value_heads, v, plan.features, f, plan.tile_f, total)


@triton.jit
def d_value(d_out, query, scale, key, value, log_decay, co_states, gradient, plan: tl.constexpr):
    """Computes gradients of the values."""
    b, n, v, d = _place(plan)
    total = tl.zeros((C, plan.tile_d), tl.float32)
    for f in range(plan.tiles_f):
        keys = _until_end(plan, log_decay, b, n, v, f, _keys(plan, key, b, n, v, f))
        total += _dot(plan, keys, tl.load(_state_pointers(plan, co_states, b, v, n + 1, f, d)))
    for g in range(plan.group):
        h, n = v * plan.group + g, _not_before_the_loop(n, g)
        weights = _weights(plan, query, scale, key, log_decay, b, n, v, h)
        total += _dot(plan, tl.trans(weights), _outputs(plan, d_out, b, n, h, d))
    _store_rows(plan, gradient, b, n, plan.value_heads, v, plan.values, d, plan.tile_d, total)


@triton.jit
def _not_before_the_loop(n, g):
    """Returns n, made to depend on g so that the compiler computes decays within the loop over g.

    Decays of all levels, computed once before the loop, would not fit in registers.
    """
    return n + tl.minimum(g, 0)


@triton.jit
def _place(plan: tl.constexpr):
    """Example, block, head and tile of a program."""
    at = tl.program_id(0)
    return at // plan.blocks, at % plan.blocks, tl.program_id(1), tl.program_id(2)


# Weights `(C, C)` of each query with the keys of its block up to its own token, their gradients,
# and sums of rows with such weights.


@triton.jit
def _weights(plan: tl.constexpr, query, scale, key, log_decay, b, n, v, h):
    row = tl.arange(0, C)
    total = tl.zeros((C, C), tl.float32)
    for f in range(plan.tiles_f):
        if plan.decay == "feature":
            queries = _queries(plan, query, scale, b, n, h, f)
            keys = _keys(plan, key, b, n, v, f).to(tl.float32)
            own = tl.sum(queries * keys, 1)
            total += tl.where(row[:, None] == row[None, :], own[:, None], 0.0)
            logs = _log_decays(plan, log_decay, b, n, v, f)
            since, until = logs, tl.zeros_like(logs)
            for level in tl.static_range(LEVELS):
                decay, pairs = _level(level, since, until)
                products = _dot(plan, queries * decay, tl.trans(keys * decay))
                total += tl.where(pairs, products, 0.0)
                since, until = _doubled(level, logs, since, until)
        else:
            queries = _given_queries(plan, query, b, n, h, f)
            total += _dot(plan, queries, tl.trans(_keys(plan, key, b, n, v, f)))
    if plan.decay != "feature":
        total = total * _scale(scale, b) * _decays(plan, log_decay, b, n, v)
    return total


@triton.jit
def _d_weights(plan: tl.constexpr, d_out, value, b, n, v, h):
    """With decays, the diagonal (each query with its own token) is zero."""
    row = tl.arange(0, C)
    total = tl.zeros((C, C), tl.float32)
    for d in range(plan.tiles_d):
        values = _values(plan, value, b, n, v, d)
        total += _dot(plan, _outputs(plan, d_out, b, n, h, d), tl.trans(values))
    if plan.decay != "none":
        total = tl.where(row[:, None] == row[None, :], 0.0, total)
    return total


@triton.jit
def _mixed(plan: tl.constexpr, log_decay, b, n, v, f, weights, rows, back: tl.constexpr):
    """Sums `(C, f)` of the rows up to each token, or from each token on if `back`.

    Their weights are decayed. With decays of features, a token's own row is left out.
    """
    if plan.decay == "feature":
        total = tl.zeros((C, plan.tile_f), tl.float32)
        logs = _log_decays(plan, log_decay, b, n, v, f)
        since, until = logs, tl.zeros_like(logs)
        for level in tl.static_range(LEVELS):
            decay, pairs = _level(level, since, until)
            chosen = tl.where(pairs, weights, 0.0)
            total += decay * _weighted(plan, chosen, rows.to(tl.float32) * decay, back)
            since, until = _doubled(level, logs, since, until)
        return total
    else:
        return _weighted(plan, weights * _decays(plan, log_decay, b, n, v), rows, back)


@triton.jit
def _weighted(plan: tl.constexpr, weights, rows, back: tl.constexpr):
    if back:
        return _dot(plan, tl.trans(weights), rows)
    else:
        return _dot(plan, weights, rows)


# Decays. The decay from one token to another is the exponential of the sum of the log decays
# between them, by a sum of masked log decays or a running sum, never by a difference.


@triton.jit
def _log_decays(plan: tl.constexpr, array, b, n, v, f):
    """Log decays `(C, f)` of a block, or `(C, 1)` with one for a token; 0 past the last token."""
    if plan.decay == "feature":
        rows = _rows(plan, array, b, n, plan.value_heads, v, plan.features, f, plan.tile_f)
    else:
        rows = _rows(plan, array, b, n, plan.value_heads, v, 1, 0, 1)
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
def _since_start(plan: tl.constexpr, array, b, n, v, f, rows):
    """Multiplies row i by the exponential of the sum of the log decays of tokens 0 to i."""
    if plan.decay == "none":
        return rows
    else:
        return rows * tl.exp(tl.cumsum(_log_decays(plan, array, b, n, v, f), 0))


@triton.jit
def _until_end(plan: tl.constexpr, array, b, n, v, f, rows):
    """Multiplies row i by the exponential of the sum of the log decays of tokens i + 1 to C - 1."""
    if plan.decay == "none":
        return rows
    else:
        later = tl.cumsum(_next_log_decays(plan, array, b, n, v, f), 0, reverse=True)
        return rows.to(tl.float32) * tl.exp(later)


@triton.jit
def _over_block(plan: tl.constexpr, array, b, n, v, f, state):
    """Returns the rest of a state after the decays of a whole block."""
    if plan.decay == "none":
        return state
    else:
        return state * tl.exp(tl.sum(_log_decays(plan, array, b, n, v, f), 0))[:, None]


@triton.jit
def _decays(plan: tl.constexpr, array, b, n, v):
    """Decays `(C, C)` from tokens j (columns) to tokens i (rows); zero where j > i."""
    row = tl.arange(0, C)
    seen = row[:, None] >= row[None, :]
    if plan.decay == "none":
        return tl.where(seen, 1.0, 0.0)
    else:
        logs = _log_decays(plan, array, b, n, v, 0)
        later = tl.where(row[:, None] > row[None, :], logs, 0.0)
        return tl.where(seen, tl.exp(tl.cumsum(later, 0)), 0.0)


@triton.jit
def _level(level: tl.constexpr, since, until):
    """Returns the decays `(C, f)` of the tokens, and a mask `(C, C)` of the pairs of a level.

    In groups of two halves of 2^level tokens, its pairs are a query in the second half of a group
    and a key in the first.
    """
    row = tl.arange(0, C)
    both, second = row >> (level + 1), ((row >> level) & 1) == 1
    pairs = (both[:, None] == both[None, :]) & second[:, None] & (second == 0)[None, :]
    return tl.exp(tl.where(second[:, None], since, until)), pairs


@triton.jit
def _doubled(level: tl.constexpr, logs, since, until):
    """Sums of log decays `(C, f)` for halves of twice 2^level tokens.

    `since` sums from the start of a half to each token, including the token's own log decay, and
    `until` from each token, without its own, to the end of the half.
    """
    second = (((tl.arange(0, C) >> level) & 1) == 1)[:, None]
    of_first = _sums(level + 1, tl.where(second, 0.0, logs))
    of_second = _sums(level + 1, tl.where(second, logs, 0.0))
    return since + tl.where(second, of_first, 0.0), until + tl.where(second, 0.0, of_second)


@triton.jit
def _sums(level: tl.constexpr, x):
    """Sums groups of 2^level rows; each row gets the sum of its group."""
    groups = tl.reshape(x, (C >> level, 1 << level, x.shape[1]))
    sums = tl.sum(groups, 1)[:, None, :]
    return tl.reshape(tl.broadcast_to(sums, groups.shape), x.shape)


# Tiles of tokens, in the dtype of the array, with zeros past the last token, feature or value.


@triton.jit
def _queries(plan: tl.constexpr, array, scale, b, n, h, f):
    """Queries with their scale, in float32."""
    return _given_queries(plan, array, b, n, h, f).to(tl.float32) * _scale(scale, b)


@triton.jit
def _scale(scale, b):
    if scale is None:
        return 1.0
    else:
        return tl.load(scale + b)


@triton.jit
def _given_queries(plan: tl.constexpr, array, b, n, h, f):
    h = h // (plan.heads // plan.query_heads)
    return _rows(plan, array, b, n, plan.query_heads, h, plan.features, f, plan.tile_f)


@triton.jit
def _keys(plan: tl.constexpr, array, b, n, v, f):
    k = v // (plan.value_heads // plan.key_heads)
    return _rows(plan, array, b, n, plan.key_heads, k, plan.features, f, plan.tile_f)


@triton.jit
def _values(plan: tl.constexpr, array, b, n, v, d):
    return _rows(plan, array, b, n, plan.value_heads, v, plan.values, d, plan.tile_d)


@triton.jit
def _outputs(plan: tl.constexpr, array, b, n, h, d):
    return _rows(plan, array, b, n, plan.heads, h, plan.values, d, plan.tile_d)


@triton.jit
def _rows(
    plan: tl.constexpr, array, b, n, heads: tl.constexpr, h, size: tl.constexpr, i,
    width: tl.constexpr,
):  # fmt: skip
    """Loads `(C, width)` of block n of a head from `(B, T, heads, size)`."""
    place = _pointers(plan, array, b, n, heads, h, size, i, width)
    there = _is_there(plan, n, tl.arange(0, C), size, i, width)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _store_rows(
    plan: tl.constexpr, array, b, n, heads: tl.constexpr, h, size: tl.constexpr, i,
    width: tl.constexpr, x,
):  # fmt: skip
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
def _chunk(array, at, size: tl.constexpr, i, width: tl.constexpr):
    """Loads `(C, width)` from `(..., C, size)`, with zeros past the last column."""
    row, column = tl.arange(0, C), i * width + tl.arange(0, width)
    place = array + at.to(tl.int64) * (C * size) + row[:, None] * size + column[None, :]
    return tl.load(place, mask=column[None, :] < size, other=0.0)


# States. The array of the state before the first token has no padding; saved states have.


@triton.jit
def _state_pointers(plan: tl.constexpr, array, b, v, n, f, d):
    row = f * plan.tile_f + tl.arange(0, plan.tile_f)
    column = d * plan.tile_d + tl.arange(0, plan.tile_d)
    return _of_states(plan, array, b, v, n) + row[:, None] * plan.whole_d + column[None, :]


@triton.jit
def _store_slice(plan: tl.constexpr, array, b, v, n, d, state):
    row = tl.arange(0, plan.all_f)
    column = d * plan.narrow + tl.arange(0, plan.narrow)
    place = _of_states(plan, array, b, v, n) + row[:, None] * plan.whole_d + column[None, :]
    tl.store(place, state, mask=(row < plan.whole_f)[:, None])


@triton.jit
def _of_states(plan: tl.constexpr, array, b, v, n):
    at = (b * plan.value_heads + v).to(tl.int64) * (plan.blocks + 1) + n
    return array + at * (plan.whole_f * plan.whole_d)


@triton.jit
def _load_initial(plan: tl.constexpr, array, b, v, f, d):
    row = f * plan.tile_f + tl.arange(0, plan.tile_f)
    column = d * plan.tile_d + tl.arange(0, plan.tile_d)
    return _of_initial(plan, array, b, v, row, column)


@triton.jit
def _load_slice(plan: tl.constexpr, array, b, v, d):
    row = tl.arange(0, plan.all_f)
    column = d * plan.narrow + tl.arange(0, plan.narrow)
    return _of_initial(plan, array, b, v, row, column)


@triton.jit
def _of_initial(plan: tl.constexpr, array, b, v, row, column):
    first = array + (b * plan.value_heads + v).to(tl.int64) * (plan.features * plan.values)
    there = (row < plan.features)[:, None] & (column < plan.values)[None, :]
    return tl.load(first + row[:, None] * plan.values + column[None, :], mask=there, other=0.0)


@triton.jit
def _dot(plan: tl.constexpr, left, right):
    """A product with float32 sums on tensor cores; factors of two dtypes are cast to float32."""
    if left.dtype != right.dtype:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=plan.precision)
