"""Tiles of tokens, and their decays, that a program of the linear recurrence in Triton reads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn.pallas.recurrence import BLOCK, Arrays, How
from effattn.pallas.triton import products

TILE = 64  # largest number of features, and of values, of a tile of the state
LEAST = 16  # smallest side of a product on tensor cores


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static configuration of a kernel: B, T, N, K, V, F, D and the kind of decay."""

    batch: int
    length: int
    query_heads: int
    key_heads: int
    value_heads: int
    features: int
    values: int
    decay: str | None  # one decay per "token", or one per "feature" of a token
    how: How

    @property
    def blocks(self) -> int:
        """Number of blocks of tokens; the last block can be partial."""
        return pl.cdiv(self.length, BLOCK)

    @property
    def heads(self) -> int:
        """Number of heads of the output."""
        return max(self.query_heads, self.value_heads)

    @property
    def tile(self) -> tuple[int, int]:
        """Numbers of features and values of a tile of the state."""
        return _tile(self.features), _tile(self.values)

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of tiles along the features and along the values."""
        return pl.cdiv(self.features, self.tile[0]), pl.cdiv(self.values, self.tile[1])

    @property
    def whole(self) -> tuple[int, int]:
        """Numbers of features and values, padded to whole tiles."""
        return self.tile[0] * self.tiles[0], self.tile[1] * self.tiles[1]

    @property
    def narrow(self) -> int:
        """Number of values of a state of which a program has all features (delta form)."""
        return max(LEAST, min(self.tile[1], TILE * TILE // pl.next_power_of_2(self.whole[0])))

    @property
    def slices(self) -> list[Any]:
        """Slices of the features, one slice per tile."""
        return [pl.ds(start, self.tile[0]) for start in range(0, self.whole[0], self.tile[0])]

    @property
    def warps(self) -> int:
        """Number of warps, such that a thread has at most 16 entries of the state."""
        return 8 if self.tile == (TILE, TILE) else 4

    def dot(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """Returns a matrix product in the precision of `how`."""
        return products.dot(left, right, self.how.precision, interpreted=self.how.interpreted)


def _tile(size: int) -> int:
    return max(LEAST, min(TILE, pl.next_power_of_2(size)))


def plan_of(how: How, arrays: Arrays) -> Plan:
    """Returns the plan for the shapes of `arrays`."""
    decay = None
    if arrays.log_decay is not None:
        decay = "token" if arrays.log_decay.ndim == 3 else "feature"
    batch, length, query_heads, features = arrays.query.shape
    key_heads, (value_heads, values) = arrays.key.shape[2], arrays.value.shape[2:]
    return Plan(batch, length, query_heads, key_heads, value_heads, features, values, decay, how)


def times(x, decay):
    """Returns `x * decay`, or `x` without decay."""
    return x if decay is None else x * decay


class Program:
    """Loads and products of one program, by blocks of C = `BLOCK` tokens.

    Loads return zeros beyond the last token, feature or value. The index f names a tile of features
    and the index d a tile of values.
    """

    def __init__(self, plan: Plan, value_head, shared):
        """`shared` has the log decays, if there are any, and the scale of the queries, if any."""
        self.plan = plan
        self.row = jnp.arange(BLOCK, dtype=jnp.int32)
        self.back = BLOCK - 1 - self.row
        self.example, self.value_head = pl.program_id(0), value_head
        self.array: Any = shared[0] if plan.decay else None
        scales = shared[1:] if plan.decay else shared
        self.scale: Any = scales[0] if scales else None

    # Tiles `(C, f)` or `(C, d)` of the given tokens.

    def query(self, array, token, head, f):
        """Loads queries `(C, f)` of a head of the output."""
        head = head // (self.plan.heads // self.plan.query_heads)
        queries = self._tile(array, token, head, 0, f)
        return queries if self.scale is None else queries * self.scale[0]

    def output(self, array, token, head, d, dtype=jnp.float32):
        """Loads `(C, d)` of a head of the output."""
        return self._tile(array, token, head, 1, d, dtype=dtype)

    def key(self, array, token, f):
        """Loads keys `(C, f)` of the key head that this program's value head reads."""
        head = self.value_head // (self.plan.value_heads // self.plan.key_heads)
        return self._tile(array, token, head, 0, f)

    def value(self, array, token, d, dtype=jnp.float32):
        """Loads values `(C, d)` of this program's value head."""
        return self._tile(array, token, self.value_head, 1, d, dtype=dtype)

    def log_decay(self, token, f, present=True):
        """Loads log decays `(C)` or `(C, f)`, with zero for tokens that are not `present`."""
        if self.plan.decay == "feature":
            return self._tile(self.array, token, self.value_head, 0, f, present)
        within = jnp.minimum(token, self.plan.length - 1)
        present &= token < self.plan.length
        at = self.array.at[self.example, within, self.value_head]
        return triton.load(at, mask=present, other=0.0).astype(jnp.float32)

    def _tile(self, array, token, head, axis, number, present=True, dtype=jnp.float32):
        width, size = self.plan.tile[axis], (self.plan.features, self.plan.values)[axis]
        column = number * width + jnp.arange(width, dtype=jnp.int32)
        present &= token < self.plan.length
        token, entry = jnp.minimum(token, self.plan.length - 1), jnp.minimum(column, size - 1)
        tile = triton.load(
            array.at[self.example, token[:, None], head, entry[None]],
            mask=(column < size)[None] & present[:, None],
            other=0.0,
        )
        return tile.astype(dtype)

    # Decays; None without decay.

    def since_start(self, start, f):
        """Decay of the state from the start of a block to each token, including the token's own."""
        if self.plan.decay is None:
            return None
        return self._column(jnp.exp(jnp.cumsum(self.log_decay(start + self.row, f), 0)))

    def until_end(self, start, f):
        """Decay from each token, which writes to the state, to the end of a block."""
        if self.plan.decay is None:
            return None
        if self.plan.decay == "feature":
            *_, (_, _, until) = self._halves(start, f)
            return jnp.exp(until)
        later = self.row[None, :] > self.row[:, None]
        log_decay = self.log_decay(start + self.row, f)[None, :]
        return self._column(jnp.exp(jnp.sum(jnp.where(later, log_decay, 0), 1)))

    def whole(self, start, f):
        """Decay of the state over a whole block."""
        if self.plan.decay is None:
            return None
        decay = jnp.exp(jnp.sum(self.log_decay(start + self.row, f), 0))
        return decay[:, None] if self.plan.decay == "feature" else decay

    def _column(self, decay):
        return decay if self.plan.decay == "feature" else decay[:, None]

    # Weights `(C, C)` of each query with the keys of its block up to its own token, gradients of
    # the weights, and sums of rows with these weights. With one decay per feature, the decays are
    # inside every product; otherwise the product is multiplied by one matrix of decays.

    def weights(self, start, query, key, head):
        """Returns the weights `(C, C)` of a head of the output."""

        def of_tile(f, weights):
            queries = self.query(query, start + self.row, head, f)
            keys = self.key(key, start + self.row, f)
            return weights + self._products(start, queries, keys, f)

        weights = self.over_tiles(0, of_tile, jnp.zeros((BLOCK, BLOCK), jnp.float32))
        return weights if self.plan.decay == "feature" else weights * self._decays(start)

    def _products(self, start, queries, keys, f):
        if self.plan.decay != "feature":
            return self.plan.dot(queries, keys.T)
        own = jnp.sum(queries * keys, 1)[:, None]
        products = jnp.where(self.row[:, None] == self.row[None, :], own, 0)
        for decay, pairs in self._levels(start, f):
            of_level = self.plan.dot(queries * decay, (keys * decay).T)
            products += jnp.where(pairs, of_level, 0)
        return products

    def gradient_of_weights(self, start, d_out, value, head, dtype=jnp.float32):
        """Returns the gradient of the weights; with decays, its diagonal (own tokens) is zero.

        The factors of its products have `dtype`.
        """

        def of_tile(d, gradient):
            d_read = self.output(d_out, start + self.row, head, d, dtype)
            values = self.value(value, start + self.row, d, dtype)
            return gradient + self.plan.dot(d_read, values.T)

        gradient = self.over_tiles(1, of_tile, jnp.zeros((BLOCK, BLOCK), jnp.float32))
        if self.plan.decay is None:
            return gradient
        return jnp.where(self.row[:, None] == self.row[None, :], 0, gradient)

    def mixed(self, start, weights, rows, f, *, back=False):
        """Weighted sums `(C, f)` of the rows up to each token, or from each token on if `back`."""

        def dot(weights, rows):
            return self.plan.dot(weights.T if back else weights, rows)

        if self.plan.decay != "feature":
            return dot(weights * self._decays(start), rows)
        return sum(
            decay * dot(jnp.where(pairs, weights, 0), rows * decay)
            for decay, pairs in self._levels(start, f)
        )

    def _decays(self, start):
        """Decays `(C, C)` from tokens j (columns) to tokens i (rows); zero where j > i."""
        visible = self.row[:, None] >= self.row[None, :]
        if self.plan.decay is None:
            return jnp.where(visible, 1.0, 0.0)
        log_decay = self.log_decay(start + self.row, 0)[:, None]
        later = jnp.where(self.row[:, None] > self.row[None, :], log_decay, 0)
        return jnp.where(visible, jnp.exp(jnp.cumsum(later, 0)), 0)

    # Decays per feature are products of two factors of at most 1. A block is halved repeatedly,
    # down to single tokens, and a pair of tokens belongs to the level at which the two tokens are
    # separated. The decay of the pair is the decay of the key until the end of its half, times the
    # decay of the query since the start of its half. No exponent is a difference of sums.

    def _levels(self, start, f):
        """Yields the decays of all tokens `(C, f)` and the mask of pairs `(C, C)` of each level."""
        for size, since, until in self._halves(start, f):
            if size < BLOCK:
                both, second = self.row // (2 * size), self.row // size % 2 == 1
                pairs = (both[:, None] == both[None, :]) & second[:, None] & ~second[None, :]
                yield jnp.exp(jnp.where(second[:, None], since, until)), pairs

    def _halves(self, start, f):
        """Yields for each size of halves: the size, and two sums of log decays `(C, f)`.

        The sums run from the start of a half to each token, including the token's own log decay,
        and from each token, without its own log decay, to the end of the half.
        """
        log_decay = self.log_decay(start + self.row, f)
        size, since, until = 1, log_decay, jnp.zeros_like(log_decay)
        while True:
            yield size, since, until
            if size == BLOCK:
                return
            second = (self.row // size % 2 == 1)[:, None]
            of_first = _sums(jnp.where(second, 0, log_decay), 2 * size)
            of_second = _sums(jnp.where(second, log_decay, 0), 2 * size)
            since = since + jnp.where(second, of_first, 0)
            until = until + jnp.where(second, 0, of_second)
            size *= 2

    # Updates over a block: of the state forward, and of the gradient of the state backward.

    def state_after(self, state, start, key, value, f, d):
        """Returns the state after a block: the decayed state before it plus the block's writes.

        Tokens are loaded in reverse order, so that a running sum gives the decays until the end.
        """
        keys = self.key(key, start + self.back, f)
        if self.plan.decay is not None:
            after = start + self.back + 1
            later = self.log_decay(after, f, self.back + 1 < BLOCK)
            keys *= self._column(jnp.exp(jnp.cumsum(later, 0)))
        written = self.plan.dot(keys.T, self.value(value, start + self.back, d))
        return times(state, self.whole(start, f)) + written

    def gradient_before(self, co_state, start, query, d_out, f, d):
        """Returns the gradient of the state before a block from the gradient after the block."""
        since_start = self.since_start(start, f)

        def of_head(head, read):
            queries = times(self.query(query, start + self.row, head, f), since_start)
            return read + self.plan.dot(queries.T, self.output(d_out, start + self.row, head, d))

        return self.over_group(of_head, times(co_state, self.whole(start, f)))

    def over_tiles(self, axis, body, carry):
        """Folds `body(number, carry)` over tiles of features (axis 0) or of values (axis 1)."""
        return _loop(self.plan.tiles[axis], body, carry)

    def over_group(self, body, carry):
        """Folds `body(head, carry)` over the heads of the output that read this value head."""
        group = self.plan.heads // self.plan.value_heads
        first = self.value_head * group
        return _loop(group, lambda g, carry: body(first + g, carry), carry)


def _loop(count, body, carry):
    """Folds `body` over `count` steps, without a loop for one step."""
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def _sums(x, size):
    """Sum groups of `size` rows of `(C, f)`; each row gets the sum of its group."""
    blocks = x.reshape(-1, size, x.shape[1])
    return jnp.broadcast_to(jnp.sum(blocks, 1)[:, None], blocks.shape).reshape(x.shape)


def tile_of(ref, plan, axis, number):
    """Loads a tile of features (axis 0) or of values (axis 1) of a state."""
    part = pl.ds(number * plan.tile[axis], plan.tile[axis])
    return ref[part, :] if axis == 0 else ref[:, part]


def put(out, tile):
    """Stores a whole tile, in the dtype of the array."""
    row, column = (jnp.arange(size, dtype=jnp.int32) for size in tile.shape)
    triton.store(out.at[row[:, None], column[None, :]], tile.astype(out.dtype))
