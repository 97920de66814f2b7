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
CHUNK = 32  # tokens of one masked product


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
        """A product of matrices, in the precision asked for."""
        return triton.dot(left, right, precision=self.how.precision)


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


def _sums(x, size):
    """Over each `size` rows of `(C, f)`, for all of them."""
    blocks = x.reshape(-1, size, x.shape[1])
    return jnp.broadcast_to(jnp.sum(blocks, 1)[:, None], blocks.shape).reshape(x.shape)


def times(x, decay):
    """Decayed, if there are decays."""
    return x if decay is None else x * decay


class Program:
    """What a kernel reads of arrays, by chunks of C tokens.

    Tokens beyond the last are zeros, as are features and values.
    """

    def __init__(self, plan: Plan, chunk: int, axis: int, value_head, log_decay):
        """`axis` of the grid are the tiles; `log_decay` is one array or none."""
        tile, across = pl.program_id(axis), plan.tiles[1]
        self.block = pl.program_id(2)  # of those that have blocks in their grid
        self.plan, self.length = plan, chunk
        self.row = jnp.arange(chunk, dtype=jnp.int32)
        self.back = chunk - 1 - self.row
        self.example, self.value_head = pl.program_id(0), value_head
        self.array: Any = log_decay[0] if log_decay else None
        self.feature = tile // across * plan.tile[0] + jnp.arange(plan.tile[0], dtype=jnp.int32)
        self.value_entry = tile % across * plan.tile[1] + jnp.arange(plan.tile[1], dtype=jnp.int32)

    # Tiles `(C, f)` or `(C, d)` of the tokens given; or one row, of one token.

    def query(self, array, token, head):
        """Of a head of the output."""
        head = head // (self.plan.heads // self.plan.query_heads)
        return self._tile(array, token, head, self.feature, self.plan.features)

    def output(self, array, token, head):
        """Of a head of the output."""
        return self._tile(array, token, head, self.value_entry, self.plan.values)

    def key(self, array, token):
        """Of the key head that this program's value head shares."""
        head = self.value_head // (self.plan.value_heads // self.plan.key_heads)
        return self._tile(array, token, head, self.feature, self.plan.features)

    def value(self, array, token):
        """Of this program's value head."""
        return self._tile(array, token, self.value_head, self.value_entry, self.plan.values)

    def log_decay(self, token, present=True):
        """`(C)` or `(C, f)`; zero where a token is not `present`."""
        if self.plan.decay == "feature":
            return self._tile(
                self.array, token, self.value_head, self.feature, self.plan.features, present
            )
        within = jnp.minimum(token, self.plan.length - 1)
        present &= token < self.plan.length
        return triton.load(
            self.array.at[self.example, within, self.value_head], mask=present, other=0.0
        )

    def _tile(self, array, token, head, column, size, present=True):
        present &= token < self.plan.length
        token = jnp.minimum(token, self.plan.length - 1)
        there, entry = column < size, jnp.minimum(column, size - 1)
        if token.ndim:
            token, present, there, entry = (
                token[:, None],
                present[:, None],
                there[None],
                entry[None],
            )
        return triton.load(
            array.at[self.example, token, head, entry], mask=there & present, other=0.0
        )

    # Decays, which are 1 or None where there are none.

    def since_start(self, start):
        """Of what is there at the start of a chunk until each token reads it, that included."""
        if self.plan.decay is None:
            return None
        return self._column(jnp.exp(jnp.cumsum(self.log_decay(start + self.row), 0)))

    def until_end(self, start):
        """Of what tokens write, the last token first, until the end of a chunk."""
        if self.plan.decay is None:
            return None
        after = start + self.back + 1
        later = self.log_decay(after, self.back + 1 < self.length)
        return self._column(jnp.exp(jnp.cumsum(later, 0)))

    def whole(self, start):
        """Of the state over a chunk."""
        if self.plan.decay is None:
            return None
        decay = jnp.exp(jnp.sum(self.log_decay(start + self.row), 0))
        return decay[:, None] if self.plan.decay == "feature" else decay

    def decays(self, start, key_row):
        """`(C, C)` from the tokens in `key_row` to each, where it does not come before them."""
        visible = self.row[:, None] >= key_row[None, :]
        if self.plan.decay is None:
            return jnp.where(visible, 1.0, 0.0)
        later = jnp.where(
            self.row[:, None] > key_row[None, :], self.log_decay(start + self.row)[:, None], 0
        )
        return jnp.where(visible, jnp.exp(jnp.cumsum(later, 0)), 0)

    # Decays of features between the tokens of a chunk, as products of two that are at most 1. The
    # chunk is halved, and its halves, down to single tokens; a pair of tokens belongs to the level
    # at which it is parted, and what decays between them is that of the key until the end of its
    # half, times that of the query since the start of its own. No logarithm is a difference.

    def levels(self, start):
        """Of each: the decay of every token, `(C, f)`, and which pairs `(C, C)` belong to it."""
        for size, since, until in self._halves(start):
            if size < self.length:
                both, second = self.row // (2 * size), self.row // size % 2 == 1
                pairs = (both[:, None] == both[None, :]) & second[:, None] & ~second[None, :]
                yield jnp.exp(jnp.where(second[:, None], since, until)), pairs

    def until_end_in_order(self, start):
        """As `until_end`, the first token first."""
        *_, (_, _, until) = self._halves(start)
        return jnp.exp(until)

    def _halves(self, start):
        """Their size, and log decays since their start, with a token's own, and until their end."""
        log_decay = self.log_decay(start + self.row)
        size, since, until = 1, log_decay, jnp.zeros_like(log_decay)
        while True:
            yield size, since, until
            if size == self.length:
                return
            second = (self.row // size % 2 == 1)[:, None]
            of_first = _sums(jnp.where(second, 0, log_decay), 2 * size)
            of_second = _sums(jnp.where(second, log_decay, 0), 2 * size)
            since = since + jnp.where(second, of_first, 0)
            until = until + jnp.where(second, 0, of_second)
            size *= 2

    def products(self, start, queries, keys):
        """`(C, C)`, of each query with the keys up to its own, where features decay."""
        own = jnp.sum(queries * keys, 1)[:, None]
        products = jnp.where(self.row[:, None] == self.row[None, :], own, 0)
        for decay, pairs in self.levels(start):
            of_level = self.plan.dot(queries * decay, (keys * decay).T)
            products += jnp.where(pairs, of_level, 0)
        return products

    def of_others(self, weights, key_row):
        """Weights `(C, C)` without those of a token for itself, where there are decays."""
        if self.plan.decay is None:
            return weights
        return jnp.where(self.row[:, None] == key_row[None, :], 0, weights)

    def _column(self, decay):
        return decay if self.plan.decay == "feature" else decay[:, None]

    # The state over a chunk, forward, and its gradient, back.

    def state_after(self, state, start, key, value):
        """What a chunk leaves of the state before it, and what it writes."""
        keys = times(self.key(key, start + self.back), self.until_end(start))
        written = self.plan.dot(keys.T, self.value(value, start + self.back))
        return times(state, self.whole(start)) + written

    def gradient_before(self, co_state, start, query, d_out):
        """The gradient of the state before a chunk, from that of the state after it."""
        since_start = self.since_start(start)

        def of_head(head, read):
            queries = times(self.query(query, start + self.row, head), since_start)
            return read + self.plan.dot(queries.T, self.output(d_out, start + self.row, head))

        return self.over_group(of_head, times(co_state, self.whole(start)))

    # Loops.

    def start(self, c):
        """The first token of a chunk of this program's block."""
        return self.block * BLOCK + c * self.length

    def chunks(self, body, carry):
        """`body(c, carry)` for each chunk of this program's block."""
        lax.fori_loop(0, BLOCK // self.length, body, carry)

    def over_group(self, body, carry):
        """`body(head, carry)` for each head of the output of this value head."""
        group = self.plan.heads // self.plan.value_heads
        if group == 1:
            return body(self.value_head, carry)
        first = self.value_head * group
        return lax.fori_loop(0, group, lambda g, carry: body(first + g, carry), carry)

    def put(self, out, c, row, tile):
        """Writes a chunk of this program's block, of whole tiles."""
        column = jnp.arange(tile.shape[1], dtype=jnp.int32)
        triton.store(out.at[c * self.length + row[:, None], column[None, :]], tile)
