"""Checks of module inputs: shapes, token ids and padding."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.arrays.segments import positions_from, valid
from effattn.decode.state import check_vocabulary, narrow, row_lengths
from effattn.nn.binding import Binding


def tokens_of(name: str, x: Any, features: int) -> jax.Array:
    """Returns x as an array; raises `ValueError` unless it is real, (batch, length, features)."""
    x = checks.as_array(name, x)
    if x.ndim != 3 or x.shape[-1] != features:
        raise ValueError(f"{name} must have shape (batch, length, {features}), got {x.shape}")
    return features_of(name, x, features)


def features_of(name: str, x: Any, features: int) -> jax.Array:
    """Returns x as an array; raises `ValueError` unless it is real, of shape (..., features)."""
    x = checks.as_array(name, x)
    if x.shape[-1:] != (features,):
        raise ValueError(f"{name} must have shape (..., {features}), got {x.shape}")
    if not jnp.isrealobj(x):
        raise ValueError(f"{name} must be real, got dtype {x.dtype}; pass its parts as features")
    return x


def token_ids(tokens: Any, name: str = "tokens") -> jax.Array:
    """Returns tokens as an array; raises `ValueError` unless they are integers (batch, length)."""
    tokens = checks.as_array(name, tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape (B, T), got {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def one_token(tokens: Any) -> jax.Array:
    """Returns tokens as an array; raises `ValueError` unless they are integers (batch, 1)."""
    tokens = token_ids(tokens)
    if tokens.shape[1] != 1:
        raise ValueError(f"step takes one token, tokens (B, 1), got tokens of shape {tokens.shape}")
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
    if lengths is not None:
        binding.require("lengths", f"{prefix}lengths")
        lengths = row_lengths(lengths, batch, time, name=f"{prefix}lengths")
        keywords = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    if segment_ids is not None:
        binding.require("segments", f"{prefix}segment_ids")
        segment_ids = checked_ids(segment_ids, batch, time, prefix)
        keywords["segment_ids"] = segment_ids
    return keywords, valid(lengths, segment_ids, time)


def checked_ids(segment_ids: Any, batch: int, time: int, prefix: str = "") -> jax.Array:
    """Returns segment ids as an array; raises `ValueError` unless they are (batch, time)."""
    segment_ids = checks.as_array(f"{prefix}segment_ids", segment_ids)
    _check_integers(f"{prefix}segment_ids", segment_ids, (batch, time))
    return segment_ids


def last_tokens(read: jax.Array, number: int, lengths: jax.Array | None) -> jax.Array:
    """The last `number` tokens, padding left out.

    Args:
      read: `(B, number + T, D)`, earlier tokens and T new tokens.
      number: how many tokens.
      lengths: `(B,)`, valid tokens among the new tokens of each right-padded row; None means T.
    """
    batch, time = read.shape[0], read.shape[1] - number
    if lengths is None:
        return read[:, time:]
    at = positions_from(row_lengths(lengths, batch, time), number)
    return jnp.take_along_axis(read, at[..., None], 1, mode="clip")


def with_global_mask(mixer: Any, global_mask: jax.Array | None) -> dict[str, jax.Array]:
    """The keyword `global_mask` for a mixer; none without a mask, or if the mixer takes none."""
    if global_mask is None or not getattr(mixer, "takes_global_mask", False):
        return {}
    return {"global_mask": global_mask}


def _check_integers(name, array, shape):
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape {shape}, got {array.dtype} of shape {array.shape}"
        )


def zero_padding(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """x with zeros in the padding, so that NaN in padding does not reach projection gradients."""
    return x if valid is None else jnp.where(valid[..., None], x, 0)
