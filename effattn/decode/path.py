"""Decoding of PaTH attention: a KV cache whose keys each new token transforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.combine import combine
from effattn.arrays.segments import within
from effattn.cores import attention
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to, stored
from effattn.functional.path import attend
from effattn.xla.path_attention import carried


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PathState:
    """KV cache with keys and values at slots `[0, length)` of each row.

    Attributes:
      key: `(B, S, K, H)`, S the capacity: keys after the transformations of all later tokens. At
        least float32, because each token changes them.
      value: `(B, S, K, Hv)`.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class PathDecoder(Decoder):
    """Decodes `path_attention`; a step costs O(S) time a row, and the state O(S) memory."""

    _state = PathState

    def _empty(self, sizes: Sizes, reflection, beta):
        key, value = sizes.heads(sizes.max_length)
        key = key.astype(dtypes.wide(sizes.dtype, reflection.dtype, beta.dtype))
        return PathState(key, value, sizes.length())

    def _extend(self, heads, state, lengths, reflection, beta):
        self._check_runs_in_xla()
        query, key, value = heads
        new = append_to(state, lengths, value=value)
        out, lse, early = attend(
            *(query, key, value, reflection, beta),
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            **self.options,
        )
        before = early, state.key.astype(early.dtype), state.value.astype(early.dtype)
        given = attention.check(
            "path_attention",
            *before,
            scale=1.0,
            key_value_seq_lengths=state.length,
            query_seq_lengths=lengths,
            precision=self.options.get("precision"),
        )
        cached, of_cached = attention.attend(*before, given)
        out, _ = combine((out, cached), (lse, of_cached))
        present = within(lengths, key.shape[1])
        reflection, beta = (
            jnp.where(present.reshape(*present.shape, *[1] * (x.ndim - 2)), x, 0).astype(
                state.key.dtype
            )
            for x in (reflection, beta)
        )
        put = functools.partial(stored, state.key, length=state.length, lengths=lengths)
        keys = carried(
            self.options.get("chunk_size"),
            self.options.get("precision"),
            key.astype(state.key.dtype),
            reflection,
            beta,
            state.length,
            put,
        )
        return out, dataclasses.replace(new, key=keys)
