"""The linear recurrence in a block of tokens on TPUs: decays, products of pairs, corrections.

The matrix unit does nearly all work. Without decay, or with one decay per token, a block is one
masked product. The log decay between two tokens is then a sum of log decays, computed as a product
with a triangular matrix of ones. With one decay per feature, the block is halved repeatedly, and
each pair of tokens is separated once, at a border between the two tokens, as in
`effattn.xla.recurrent_chunks`. The query has decayed since the border and the key until the border,
each by the exponential of a sum of log decays. This sum is a product with a matrix of zeros and
ones. A block of 64 tokens thus takes six products with a matrix of 64 x 64 for the sums, and six
masked products for the weights. As 0 * -inf is NaN, a decay of zero has the finite log decay
`FORGETS` in the kernels.

Products with a matrix of zeros and ones are exact up to the rounding of float32 sums. The other
matrix is the sum of three matrices of bfloat16 (`_parts`), so they take three passes of the matrix
unit, where a product in full float32 takes six.

Shapes: C tokens, F features, D values.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from effattn.pallas.recurrence import BLOCK, Arrays, How

FORGETS = -1e30  # log decay in place of -inf: a sum of 128 is finite, and its exponential is zero


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static configuration of a kernel: B, N, K, V, C, the kind of decay, and blocks.

    Attributes:
      batch: B.
      query_heads, key_heads, value_heads: N, K and V.
      decay: one decay per "token", or one per "feature" of a token; None without decay.
      has_delta: whether values are corrected (the delta form).
      how: execution options.
      tokens: C, tokens in a block.
      blocks: number of blocks.
    """

    batch: int
    query_heads: int
    key_heads: int
    value_heads: int
    decay: str | None
    has_delta: bool
    how: How
    tokens: int
    blocks: int

    @classmethod
    def of(cls, how: How, arrays: Arrays, tokens: int = BLOCK) -> "Plan":
        """The configuration for blocks of `tokens` tokens."""
        decay = None
        if arrays.log_decay is not None:
            decay = "token" if arrays.log_decay.ndim == 3 else "feature"
        batch, length, query_heads, _ = arrays.query.shape
        heads = query_heads, arrays.key.shape[2], arrays.value.shape[2]
        has_delta = arrays.recalled is not None
        return cls(batch, *heads, decay, has_delta, how, tokens, pl.cdiv(length, tokens))

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
        return dot(left, right, contract, lax.Precision.HIGHEST if exact else None)

    def over_group(self, body, carry):
        """Folds `body(g, carry)` over the heads of the output that read one value head."""
        if self.group == 1:
            return body(0, carry)
        return lax.fori_loop(jnp.int32(0), jnp.int32(self.group), body, carry)


def dot(left, right, contract=(1, 0), precision: lax.Precision | None = lax.Precision.HIGHEST):
    """Returns the product over one axis of each operand, in float32."""
    dimensions = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(
        left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _sums(where, x, axis=0):
    """Product in float32 of a mask `(m, n)` and x, over the axis of x that has length n."""
    mask = jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)
    return sum(dot(mask, part, (1, axis), None) for part in _parts(x))


def _sums_of_columns(x, where, axis):
    """Product in float32 of x and a mask `(n, m)`, over the axis of x that has length n."""
    mask = jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)
    return sum(dot(part, mask, (axis, 0), None) for part in _parts(x))


def _parts(x):
    """Three arrays of bfloat16 whose sum is x: the first eight bits, the next eight and the rest.

    Bits are cut off, because a compiler may leave out a conversion to bfloat16 and back.
    """

    def first(x):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
        return lax.bitcast_convert_type(bits, jnp.float32)

    high = first(x)
    middle = first(x - high)
    return [part.astype(jnp.bfloat16) for part in (high, middle, x - high - middle)]


def times(x: jax.Array, decay: jax.Array | None) -> jax.Array:
    """The product with a decay; None is 1."""
    return x if decay is None else x * decay


def written(plan: Plan, at: "Decays", key: jax.Array, value: jax.Array) -> jax.Array:
    """Decayed products of keys and values in the state at the end of a block, `(F, D)`."""
    return plan.dot(times(key, at.until_end()), value, (0, 0))


