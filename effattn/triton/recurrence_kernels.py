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

from effattn.triton.recurrence_tiles import (
    LEVELS,
    C,
    decayed,
    decays_of_level,
    dot,
    doubled,
    load_chunk,
    load_given_queries,
    load_keys,
    load_log_decays,
    load_outputs,
    load_queries,
    load_rows,
    load_scale,
    load_tile,
    load_tiles,
    load_values,
    over_block,
    save,
    save_tiles,
    saved_pointers,
    since_start,
    store_log_decays,
    store_rows,
    store_tile,
    store_tiles,
    until_end,
)

# Walks. Grid: examples, value heads, tiles of the state.


@triton.jit
def walk(key, value, log_decay, initial, states, last, plan: tl.constexpr):
    """Saves the state before each block, and the last state, from keys and values."""
    b, v, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    f, d = tile // plan.tiles_d, tile % plan.tiles_d
    state = load_tile(plan, initial, b, v, f, d)
    for n in range(plan.blocks):
        save(saved_pointers(plan, states, b, v, n, f, d), state)
        # The state after the block: what is left of it, and what the tokens of the block write.
        keys = until_end(plan, log_decay, b, n, v, f, load_keys(plan, key, b, n, v, f))
        written = dot(plan, tl.trans(keys), load_values(plan, value, b, n, v, d))
        state = over_block(plan, log_decay, b, n, v, f, state) + written
    store_tile(plan, last, b, v, f, d, state)


@triton.jit
def walk_back(query, scale, d_out, log_decay, last, co_states, first, plan: tl.constexpr):
    """Saves the gradient of the state after each block, and of the first state, from queries."""
    b, v, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    f, d = tile // plan.tiles_d, tile % plan.tiles_d
    co_state = load_tile(plan, last, b, v, f, d)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        save(saved_pointers(plan, co_states, b, v, n, f, d), co_state)
        co_state = over_block(plan, log_decay, b, n, v, f, co_state)
        for g in range(plan.group):
            h = v * plan.group + g
            queries = load_queries(plan, query, scale, b, n, h, f)
            queries = since_start(plan, log_decay, b, n, v, f, queries)
            co_state += dot(plan, tl.trans(queries), load_outputs(plan, d_out, b, n, h, d))
    store_tile(plan, first, b, v, f, d, co_state)


# Walks of the delta form, see `effattn.pallas.recurrence_delta`: X = value - recalled S and
# S' = kept S + key^T X. The state of a program is a tuple of tiles, so that no product has operands
# that do not fit in registers. Grid: examples, value heads, tiles of values.


@triton.jit
def correct(recalled, key, kept, value, initial, corrected, states, last, plan: tl.constexpr):
    """Writes corrected values `(B, V, n, C, D)`, and saves the states as `walk` does."""
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = load_tiles(plan, initial, b, v, d)
    for n in range(plan.blocks):
        save_tiles(plan, states, b, v, n, d, state)
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
    store_tiles(plan, last, b, v, d, state)


@triton.jit
def correct_back(
    recalled, key, kept, query, value, d_out, last, corrected, co_states, first,
    plan: tl.constexpr,
):  # fmt: skip
    """Writes gradients of corrected values, and saves those of the states, backwards.

    The gradient of the state before a block also gets query^T d_out.
    """
    b, v, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = load_tiles(plan, last, b, v, d)
    for step in range(plan.blocks):
        n = plan.blocks - 1 - step
        save_tiles(plan, co_states, b, v, n, d, state)
        state = _corrected(plan, recalled, key, kept, value, corrected, b, v, n, d, state)
        for g in range(plan.group):
            at = ((b * plan.value_heads + v) * plan.blocks + n) * plan.group + g
            d_read = load_chunk(d_out, at, plan.values, d, plan.tile_d)
            state = _with_products(plan, query, at, d_read, state)
    store_tiles(plan, first, b, v, d, state)


@triton.jit
def _corrected(plan: tl.constexpr, recalled, key, kept, value, corrected, b, v, n, d, state):
    """Writes the corrected values of a block; returns the state after it."""
    at = (b * plan.value_heads + v) * plan.blocks + n
    found = load_chunk(value, at, plan.values, d, plan.tile_d)
    for f in tl.static_range(tl.constexpr(plan.tiles_f)):
        recalls = load_chunk(recalled, at, plan.features, f, plan.tile_f)
        found -= dot(plan, recalls, state[f])
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
        some = load_chunk(keys, at, plan.features, f, plan.tile_f)
        total += (state[f] + dot(plan, tl.trans(some), rows),)  # type: ignore[assignment]
    return total


# Kernels of blocks. Grid: examples times blocks, heads, tiles.


@triton.jit
def read(query, scale, key, value, log_decay, states, out, plan: tl.constexpr):
    """Computes the output."""
    b, n, h, d = _place(plan)
    v = h // plan.group
    weights = _weights(plan, query, scale, key, log_decay, b, n, v, h)
    total = dot(plan, weights, load_values(plan, value, b, n, v, d))
    for f in range(plan.tiles_f):
        queries = load_queries(plan, query, scale, b, n, h, f)
        queries = since_start(plan, log_decay, b, n, v, f, queries)
        total += dot(plan, queries, tl.load(saved_pointers(plan, states, b, v, n, f, d)))
    store_rows(plan, out, b, n, plan.heads, h, plan.values, d, plan.tile_d, total)


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
        store_log_decays(plan, d_log_decay, log_decay, b, n, h, 0, found[:, None])


