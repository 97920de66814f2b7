"""Shared parts of the RWKV layers: token shift and the check of `depth`."""

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.cores.sequence_parts import with_tokens_before
from effattn.nn.tokens import last_tokens


def check_depth(depth: float) -> None:
    """Raises `ValueError` unless `depth` is a number in [0, 1]."""
    needs = "a number in [0, 1], the first layer to the last"
    if not 0 <= checks.real("depth", depth, needs) <= 1:
        raise ValueError(f"depth must be {needs}, got {depth}")


def token_shift(
    x: jax.Array,
    before: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the previous token `x_(t-1)` of every token, and the last token.

    Args:
      x: `(B, T, D)`, zero in the padding.
      before: `(B, D)`, the token before `x_0`; None means zeros, or, where devices hold parts of a
        sequence, the last token of the device before.
      lengths: `(B,)` int, valid tokens of each right-padded row.
      segment_ids: `(B, T)` int, packed sequences; the first token of a document follows zeros.

    Returns:
      `(shifted (B, T, D), last (B, D))`: `last` is the last valid token, the argument `before` of
      the next call.
    """
    if before is None:
        read, dtype = with_tokens_before(x, 1), x.dtype
    else:
        read, dtype = jnp.concatenate([before[:, None].astype(x.dtype), x], 1), before.dtype
    shifted = read[:, :-1]
    if segment_ids is not None:
        ids = jnp.asarray(segment_ids)
        same = ids == with_tokens_before(ids, 1)[:, :-1]
        shifted = jnp.where(same[..., None], shifted, 0)
    return shifted, last_tokens(read, 1, lengths)[:, 0].astype(dtype)


def mixed_with_previous(x: jax.Array, shifted: jax.Array, amounts: jax.Array) -> jax.Array:
    """Interpolates `amounts * x + (1 - amounts) * shifted` for C inputs; `(C, B, T, D)`."""
    shifted = shifted.astype(x.dtype)
    return amounts * x[None] + (1 - amounts) * shifted[None]
