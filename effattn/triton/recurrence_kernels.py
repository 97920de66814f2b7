"""Linear recurrence in the Triton language: kernels.

The state is cut into tiles of at most 64 features by 64 values, and the sequence into blocks of
C = 64 tokens. There are no atomics, and the order of every sum is fixed. There are two kinds of
kernel:

- Walks go through the sequence block by block and save the state, or its gradient, between blocks.
  A program has one tile of the state in registers (`walk`, `walk_back`), or in the delta form all
  features of a few values (`correct`, `correct_back`), as a corrected value depends on all
  features of the state before.
- Kernels of blocks compute the output (`read`) or all gradients (`gradients`) of all blocks in
  parallel, from the saved states. A program computes one tile `(C, d)` of the output, or the
  gradients of one block.

Without decay, or with one decay for a token, the weights of a block are one masked product. With
decays of features, the products decay inside the sum over features: a block is halved again and
again, down to single tokens, which gives six levels. Each pair of tokens is separated at one level.
The pairs of a level are one product of queries, decayed since the start of their half, with keys,
decayed until the end of their half. No exponent is a difference of sums.

Arrays are contiguous: queries `(B, T, N, F)`, keys `(B, T, K, F)`, values `(B, T, V, D)`, log
decays `(B, T, V)` or `(B, T, V, F)`, a scale of the queries `(B,)`, output and its gradient
`(B, T, heads, D)`, saved states `(B, V, n, F', D')` with F' and D' whole tiles, gradients
`(B, T, heads, size)`. The first token of a tile is an offset of 64 bits, so arrays may have any
size. The index f names a tile of features, and d a tile of values.
"""

import triton
import triton.language as tl

C = tl.constexpr(64)  # tokens of a block, as `effattn.pallas.recurrence.BLOCK`
LEVELS = tl.constexpr(6)  # log2(C)


# Walks. Grid: examples, value heads, tiles of the state.


@triton.jit
def walk(key, value, log_decay, initial, states, last, plan: tl.constexpr):
    """Saves the state before each block, and the last state, from keys and values."""
    b, v, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    f, d = tile // plan.tiles_d, tile % plan.tiles_d
    state = _load_tile(plan, initial, b, v, f, d)
    for n in range(plan.blocks):
        _save(_state_pointers(plan, states, b, v, n, f, d), state)
        # The state after the block: what is left of it, and what the tokens of the block write.
        keys = _until_end(plan, log_decay, b, n, v, f, _keys(plan, key, b, n, v, f))
        written = _dot(plan, tl.trans(keys), _values(plan, value, b, n, v, d))
        state = _over_block(plan, log_decay, b, n, v, f, state) + written
    _store_tile(plan, last, b, v, f, d, state)


@triton.jit
def walk_back(query, scale, d_out, log_decay, last, co_states, first, plan: tl.constexpr):
    """Saves the gradient of the state after each block, and of the first state, from queries."""
    b, v, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    f, d = tile // plan.tiles_d, tile % plan.tiles_d
    co_state = _load_tile(plan, last, b, v, f, d)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        _save(_state_pointers(plan, co_states, b, v, n, f, d), co_state)
        co_state = _over_block(plan, log_decay, b, n, v, f, co_state)
        for g in range(plan.group):
            h = v * plan.group + g
            queries = _queries(plan, query, scale, b, n, h, f)
            queries = _since_start(plan, log_decay, b, n, v, f, queries)
            co_state += _dot(plan, tl.trans(queries), _outputs(plan, d_out, b, n, h, d))
    _store_tile(plan, first, b, v, f, d, co_state)


# Walks of the delta form, see `effattn.pallas.recurrence_delta`: X = value - recalled S and
# S' = kept S + key^T X. Grid: examples, value heads, slices of values.


@triton.jit
def correct(recalled, key, kept, value, initial, corrected, states, last, plan: tl.constexpr):
    """Writes corrected values `(B, V, n, C, D)`, and saves the states as `walk` does."""
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = _load_slice(plan, initial, b, v, d)
    for n in range(plan.blocks):
        _save_slice(plan, states, b, v, n, d, state)
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
    _store_slice(plan, last, b, v, d, state)


