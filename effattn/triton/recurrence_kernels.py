"""Linear recurrence in the Triton language: kernels.

The state is cut into tiles of at most 64 features by 64 values, and the sequence into blocks of
C = 64 tokens. There are no atomics, and the order of every sum is fixed. There are two kinds of
kernel:

- Walks go through the sequence block by block and save the state, or its gradient, between blocks.
  A program has one tile of the state in registers (`walk`, `walk_back`), or in the delta form the
  tiles of all features of a few values (`correct`, `correct_back`), as a corrected value depends on
  all features of the state before.
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
# S' = kept S + key^T X. The state of a program is a tuple of tiles, so that no product has operands
# that do not fit in registers. Grid: examples, value heads, tiles of values.


@triton.jit
def correct(recalled, key, kept, value, initial, corrected, states, last, plan: tl.constexpr):
    """Writes corrected values `(B, V, n, C, D)`, and saves the states as `walk` does."""
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = _load_tiles(plan, initial, b, v, d)
    for n in range(plan.blocks):
        _save_tiles(plan, states, b, v, n, d, state)
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
    _store_tiles(plan, last, b, v, d, state)


@triton.jit
def correct_back(
    recalled, key, kept, query, value, d_out, last, corrected, co_states, first,
    plan: tl.constexpr,
):  # fmt: skip
    """Writes gradients of corrected values, and saves those of the states, backwards.

    The gradient of the state before a block also gets query^T d_out.
    """
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = _load_tiles(plan, last, b, v, d)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        _save_tiles(plan, co_states, b, v, n, d, state)
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
        for g in range(plan.group):
            at = ((b * plan.value_heads + v) * plan.blocks + n) * plan.group + g
            d_read = _chunk(d_out, at, plan.values, d, plan.tile_d)
            state = _with_products(plan, query, at, d_read, state)
    _store_tiles(plan, first, b, v, d, state)


@triton.jit
def _corrected(plan: tl.constexpr, recalled, key, kept, value, corrected, b, v, n, d, state):
    """Writes the corrected values of a block; returns the state after it."""
    at = (b * plan.value_heads + v) * plan.blocks + n
    found = _chunk(value, at, plan.values, d, plan.tile_d)
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        recalls = _chunk(recalled, at, plan.features, f, plan.tile_f)
        found -= _dot(plan, recalls, state[f])
    row, column = tl.arange(0, C), d * plan.tile_d + tl.arange(0, plan.tile_d)
    place = corrected + at.to(tl.int64) * (C * plan.values)
    place += row[:, None] * plan.values + column[None, :]
    tl.store(place, found, mask=column[None, :] < plan.values)
    left = ()
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        left += (state[f] * _kept(plan, kept, at, f),)  # type: ignore[assignment]
    return _with_products(plan, key, at, found, left)


@triton.jit
def _kept(plan: tl.constexpr, kept, at, f):
    """The part of a tile of the state that a block keeps: a number, or `(f, 1)`."""
    if plan.kept_features == 1:
        return tl.load(kept + at)
    else:
        feature = f * plan.tile_f + tl.arange(0, plan.tile_f)
        place = kept + at.to(tl.int64) * plan.features + feature
        return tl.load(place, mask=feature < plan.features, other=0.0)[:, None]


@triton.jit
def _with_products(plan: tl.constexpr, keys, at, rows, state):
    """The state plus keys^T rows."""
    total = ()
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        some = _chunk(keys, at, plan.features, f, plan.tile_f)
        total += (state[f] + _dot(plan, tl.trans(some), rows),)  # type: ignore[assignment]
    return total


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

    The gradients of values, of queries and of keys each have their own loop: if two products in the
    body of a loop share an operand, Triton gives a thread whole rows of both results, which do not
    fit in its registers.
    """
    b, n, h, _ = _place(plan)
    v = h // plan.group
    if plan.with_value:
        weights = _weights(plan, query, scale, key, log_decay, b, n, v, h)
        for d in range(plan.tiles_d):
            n, weights = _within_the_loop(n, d), _within_the_loop(weights, d)
            _d_values(plan, d_out, key, log_decay, co_states, d_value, b, n, h, d, weights)
    d_weights, own = _d_weights(plan, d_out, value, log_decay, b, n, v, h)
    crossing, at_end = tl.zeros((C,), tl.float32), 0.0
    for f in range(plan.tiles_f):
        n, d_weights = _within_the_loop(n, f), _within_the_loop(d_weights, f)
        crossing += _d_queries(
            plan, d_out, query, scale, key, log_decay, states, d_query, d_log_decay, b, n, h, f,
            d_weights, own,
        )  # fmt: skip
    if plan.decay == "feature":
        tl.debug_barrier()  # the next loop reads sums that other threads stored in the loop above
    for f in range(plan.tiles_f):
        n, d_weights = _within_the_loop(n, f), _within_the_loop(d_weights, f)
        crossed, ended = _d_keys(
            plan, query, scale, key, value, log_decay, states, co_states, d_key, d_log_decay, b, n,
            h, f, d_weights, own,
        )  # fmt: skip
        crossing, at_end = crossing - crossed, at_end + ended
    if plan.decay == "token":
        found = tl.cumsum(crossing, 0, reverse=True) + at_end
        _store_log_decays(plan, d_log_decay, log_decay, b, n, h, 0, found[:, None])


