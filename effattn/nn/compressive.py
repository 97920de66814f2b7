"""Mixer with the attention of the Compressive Transformer: slots for tokens before the memory."""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, valid, within
from effattn.cores import sequence_parts
from effattn.cores.relative_segments import Keys, Places, Sizes, reconstruction_errors, windows
from effattn.decode import ring
from effattn.decode.ring import RingState
from effattn.decode.state import new_lengths
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.tokens import last_tokens, padding_of, tokens_of, zero_padding
from effattn.nn.transformer_xl import TransformerXLAttention

COMPRESSIONS = ("mean", "max", "convolution")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressiveState:
    """Decode state of constant size.

    Attributes:
      tokens: keys and values of the last L + M - 1 tokens.
      slots: keys and values of the last slots.
      inputs: `(B, c - 1, D)`, the last tokens, for the next slot.
    """

    tokens: RingState
    slots: RingState
    inputs: jax.Array

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32, tokens seen."""
        return self.tokens.length


class CompressiveAttention(TransformerXLAttention):
    """Transformer-XL attention with a second memory, of compressed tokens.

    Rae et al. 2019, "Compressive Transformers for Long-Range Sequence Modelling". Tokens that leave
    the memory of M tokens are compressed, c at a time, to a slot, a vector of D features:

        slot = mean or max of c tokens, or sum_(i < c) x_i K_i with learned matrices K

    A token attends, in one softmax, to its segment up to itself, to the memory and to the last C
    slots. The distance of a slot is its number of places before the token in the sequence of slots,
    memory and segment. Time is O(T (L + M + C) D), and the decode state O((L + M + C) D).

    Args:
      in_features: D, number of features per token.
      segment_size: L, tokens per segment, a multiple of c.
      memory_size: M, tokens of the memory, a multiple of c.
      num_slots: C, number of slots.
      compression_rate: c, tokens per slot, 2 or more.
      compression: "mean", "max" or "convolution".
      head_dim: H, head dimension; default D / N.
      stop_gradient: whether gradients stop at tokens of the memory, at slots and at a decode state.
        With it, `compression_loss` alone trains the convolution, as in the paper.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: sizes that are no multiples of the rate, or the errors of `effattn.nn.options`.
    """

    _mechanism = "compressive"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        segment_size: int = 64,
        memory_size: int = 64,
        num_slots: int = 64,
        compression_rate: int = 4,
        compression: str = "convolution",
        head_dim: int | None = None,
        stop_gradient: bool = True,
        **options: Unpack[Projected],
    ):
        super().__init__(
            in_features,
            num_heads,
            segment_size=segment_size,
            memory_size=memory_size,
            head_dim=head_dim,
            stop_gradient=stop_gradient,
            **options,
        )
        self.num_slots = checks.at_least("num_slots", num_slots, 1, "slots")
        rate = checks.at_least("compression_rate", compression_rate, 2, "tokens")
        for name, size in (("segment_size", segment_size), ("memory_size", memory_size)):
            if size % rate:
                raise ValueError(
                    f"{name} must be a multiple of compression_rate={rate}, got {size}"
                )
        checks.one_of("compression", compression, COMPRESSIONS)
        self.compression_rate, self.compression = rate, compression
        make, shape = Layers(**options), (rate, in_features, in_features)
        learned = compression == "convolution"
        self.kernel = make.drawn(make.kernel_init, *shape) if learned else None

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.segment_size, self.memory_size, self.num_slots, self.compression_rate)

    @property
    def _slots_back(self) -> int:
        """Number of slots from a query to the oldest slot that it may read."""
        return self.num_slots + (self.segment_size + self.memory_size) // self.compression_rate

    def _compressed(self, x: jax.Array, places: Places) -> tuple[jax.Array, Places]:
        """Slots whose last tokens are in runs of c tokens, `(B, ceil(T / c), D)`, and their places.

        x has c - 1 tokens before the T tokens. A run without the last token of a slot has a slot of
        document 0.
        """
        rate = self.compression_rate
        number = -(-(x.shape[1] - rate + 1) // rate)

        def runs(x, first, width):
            return jnp.moveaxis(windows(x[:, first:], number, rate, width), 0, 1)

        position, document = (runs(x, rate - 1, rate) for x in places)
        is_last = (position % rate == rate - 1) & (document != 0)
        at = jnp.argmax(is_last, -1, keepdims=True)
        tokens = runs(x, 0, 2 * rate - 1)
        of_slot = (at + jnp.arange(rate)[None, None])[..., None]
        tokens = jnp.take_along_axis(tokens, of_slot, 2, mode="clip")
        if self.kernel is not None:
            dtype = self._computed_in(tokens)
            kernel = self.kernel[...].astype(dtype)
            slots = jnp.einsum("bmcd,cde->bme", tokens.astype(dtype), kernel)
        else:
            slots = tokens.max(2) if self.compression == "max" else tokens.mean(2)

        def of_last(x):
            return jnp.take_along_axis(x, at, -1, mode="clip")[..., 0]

        document = jnp.where(is_last.any(-1), of_last(document), 0)
        return slots, Places(of_last(position) // rate, document)

    def _slots(self, x: jax.Array, places: Places) -> tuple[jax.Array, Places]:
        """Slots of whole sequences x, and those before the first token."""
        rate, time = self.compression_rate, x.shape[1]
        sequence_parts.check_blocks("slots", rate, time)
        before = self._slots_back
        if sequence_parts.current() is None:
            before = min(before, -(-time // rate))

        def after(arrays, count):
            return jax.tree.map(lambda x: sequence_parts.with_tokens_before(x, count), arrays)

        return after(self._compressed(*after((x, places), rate - 1)), before)

    def _mix_all(self, x, lengths, segment_ids):
        own, memory, places = self._read(x, segment_ids)
        slots, at = self._slots(x, places)
        if self.stop_gradient:
            slots = lax.stop_gradient(slots)
        keys = Keys(self.key(slots), self.value(slots), at)
        return self._attended(x, own, memory, segment_ids is None, keys)

    def _empty(self, batch, max_length, dtype):
        sizes = self._cached(batch, self._slots_back, dtype)
        return CompressiveState(
            tokens=super()._empty(batch, max_length, dtype),
            slots=ring.empty(self._slots_back, sizes),
            inputs=jnp.zeros((batch, self.compression_rate - 1, self.in_features), dtype),
        )

    def _extend(self, x, state, lengths):
        if self.stop_gradient:
            state = lax.stop_gradient(state)
        more, kept = new_lengths(lengths, *x.shape[:2]), self.compression_rate - 1
        own, memory, tokens = self._append(x, state.tokens, more)
        read = jnp.concatenate([state.inputs.astype(x.dtype), x], 1)
        positions = positions_from(state.length - kept, read.shape[1])
        is_there = (positions >= 0) & within(kept + more, read.shape[1])
        new, at = self._compressed(read, Places(positions, is_there.astype(jnp.int32)))
        if self.stop_gradient:
            new = lax.stop_gradient(new)
        back, count = self._slots_back, (at.document != 0).sum(-1, dtype=jnp.int32)
        key, value, filled, slots = ring.append(
            state.slots, self.key(new), self.value(new), count, back
        )
        numbers = positions_from(state.slots.length - back, back + new.shape[1])
        keys = Keys(key, value, Places(numbers, filled.astype(jnp.int32)))
        y = self._attended(x, own, memory, False, keys)
        inputs = last_tokens(read, kept, lengths).astype(state.inputs.dtype)
        return y, CompressiveState(tokens, slots, inputs)

    def compression_loss(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The loss of the compression: how well slots stand for the tokens that they compress.

        After a segment, the first L tokens of the memory become slots. The loss is the mean squared
        difference between the segment's attention to these tokens and to their slots, without
        positions, averaged over the valid tokens of segments with such tokens. Only the
        convolution has a gradient.

        Args:
          x: `(B, T, D)`.
          lengths: as in a call.
          segment_ids: as in a call.

        Returns:
          `()`, at least float32; 0 if no tokens are compressed.

        Raises:
          ValueError: the errors of a call.
        """
        sequence_parts.refuse("compression_loss")
        x = lax.stop_gradient(tokens_of("x", x, self.in_features))
        batch, time = x.shape[:2]
        padding, present = padding_of(self.binding, batch, time, lengths, segment_ids)
        ids = padding.get("segment_ids")
        x = zero_padding(x, present)
        query, (_, memory, places) = self.query(x), self._read(x, ids)
        slots, at = self._slots(x, places)

        def heads(layer):
            kernel = lax.stop_gradient(layer.kernel[...])
            return jnp.einsum("bmd,dnh->bmnh", *dtypes.alike(slots, kernel))

        query, memory = lax.stop_gradient((query, memory))
        keys = Keys(heads(self.key), heads(self.value), at)
        scale, sizes = self.head_dim**-0.5, self._sizes
        errors, counts = reconstruction_errors(
            query, memory, keys, scale, sizes, aligned=ids is None
        )
        present = valid(lengths, ids, time)
        counts = counts if present is None else counts & present
        return jnp.where(counts, errors, 0).sum() / jnp.maximum(counts.sum(), 1)