@triton.jit
def correct_back(
    recalled, key, kept, query, value, d_out, last, corrected, co_states, first,
    plan: tl.constexpr,
):  # fmt: skip
    """Writes gradients of corrected values, and saves those of the states, backwards.

    The gradient of the state before a block also gets query^T d_out.
    """
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = _load_slice(plan, last, b, v, d)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        _save_slice(plan, co_states, b, v, n, d, state)
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
        for g in range(plan.group):
            at = ((b * plan.value_heads + v) * plan.blocks + n) * plan.group + g
            queries = _chunk(query, at, plan.features, 0, plan.all_f)
            d_read = _chunk(d_out, at, plan.values, d, plan.narrow)
            state += _dot(plan, tl.trans(queries), d_read)
    _store_slice(plan, first, b, v, d, state)


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
def gradients(
    d_out, query, scale, key, value, log_decay, states, co_states, d_query, d_key, d_value,
    d_log_decay, plan: tl.constexpr,
):  # fmt: skip
    """Computes gradients of queries, keys, values and log decays, of one head of the output.

    With decays, the pair of a query and its own token is kept apart, as it never decays (see
    `effattn.pallas.recurrence` for the gradient of the log decays). The gradients of the states
    belong to the first of the heads that read a value head.
    """
    b, n, h, _ = _place(plan)
    v, is_first = h // plan.group, h % plan.group == 0
    d_weights, own = _d_weights(plan, d_out, value, b, n, v, h)
    crossing, at_end = tl.zeros((C,), tl.float32), 0.0
    for f in range(plan.tiles_f):
        n = _within_the_loop(n, f)
        of_query = tl.zeros((C, plan.tile_f), tl.float32)
        of_key = tl.zeros((C, plan.tile_f), tl.float32)
        inner = tl.zeros((plan.tile_f,), tl.float32)
        for d in range(plan.tiles_d):
            state = tl.load(_state_pointers(plan, states, b, v, n, f, d))
            of_query += _dot(plan, _outputs(plan, d_out, b, n, h, d), tl.trans(state))
            if is_first:
                co_state = tl.load(_state_pointers(plan, co_states, b, v, n, f, d))
                of_key += _dot(plan, _values(plan, value, b, n, v, d), tl.trans(co_state))
                if plan.decay != "none":
                    inner += tl.sum(state.to(tl.float32) * co_state.to(tl.float32), 1)
        queries = _queries(plan, query, scale, b, n, h, f)
        keys = _keys(plan, key, b, n, v, f)
        of_query = _since_start(plan, log_decay, b, n, v, f, of_query)
        of_key = _until_end(plan, log_decay, b, n, v, f, of_key)
        if plan.decay != "none":
            # The sum of S' times its gradient, where S' = W S + K^T V is the state after the block.
            inner = _over_block(plan, log_decay, b, n, v, f, inner[:, None])
            inner = tl.sum(inner, 1) + tl.sum(of_key * keys.to(tl.float32), 0)
        of_query += _mixed(plan, log_decay, b, n, v, f, d_weights, keys, back=False)
        of_key += _mixed(plan, log_decay, b, n, v, f, d_weights, queries, back=True)
        if plan.decay != "none":
            product = queries * of_query - keys.to(tl.float32) * of_key
            if plan.decay == "feature":
                found = tl.cumsum(product, 0, reverse=True) + inner[None, :]
                _store_log_decays(plan, d_log_decay, log_decay, b, n, h, f, found)
            else:
                crossing += tl.sum(product, 1)
                at_end += tl.sum(inner, 0)
            of_query += own[:, None] * keys.to(tl.float32)
            of_key += own[:, None] * queries
        _store_rows(plan, d_query, b, n, plan.heads, h, plan.features, f, plan.tile_f, of_query)
        _store_rows(plan, d_key, b, n, plan.heads, h, plan.features, f, plan.tile_f, of_key)
    if plan.decay == "token":
        found = tl.cumsum(crossing, 0, reverse=True) + at_end
        _store_log_decays(plan, d_log_decay, log_decay, b, n, h, 0, found[:, None])
    if plan.with_value:
        weights = _weights(plan, query, scale, key, log_decay, b, n, v, h)
        for d in range(plan.tiles_d):
            n = _within_the_loop(n, d)
            of_value = _dot(plan, tl.trans(weights), _outputs(plan, d_out, b, n, h, d))
            if is_first:
                for f in range(plan.tiles_f):
                    keys = _keys(plan, key, b, n, v, f)
                    keys = _until_end(plan, log_decay, b, n, v, f, keys)
                    co_state = tl.load(_state_pointers(plan, co_states, b, v, n, f, d))
                    of_value += _dot(plan, keys, co_state)
            _store_rows(plan, d_value, b, n, plan.heads, h, plan.values, d, plan.tile_d, of_value)