class Decays:
    """Decays of the tokens of a block; None without decay."""

    def __init__(self, plan: Plan, log_decay: jax.Array | None):
        """`log_decay` is `(C, F)`, or `(1, C)` for all features."""
        self.plan, self.log = plan, log_decay
        square = plan.tokens, plan.tokens
        # Token of the row (i) and token of the column (j).
        self.down = lax.broadcasted_iota(jnp.int32, square, 0)
        self.across = lax.broadcasted_iota(jnp.int32, square, 1)

    def sums(self, where):
        """Sums the log decays of the tokens (columns) in the mask `where`, for each token (row)."""
        assert self.log is not None
        if self.plan.decay == "feature":
            return _sums(where, self.log)
        return jnp.sum(jnp.where(where, self.log, 0), 1, keepdims=True)

    def since_start(self, before: bool = False):
        """Decays `(C, f)`, f = F or 1, from the start of the block to each token's read.

        With `before`, tokens read the state before them, which has not decayed at these tokens.
        """
        return None if self.log is None else jnp.exp(self.sums(self.earlier(before)))

    def earlier(self, before: bool):
        """Mask `(C, C)` of j <= i or, with `before`, of j < i, where i is the row."""
        return self.across < self.down if before else self.across <= self.down

    def until_end(self):
        """Decays `(C, f)` from each token's write to the end of the block."""
        return None if self.log is None else jnp.exp(self.sums(self.across > self.down))

    def whole(self):
        """Decay `(f, 1)` of the state over the whole block."""
        if self.log is None:
            return None
        if self.plan.decay == "feature":
            every = jnp.ones((self.plan.tokens, 1), bool)
            return jnp.exp(_sums_of_columns(self.log, every, 0))
        return jnp.exp(jnp.sum(self.log, 1, keepdims=True))

    def gradient(
        self, crossing: jax.Array, at_end: jax.Array, recalled: jax.Array | None = None
    ) -> jax.Array:
        """Gradient of the log decays, in their shape; see `effattn.pallas.recurrence`.

        Args:
          crossing: q dq - k dk of each token, `(C, F)`.
          at_end: products of the state with its gradient at the end of the block, `(F, D)`.
          recalled: b db of each token in the delta form, `(C, F)`. The key b reads the state before
            its token.
        """
        assert self.log is not None
        if self.plan.decay == "feature":
            gradient = _sums(self.across >= self.down, crossing)
            if recalled is not None:
                gradient += _sums(self.across > self.down, recalled)
            every = jnp.ones((1, at_end.shape[1]), bool)
            gradient += _sums(every, at_end, 1)
        else:

            def later(x, where):
                of_rows = jnp.where(where, jnp.sum(x, 1, keepdims=True), 0)
                return jnp.sum(of_rows, 0, keepdims=True)

            gradient = later(crossing, self.down >= self.across) + jnp.sum(at_end)
            if recalled is not None:
                gradient += later(recalled, self.down > self.across)
        return jnp.where(self.log <= FORGETS, 0, gradient)


class Pairs:
    """Products of queries i and decayed keys j of a block, `(C, C)`, and their gradients.

    A query reads the state after its token or, with `before`, the state before it.
    """

    def __init__(self, at: Decays, before: bool = False):
        self.plan, self.log, self.down, self.across = at.plan, at.log, at.down, at.across
        self.before, self.visible = before, at.earlier(before)
        if self.plan.decay == "feature":
            bits = range(self.plan.tokens.bit_length() - 1)
            self.halvings = [self._halving(at, bit) for bit in bits]
        else:
            self.alike = self._alike()

    def _halving(self, at, bit):
        """Returns, for blocks of `2 << bit` tokens, the separated pairs and decays to the border.

        The pairs are a mask `(C, C)`; the decays between a token and the border are `(C, F)`.
        """
        second, key_second = (self.down >> bit) & 1 == 1, (self.across >> bit) & 1 == 1
        block = self.down >> (bit + 1) == self.across >> (bit + 1)
        since = second & key_second & self.visible
        until = ~second & ~key_second & (self.across > self.down)
        return second & ~key_second & block, jnp.exp(at.sums(block & (since | until)))

    def _alike(self):
        """Decays `(C, C)` from j to i if all features decay equally; 0 where i does not read j."""
        if self.log is None:
            return jnp.where(self.visible, 1.0, 0.0)
        logs = jnp.where(self.visible, self.log, 0)
        return jnp.where(
            self.visible, jnp.exp(_sums_of_columns(logs, self.down > self.across, 1)), 0
        )

    def products(self, query, key):
        """Returns the weights `(C, C)`, the decayed products of queries and keys."""
        product = self.plan.dot
        if self.plan.decay != "feature":
            return product(query, key, (1, 1)) * self.alike
        weights: Any = 0
        if not self.before:
            own = jnp.sum(query * key, 1, keepdims=True)
            weights = jnp.where(self.down == self.across, own, 0)
        for parted, decay in self.halvings:
            weights += jnp.where(parted, product(query * decay, key * decay, (1, 1)), 0)
        return weights

    def gradient(self, d_products, array, contract):
        """Returns the gradient `(C, F)` of queries or of keys from the gradient of the products.

        For queries, `array` is the keys and `contract` is (1, 0); for keys, `array` is the queries
        and `contract` is (0, 0). With decays, products of a token with itself are left out.
        """
        product = self.plan.dot
        if self.plan.decay == "feature":
            found: Any = 0
            for parted, decay in self.halvings:
                some = jnp.where(parted, d_products, 0)
                found += product(some, array * decay, contract) * decay
            return found
        d_products *= self.alike
        if self.log is not None:
            d_products = jnp.where(self.down == self.across, 0, d_products)
        return product(d_products, array, contract)


