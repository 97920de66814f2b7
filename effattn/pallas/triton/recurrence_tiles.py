"""What one program of the linear recurrence by Triton reads: tiles of tokens, and their decays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn.pallas.recurrence import BLOCK, Arrays, How

TILE = 64  # features, and values, of the state in one program, at most
LEAST = 16  # the least that the products of tensor cores take


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is traced: B, T, N, K, V, F and D, and how features decay."""

    batch: int
    length: int
    query_heads: int
    key_heads: int
    value_heads: int
    features: int
    values: int
    decay: str | None  # of each "token", or of each "feature" of one
    how: How

    @property
    def blocks(self) -> int:
        """Of tokens, the last one perhaps in part."""
        return pl.cdiv(self.length, BLOCK)

    @property
    def heads(self) -> int:
        """Of the output."""
        return max(self.query_heads, self.value_heads)

    @property
    def tile(self) -> tuple[int, int]:
        """Features and values of a tile of the state."""
        return _tile(self.features), _tile(self.values)

    @property
    def tiles(self) -> tuple[int, int]:
        """How many along the features, and along the values."""
        return pl.cdiv(self.features, self.tile[0]), pl.cdiv(self.values, self.tile[1])

    @property
    def whole(self) -> tuple[int, int]:
        """Features and values of whole tiles."""
        return self.tile[0] * self.tiles[0], self.tile[1] * self.tiles[1]

    @property
    def narrow(self) -> int:
        """Values of a state of which a program has all features."""
        return max(LEAST, min(self.tile[1], TILE * TILE // pl.next_power_of_2(self.whole[0])))

    @property
    def slices(self) -> list[Any]:
        """Of all features, those of each tile."""
        return [pl.ds(start, self.tile[0]) for start in range(0, self.whole[0], self.tile[0])]

    @property
    def warps(self) -> int:
        """So many that a thread has 16 entries of the state, or fewer."""
        return 8 if self.tile == (TILE, TILE) else 4

    def dot(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """A product of matrices, in the precision asked for.

        That of float32 is three products of TensorFloat-32, of what it keeps and of what it leaves,
        which are exact to about 2**-22. Interpreters have float32 itself.
        """
        precision: Any = self.how.precision
        if precision == lax.Precision.HIGHEST and not self.how.interpreted:
            precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return triton.dot(left, right, precision=precision)


def _tile(size: int) -> int:
    return max(LEAST, min(TILE, pl.next_power_of_2(size)))


def plan_of(how: How, arrays: Arrays) -> Plan:
    """What the shapes of arrays fix."""
    decay = None
    if arrays.log_decay is not None:
        decay = "token" if arrays.log_decay.ndim == 3 else "feature"
    batch, length, query_heads, features = arrays.query.shape
    key_heads, (value_heads, values) = arrays.key.shape[2], arrays.value.shape[2:]
    return Plan(batch, length, query_heads, key_heads, value_heads, features, values, decay, how)


def times(x, decay):
    """Decayed, if there are decays."""
    return x if decay is None else x * decay


class Program:
    """What a kernel reads of arrays, by blocks of C = `BLOCK` tokens.

    Tokens beyond the last are zeros, as are features and values. A tile of features is told by its
    number f, one of values by d.
    """

    def __init__(self, plan: Plan, value_head, log_decay):
        """`log_decay` is one array or none."""
        self.plan = plan
        self.row = jnp.arange(BLOCK, dtype=jnp.int32)
        self.back = BLOCK - 1 - self.row
        self.example, self.value_head = pl.program_id(0), value_head
        self.array: Any = log_decay[0] if log_decay else None

    # Tiles `(C, f)` or `(C, d)` of the tokens given.

    def query(self, array, token, head, f):
        """Of a head of the output."""
        head = head // (self.plan.heads // self.plan.query_heads)
        return self._tile(array, token, head, 0, f)

    def output(self, array, token, head, d):
        """Of a head of the output."""
        return self._tile(array, token, head, 1, d)

    def key(self, array, token, f):
        """Of the key head that this program's value head shares."""
        head = self.value_head // (self.plan.value_heads // self.plan.key_heads)
        return self._tile(array, token, head, 0, f)

    def value(self, array, token, d):
        """Of this program's value head."""
        return self._tile(array, token, self.value_head, 1, d)

    def log_decay(self, token, f, present=True):
        """`(C)` or `(C, f)`; zero where a token is not `present`."""
        if self.plan.decay == "feature":
            return self._tile(self.array, token, self.value_head, 0, f, present)
        within = jnp.minimum(token, self.plan.length - 1)
        present &= token < self.plan.length
        return triton.load(
            self.array.at[self.example, within, self.value_head], mask=present, other=0.0
        )

    def _tile(self, array, token, head, axis, number, present=True):
        width, size = self.plan.tile[axis], (self.plan.features, self.plan.values)[axis]
        column = number * width + jnp.arange(width, dtype=jnp.int32)
        present &= token < self.plan.length
        token, entry = jnp.minimum(token, self.plan.length - 1), jnp.minimum(column, size - 1)
        return triton.load(
            array.at[self.example, token[:, None], head, entry[None]],
            mask=(column < size)[None] & present[:, None],
            other=0.0,
        )

    # Decays, which are None where there are none.

    def since_start(self, start, f):
        """Of what is there at the start of a block until each token reads it, that included."""
        if self.plan.decay is None:
            return None
        return self._column(jnp.exp(jnp.cumsum(self.log_decay(start + self.row, f), 0)))

    def until_end(self, start, f):
        """Of what each token writes, until the end of a block."""
        if self.plan.decay is None:
            return None
        if self.plan.decay == "feature":
            *_, (_, _, until) = self._halves(start, f)
            return jnp.exp(until)
        later = self.row[None, :] > self.row[:, None]
        log_decay = self.log_decay(start + self.row, f)[None, :]
        return self._column(jnp.exp(jnp.sum(jnp.where(later, log_decay, 0), 1)))

    def whole(self, start, f):
        """Of the state over a block."""
        if self.plan.decay is None:
            return None
        decay = jnp.exp(jnp.sum(self.log_decay(start + self.row, f), 0))
        return decay[:, None] if self.plan.decay == "feature" else decay

    def _column(self, decay):
        return decay if self.plan.decay == "feature" else decay[:, None]

    # Weights `(C, C)` of each query with the keys of its block up to its own, their gradients, and
    # what they mix. Where features decay they decay in every product, elsewhere all at once.

    def weights(self, start, query, key, head):
        """Of a head of the output."""

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

    def gradient_of_weights(self, start, d_out, value, head):
        """Where there are decays, without those of a token for itself."""

        def of_tile(d, gradient):
            d_read = self.output(d_out, start + self.row, head, d)
            return gradient + self.plan.dot(d_read, self.value(value, start + self.row, d).T)

        gradient = self.over_tiles(1, of_tile, jnp.zeros((BLOCK, BLOCK), jnp.float32))
        if self.plan.decay is None:
            return gradient
        return jnp.where(self.row[:, None] == self.row[None, :], 0, gradient)

    def mixed(self, start, weights, rows, f, *, back=False):
        """`(C, f)`, of the rows up to each token, or if `back` of those from it on."""

        def dot(weights, rows):
            return self.plan.dot(weights.T if back else weights, rows)

        if self.plan.decay != "feature":
            return dot(weights * self._decays(start), rows)
        return sum(
            decay * dot(jnp.where(pairs, weights, 0), rows * decay)
            for decay, pairs in self._levels(start, f)
        )

    def _decays(self, start):
        """`(C, C)` to the tokens in rows from those in columns, where these do not come after."""
        visible = self.row[:, None] >= self.row[None, :]
        if self.plan.decay is None:
            return jnp.where(visible, 1.0, 0.0)
        log_decay = self.log_decay(start + self.row, 0)[:, None]
        later = jnp.where(self.row[:, None] > self.row[None, :], log_decay, 0)
        return jnp.where(visible, jnp.exp(jnp.cumsum(later, 0)), 0)

    # Those of features are products of two that are at most 1. A block is halved, and its halves,
    # down to single tokens; a pair of tokens belongs to the level at which it is parted, and what
    # decays between them is that of the key until the end of its half, times that of the query
    # since the start of its own. No logarithm is a difference.

    def _levels(self, start, f):
        """Of each: the decay of every token, `(C, f)`, and which pairs `(C, C)` belong to it."""
        for size, since, until in self._halves(start, f):
            if size < BLOCK:
                both, second = self.row // (2 * size), self.row // size % 2 == 1
                pairs = (both[:, None] == both[None, :]) & second[:, None] & ~second[None, :]
                yield jnp.exp(jnp.where(second[:, None], since, until)), pairs

    def _halves(self, start, f):
        """Their size, and log decays since their start, with a token's own, and until their end."""
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

    # The state over a block, forward, and its gradient, back.

    def state_after(self, state, start, key, value, f, d):
        """What a block leaves of the state before it, and what it writes, the last token first."""
        keys = self.key(key, start + self.back, f)
        if self.plan.decay is not None:
            after = start + self.back + 1
            later = self.log_decay(after, f, self.back + 1 < BLOCK)
            keys *= self._column(jnp.exp(jnp.cumsum(later, 0)))
        written = self.plan.dot(keys.T, self.value(value, start + self.back, d))
        return times(state, self.whole(start, f)) + written

    def gradient_before(self, co_state, start, query, d_out, f, d):
        """The gradient of the state before a block, from that of the state after it."""
        since_start = self.since_start(start, f)

        def of_head(head, read):
            queries = times(self.query(query, start + self.row, head, f), since_start)
            return read + self.plan.dot(queries.T, self.output(d_out, start + self.row, head, d))

        return self.over_group(of_head, times(co_state, self.whole(start, f)))

    def over_tiles(self, axis, body, carry):
        """`body(number, carry)` for each tile of features, axis 0, or of values, 1."""
        return _loop(self.plan.tiles[axis], body, carry)

    def over_group(self, body, carry):
        """`body(head, carry)` for each head of the output of this value head."""
        group = self.plan.heads // self.plan.value_heads
        first = self.value_head * group
        return _loop(group, lambda g, carry: body(first + g, carry), carry)


def _loop(count, body, carry):
    """No loop where it would be of one."""
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def _sums(x, size):
    """Over each `size` rows of `(C, f)`, for all of them."""
    blocks = x.reshape(-1, size, x.shape[1])
    return jnp.broadcast_to(jnp.sum(blocks, 1)[:, None], blocks.shape).reshape(x.shape)


def tile_of(ref, plan, axis, number):
    """The features, axis 0, or the values, 1, of a state that belong to a tile."""
    part = pl.ds(number * plan.tile[axis], plan.tile[axis])
    return ref[part, :] if axis == 0 else ref[:, part]


def put(out, tile):
    """Writes whole tiles."""
    row, column = (jnp.arange(size, dtype=jnp.int32) for size in tile.shape)
    triton.store(out.at[row[:, None], column[None, :]], tile)
