"""Decoding of selective attention: a KV cache, and how much each key is masked."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, within
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to
from effattn.functional.selective import Heads, Pairs, attend, total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectiveState:
    """KV cache at slots `[0, length)` of each row, with the keys of the selection.

    Attributes:
      key: `(B, S, K, H)`, S the capacity.
      value: `(B, S, K, Hv)`.
      selection_key: `(B, S, 1, Hs)`.
      selected: `(B, S)`, at least float32: by how much the tokens so far mask each cached key j for
        the next query i, F_ij of `effattn.selective_attention`.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    selection_key: jax.Array
    selected: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class SelectiveDecoder(Decoder):
    """Decodes `selective_attention`; a step costs O(S) time a row, and the state O(S) memory."""

    _state = SelectiveState

    def _takes(self):
        return ("scale", "precision", "key_tile", "implementation")

    def _empty(self, sizes: Sizes, selection_query, selection_key):
        key, value = sizes.heads(sizes.max_length)
        shape = sizes.batch, sizes.max_length
        return SelectiveState(
            key,
            value,
            jnp.zeros((*shape, *selection_key.shape[2:]), sizes.dtype),
            jnp.zeros(shape, dtypes.wide(sizes.dtype)),
            sizes.length(),
        )

    def _extend(self, heads, state, lengths, selection_query, selection_key):
        query, key, value = heads
        checks.known_length("decoding selective_attention", query)
        self._check_runs_in_xla()
        present = within(lengths, key.shape[1])
        own = query, key, value, selection_query, selection_key
        query, key, value, selection_query, selection_key = (
            jnp.where(present[..., None, None], x, 0) for x in own
        )
        new = append_to(state, lengths, key=key, value=value, selection_key=selection_key)
        ones = jnp.ones_like(new.selected, jnp.int32)
        arrays = Heads(
            query,
            new.key.astype(key.dtype),
            new.value.astype(value.dtype),
            selection_query[..., 0, :],
            new.selection_key.astype(selection_key.dtype)[..., 0, :],
        )
        # Unfilled slots have positions after every query.
        pairs = Pairs(
            query_ids=present.astype(jnp.int32),
            key_ids=ones,
            positions=positions_from(state.length, key.shape[1]),
            is_first=jnp.cumsum(ones, 1) == 1,
            selected=state.selected,
        )
        scale = checks.scale(self.options.get("scale"), key.shape[-1])
        how = scale, self.options.get("precision"), self.options.get("key_tile")
        out, _ = attend(arrays, pairs, *how)
        selected = total(arrays, pairs, *how).astype(state.selected.dtype)
        return out, dataclasses.replace(new, selected=selected)