@triton.jit
def _d_values(plan: tl.constexpr, d_out, key, log_decay, co_states, d_value, b, n, h, d, weights):
    v, is_first = h // plan.group, h % plan.group == 0
    found = _dot(plan, tl.trans(weights), _outputs(plan, d_out, b, n, h, d))
    if is_first:
        for f in range(plan.tiles_f):
            keys = _until_end(plan, log_decay, b, n, v, f, _keys(plan, key, b, n, v, f))
            co_state = tl.load(_state_pointers(plan, co_states, b, v, n, f, d))
            found += _dot(plan, keys, co_state)
    _store_rows(plan, d_value, b, n, plan.heads, h, plan.values, d, plan.tile_d, found)


@triton.jit
def _d_queries(
    plan: tl.constexpr, d_out, query, scale, key, log_decay, states, d_query, d_log_decay, b, n, h,
    f, d_weights, own,
):  # fmt: skip
    """Stores the gradients of a tile of queries, from the results of `_d_weights`.

    Returns q dq of each token, summed over the features, `(C,)`, without the part of dq from the
    query's own token. With decays of features, also stores the sums of q dq over each token and the
    later ones of the block, `(C, f)`, the first part of the gradients of the log decays.
    """
    v = h // plan.group
    found = tl.zeros((C, plan.tile_f), tl.float32)
    for d in range(plan.tiles_d):
        state = tl.load(_state_pointers(plan, states, b, v, n, f, d))
        found += _dot(plan, _outputs(plan, d_out, b, n, h, d), tl.trans(state))
    found = _since_start(plan, log_decay, b, n, v, f, found)
    keys = _keys(plan, key, b, n, v, f)
    found += _mixed(plan, log_decay, b, n, v, f, d_weights, keys, back=False)
    product = _queries(plan, query, scale, b, n, h, f) * found
    if plan.decay == "feature":
        later = tl.cumsum(product, 0, reverse=True)
        _store_rows(plan, d_log_decay, b, n, plan.heads, h, plan.features, f, plan.tile_f, later)
    if plan.decay != "none":
        found += own[:, None] * keys.to(tl.float32)
    _store_rows(plan, d_query, b, n, plan.heads, h, plan.features, f, plan.tile_f, found)
    return tl.sum(product, 1)


@triton.jit
def _d_keys(
    plan: tl.constexpr, query, scale, key, value, log_decay, states, co_states, d_key, d_log_decay,
    b, n, h, f, d_weights, own,
):  # fmt: skip
    """Stores the gradients of a tile of keys, from the results of `_d_weights`.

    Returns k dk of each token, summed over the features, `(C,)`, without the part of dk from the
    key's own token, and the sum over features and values of S' times its gradient, where
    S' = W S + K^T V is the state after the block. With decays of features, completes the gradients
    of the log decays.
    """
    v, is_first = h // plan.group, h % plan.group == 0
    found = tl.zeros((C, plan.tile_f), tl.float32)
    at_end = tl.zeros((plan.tile_f,), tl.float32)
    if is_first:
        for d in range(plan.tiles_d):
            co_state = tl.load(_state_pointers(plan, co_states, b, v, n, f, d))
            found += _dot(plan, _values(plan, value, b, n, v, d), tl.trans(co_state))
            if plan.decay != "none":
                state = tl.load(_state_pointers(plan, states, b, v, n, f, d))
                at_end += tl.sum(state.to(tl.float32) * co_state.to(tl.float32), 1)
    queries = _queries(plan, query, scale, b, n, h, f)
    keys = _keys(plan, key, b, n, v, f).to(tl.float32)
    found = _until_end(plan, log_decay, b, n, v, f, found)
    at_end = tl.sum(_over_block(plan, log_decay, b, n, v, f, at_end[:, None]), 1)
    at_end += tl.sum(found * keys, 0)
    found += _mixed(plan, log_decay, b, n, v, f, d_weights, queries, back=True)
    product = keys * found
    if plan.decay == "feature":
        later = at_end[None, :] - tl.cumsum(product, 0, reverse=True)
        later += _rows(plan, d_log_decay, b, n, plan.heads, h, plan.features, f, plan.tile_f)
        _store_log_decays(plan, d_log_decay, log_decay, b, n, h, f, later)
    if plan.decay != "none":
        found += own[:, None] * queries
    _store_rows(plan, d_key, b, n, plan.heads, h, plan.features, f, plan.tile_f, found)
    return tl.sum(product, 1), tl.sum(at_end, 0)


