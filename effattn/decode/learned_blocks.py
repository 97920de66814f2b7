"""Decoding of learned blocks: a KV cache and the sums of the keys of the selection."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, within
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.moba import check_blocks, sums_of_blocks
from effattn.decode.tokens import append_to
from effattn.functional.learned_blocks import attend, choose
from effattn.functional.moba import check_options


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnedBlockState:
    """Decode state: keys and values at slots `[0, length)` of each row, and sums of blocks.

    Attributes:
      key: `(B, S, K, H)`, S the capacity: whole blocks of b tokens, or less than one block.
      value: `(B, S, K, Hv)`.
      selection_sum: `(B, n, K, Hs)`, the sum of the keys of the selection of each block, at least
        float32.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    selection_sum: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class LearnedBlockDecoder(Decoder):
    """Decodes `effattn.learned_block_attention`; `block_size` and `top_k` are required.

    A step costs O(k b + S / b) time a row, and the state O(S) memory. The state has room for
    `max_length` tokens a row, rounded up to whole blocks unless it is less than a block.
    """

    _state = LearnedBlockState

    def _needs(self):
        return ("block_size", "top_k")

    def _takes(self):
        return (*self._needs(), "scale", "precision", "implementation")

    def _empty(self, sizes: Sizes, selection_query, selection_key):
        size, _ = self._read(sizes.max_length)
        blocks = -(-sizes.max_length // size)
        key, value = sizes.heads(blocks * size)
        shape = sizes.batch, blocks, *selection_key.shape[2:]
        sums = jnp.zeros(shape, dtypes.wide(sizes.dtype))
        return LearnedBlockState(key, value, sums, sizes.length())

    def _extend(self, heads, state, lengths, selection_query, selection_key):
        checks.known_length("decoding learned_block_attention", heads[0])
        self._check_runs_in_xla()
        size, top_k = self._read(state.key.shape[1])
        check_blocks("selection_sum", state.selection_sum, state.key.shape[1], size)
        present = within(lengths, heads[0].shape[1])[..., None, None]
        query, key, value, selection_query, selection_key = (
            jnp.where(present, x, 0) for x in (*heads, selection_query, selection_key)
        )
        positions = positions_from(state.length, key.shape[1])
        new = append_to(state, lengths, key=key, value=value)
        like = state.selection_sum
        sums = like + sums_of_blocks(selection_key, positions // size, like)
        blocks, gates = choose(size, top_k, selection_query, sums, positions, new.length)
        out, _ = attend(
            size,
            self.options.get("precision"),
            query,
            new.key.astype(key.dtype),
            new.value.astype(value.dtype),
            blocks,
            gates,
            checks.scale(self.options.get("scale"), key.shape[-1]),
            positions,
            new.length,
        )
        return jnp.where(present, out, 0), dataclasses.replace(new, selection_sum=sums)

    def _read(self, capacity):
        return check_options(self.options["block_size"], self.options["top_k"], capacity)