@triton.jit
def _within_the_loop(n, i):
    """Returns n, made to depend on i so that the compiler computes decays within the loop over i.

    Decays of all levels, computed once before the loop, would not fit in registers.
    """
    return n + tl.minimum(i, 0)


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
    """Gradients of the weights; with decays without the diagonal, which is the second result."""
    row = tl.arange(0, C)
    total = tl.zeros((C, C), tl.float32)
    for d in range(plan.tiles_d):
        values = _values(plan, value, b, n, v, d)
        total += _dot(plan, _outputs(plan, d_out, b, n, h, d), tl.trans(values))
    own = tl.where(row[:, None] == row[None, :], total, 0.0)
    if plan.decay != "none":
        total -= own
    return total, tl.sum(own, 1)


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
def _store_log_decays(plan: tl.constexpr, array, log_decay, b, n, h, f, found):
    """Stores gradients of log decays, `(C, f)` or `(C, 1)`; 0 where the log decay is -inf."""
    logs = _log_decays(plan, log_decay, b, n, h // plan.group, f)
    found = tl.where(logs == float("-inf"), 0.0, found)
    if plan.decay == "feature":
        _store_rows(plan, array, b, n, plan.heads, h, plan.features, f, plan.tile_f, found)
    else:
        _store_rows(plan, array, b, n, plan.heads, h, 1, 0, 1, found)


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


# States. The first and the last one, `(B, V, F, D)`, have no padding; saved states have.


@triton.jit
def _state_pointers(plan: tl.constexpr, array, b, v, n, f, d):
    row, column = _of_tile(plan, f, d)
    return _of_states(plan, array, b, v, n) + row[:, None] * plan.whole_d + column[None, :]


@triton.jit
def _save_slice(plan: tl.constexpr, array, b, v, n, d, state):
    row, column = _of_slice(plan, d)
    place = _of_states(plan, array, b, v, n) + row[:, None] * plan.whole_d + column[None, :]
    tl.store(place, state.to(array.dtype.element_ty), mask=(row < plan.whole_f)[:, None])


@triton.jit
def _save(pointers, state):
    tl.store(pointers, state.to(pointers.dtype.element_ty))


@triton.jit
def _of_states(plan: tl.constexpr, array, b, v, n):
    at = (b * plan.value_heads + v).to(tl.int64) * plan.blocks + n
    return array + at * (plan.whole_f * plan.whole_d)


@triton.jit
def _load_tile(plan: tl.constexpr, array, b, v, f, d):
    row, column = _of_tile(plan, f, d)
    place, there = _of_whole(plan, array, b, v, row, column)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _store_tile(plan: tl.constexpr, array, b, v, f, d, state):
    row, column = _of_tile(plan, f, d)
    place, there = _of_whole(plan, array, b, v, row, column)
    tl.store(place, state, mask=there)


@triton.jit
def _load_slice(plan: tl.constexpr, array, b, v, d):
    row, column = _of_slice(plan, d)
    place, there = _of_whole(plan, array, b, v, row, column)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _store_slice(plan: tl.constexpr, array, b, v, d, state):
    row, column = _of_slice(plan, d)
    place, there = _of_whole(plan, array, b, v, row, column)
    tl.store(place, state, mask=there)


@triton.jit
def _of_tile(plan: tl.constexpr, f, d):
    return f * plan.tile_f + tl.arange(0, plan.tile_f), d * plan.tile_d + tl.arange(0, plan.tile_d)


@triton.jit
def _of_slice(plan: tl.constexpr, d):
    return tl.arange(0, plan.all_f), d * plan.narrow + tl.arange(0, plan.narrow)


@triton.jit
def _of_whole(plan: tl.constexpr, array, b, v, row, column):
    first = array + (b * plan.value_heads + v).to(tl.int64) * (plan.features * plan.values)
    there = (row < plan.features)[:, None] & (column < plan.values)[None, :]
    return first + row[:, None] * plan.values + column[None, :], there


@triton.jit
def _dot(plan: tl.constexpr, left, right):
    """A product with float32 sums on tensor cores; factors of two dtypes are cast to float32."""
    if left.dtype != right.dtype:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=plan.precision)