def unit_inverses(plan: Plan, systems: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the inverse `(C, C)` of I + P for each strictly lower triangular P of `systems`.

    Starts from single tokens and doubles the size of the inverted blocks on the diagonal:
    [[E, 0], [X, L]]^-1 = [[E^-1, 0], [-L^-1 X E^-1, L^-1]]. Each size is computed for all systems
    together, so that the compiler can overlap their products.
    """
    square = plan.tokens, plan.tokens
    down, across = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    found = [jnp.where(down == across, 1.0, 0.0)] * len(systems)
    for bit in range(plan.tokens.bit_length() - 1):
        is_below = (down >> bit) ^ (across >> bit) == 1
        below = [jnp.where(is_below, system, 0) for system in systems]
        if bit:
            below = [plan.dot(x, part) for x, part in zip(found, below, strict=True)]
            below = [plan.dot(part, x) for x, part in zip(found, below, strict=True)]
        found = [x - part for x, part in zip(found, below, strict=True)]
    return found


class Corrections:
    """Corrected values X = T V - (T B) S of a block; see `effattn.pallas.recurrence_delta`.

    Attributes:
      recalled: keys b, `(C, F)`.
      pairs: products P of keys b and k.
      since_start: decays `(C, f)` of the state that the keys b read; None without decay.
    """

    def __init__(self, at: Decays, recalled: jax.Array):
        self.plan, self.recalled = at.plan, recalled
        self.pairs, self.since_start = Pairs(at, before=True), at.since_start(before=True)

    def reads(self) -> jax.Array:
        """B, the keys b that read the state before the block, `(C, F)`."""
        return times(self.recalled, self.since_start)

    def gradients(
        self,
        inverse: jax.Array,
        d_corrected: jax.Array,
        corrected: jax.Array,
        key: jax.Array,
        state: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Gradients of all that the corrected values depend on.

        Args:
          inverse: T, `(C, C)`.
          d_corrected: E + K G', the gradient of X from the outputs of the block and from later
            blocks, without its effect on other corrected values, `(C, D)`.
          corrected: X, `(C, D)`.
          key: keys k, `(C, F)`.
          state: state before the block, `(F, D)`.

        Returns:
          The gradients of the values, dX, `(C, D)`, and of the keys b, `(C, F)`; and the parts of
          the gradients of the keys k, `(C, F)`, and of the state, `(F, D)`, that pass through the
          corrected values.
        """
        dot = self.plan.dot
        d_value = dot(inverse, d_corrected, (0, 0))
        # The recalled values B S + P X have the gradient -d_value.
        d_pairs = -dot(d_value, corrected, (1, 1))
        d_recalled = self.pairs.gradient(d_pairs, key, (1, 0))
        d_recalled -= times(dot(d_value, state, (1, 1)), self.since_start)
        d_key = self.pairs.gradient(d_pairs, self.recalled, (0, 0))
        d_state = -dot(self.reads(), d_value, (0, 0))
        return d_value, d_recalled, d_key, d_state
