"""Which keys a token reaches: what a causal sparse pattern says of itself, to be decoded."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.segments import positions_from


def decoder_of(reach: Callable[..., jax.Array]) -> Callable[..., Any]:
    """What an entry of the registry names as `decoder`; `reach` is that of `GatheredDecoder`."""

    def decoder(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        # Imported on use: not everyone who imports the library decodes.
        from effattn.decode.gathered import GatheredDecoder

        return GatheredDecoder(reach, function, options)

    return decoder


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
