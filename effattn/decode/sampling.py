"""Choosing the next token from logits."""

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
    """One token a row: the likeliest without a temperature, else a draw.

    The logits are cut to the `top_k` largest and divided by the temperature, then cut to the
    smallest set of likeliest tokens whose probability reaches `top_p` (nucleus sampling: Holtzman
    et al. 2020, "The Curious Case of Neural Text Degeneration"). Ties with the last one kept stay.
    Probabilities and noise are at least float32.

    Of several likeliest tokens the first is taken without a temperature, and with one each is
    equally likely. A logit of +inf is certain, and one of -inf or NaN is never chosen unless all
    are. Then all tokens count as equal.

    Args:
      logits: `(..., V)`.
      rng: a `jax.random` key; needed with a temperature.
      temperature: positive and finite; None takes the likeliest token. One below the smallest
        normal number of the dtype counts as that number.
      top_k: between 1 and V.
      top_p: in (0, 1].

    Returns:
      `(...)` int32.

    Raises:
      ValueError: an argument is missing, or known to be out of its range.
    """
    logits = jnp.asarray(logits)
    if jnp.issubdtype(logits.dtype, jnp.inexact):
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rng = check_draw(rng, temperature, top_k, top_p)
    # In 16 bits, the noise that decides a draw has too few values.
    logits = _below_best(logits.astype(dtypes.wide(logits.dtype)))
    if top_k is not None:
        if top_k > logits.shape[-1]:
            raise ValueError(
                f"top_k must be between 1 and the vocabulary size {logits.shape[-1]}, got {top_k}"
            )
        smallest = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    logits = logits / divisor(temperature, logits.dtype)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        top_p = jnp.asarray(top_p, logits.dtype)
        kept = (before < top_p) | (top_p >= 1)
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        # The likeliest token, at 0, always stays.
        logits = jnp.where(logits < jnp.minimum(smallest, 0), -jnp.inf, logits)
    return jax.random.categorical(rng, logits, axis=-1).astype(jnp.int32)


def _below_best(logits: jax.Array) -> jax.Array:
    """The logits less the largest, which are 0 even if they are infinite."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    is_best = logits == best
    # Of two infinities the difference would be NaN.
    return jnp.where(is_best, 0, jnp.where(is_best, 0, logits) - best)


def divisor(temperature: Any, dtype: Any) -> jax.Array:
    """The temperature as a number of that dtype that is normal, and whose reciprocal is.

    Processors may take a subnormal number for zero, and divide by multiplying.
    """
    least = jnp.finfo(dtype).tiny
    clip = jnp.clip if isinstance(temperature, jax.Array) else np.clip
    return jnp.asarray(clip(temperature, float(least), float(1 / least)), dtype)


def is_number(value: Any) -> bool:
    """Whether it is a number, or an array of them."""
    return isinstance(value, jax.Array | np.ndarray | numbers.Real)


def check_draw(rng: Any, temperature: Any, top_k: Any, top_p: Any) -> jax.Array:
    """The key; `ValueError` for what no token can be drawn with, where its value is known."""
    if not isinstance(rng, jax.Array | np.ndarray):
        raise ValueError(
            f"temperature={temperature} draws tokens and needs rng, a jax.random key, got {rng!r}; "
            "to take the likeliest one pass temperature=0 to generate, or None to sample_token"
        )
    for name, number in (("temperature", temperature), ("top_p", top_p)):
        if number is not None and not is_number(number):
            raise ValueError(f"{name} must be a number, got {number!r}")
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
    return jnp.asarray(rng)
