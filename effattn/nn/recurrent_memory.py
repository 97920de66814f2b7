"""Mixer with attention within segments and a recurrent memory across segments."""

import dataclasses
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import positions_from_segment_ids, within
from effattn.cores import passed_states, sequence_parts
from effattn.cores.document_blocks import blocks_of
from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import bounded, check_bound, new_lengths
from effattn.nn.array_options import own_copy
from effattn.nn.cell import cell
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected
from effattn.nn.tokens import tokens_of


class RecurrentMemoryAttention(CausalMixer):
    """Causal attention within segments and to a recurrent memory of earlier segments.

    After Bulatov et al. 2022, "Recurrent Memory Transformer". A sequence is split into segments of
    S tokens. A token attends, in one softmax, to the tokens of its segment up to itself and to M
    memory slots. At the end of a segment, each slot attends to the segment, and a gated recurrent
    unit (Cho et al. 2014) updates the slot:

        y_t = softmax(q_t . [k of the segment up to t, m W_k]) [v, m W_v] W_o
        read = attention(m W_r, k, v) W_o;   m' = GRU(m, read)

    The initial memory is learned. Segments of a packed document count from its start, and it starts
    with the initial memory. Time is O(T (S + M) D), memory O(T D), decode state O((S + M) D).

    Args:
      in_features: D, number of features per token and per slot.
      segment_size: S, tokens per segment.
      num_slots: M, number of memory slots.
      head_dim: H, head dimension; default D / N.
      rotary: rotary embedding of token queries and keys by position in the segment; called as
        `rotary(x, positions)`. Memory slots are not rotated.
      stop_gradient: whether gradients stop at a memory or decode state passed to a call. Within a
        call, gradients flow across segments.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "recurrent_memory"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        segment_size: int = 64,
        num_slots: int = 8,
        head_dim: int | None = None,
        rotary: Callable[..., jax.Array] | None = None,
        stop_gradient: bool = True,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads = num_heads
        self.segment_size = checks.at_least("segment_size", segment_size, 1, "tokens")
        self.num_slots = checks.at_least("num_slots", num_slots, 1, "slots")
        self.rotary, self.stop_gradient = own_copy(rotary), stop_gradient

        make, heads = Layers(**options), (num_heads, self.head_dim)
        self.query, self.key, self.value, self.read = (
            make.heads(in_features, heads) for _ in range(4)
        )
        self.out = make.out(heads, in_features)
        self.update = cell(nnx.GRUCell, in_features, **make.numbers)
        self.memory = make.drawn(nnx.initializers.normal(1.0), num_slots, in_features)

    def mix_segments(
        self, x: jax.Array, memory: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Mixes whole segments, and returns the memory for the following segments.

        Args:
          x: `(B, T, D)`, T a multiple of the segment size.
          memory: `(B, M, D)`, from an earlier call; default the learned initial memory.

        Returns:
          `(y (B, T, D), memory (B, M, D))`.

        Raises:
          ValueError: inconsistent shapes.
        """
        x = tokens_of("x", x, self.in_features)
        batch, time, features = x.shape
        if time % self.segment_size:
            raise ValueError(
                f"x must have a multiple of segment_size={self.segment_size} tokens, got {time}"
            )
        dtype = self._computed_in(x)
        if memory is None:
            memory = self._first(batch, dtype)
        else:
            memory = checks.shaped("memory", memory, (batch, self.num_slots, features))
            memory = lax.stop_gradient(memory) if self.stop_gradient else memory
        number = x.shape[1] // self.segment_size
        segments = x.astype(dtype).reshape(batch, number, self.segment_size, features)
        inputs = self, jnp.moveaxis(segments, 1, 0)
        y, last = passed_states.in_turns(
            type(self).__name__, _each_segment, inputs, memory.astype(dtype)
        )
        return jnp.moveaxis(y, 0, 1).reshape(x.shape), last

    def _segment(self, memory, tokens):
        """The memory after a segment `(B, S, D)`, and its outputs."""
        places = jnp.arange(self.segment_size)
        query, key = (self._turned(p(tokens), places) for p in (self.query, self.key))
        value = self.value(tokens)
        seen = within(places + 1, self.segment_size)
        y = self._attended(self.query(tokens), query, key, value, memory, seen)
        return self._updated(memory, key, value).astype(memory.dtype), y

    def _mix_all(self, x, lengths, segment_ids):
        sequence_parts.check_blocks("segments", self.segment_size, x.shape[1])
        time = x.shape[1]
        if segment_ids is not None and time:
            return self._mix_documents(x, jnp.asarray(segment_ids))
        # Causality: the tokens of x do not read the padding at the end.
        whole = jnp.pad(x, ((0, 0), (0, -time % self.segment_size), (0, 0)))
        return self.mix_segments(whole)[0][:, :time]

    def _mix_documents(self, x, ids):
        """Mixes packed documents, each with segments from its start on and with a new memory."""
        if sequence_parts.current() is not None:
            raise ValueError(
                "segment_ids need whole rows, because a document begins a segment, got a part of a "
                "row on each device; leave segment_ids out, or give each device whole rows"
            )
        batch, size, dtype = x.shape[0], self.segment_size, self._computed_in(x)
        blocks = blocks_of(ids, size)
        places = jnp.where(blocks.is_main, jnp.arange(blocks.token.shape[1])[None] % size, 0)
        in_document = blocks.gather_ids(positions_from_segment_ids(ids))
        tokens = (
            blocks.gather(x.astype(dtype)),
            blocks.gather_ids(ids),
            blocks.is_main,
            jnp.where(blocks.is_main, places, in_document),
        )
        number = blocks.first.shape[1]
        shape = batch, number, size
        by_segment = [jnp.moveaxis(t.reshape(*shape, *t.shape[2:]), 1, 0) for t in tokens]
        begins = jnp.equal(blocks.first, jnp.arange(number, dtype=jnp.int32)[None]).T
        first = self._first(batch, dtype)
        inputs, first = mesh_axes.vary_alike(((*by_segment, begins), first))

        @jax.checkpoint
        def segment(memory, inputs):
            """Documents of a segment besides the main one are whole, and leave no memory."""
            tokens, ids, is_main, places, begins = inputs
            memory = jnp.where(begins[:, None, None], first, memory)
            query, key = (self._turned(p(tokens), places) for p in (self.query, self.key))
            value = self.value(tokens)
            slots = jnp.concatenate([memory, first], 1)
            of_memory = jnp.arange(slots.shape[1])[None, None] < self.num_slots
            seen = (ids[:, None] == ids[..., None]) & jnp.tri(size, dtype=bool)[None]
            y = self._attended(
                self.query(tokens), query, key, value, slots, seen, is_main[..., None] == of_memory
            )
            return self._updated(memory, key, value).astype(memory.dtype), y

        _, y = lax.scan(segment, first, inputs)
        return blocks.gather_back(jnp.moveaxis(y, 0, 1).reshape(batch, number * size, x.shape[2]))

    def _empty(self, batch, max_length, dtype):
        slots, bound = bounded(self.segment_size, max_length)
        shape = (batch, slots, self.num_heads, self.head_dim)
        state = self._first(batch, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return RecurrentState(state, jnp.zeros((batch,), jnp.int32), bound)

    def _extend(self, x, state, lengths):
        more = new_lengths(lengths, *x.shape[:2])
        check_bound(state, more, state.state[1].shape[1], self.segment_size)
        dtype, kept = self._computed_in(x), jax.tree.map(lambda s: s.dtype, state.state)
        start = jax.tree.map(lambda s: s.astype(dtype), state.state)
        if self.stop_gradient:
            start = lax.stop_gradient(start)
        slots = jnp.arange(state.state[1].shape[1])[None]

        def step(carry, of_token):
            """Reads one token per row; rows may be at different positions of their segments."""
            (memory, keys, values), length = carry
            token, valid = of_token
            place = (length % self.segment_size)[:, None]
            query, key = (self._turned(p(token), place) for p in (self.query, self.key))
            here = (slots == place) & valid[:, None]
            keys = jnp.where(here[..., None, None], key, keys)
            values = jnp.where(here[..., None, None], self.value(token), values)
            seen = within(place + 1, keys.shape[1])
            y = self._attended(self.query(token), query, keys, values, memory, seen)
            ends = valid & (place[:, 0] == self.segment_size - 1)
            after = self._updated(memory, keys, values).astype(memory.dtype)
            memory = jnp.where(ends[:, None, None], after, memory)
            return ((memory, keys, values), length + valid.astype(length.dtype)), y[:, 0]

        by_token = jnp.moveaxis(x.astype(dtype), 1, 0)[:, :, None]
        valid = within(more, x.shape[1]).T
        (carried, length), y = lax.scan(step, (start, state.length), (by_token, valid))
        carried = jax.tree.map(lambda s, to: s.astype(to), carried, kept)
        return jnp.moveaxis(y, 0, 1), dataclasses.replace(state, state=carried, length=length)

    def _first(self, batch, dtype):
        memory = self.memory[...].astype(dtype)
        return jnp.broadcast_to(memory, (batch, *memory.shape))

    def _turned(self, heads, places):
        if self.rotary is None:
            return heads
        return self.rotary(heads, jnp.broadcast_to(places, heads.shape[:2]))

    def _attended(self, unturned, query, key, value, memory, seen, slots_seen=None):
        """Outputs `(B, T, D)` of tokens, from the segment's keys and values.

        `seen`, bool `(T, S)` or `(B, T, S)`, are the keys that each token reads, and `slots_seen`,
        `(B, T, M)`, the slots; None for all.
        """
        near = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=self._wide(key))
        seen = seen[None, None] if seen.ndim == 2 else seen[:, None]
        near = jnp.where(seen, near, dtypes.lowest(near.dtype))
        far = jnp.einsum(
            "btnh,bsnh->bnts", unturned, self.key(memory), preferred_element_type=near.dtype
        )
        if slots_seen is not None:
            far = jnp.where(slots_seen[:, None], far, dtypes.lowest(far.dtype))
        weights = jax.nn.softmax(jnp.concatenate([near, far], -1) * self.head_dim**-0.5, -1)
        values = jnp.concatenate([value, self.value(memory)], 1)
        return self.out(jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), values))

    def _updated(self, memory, key, value):
        """Memory after a segment with these keys and values."""
        logits = jnp.einsum(
            "btnh,bsnh->bnts", self.read(memory), key, preferred_element_type=self._wide(key)
        )
        weights = jax.nn.softmax(logits * self.head_dim**-0.5, -1).astype(value.dtype)
        read = self.out(jnp.einsum("bnts,bsnh->btnh", weights, value))
        return self.update(memory, read)[0]

    def _wide(self, array):
        return dtypes.wide(array.dtype)


def _each_segment(inputs, memory):
    """Outputs of segments `(number, B, S, D)`, and the memory after them."""
    mixer, segments = inputs
    last, y = lax.scan(jax.checkpoint(mixer._segment), memory, segments)
    return y, last
