"""Token mixing of RWKV-4: running averages with decaying weights, for each feature."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import within
from effattn.xla.linear_scan import linear_scan, max_plus_scan

# Lower than any key; differences of such exponents do not overflow.
_LOWEST = -1e30


class Sums(NamedTuple):
    """Weighted sums of values over tokens, for each feature, and sums of the weights.

    Both sums are divided by exp(largest) to prevent overflow.

    Attributes:
      values: `(*B, D)` or `(*B, T, D)`, sum of exp(k - largest) v.
      weights: same shape, sum of exp(k - largest).
      largest: same shape, the largest exponent, or `_LOWEST` before the first token.
    """

    values: jax.Array
    weights: jax.Array
    largest: jax.Array

    def average(self) -> jax.Array:
        """Returns the weighted average of the values; zeros where the weights are zero."""
        present = self.weights > 0
        return jnp.where(present, self.values, 0) / jnp.where(present, self.weights, 1)

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
    return Sums(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.full(shape, _LOWEST, dtype))


def initial_sums(initial: Sums | None, like: jax.Array) -> Sums:
    """Returns the checked initial sums `(B, D)` for tokens `like (B, T, D)`, in their dtype.

    None and zeros are the empty sums. Where the weights are zero, `largest` becomes `_LOWEST`.
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
    return Sums(values, weights, jnp.where(weights > 0, largest, _LOWEST))


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
        key = jnp.where(valid[..., None], key, _LOWEST)
        fall = jnp.where(valid[..., None], lead(decay, 3), 0)
    else:
        fall = jnp.broadcast_to(decay, key.shape)
    if starts is not None:
        fall = jnp.where(starts[..., None], -_LOWEST, fall)
    largest = max_plus_scan(-fall, key, initial.largest)
    # Exponents from before a start can fall below `_LOWEST`.
    largest = jnp.maximum(largest, _LOWEST)
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


def with_initial(initial: Sums | None, sums: Sums) -> Sums:
    """Prepends the initial sums to the running sums: `(B, 1 + T, D)`."""
    initial = initial_sums(initial, sums.values)
    return jax.tree.map(lambda first, x: jnp.concatenate([first[:, None], x], 1), initial, sums)


@jax.named_scope("rwkv4_mixing")
@checks.checked
def rwkv4_mixing(
    key: jax.Array,
    value: jax.Array,
    *,
    decay: jax.Array,
    bonus: jax.Array,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: Sums | None = None,
    return_state: bool = False,
) -> jax.Array | tuple[jax.Array, Sums]:
    r"""WKV averages of RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs").

    For each feature separately, with decay w and bonus u:

        y_t = (sum_(s < t) exp(k_s - (t - 1 - s) w) v_s + exp(u + k_t) v_t)
              / (sum_(s < t) exp(k_s - (t - 1 - s) w) + exp(u + k_t))

    The mixing is always causal. Sums are divided by exp of their largest exponent, so keys of any
    size do not overflow. Time is O(T D log C) for chunks of C = 64 tokens, memory O(T D); the state
    has 3 D numbers a row. Gradients do not flow through the largest exponents, which cancel.

    Args:
      key: `(B, T, D)`.
      value: `(B, T, D)`, of the dtype of the key.
      decay: w, `(D,)`, 0 or more.
      bonus: u, `(D,)`.
      lengths: `(B,)` int, valid tokens of each row; padding gives zeros and keeps the state.
      segment_ids: int `(B, T)`: each run of equal ids is a separate document; 0 is padding.
      initial_state: the state before the first token, from an earlier call.
      return_state: also return the state after the last valid token.

    Returns:
      `(B, T, D)` in the dtype of `value`; with `return_state`, `(y, state)`; the state is
      `Sums` of shape `(B, D)`, in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a state together with `segment_ids`.
    """
    key, value, valid, starts = check_tokens_by_feature(
        {"key": key, "value": value}, lengths, segment_ids, initial_state
    )
    dtype, size = key.dtype, (key.shape[-1],)
    wide = dtypes.wide(dtype)
    key, values = key.astype(wide), value.astype(wide)
    decay = checks.shaped("decay", decay, size).astype(wide)
    bonus = checks.shaped("bonus", bonus, size).astype(wide)
    sums = running_sums(key, values, decay, valid, starts, initial_state)
    sums = with_initial(initial_state, sums)
    before = jax.tree.map(lambda x: x[:, :-1], sums)
    if starts is not None:
        values_before, weights = (jnp.where(starts[..., None], 0, x) for x in before[:2])
        before = Sums(values_before, weights, before.largest)
    y = before.plus(one_token(key + lead(bonus, 3), values)).average()
    if valid is not None:
        y = jnp.where(valid[..., None], y, 0)
    y = y.astype(dtype)
    return (y, jax.tree.map(lambda x: x[:, -1], sums)) if return_state else y


def check_tokens_by_feature(
    arrays: dict[str, jax.Array], lengths: Any, segment_ids: Any, initial_state: Any
) -> tuple[Any, ...]:
    """Checks arrays `(B, T, D)` of one dtype, and sets their padding to zero.

    Returns:
      The arrays; then `valid` and `starts`, bool `(B, T)` or None: True at valid tokens, and True
      at the first token of each document.
    """
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    (first, like), *_ = arrays.items()
    if like.ndim != 3 or not jnp.issubdtype(like.dtype, jnp.floating):
        raise ValueError(
            f"{first} must be floating point of shape (batch, length, features), got {like.dtype} "
            f"of shape {like.shape}"
        )
    for name, array in arrays.items():
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ValueError(
                f"{name} must be {like.dtype} of shape {like.shape}, as {first} is, got "
                f"{array.dtype} of shape {array.shape}"
            )
    checks.known_length("this mixing of tokens", like, axis=-2)
    batch, time = like.shape[:2]
    valid = starts = None
    lengths = checks.lengths("lengths", lengths, (batch,))
    if lengths is not None:
        valid = within(lengths, time)
    pair = checks.segment_ids(segment_ids, (batch,), time, time)
    if pair is not None:
        if initial_state is not None:
            raise ValueError(
                "initial_state and segment_ids cannot be given together: documents start anew"
            )
        ids = pair[0]
        valid = (ids != 0) if valid is None else (ids != 0) & valid
        changes = ids[:, 1:] != ids[:, :-1]
        starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), changes], 1)
    if valid is not None:
        arrays = {k: jnp.where(valid[..., None], x, 0) for k, x in arrays.items()}
    return (*arrays.values(), valid, starts)


registry.register(
    registry.Mechanism(
        name="rwkv4",
        family="recurrent",
        paper="Peng et al. 2023, RWKV: Reinventing RNNs for the Transformer Era",
        function=rwkv4_mixing,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.rwkv4:RWKV4",
        complexity="O(N D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
