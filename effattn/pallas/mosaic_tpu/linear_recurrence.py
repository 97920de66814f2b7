"""Linear recurrence for TPUs, lowered by Mosaic.

A program computes one block of 64 tokens of one head. The pipeline copies blocks of the arrays to
VMEM and back: a whole state of up to 256 x 256, which is 256 KB in float32, and at most 64 KB each
of queries, keys, values and results. Two buffers of each array and the intermediate results fit in
a few of the 16 MB of VMEM. The backward of keys and values holds all query heads of one key head,
so the number of these query heads is limited (`GROUP_LANES`). Arrays have the axis of heads before
the axis of tokens, as a block is tokens by features. A length that is not a multiple of 64 is
padded.

`_walk` and `_walk_back`, and for the delta form `_correct` and `_correct_back`, go through the
blocks in order. The state, or its gradient, stays in scratch memory between blocks and is saved
before each block; one more step saves it after the last. The other kernels compute blocks in any
order.

The matrix unit does nearly all work. Without decay, or with one decay per token, a block is one
masked product. The log decay between two tokens is then a sum of log decays, computed as a product
with a triangular matrix of ones. With one decay per feature, the block is halved repeatedly, and
each pair of tokens is separated once, at a border between the two tokens, as in
`effattn.xla.recurrent_chunks`. The query has decayed since the border and the key until the border,
each by the exponential of a sum of log decays. This sum is a product with a matrix of zeros and
ones. A block thus takes six products of 64 x 64 for the sums and six masked products for the
weights. The products with a matrix of zeros and ones are in full float32. As 0 * -inf is NaN, a
decay of zero has the finite log decay `FORGETS` in the kernels.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.recurrence import BLOCK, Arrays, How

LANES = 128
# Largest number of lanes of the query heads of a key head and of their output gradients; two blocks
# of 64 tokens take 4 MB.
GROUP_LANES = 8192
FORGETS = -1e30  # log decay in place of -inf: a sum of 64 is finite, and its exponential is zero


LIMITS = dispatch.Limits(("float32", "bfloat16"), 256)


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    dtypes = {array.dtype for array in jax.tree.leaves((x.queries, x.keys))}
    for dtype in (*dtypes, config.dtype):
        if reason := LIMITS.refusal(dtype, 0):
            return reason
    if reason := recurrence.refusal(config, x):
        return reason
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    group = max(terms.query.shape[-2] // x.state.shape[-3], 1)
    lanes = sum(pl.cdiv(size, LANES) * LANES for size in x.state.shape[-2:])
    if group * lanes > GROUP_LANES:
        return (
            f"takes up to {GROUP_LANES // lanes} query heads for each key head of this size, got "
            f"{group}"
        )
    return None


def forward(config: Config, x: Inputs):
    """Returns `((output, state), saved)`; see `effattn.pallas.recurrence.forward`."""
    return recurrence.forward(KERNELS, config, x)


def backward(config: Config, x: Inputs, saved, d_output, d_state) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.recurrence.backward`."""
    return recurrence.backward(KERNELS, config, x, saved, d_output, d_state)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static configuration of a kernel: B, n, N, K, V and the kind of decay."""

    batch: int
    blocks: int
    query_heads: int
    key_heads: int
    value_heads: int
    decay: str | None  # one decay per "token", or one per "feature" of a token
    how: How

    @property
    def heads(self) -> int:
        """Number of heads of the output."""
        return max(self.query_heads, self.value_heads)

    @property
    def group(self) -> int:
        """Number of heads of the output that read one value head."""
        return self.heads // self.value_heads

    def dot(self, left: jax.Array, right: jax.Array, contract: tuple[int, int] = (1, 0)):
        """Returns the product over one axis of each operand, in the precision of `how`."""
        exact = self.how.precision != lax.Precision.DEFAULT
        return _dot(left, right, contract, lax.Precision.HIGHEST if exact else None)

    def over_group(self, body, carry):
        """Folds `body(g, carry)` over the heads of the output that read one value head."""
        if self.group == 1:
            return body(0, carry)
        return lax.fori_loop(jnp.int32(0), jnp.int32(self.group), body, carry)


def _dot(left, right, contract=(1, 0), precision: lax.Precision | None = lax.Precision.HIGHEST):
    dimensions = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(
        left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _plan(how: How, arrays: Arrays) -> _Plan:
    decay = None
    if arrays.log_decay is not None:
        decay = "token" if arrays.log_decay.ndim == 3 else "feature"
    batch, length, query_heads, _ = arrays.query.shape
    heads = query_heads, arrays.key.shape[2], arrays.value.shape[2]
    return _Plan(batch, pl.cdiv(length, BLOCK), *heads, decay, how)


# Calls of kernels, with the block specifications of arrays.


def _by_head(x):
    """Transposes `(B, T, heads, size)` to `(B, heads, T', size)`, padded to whole blocks."""
    x = jnp.moveaxis(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % BLOCK), (0, 0)])


def _terms(arrays):
    """Returns queries, keys and values; XLA applies the scale of the queries."""
    query, key, value, _, scale = arrays
    return query if scale is None else query.astype(scale.dtype) * scale, key, value


def _by_token(x, length):
    return jnp.moveaxis(x[:, :, :length], 2, 1)


def _log_decay(arrays):
    """Returns a list of the log decays, or an empty list without decay.

    Decays per feature are `(B, heads, T', F)`; decays per token are `(B, V, n, 1, C)`.
    """
    if arrays.log_decay is None:
        return []
    finite = jnp.maximum(arrays.log_decay.astype(jnp.float32), FORGETS)
    if finite.ndim == 4:
        return [_by_head(finite)]
    rows = _by_head(finite[..., None])
    return [rows.reshape(*rows.shape[:2], -1, 1, BLOCK)]


def _call(
    plan,
    kernel,
    heads,
    inputs,
    specs,
    shapes,
    out_specs,
    scratch=(),
    in_order=False,
    dtype=jnp.float32,
):
    inputs = mesh_axes.vary_alike(inputs)
    varying = jax.typeof(inputs[0]).manual_axis_type
    interpreter = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    order: Any = "arbitrary" if in_order else "parallel"
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(plan.batch, heads, plan.blocks + in_order),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape in shapes
        ],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", order)),
        interpret=interpreter if plan.how.interpreted else False,
        name=f"linear_recurrence{kernel.__name__}",
    )(*inputs)


def _every(n):
    """The block of a step of a kernel that computes blocks in any order."""
    return n


def _in_order(plan):
    """Returns a function from a step of a walk to its block; the extra step gets the last block."""
    return lambda n: jnp.minimum(n, plan.blocks - 1)


def _in_reverse(plan):
    """Returns the same for a walk from the last block to the first."""
    return lambda n: jnp.maximum(plan.blocks - 1 - n, 0)


def _tokens(size, share=1, group=None, block_at=_every):
    """Specifies blocks `(C, size)`, or `(group, C, size)`, of an array `(B, heads, T', size)`.

    `share` heads of the grid read one head of the array. `block_at(step)` is the block of a step.
    """
    return pl.BlockSpec((None, group, BLOCK, size), lambda b, h, n: (b, h // share, block_at(n), 0))


def _decays(plan, arrays, share=1, block_at=_every):
    if plan.decay is None:
        return []
    if plan.decay == "feature":
        return [_tokens(arrays.key.shape[-1], share, block_at=block_at)]

    def place(b, h, n):
        return b, h // share, block_at(n), 0, 0

    return [pl.BlockSpec((None, None, None, 1, BLOCK), place)]


def _saved(sizes, place):
    return pl.BlockSpec((None, None, None, *sizes), lambda b, h, n: (*place(b, h, n), 0, 0))


def _states(how, arrays: Arrays, state):
    plan, sizes = _plan(how, arrays), state.shape[2:]
    share, block_at = plan.value_heads // plan.key_heads, _in_order(plan)
    (states,) = _call(
        plan,
        _walk,
        plan.value_heads,
        [_by_head(arrays.key), _by_head(arrays.value), *_log_decay(arrays), state[:, :, None]],
        [
            _tokens(sizes[0], share, block_at=block_at),
            _tokens(sizes[1], block_at=block_at),
            *_decays(plan, arrays, block_at=block_at),
            _saved(sizes, lambda b, h, n: (b, h, 0)),
        ],
        [(*state.shape[:2], plan.blocks + 1, *sizes)],
        [_saved(sizes, lambda b, h, n: (b, h, n))],
        [pltpu.VMEM(sizes, jnp.float32)],
        in_order=True,
    )
    return states


def _gradients_of_states(how, arrays: Arrays, d_out, d_state):
    plan, sizes = _plan(how, arrays), d_state.shape[2:]
    block_at = _in_reverse(plan)
    (states,) = _call(
        plan,
        _walk_back,
        plan.value_heads,
        [
            _by_head(_terms(arrays)[0]),
            _by_head(d_out),
            *_log_decay(arrays),
            d_state[:, :, None],
        ],
        [
            _tokens(sizes[0], plan.heads // plan.query_heads, plan.group, block_at),
            _tokens(sizes[1], 1, plan.group, block_at),
            *_decays(plan, arrays, block_at=block_at),
            _saved(sizes, lambda b, h, n: (b, h, 0)),
        ],
        [(*d_state.shape[:2], plan.blocks + 1, *sizes)],
        [_saved(sizes, lambda b, h, n: (b, h, plan.blocks - n))],
        [pltpu.VMEM(sizes, jnp.float32)],
        in_order=True,
    )
    return states


def _of_queries(plan, arrays, kernel, states, size, *more, dtype=jnp.float32):
    """Runs a kernel for each block of each head of the output; returns `(B, T, heads, size)`.

    `more` are arrays `(B, T, heads, D)` that the kernel also reads.
    """
    features, values = states.shape[3:]
    length = plan.blocks * BLOCK
    (out,) = _call(
        plan,
        kernel,
        plan.heads,
        [
            *map(_by_head, (*more, *_terms(arrays))),
            *_log_decay(arrays),
            states,
        ],
        [
            *[_tokens(values)] * len(more),
            _tokens(features, plan.heads // plan.query_heads),
            _tokens(features, plan.heads // plan.key_heads),
            _tokens(values, plan.group),
            *_decays(plan, arrays, plan.group),
            _saved((features, values), lambda b, h, n: (b, h // plan.group, n)),
        ],
        [(plan.batch, plan.heads, length, size)],
        [_tokens(size)],
        dtype=dtype,
    )
    return _by_token(out, arrays.query.shape[1])


def _read(how, arrays: Arrays, states):
    plan = _plan(how, arrays)
    return _of_queries(plan, arrays, _read_block, states, states.shape[4], dtype=how.dtype)


def _d_query(how, arrays: Arrays, states, d_out):
    plan = _plan(how, arrays)
    return _of_queries(plan, arrays, _d_query_block, states, states.shape[3], d_out)


def _d_key_value(how, arrays: Arrays, co_states, d_out):
    plan = _plan(how, arrays)
    features, values = sizes = co_states.shape[3:]
    share, length = plan.value_heads // plan.key_heads, plan.blocks * BLOCK
    gradients = _call(
        plan,
        _d_key_value_block,
        plan.value_heads,
        [*map(_by_head, (d_out, *_terms(arrays))), *_log_decay(arrays), co_states],
        [
            _tokens(values, 1, plan.group),
            _tokens(features, plan.heads // plan.query_heads, plan.group),
            _tokens(features, share),
            _tokens(values),
            *_decays(plan, arrays),
            _saved(sizes, lambda b, h, n: (b, h, n + 1)),
        ],
        [(plan.batch, plan.value_heads, length, size) for size in sizes],
        [_tokens(features), _tokens(values)],
    )
    return [_by_token(x, arrays.query.shape[1]) for x in gradients]


def _corrected(how, arrays: Arrays, chunks, state):
    plan = _plan(how, arrays)
    return _of_chunks(plan, _correct, chunks, state, _in_order(plan), lambda n: n)


def _corrected_back(how, arrays: Arrays, chunks, d_state):
    plan = _plan(how, arrays)
    place = functools.partial(jnp.subtract, plan.blocks)
    return _of_chunks(plan, _correct_back, chunks, d_state, _in_reverse(plan), place)


def _of_chunks(plan, kernel, chunks, state, chunk_at, place):
    """Returns corrected values `(B, V, n, C, D)`, and the states before and after each chunk.

    `chunk_at(step)` is the chunk of a step of the grid, and `place(step)` that of the state before
    the step.
    """

    def spec(x):
        return pl.BlockSpec(
            (None, None, None, *x.shape[3:]),
            lambda b, h, step: (b, h, chunk_at(step), *(0,) * (x.ndim - 3)),
        )

    arrays = [x for x in chunks if x is not None]
    states = (*state.shape[:2], plan.blocks + 1, *state.shape[2:])
    return _call(
        plan,
        kernel,
        plan.value_heads,
        [*arrays, state[:, :, None]],
        [*map(spec, arrays), _saved(state.shape[2:], lambda b, h, n: (b, h, 0))],
        [chunks.value.shape, states],
        [spec(chunks.value), _saved(state.shape[2:], lambda b, h, n: (b, h, place(n)))],
        [pltpu.VMEM(state.shape[2:], jnp.float32)],
        in_order=True,
    )


KERNELS = recurrence.Kernels(
    **recurrence.by_blocks(_states, _gradients_of_states, _read, _d_query, _d_key_value),
    read=_read,
    d_query=_d_query,
    d_key_value=_d_key_value,
    correct=_corrected,
    correct_back=_corrected_back,
)


# Kernels: a program has one block of tokens, (C, F) and (C, D), and one state (F, D).


def _save(plan, given, saved, state):
    """Saves the state before each step, starting from the given state.

    Returns a decorator that runs a function except in the last step, which has no block.
    """
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        state[...] = given[...]

    saved[...] = state[...]
    return pl.when(step < plan.blocks)


def _walk(plan, key, value, *refs):
    *log_decay, initial, states, state = refs

    @_save(plan, initial, states, state)
    def _():
        at = _Decays(plan, log_decay)
        written = plan.dot(_times(_wide(key), at.until_end()), _wide(value), (0, 0))
        state[...] = _times(state[...], at.whole()) + written


def _walk_back(plan, query, d_out, *refs):
    *log_decay, last, co_states, co_state = refs

    @_save(plan, last, co_states, co_state)
    def _():
        at = _Decays(plan, log_decay)
        since_start = at.since_start()

        def of_head(g, before):
            queries = _times(_wide(query, g), since_start)
            return before + plan.dot(queries, _wide(d_out, g), (0, 0))

        co_state[...] = plan.over_group(of_head, _times(co_state[...], at.whole()))


def _correct(plan, recalled, key, value, kept, initial, corrected, states, state):
    @_save(plan, initial, states, state)
    def _():
        corrected[...], state[...] = _corrected_chunk(plan, recalled, key, value, kept, state)


def _correct_back(
    plan, recalled, key, value, kept, query, d_out, last, corrected, co_states, co_state
):
    @_save(plan, last, co_states, co_state)
    def _():
        corrected[...], before = _corrected_chunk(plan, recalled, key, value, kept, co_state)

        def of_head(g, before):
            return before + plan.dot(query[g], d_out[g], (0, 0))

        co_state[...] = plan.over_group(of_head, before)


def _corrected_chunk(plan, recalled, key, value, kept, state):
    """Returns the corrected values of a chunk and the state after the chunk."""
    before = state[...]
    found = value[...] - plan.dot(recalled[...], before)
    return found, kept[...] * before + plan.dot(key[...], found, (0, 0))


def _read_block(plan, query, key, value, *refs):
    *log_decay, states, out = refs
    at = _Decays(plan, log_decay)
    queries = _wide(query)
    weights = _Pairs(at).products(queries, _wide(key))
    read = plan.dot(_times(queries, at.since_start()), states[...])
    out[...] = (read + plan.dot(weights, _wide(value))).astype(out.dtype)


def _d_query_block(plan, d_out, query, key, value, *refs):
    *log_decay, states, d_query = refs
    at = _Decays(plan, log_decay)
    d_read = _wide(d_out)
    across = _times(plan.dot(d_read, states[...], (1, 1)), at.since_start())
    d_weights = plan.dot(d_read, _wide(value), (1, 1))
    d_query[...] = across + _Pairs(at).gradient(d_weights, _wide(key), (1, 0))


def _d_key_value_block(plan, d_out, query, key, value, *refs):
    *log_decay, co_states, d_key, d_value = refs
    at = _Decays(plan, log_decay)
    pairs = _Pairs(at)
    keys, values, until_end = _wide(key), _wide(value), at.until_end()
    d_keys = _times(plan.dot(values, co_states[...], (1, 1)), until_end)
    d_values = plan.dot(_times(keys, until_end), co_states[...])

    def of_head(g, gradients):
        d_keys, d_values = gradients
        queries, d_read = _wide(query, g), _wide(d_out, g)
        d_keys += pairs.gradient(plan.dot(d_read, values, (1, 1)), queries, (0, 0))
        return d_keys, d_values + plan.dot(pairs.products(queries, keys), d_read, (0, 0))

    d_key[...], d_value[...] = plan.over_group(of_head, (d_keys, d_values))


def _wide(ref, index=...):
    """Loads an array of tokens in float32."""
    return ref[index].astype(jnp.float32)


def _times(x, decay):
    return x if decay is None else x * decay


class _Decays:
    """Decays of the tokens of a block; None without decay."""

    def __init__(self, plan: _Plan, log_decay):
        """`log_decay` is a list: one block `(C, F)`, or `(1, C)` for all features, or empty."""
        self.plan = plan
        self.log: Any = log_decay[0][...] if log_decay else None
        # Token of the row (i) and token of the column (j).
        self.down = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
        self.across = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)

    def sums(self, where):
        """Sum, for each token (row), the log decays of the tokens (columns) in the mask `where`."""
        if self.plan.decay == "feature":
            return _dot(jnp.where(where, 1.0, 0.0), self.log)
        return jnp.sum(jnp.where(where, self.log, 0), 1, keepdims=True)

    def since_start(self):
        """Decays `(C, f)`, f = F or 1, from the start of the block to each token's read."""
        return None if self.log is None else jnp.exp(self.sums(self.across <= self.down))

    def until_end(self):
        """Decays `(C, f)` from each token's write to the end of the block."""
        return None if self.log is None else jnp.exp(self.sums(self.across > self.down))

    def whole(self):
        """Decay `(f, 1)` of the state over the whole block."""
        if self.plan.decay == "feature":
            every = jnp.ones((BLOCK, 1), jnp.float32)
            return jnp.exp(_dot(self.log, every, (0, 0)))
        return None if self.log is None else jnp.exp(jnp.sum(self.log, 1, keepdims=True))


