"""Means of tokens over equal segments, with gradients that are gathered."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.axes import lead
from effattn.arrays.linear_map import with_derivatives
from effattn.arrays.segments import positions_from, within
from effattn.cores.sequence_parts import Parts


def segment_means(x: jax.Array, lengths: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Means of `x (*B, L, K, H)` over `count` segments of the valid tokens.

    Returns:
      The means `(*B, min(count, L), K, H)`, zeros for empty segments; and the number of nonempty
      segments, `(*B)`, which come first.
    """
    count = min(count, x.shape[-3])
    return _means_of((count, x.shape[-3]), x, lengths), jnp.minimum(lengths, count)


class Segments(NamedTuple):
    """Consecutive segments of a sequence, whose sizes differ by one token at most.

    The first `longer` segments have `at_least + 1` tokens, the others `at_least`.
    """

    at_least: jax.Array
    longer: jax.Array

    @classmethod
    def of(cls, size: jax.Array, count: Any) -> "Segments":
        """Divides `size` tokens into `count` segments; both may be arrays of integers."""
        return cls(*jnp.divmod(size, count))

    def start(self, segment: jax.Array) -> jax.Array:
        """Position of the first token of a segment."""
        return segment * self.at_least + jnp.minimum(segment, self.longer)

    def tokens(self, segment: jax.Array) -> jax.Array:
        """Number of tokens of a segment."""
        return self.at_least + (segment < self.longer).astype(self.at_least.dtype)

    def segment(self, position: jax.Array) -> jax.Array:
        """Segment of the token at a position; positions past the last token continue the count."""
        later = position - self.longer * (self.at_least + 1)
        after = self.longer + later // jnp.maximum(self.at_least, 1)
        return jnp.where(later < 0, position // (self.at_least + 1), after)


def _means(static, x, lengths):
    count, length = static
    segments = Segments.of(lengths[..., None], count)
    segment = lead(jnp.arange(count, dtype=lengths.dtype), lengths.ndim + 1)
    start, size = segments.start(segment), segments.tokens(segment)
    largest = -(-length // count)
    tokens = _take(x, jnp.minimum(positions_from(start, largest), length - 1))
    tokens = jnp.where(within(size, largest)[..., None, None], tokens, 0)
    return tokens.sum(-3) / jnp.maximum(size, 1)[..., None, None].astype(x.dtype)


def _means_fwd(static, x, lengths):
    return _means(static, x, lengths), lengths


def _means_bwd(static, lengths, cotangent):
    """Gathers the gradient of each token from its segment; autodiff would scatter."""
    count, length = static
    segments = Segments.of(lengths[..., None], count)
    token = lead(jnp.arange(length, dtype=lengths.dtype), lengths.ndim + 1)
    segment = segments.segment(token)
    share = _take(cotangent, jnp.minimum(segment, count - 1))
    size = jnp.maximum(segments.tokens(segment), 1)[..., None, None].astype(share.dtype)
    return clear_after(share / size, lengths), None


_means_of = with_derivatives(_means, _means_fwd, _means_bwd)


def means_of_parts(
    parts: Parts, x: jax.Array, lengths: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """`segment_means` of a sequence that devices hold in parts, by a sum of `count` tokens.

    `x` and `lengths` are those of this device's part.
    """
    length = x.shape[-3]
    count = min(count, length * parts.devices)
    total = parts.sum(lengths)
    segments = Segments.of(total[..., None], count)
    token = lead(jnp.arange(length, dtype=lengths.dtype), lengths.ndim + 1) + parts.index * length
    segment = segments.segment(token)
    size = jnp.maximum(segments.tokens(segment), 1)
    inside = (segment[..., None] == jnp.arange(count)) & within(lengths, length)[..., None]
    weights = jnp.where(inside, 1 / size[..., None].astype(x.dtype), 0)  # (*B, L, count)
    means = jnp.einsum("...lc,...lkh->...ckh", weights, x, precision="highest")
    return parts.sum(means), jnp.minimum(total, count)


def _take(x, index):
    """Gathers tokens of `x (*B, L, K, H)` at `index (*B, ...)`."""
    flat = lax.collapse(index, x.ndim - 3)[..., None, None]
    return jnp.take_along_axis(x, flat, -3).reshape(*index.shape, *x.shape[-2:])


def clear_after(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Sets tokens of `(*B, L, K, H)` after the lengths to zero."""
    return jnp.where(within(lengths, x.shape[-3])[..., None, None], x, 0)
