"""Checks of module inputs: shapes, token ids and padding."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.arrays.segments import within
from effattn.decode.state import check_vocabulary, narrow
from effattn.nn.binding import Binding


def tokens_of(name: str, x: Any, features: int) -> jax.Array:
    """Returns x as an array; raises `ValueError` unless its shape is (batch, length, features)."""
    x = checks.as_array(name, x)
    if x.ndim != 3 or x.shape[-1] != features:
        raise ValueError(f"{name} must have shape (batch, length, {features}), got {x.shape}")
    return x


def token_ids(tokens: Any, name: str = "tokens") -> jax.Array:
    """Returns tokens as an array; raises `ValueError` unless they are integers (batch, length)."""
    tokens = checks.as_array(name, tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape (B, T), got {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def indices_of(
    tokens: jax.Array, valid: jax.Array | None, vocab_size: int, name: str = "tokens"
) -> jax.Array:
    """Indices into an embedding table: 0 in the padding, `vocab_size` or more for invalid tokens.

    JAX reads NaN at indices past the end. Raises `ValueError` for invalid tokens if `tokens` and
    `valid` are concrete.
    """
    check_vocabulary(name, tokens, valid, vocab_size)
    tokens = narrow(tokens)
    if valid is not None:
        tokens = jnp.where(valid, tokens, 0)
    # A negative index would count from the end.
    return jnp.where(tokens < 0, vocab_size, tokens)


def padding_of(
    binding: Binding,
    batch: int,
    time: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    prefix: str = "",
) -> tuple[dict[str, Any], jax.Array | None]:
    """Padding keywords of the attention function, and the mask `(B, T)` of valid tokens or None."""
    keywords: dict[str, Any] = {}
    valid = None
    if lengths is not None:
        binding.require("lengths", f"{prefix}lengths")
        checks.not_negative(f"{prefix}lengths", lengths)
        lengths = checks.as_array(f"{prefix}lengths", lengths)
        _check_integers(f"{prefix}lengths", lengths, (batch,))
        keywords = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        valid = within(lengths, time)
    if segment_ids is not None:
        binding.require("segments", f"{prefix}segment_ids")
        segment_ids = checks.as_array(f"{prefix}segment_ids", segment_ids)
        _check_integers(f"{prefix}segment_ids", segment_ids, (batch, time))
        keywords["segment_ids"] = segment_ids
        nonzero = segment_ids != 0
        valid = nonzero if valid is None else valid & nonzero
    return keywords, valid


def _check_integers(name, array, shape):
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape {shape}, got {array.dtype} of shape {array.shape}"
        )


def zero_padding(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """x with zeros in the padding, so that NaN in padding does not reach projection gradients."""
    return x if valid is None else jnp.where(valid[..., None], x, 0)
