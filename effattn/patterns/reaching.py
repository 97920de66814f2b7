"""Key positions that a token reaches in a causal sparse pattern, for decoding."""

import jax
import jax.numpy as jnp

from effattn.arrays.segments import positions_from


def positions_of_blocks(blocks: jax.Array, block_size: int, capacity: int) -> jax.Array:
    """The tokens `(*L, k b)` of blocks `(*L, k)`, -1 for none, each once.

    For a `reach` in blocks, of which b tokens can be among the first `capacity`: all, or if there
    is no room for one block as many as there is room for. A block that is named again is replaced
    by positions below 0.
    """
    blocks = jnp.sort(blocks, axis=-1)
    again = jnp.pad(blocks[..., 1:] == blocks[..., :-1], [(0, 0)] * (blocks.ndim - 1) + [(1, 0)])
    first = block_size * jnp.where(again, -1, blocks)
    size = min(block_size, max(capacity, 1))
    tokens = positions_from(first, size)
    return tokens.reshape(*blocks.shape[:-1], blocks.shape[-1] * size)