class _Pairs:
    """Products of queries i and decayed keys j of a block, `(C, C)`, and their gradients."""

    def __init__(self, at: _Decays):
        self.plan, self.log, self.down, self.across = at.plan, at.log, at.down, at.across
        if self.plan.decay == "feature":
            self.halvings = [self._halving(at, bit) for bit in range(BLOCK.bit_length() - 1)]
        else:
            self.alike = self._alike()

    def _halving(self, at, bit):
        """Return, for blocks of `2 << bit` tokens, the separated pairs and decays to the border.

        The pairs are a mask `(C, C)`; the decays between a token and the border are `(C, F)`.
        """
        second, key_second = (self.down >> bit) & 1 == 1, (self.across >> bit) & 1 == 1
        block = self.down >> (bit + 1) == self.across >> (bit + 1)
        since = second & key_second & (self.across <= self.down)
        until = ~second & ~key_second & (self.across > self.down)
        return second & ~key_second & block, jnp.exp(at.sums(block & (since | until)))

    def _alike(self):
        """Decays `(C, C)` from j to i if all features decay equally; 0 where i comes before j."""
        visible = self.across <= self.down
        if self.log is None:
            return jnp.where(visible, 1.0, 0.0)
        later = jnp.where(self.down > self.across, 1.0, 0.0)
        return jnp.where(visible, jnp.exp(_dot(jnp.where(visible, self.log, 0), later)), 0)

    def products(self, query, key):
        """Returns the weights `(C, C)`, the decayed products of queries and keys."""
        dot = self.plan.dot
        if self.plan.decay != "feature":
            return dot(query, key, (1, 1)) * self.alike
        own = jnp.sum(query * key, 1, keepdims=True)
        weights = jnp.where(self.down == self.across, own, 0)
        for parted, decay in self.halvings:
            weights += jnp.where(parted, dot(query * decay, key * decay, (1, 1)), 0)
        return weights

    def gradient(self, d_products, array, contract):
        """Returns the gradient `(C, F)` of queries or of keys from the gradient of the products.

        For queries, `array` is the keys and `contract` is (1, 0); for keys, `array` is the queries
        and `contract` is (0, 0). With decays, products of a token with itself are left out.
        """
        dot = self.plan.dot
        if self.plan.decay == "feature":
            return sum(
                dot(jnp.where(parted, d_products, 0), array * decay, contract) * decay
                for parted, decay in self.halvings
            )
        d_products *= self.alike
        if self.log is not None:
            d_products = jnp.where(self.down == self.across, 0, d_products)
        return dot(d_products, array, contract)
