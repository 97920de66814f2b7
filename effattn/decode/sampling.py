"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp


def sample_token(
    logits: jax.Array,
    rng: jax.Array | None = None,
    *,
    temperature: jax.Array | float | None = None,
    top_k: int | None = None,
    top_p: jax.Array | float | None = None,
) -> jax.Array:
    """One token a row: the likeliest without a temperature, else a draw.

    The logits are divided by the temperature, then cut to the `top_k` largest, then to the
    smallest set of likeliest tokens whose probability reaches `top_p` (nucleus sampling: Holtzman
    et al. 2020, "The Curious Case of Neural Text Degeneration"). Ties with the last one kept stay.

    Args:
      logits: `(..., V)`.
      rng: a `jax.random` key; needed with a temperature.
      temperature: positive; None takes the likeliest token.
      top_k: between 1 and V.
      top_p: in (0, 1].

    Returns:
      `(...)` int32.
    """
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if rng is None:
        raise ValueError("sampling with a temperature needs rng, a jax.random key; got None")
    vocab_size = logits.shape[-1]
    logits = logits / temperature
    if top_k is not None:
        if not 1 <= top_k <= vocab_size:
            raise ValueError(
                f"top_k must be between 1 and the vocabulary size {vocab_size}, got {top_k}"
            )
        smallest = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        # The likeliest token has nothing before it and always stays.
        smallest = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(rng, logits, axis=-1).astype(jnp.int32)
