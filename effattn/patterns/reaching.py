"""Key positions that a query reaches in a causal sparse pattern, for decoding."""

import jax
import jax.numpy as jnp

from effattn.arrays.segments import positions_from


def positions_of_blocks(blocks: jax.Array, block_size: int, capacity: int) -> jax.Array:
    """Returns the positions `(*L, k b)` of the tokens in blocks `(*L, k)`, each position once.

    Negative positions mean no token: for a block number of -1, and for a block that is listed
    again. b is `block_size`, or `capacity` (at least 1) if that is less.
    """
    blocks = jnp.sort(blocks, axis=-1)
    again = jnp.pad(blocks[..., 1:] == blocks[..., :-1], [(0, 0)] * (blocks.ndim - 1) + [(1, 0)])
    first = block_size * jnp.where(again, -1, blocks)
    size = min(block_size, max(capacity, 1))
    tokens = positions_from(first, size)
    return tokens.reshape(*blocks.shape[:-1], blocks.shape[-1] * size)
