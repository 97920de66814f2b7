"""Sampling of the next token from logits."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.decode.state import is_concrete


def sample_token(
    logits: jax.Array,
    rng: jax.Array | None = None,
    *,
    temperature: jax.Array | float | None = None,
    top_k: int | None = None,
    top_p: jax.Array | float | None = None,
) -> jax.Array:
    """Draws one token a row; without a temperature, takes the likeliest token.

    A draw keeps the `top_k` largest logits, divides them by the temperature, and then keeps the
    smallest set of likeliest tokens whose total probability reaches `top_p` (nucleus sampling:
    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"). Tokens that tie with the
    last kept token are also kept. Probabilities and noise are at least float32.

    If several tokens have the largest logit, greedy decoding takes the first of them, and a draw
    takes each with equal probability. A token with logit +inf is chosen with certainty. A token
    with logit -inf or NaN is never chosen, unless all logits are -inf or NaN; then all tokens are
    equally likely.

    Args:
      logits: `(..., V)`.
      rng: a `jax.random` key; required with a temperature.
      temperature: positive and finite, one number or one for each row, `(...)`; None takes the
        likeliest token. A value below the smallest normal number of the dtype is raised to that
        number.
      top_k: between 1 and V.
      top_p: in (0, 1], one number or one for each row, `(...)`.

    Returns:
      `(...)` int32.

    Raises:
      ValueError: an argument is missing, has the wrong shape, is concrete and out of its range, or
        is for draws alone and given without a temperature.
    """
    logits = jnp.asarray(logits)
    if jnp.issubdtype(logits.dtype, jnp.inexact):
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    if temperature is None:
        given = {"rng": rng, "top_k": top_k, "top_p": top_p}
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            raise ValueError(
                f"temperature=None takes the likeliest token and uses no {', '.join(unused)}; give "
                "a temperature to draw, such as 1.0, or leave them out"
            )
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rng = check_draw(rng, temperature, top_k, top_p, logits.shape[:-1])
    # Random noise in 16 bits has too few distinct values.
    logits = _below_best(dtypes.widen(logits))
    if top_k is not None:
        if top_k > logits.shape[-1]:
            raise ValueError(
                f"top_k must be between 1 and the vocabulary size {logits.shape[-1]}, got {top_k}"
            )
        smallest = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    logits = logits / divisor(temperature, logits.dtype)[..., None]
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        top_p = jnp.asarray(top_p, logits.dtype)[..., None]
        kept = (before < top_p) | (top_p >= 1)
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        # The likeliest token has logit 0 and is always kept.
        logits = jnp.where(logits < jnp.minimum(smallest, 0), -jnp.inf, logits)
    return jax.random.categorical(rng, logits, axis=-1).astype(jnp.int32)


def _below_best(logits: jax.Array) -> jax.Array:
    """Subtracts the largest logit; the result at the largest logits is 0, even if they are inf."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    is_best = logits == best
    # inf - inf would be NaN.
    return jnp.where(is_best, 0, jnp.where(is_best, 0, logits) - best)


def divisor(temperature: Any, dtype: Any) -> jax.Array:
    """Clips the temperature so that it and its reciprocal are normal numbers of `dtype`.

    Processors may flush subnormal numbers to zero, and may divide by multiplying by the reciprocal.
    """
    least = jnp.finfo(dtype).tiny
    clip = jnp.clip if isinstance(temperature, jax.Array) else np.clip
    return jnp.asarray(clip(temperature, float(least), float(1 / least)), dtype)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a real number or an array."""
    return isinstance(value, jax.Array | np.ndarray | numbers.Real)


def check_draw(
    rng: Any, temperature: Any, top_k: Any, top_p: Any, rows: tuple[int, ...] = ()
) -> jax.Array:
    """Checks the arguments of a draw for `rows` of logits, as far as they are concrete.

    Returns:
      The key.
    """
    if rng is None:
        raise ValueError(
            f"temperature={temperature} draws tokens and needs rng, a jax.random key, got {rng!r}; "
            "to take the likeliest one pass temperature=0 to generate, or None to sample_token"
        )
    for name, number in (("temperature", temperature), ("top_p", top_p)):
        if number is not None and not is_number(number):
            raise ValueError(f"{name} must be a number, got {number!r}")
        if np.shape(number) not in ((), rows):
            raise ValueError(
                f"{name} must be one number, or one for each row, of shape {rows}, got shape "
                f"{np.shape(number)}"
            )
    if is_concrete(temperature):
        divisor = np.asarray(temperature)
        if not np.all((divisor > 0) & (divisor < np.inf)):
            raise ValueError(
                f"temperature must be positive and finite to draw tokens, got {temperature}"
            )
    if top_k is not None and (not checks.is_integer(top_k) or top_k < 1):
        raise ValueError(
            f"top_k must be an int between 1 and the vocabulary size, or None, got {top_k!r}"
        )
    if top_p is not None and is_concrete(top_p):
        share = np.asarray(top_p)
        if not np.all((share > 0) & (share <= 1)):
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    return jnp.asarray(checks.key("rng", rng))