@triton.jit
def _within_the_loop(x, i):
    """Returns x unchanged, as x + min(i, 0) with the index i >= 0 of a loop.

    Otherwise the compiler moves expressions of x out of the loop, such as decays or the parts of a
    product in full float32, and their results do not fit in registers.
    """
    return x + tl.minimum(i, 0)


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
            for level in range(LEVELS):
                decay, pairs = _level(level, since, until)
                products = _dot(plan, queries * decay, tl.trans(keys * decay))
                total += tl.where(pairs, products, 0.0)
                since, until = _doubled(level, since, until)
        else:
            queries = _given_queries(plan, query, b, n, h, f)
            total += _dot(plan, queries, tl.trans(_keys(plan, key, b, n, v, f)))
    if plan.decay != "feature":
        total = _decayed(plan, log_decay, b, n, v, total * _scale(scale, b))
    return total


@triton.jit
def _d_weights(plan: tl.constexpr, d_out, value, log_decay, b, n, v, h):
    """Returns gradients `(C, C)` of each pair of tokens, and their diagonal `(C,)`.

    With decays of features, they are those of the weights; otherwise those of the products of
    queries and keys before any decay, and zero where j > i. With decays, the diagonal of the first
    result is zero.
    """
    row = tl.arange(0, C)
    total = tl.zeros((C, C), tl.float32)
    for d in range(plan.tiles_d):
        values = _values(plan, value, b, n, v, d)
        total += _dot(plan, _outputs(plan, d_out, b, n, h, d), tl.trans(values))
    own = tl.where(row[:, None] == row[None, :], total, 0.0)
    if plan.decay != "none":
        total -= own
    if plan.decay != "feature":
        total = _decayed(plan, log_decay, b, n, v, total)
    return total, tl.sum(own, 1)


@triton.jit
def _mixed(plan: tl.constexpr, log_decay, b, n, v, f, weights, rows, back: tl.constexpr):
    """Sums `(C, f)` of the rows up to each token, or from each token on if `back`.

    With decays of features, decays the rows, and leaves out a token's own row. Otherwise `weights`
    include the decays.
    """
    if plan.decay == "feature":
        total = tl.zeros((C, plan.tile_f), tl.float32)
        logs = _log_decays(plan, log_decay, b, n, v, f)
        since, until = logs, tl.zeros_like(logs)
        for level in range(LEVELS):
            decay, pairs = _level(level, since, until)
            chosen = tl.where(pairs, weights, 0.0)
            total += decay * _weighted(plan, chosen, rows.to(tl.float32) * decay, back)
            since, until = _doubled(level, since, until)
        return total
    else:
        return _weighted(plan, weights, rows, back)


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
def _decayed(plan: tl.constexpr, array, b, n, v, weights):
    """Multiplies weights `(C, C)` by the decays from tokens j (columns) to tokens i (rows).

    The result is zero where j > i.
    """
    row = tl.arange(0, C)
    if plan.decay != "none":
        logs = _log_decays(plan, array, b, n, v, 0)
        later = tl.where(row[:, None] > row[None, :], logs, 0.0)
        weights = weights * tl.exp(tl.cumsum(later, 0))
    return tl.where(row[:, None] >= row[None, :], weights, 0.0)


@triton.jit
def _level(level, since, until):
    """Returns the decays `(C, f)` of the tokens, and a mask `(C, C)` of the pairs of a level.

    In groups of two halves of 2^level tokens, its pairs are a query in the second half of a group
    and a key in the first.
    """
    row = tl.arange(0, C)
    both, second = row >> (level + 1), ((row >> level) & 1) == 1
    pairs = (both[:, None] == both[None, :]) & second[:, None] & (second == 0)[None, :]
    return tl.exp(tl.where(second[:, None], since, until)), pairs


@triton.jit
def _doubled(level, since, until):
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
def _load_tiles(plan: tl.constexpr, array, b, v, d):
    """All tiles of these values, in a tuple."""
    state = ()
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        state += (_load_tile(plan, array, b, v, f, d),)  # type: ignore[assignment]
    return state


@triton.jit
def _store_tiles(plan: tl.constexpr, array, b, v, d, state):
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        _store_tile(plan, array, b, v, f, d, state[f])


@triton.jit
def _save_tiles(plan: tl.constexpr, array, b, v, n, d, state):
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        _save(_state_pointers(plan, array, b, v, n, f, d), state[f])


@triton.jit
def _of_tile(plan: tl.constexpr, f, d):
    return f * plan.tile_f + tl.arange(0, plan.tile_f), d * plan.tile_d + tl.arange(0, plan.tile_d)


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
