"""Decoding of native sparse attention: a KV cache, and compressed blocks of keys and values."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.arrays.segments import positions_from, within
from effattn.cores.native_sparse import SIZES, Settings, attend, compressed_blocks
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to, stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NativeSparseState:
    """Decode state: keys and values at slots `[0, length)` of each row, and compressed blocks.

    Attributes:
      key: `(B, S, K, H)`, S the capacity.
      value: `(B, S, K, Hv)`.
      compressed_key: `(B, M, K, H)`, one for each of the M compressed blocks of S tokens; zeros for
        blocks that are not complete.
      compressed_value: `(B, M, K, Hv)`.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    compressed_key: jax.Array
    compressed_value: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class NativeSparseDecoder(Decoder):
    """Decodes `effattn.native_sparse_attention`; `extend` needs `gates (B, T, N, 3)`.

    A step costs O(n b + w + S / d) time a row, and the state O(S) memory. The state has room for
    `max_length` tokens a row, rounded up to whole blocks unless it is less than a block.
    """

    _state = NativeSparseState

    def _takes(self):
        return (*SIZES, "compress", "scale", "precision", "implementation")

    @property
    def settings(self) -> Settings:
        """The checked sizes, from the options or the defaults of the function."""
        return Settings.among(self.options)

    def _empty(self, sizes: Sizes, gates=None):
        settings = self.settings
        block = min(settings.block, max(sizes.max_length, 1))
        capacity = -(-sizes.max_length // block) * block
        return NativeSparseState(
            *sizes.heads(capacity),
            *sizes.heads(max(settings.count(capacity), 0)),
            sizes.length(),
        )

    def _extend(self, heads, state, lengths, gates):
        query, key, value = heads
        checks.known_length("decoding native_sparse_attention", query)
        capacity, settings = state.key.shape[1], self.settings
        blocks = max(settings.count(capacity), 0)
        if state.compressed_key.shape[1] != blocks:
            raise ValueError(
                f"compressed_key of the state must have {blocks} blocks of compression_size="
                f"{settings.compression} keys in {capacity}, every compression_stride="
                f"{settings.stride}, got {state.compressed_key.shape[1]}; make the state with the "
                "init_state of this layer"
            )
        present = within(lengths, key.shape[1])[..., None, None]
        query, key, value, gates = (jnp.where(present, x, 0) for x in (query, key, value, gates))
        new = append_to(state, lengths, key=key, value=value)
        new = self._compress(new, state.length, key.shape[1])
        out = attend(
            self.settings,
            (query, new.key.astype(key.dtype), new.value.astype(value.dtype)),
            (new.compressed_key.astype(key.dtype), new.compressed_value.astype(value.dtype)),
            gates,
            state.length,
            new.length,
            scale=checks.scale(self.options.get("scale"), key.shape[-1]),
            precision=self.options.get("precision"),
            implementation=self.options.get("implementation"),
        )
        return jnp.where(present, out, 0), new

    def _compress(self, state: NativeSparseState, before, time):
        """Adds the compressed blocks that end in the `time` tokens after the first `before`."""
        settings = self.settings
        if state.compressed_key.shape[1] == 0:
            return state
        first, after = (jnp.maximum(settings.count(length), 0) for length in (before, state.length))
        number = positions_from(first, time // settings.stride + 1)  # (B, C)
        at = positions_from(settings.stride * number, settings.compression)  # (B, C, l)

        def blocks(x):  # (B, C, K, l, H)
            read = jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(x, at)
            return jnp.moveaxis(read, 2, 3)

        keys, values = compressed_blocks(
            blocks(state.key), blocks(state.value), self.options.get("compress")
        )
        return dataclasses.replace(
            state,
            compressed_key=stored(state.compressed_key, keys, first, after - first),
            compressed_value=stored(state.compressed_value, values, first, after - first),
        )
