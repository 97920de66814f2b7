"""Running sums of values, weighted by the exponentials of keys, for each feature."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks
from effattn.arrays.axes import lead
from effattn.cores import passed_states, sequence_parts
from effattn.xla.linear_scan import linear_scan, max_plus_scan

# Lower than any key; differences of such exponents do not overflow.
LOWEST = -1e30


class Sums(NamedTuple):
    """Weighted sums of values over tokens, for each feature, and sums of the weights.

    Both sums are divided by exp(largest) to prevent overflow.

    Attributes:
      values: `(*B, D)` or `(*B, T, D)`, sum of exp(k - largest) v.
      weights: same shape, sum of exp(k - largest).
      largest: same shape, the largest exponent, or `LOWEST` before the first token.
    """

    values: jax.Array
    weights: jax.Array
    largest: jax.Array

    def average(self) -> jax.Array:
        """Returns the weighted average of the values; zeros where the weights are zero."""
        present = self.weights > 0
        return jnp.where(present, self.values, 0) / jnp.where(present, self.weights, 1)

    def emptied(self, flags: jax.Array) -> "Sums":
        """Returns the empty sums where a flag is set.

        Larger keys of an earlier document would make the weights of the next one underflow.
        """
        empty = empty_sums(self.values.shape, self.values.dtype)
        return jax.tree.map(lambda none, sums: jnp.where(flags, none, sums), empty, self)

    def plus(self, other: "Sums") -> "Sums":
        """Returns the sums over the tokens of both operands."""
        largest = lax.stop_gradient(jnp.maximum(self.largest, other.largest))
        mine, theirs = (jnp.exp(part.largest - largest) for part in (self, other))
        return Sums(
            self.values * mine + other.values * theirs,
            self.weights * mine + other.weights * theirs,
            largest,
        )


def one_token(exponent: jax.Array, value: jax.Array) -> Sums:
    """Returns the sums of one token with weight exp(exponent)."""
    largest = lax.stop_gradient(exponent)
    weight = jnp.exp(exponent - largest)
    return Sums(weight * value, weight, largest)


def empty_sums(shape: tuple[int, ...], dtype: Any) -> Sums:
    """Returns the empty sums."""
    return Sums(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.full(shape, LOWEST, dtype))


def initial_sums(initial: Sums | None, like: jax.Array) -> Sums:
    """Returns the checked initial sums `(B, D)` for tokens `like (B, T, D)`, in their dtype.

    None and zeros are the empty sums. Where the weights are zero, `largest` becomes `LOWEST`.
    """
    shape = like.shape[0], like.shape[2]
    if initial is None:
        return empty_sums(shape, like.dtype)
    if not isinstance(initial, Sums):
        raise ValueError(
            f"initial_state must be the Sums that an earlier call returned, got {initial!r:.80}"
        )
    values, weights, largest = (
        checks.shaped(f"initial_state.{name}", x, shape).astype(like.dtype)
        for name, x in initial._asdict().items()
    )
    return Sums(values, weights, lax.stop_gradient(jnp.where(weights > 0, largest, LOWEST)))


def running_sums(
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    valid: jax.Array | None = None,
    starts: jax.Array | None = None,
    initial: Sums | None = None,
) -> Sums:
    """Returns the running sums up to and including each token, with decaying weights.

    Args:
      key: `(B, T, D)`, exponents.
      value: `(B, T, D)`.
      decay: `(D,)`, amount by which exponents of earlier tokens fall at each token, 0 or more.
      valid: bool `(B, T)`, False in the padding.
      starts: bool `(B, T)`, True at the first token of each document.
      initial: the sums before the first token, `(B, D)`; zeros or None for empty sums.

    Returns:
      `Sums` of shape `(B, T, D)`.
    """
    initial = initial_sums(initial, key)
    if valid is not None:
        # Padding adds no weight and does not decay earlier weights.
        key = jnp.where(valid[..., None], key, LOWEST)
        fall = jnp.where(valid[..., None], lead(decay, 3), 0)
    else:
        fall = jnp.broadcast_to(decay, key.shape)
    if starts is not None:
        fall = jnp.where(starts[..., None], -LOWEST, fall)
    largest = max_plus_scan(-fall, key, initial.largest)
    # Exponents from before a start can fall below `LOWEST`.
    largest = jnp.maximum(largest, LOWEST)
    before = jnp.concatenate([initial.largest[:, None], largest[:, :-1]], 1)
    kept = jnp.exp(lax.stop_gradient(before) - fall - largest)
    if starts is not None:
        kept = jnp.where(starts[..., None], 0, kept)
    weight = jnp.exp(key - largest)
    if valid is not None:
        weight = jnp.where(valid[..., None], weight, 0)
    both = linear_scan(
        jnp.concatenate([kept, kept], -1),
        jnp.concatenate([weight * value, weight], -1),
        jnp.concatenate([initial.values, initial.weights], -1),
    )
    values, weights = jnp.split(both, 2, -1)
    return Sums(values, weights, largest)


def passed_sums(
    name: str,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    valid: jax.Array | None = None,
    starts: jax.Array | None = None,
    initial: Sums | None = None,
) -> tuple[Sums | None, Sums | None]:
    """The sums before this device's part of a sequence, and those after the whole sequence.

    The arguments after `name`, that of the function for messages, are those of `running_sums`.
    Outside of `sequence_parts.along`, the results are `initial` and None.
    """
    parts = sequence_parts.parts_for(name, "pass_states")
    if parts is None:
        return initial, None
    time = key.shape[1]
    present = jnp.ones(key.shape[:2], bool) if valid is None else valid
    count = present.sum(1)
    later = count[:, None] - jnp.cumsum(present, 1)
    fall, resets = lead(decay, 2) * count[:, None], jnp.zeros_like(count, bool)
    if starts is not None:
        first = jnp.where(starts, jnp.arange(time), 0).max(1)
        present, resets = present & (jnp.arange(time) >= first[:, None]), starts.any(1)
    exponent = jnp.where(present[..., None], key - lead(decay, 3) * later[..., None], LOWEST)
    largest = lax.stop_gradient(exponent.max(1))
    weight = jnp.where(present[..., None], jnp.exp(exponent - largest[:, None]), 0)
    added = Sums((weight * value).sum(1), weight.sum(1), largest)
    kept = jnp.where(resets[:, None], 0, 1).astype(key.dtype)

    def after(before, pair):
        kept, fall, added = pair
        before = Sums(before.values, before.weights, before.largest - fall)
        return before.emptied(kept == 0).plus(added)

    return passed_states.chained(parts, (kept, fall, added), initial_sums(initial, key), after)


def with_initial(initial: Sums | None, sums: Sums) -> Sums:
    """Prepends the initial sums to the running sums: `(B, 1 + T, D)`."""
    initial = initial_sums(initial, sums.values)
    return jax.tree.map(lambda first, x: jnp.concatenate([first[:, None], x], 1), initial, sums)