@triton.jit
def _d_values(plan: tl.constexpr, d_out, key, log_decay, co_states, d_value, b, n, h, d, weights):
    v, is_first = h // plan.group, h % plan.group == 0
    found = dot(plan, tl.trans(weights), load_outputs(plan, d_out, b, n, h, d))
    if is_first:
        for f in range(plan.tiles_f):
            keys = until_end(plan, log_decay, b, n, v, f, load_keys(plan, key, b, n, v, f))
            co_state = tl.load(saved_pointers(plan, co_states, b, v, n, f, d))
            found += dot(plan, keys, co_state)
    store_rows(plan, d_value, b, n, plan.heads, h, plan.values, d, plan.tile_d, found)


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
        state = tl.load(saved_pointers(plan, states, b, v, n, f, d))
        found += dot(plan, load_outputs(plan, d_out, b, n, h, d), tl.trans(state))
    found = since_start(plan, log_decay, b, n, v, f, found)
    keys = load_keys(plan, key, b, n, v, f)
    found += _mixed(plan, log_decay, b, n, v, f, d_weights, keys, back=False)
    product = load_queries(plan, query, scale, b, n, h, f) * found
    if plan.decay == "feature":
        later = tl.cumsum(product, 0, reverse=True)
        store_rows(plan, d_log_decay, b, n, plan.heads, h, plan.features, f, plan.tile_f, later)
    if plan.decay != "none":
        found += own[:, None] * keys.to(tl.float32)
    store_rows(plan, d_query, b, n, plan.heads, h, plan.features, f, plan.tile_f, found)
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
            co_state = tl.load(saved_pointers(plan, co_states, b, v, n, f, d))
            found += dot(plan, load_values(plan, value, b, n, v, d), tl.trans(co_state))
            if plan.decay != "none":
                state = tl.load(saved_pointers(plan, states, b, v, n, f, d))
                at_end += tl.sum(state.to(tl.float32) * co_state.to(tl.float32), 1)
    queries = load_queries(plan, query, scale, b, n, h, f)
    keys = load_keys(plan, key, b, n, v, f).to(tl.float32)
    found = until_end(plan, log_decay, b, n, v, f, found)
    at_end = tl.sum(over_block(plan, log_decay, b, n, v, f, at_end[:, None]), 1)
    at_end += tl.sum(found * keys, 0)
    found += _mixed(plan, log_decay, b, n, v, f, d_weights, queries, back=True)
    product = keys * found
    if plan.decay == "feature":
        later = at_end[None, :] - tl.cumsum(product, 0, reverse=True)
        later += load_rows(plan, d_log_decay, b, n, plan.heads, h, plan.features, f, plan.tile_f)
        store_log_decays(plan, d_log_decay, log_decay, b, n, h, f, later)
    if plan.decay != "none":
        found += own[:, None] * queries
    store_rows(plan, d_key, b, n, plan.heads, h, plan.features, f, plan.tile_f, found)
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
            queries = load_queries(plan, query, scale, b, n, h, f)
            keys = load_keys(plan, key, b, n, v, f).to(tl.float32)
            own = tl.sum(queries * keys, 1)
            total += tl.where(row[:, None] == row[None, :], own[:, None], 0.0)
            logs = load_log_decays(plan, log_decay, b, n, v, f)
            since, until = logs, tl.zeros_like(logs)
            for level in range(LEVELS):
                decay, pairs = decays_of_level(level, since, until)
                products = dot(plan, queries * decay, tl.trans(keys * decay))
                total += tl.where(pairs, products, 0.0)
                since, until = doubled(level, since, until)
        else:
            queries = load_given_queries(plan, query, b, n, h, f)
            total += dot(plan, queries, tl.trans(load_keys(plan, key, b, n, v, f)))
    if plan.decay != "feature":
        total = decayed(plan, log_decay, b, n, v, total * load_scale(scale, b))
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
        values = load_values(plan, value, b, n, v, d)
        total += dot(plan, load_outputs(plan, d_out, b, n, h, d), tl.trans(values))
    own = tl.where(row[:, None] == row[None, :], total, 0.0)
    if plan.decay != "none":
        total -= own
    if plan.decay != "feature":
        total = decayed(plan, log_decay, b, n, v, total)
    return total, tl.sum(own, 1)


@triton.jit
def _mixed(plan: tl.constexpr, log_decay, b, n, v, f, weights, rows, back: tl.constexpr):
    """Sums `(C, f)` of the rows up to each token, or from each token on if `back`.

    With decays of features, decays the rows, and leaves out a token's own row. Otherwise `weights`
    include the decays.
    """
    if plan.decay == "feature":
        total = tl.zeros((C, plan.tile_f), tl.float32)
        logs = load_log_decays(plan, log_decay, b, n, v, f)
        since, until = logs, tl.zeros_like(logs)
        for level in range(LEVELS):
            decay, pairs = decays_of_level(level, since, until)
            chosen = tl.where(pairs, weights, 0.0)
            total += decay * _weighted(plan, chosen, rows.to(tl.float32) * decay, back)
            since, until = doubled(level, since, until)
        return total
    else:
        return _weighted(plan, weights, rows, back)


@triton.jit
def _weighted(plan: tl.constexpr, weights, rows, back: tl.constexpr):
    if back:
        return dot(plan, tl.trans(weights), rows)
    else:
        return dot(plan, weights, rows)
