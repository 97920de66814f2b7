"""Decoding of MoBA: a KV cache and the sum of the keys of each block."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, within
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to
from effattn.functional.moba import attend, check_options


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MobaState:
    """Decode state: keys and values at slots `[0, length)` of each row, and sums of blocks.

    Attributes:
      key: `(B, S, K, H)`, S the capacity: whole blocks of b tokens, or less than one block.
      value: `(B, S, K, Hv)`.
      key_sum: `(B, n, K, H)`, the sum of the keys of each block, at least float32.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    key_sum: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class MobaDecoder(Decoder):
    """Decodes `effattn.moba_attention`; `block_size` and `top_k` are required.

    A step costs O(k b + S / b) time a row, and the state O(S) memory. The state has room for
    `max_length` tokens a row, rounded up to whole blocks unless it is less than a block.
    """

    _state = MobaState

    def _needs(self):
        return ("block_size", "top_k")

    def _takes(self):
        return (*self._needs(), "scale", "precision", "implementation")

    def _empty(self, sizes: Sizes):
        size, _ = self._read(sizes.max_length)
        blocks = -(-sizes.max_length // size)
        key, value = sizes.heads(blocks * size)
        sums, _ = sizes.heads(blocks, dtypes.wide(sizes.dtype))
        return MobaState(key, value, sums, sizes.length())

    def _extend(self, heads, state, lengths):
        query, key, value = heads
        checks.known_length("decoding moba_attention", query)
        size, top_k = self._read(state.key.shape[1])
        check_blocks("key_sum", state.key_sum, state.key.shape[1], size)
        present = within(lengths, key.shape[1])[..., None, None]
        key, value = (jnp.where(present, x, 0) for x in (key, value))
        positions = positions_from(state.length, key.shape[1])
        new = append_to(state, lengths, key=key, value=value)
        stored = new.key.astype(key.dtype), new.value.astype(value.dtype)
        sums = state.key_sum + sums_of_blocks(key, positions // size, state.key_sum)
        out, _ = attend(
            "moba_attention",
            size,
            top_k,
            (jnp.where(present, query, 0), *stored),
            sums,
            new.length,
            positions,
            scale=checks.scale(self.options.get("scale"), key.shape[-1]),
            precision=self.options.get("precision"),
            implementation=self.options.get("implementation"),
        )
        return jnp.where(present, out, 0), dataclasses.replace(new, key_sum=sums)

    def _read(self, capacity):
        return check_options(self.options["block_size"], self.options["top_k"], capacity)


def check_blocks(name, sums, capacity, size):
    """Raises `ValueError` unless there is one sum for each block of the keys."""
    blocks = -(-capacity // size)
    if sums.shape[1] != blocks:
        raise ValueError(
            f"{name} of the state must have the sums of {blocks} blocks of block_size={size} keys "
            f"in {capacity}, got {sums.shape[1]}; make the state with the init_state of this layer"
        )


def sums_of_blocks(key, blocks, like):
    """Sums of new keys `(B, T, K, H)` by block `(B, n, K, H)`; blocks are int32 `(B, T)`."""
    every = jnp.arange(like.shape[1], dtype=jnp.int32)
    is_member = (blocks[:, None] == every[None, :, None]).astype(like.dtype)
    key = key.astype(like.dtype)
    return jnp.einsum("bnt,btkh->bnkh", is_member, key, precision="highest")
