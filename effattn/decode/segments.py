"""Extension of states that summarise each finished segment of tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks
from effattn.arrays.segments import positions_from, within


def extend_by_segment(
    extend_inside: Callable[..., tuple[jax.Array, Any]],
    segment: int,
    arrays: tuple[jax.Array, ...],
    state: Any,
    lengths: jax.Array,
) -> tuple[jax.Array, Any]:
    """Extends a state by T tokens, in parts that do not cross a segment border of any row.

    Args:
      extend_inside: `(arrays, state, lengths) -> (out, state)`, called for each part; the state has
        a `length`.
      segment: m, tokens in a segment.
      arrays: query `(B, T, N, H)`, key, value `(B, T, K, Hv)` and other arrays of the new tokens.
      state: the state before the new tokens.
      lengths: `(B,)` int32, number of valid new tokens of each row.

    Returns:
      The output `(B, T, N, Hv)`, zeros in the padding, and the state after the new tokens.
    """
    checks.known_length("decoding segment by segment", arrays[0], axis=1 - arrays[0].ndim)
    query, _, value, *_ = arrays
    batch, time = query.shape[:2]
    if time == 1:
        return extend_inside(arrays, state, lengths)
    size = min(time, segment)
    rows = jnp.arange(batch)[:, None]

    def part(carry, _):
        """Extends each row by its next tokens, up to the end of the present segment."""
        outs, state, start = carry
        left = segment - state.length % segment
        taken = jnp.minimum(jnp.minimum(lengths - start, left), size)
        at = positions_from(start, size)
        new = tuple(
            jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), 1, mode="clip")
            for x in arrays
        )
        of_part, state = extend_inside(new, state, taken)
        at = jnp.where(within(taken, size), at, time)
        return (outs.at[rows, at].set(of_part, mode="drop"), state, start + taken), None

    outs = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    carry = outs, state, jnp.zeros((batch,), jnp.int32)
    (outs, state, _), _ = lax.scan(part, carry, length=1 + -(-(time - 1) // segment))
    return outs, state
