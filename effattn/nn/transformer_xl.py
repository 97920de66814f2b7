"""Mixer with the attention of Transformer-XL: segments, a memory and relative positions."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks
from effattn.arrays.segments import positions_from
from effattn.cores import sequence_parts
from effattn.cores.relative_segments import Keys, Places, Sizes, Terms, attend
from effattn.decode import decoder, ring
from effattn.decode.ring import RingState
from effattn.decode.state import new_lengths
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected
from effattn.nn.placement import axes
from effattn.nn.sinusoidal import sinusoidal_positions


class TransformerXLAttention(CausalMixer):
    """Causal attention within segments and to the tokens before them, with relative positions.

    Dai et al. 2019, "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context". A
    sequence is split into segments of L tokens. A token attends, in one softmax, to the tokens of
    its segment up to itself and to the memory, the M tokens before the segment:

        logit_tj = ((q_t + u) . k_j + (q_t + v) . W_r r_(t - j)) / sqrt(H)

    r_d is the sinusoidal vector of the distance d, and u and v are learned vectors of each head.
    Time is O(T (L + M) D), memory O(T D (L + M) / L) and O(N L (L + M)) for one segment, and the
    decode state O((L + M) D).

    Args:
      in_features: D, number of features per token. Sinusoidal vectors have an even number of
        features, D or D + 1.
      segment_size: L, tokens per segment, counted from the start of a document.
      memory_size: M, tokens of the memory.
      head_dim: H, head dimension; default D / N.
      stop_gradient: whether gradients stop at the tokens of the memory, as in the paper, and at a
        decode state. The projections of keys and values get gradients from the memory too.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: a size below 1, or the errors of `effattn.nn.options`.
    """

    _mechanism = "transformer_xl"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        segment_size: int = 64,
        memory_size: int = 64,
        head_dim: int | None = None,
        stop_gradient: bool = True,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads = num_heads
        self.segment_size = checks.at_least("segment_size", segment_size, 1, "tokens")
        self.memory_size = checks.at_least("memory_size", memory_size, 1, "tokens")
        self.stop_gradient = stop_gradient
        make, heads = Layers(**options), (num_heads, self.head_dim)
        self.query, self.key, self.value = (make.heads(in_features, heads) for _ in range(3))
        self.distance_features = in_features + in_features % 2
        self.distance = make.heads(self.distance_features, heads)
        self.out = make.out(heads, in_features)
        init = nnx.initializers.normal(0.02)
        self.content_bias, self.position_bias = (
            make.drawn(init, *heads, **axes("heads", None)) for _ in range(2)
        )

    @property
    def _span(self) -> int:
        """Distance from a query to the oldest token that it may attend to."""
        return self.segment_size + self.memory_size - 1

    def _mix_all(self, x, lengths, segment_ids):
        # Causality: the tokens of x do not read the padding at the end of a row.
        own, memory, _ = self._read(x, segment_ids)
        return self._attended(x, own, memory, aligned=segment_ids is None)

    def _read(self, x: jax.Array, segment_ids: jax.Array | None) -> tuple[Keys, Keys, Places]:
        """Keys that tokens x read in their segment and in the memory, and the places of x."""
        batch, time = x.shape[:2]
        aligned = segment_ids is None
        if aligned:
            sequence_parts.check_blocks("segments", self.segment_size, time)
        positions = sequence_parts.positions(time, segment_ids)
        ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
        reach = self.memory_size if aligned else self._span
        if sequence_parts.current() is None:
            most = (max(time, 1) - 1) // self.segment_size * self.segment_size
            reach = min(reach, most if aligned else max(time, 1) - 1)
        places = Places(jnp.broadcast_to(positions, (batch, time)), ids)

        def read(x):
            keys = Keys(self.key(x), self.value(x), places)
            return jax.tree.map(lambda x: sequence_parts.with_tokens_before(x, reach), keys)

        own = read(x)
        return own, read(lax.stop_gradient(x)) if self.stop_gradient else own, places

    def _empty(self, batch, max_length, dtype):
        return ring.empty(self._span, self._cached(batch, max_length, dtype))

    def _cached(self, batch: int, max_length: int, dtype: Any) -> decoder.Sizes:
        size = self.head_dim
        return decoder.Sizes(batch, max_length, self.num_heads, size, size, dtype)

    def _extend(self, x, state, lengths):
        own, memory, after = self._append(x, state, new_lengths(lengths, *x.shape[:2]))
        return self._attended(x, own, memory, aligned=False), after

    def _append(
        self, x: jax.Array, state: RingState, more: jax.Array
    ) -> tuple[Keys, Keys, RingState]:
        """Keys that new tokens x read in their segment and in the memory, and the new state."""
        checks.known_length(f"decoding with {type(self).__name__}", x, axis=-2)
        kept, span = state.key.shape[1], self._span
        if self.stop_gradient:
            state = lax.stop_gradient(state)
        positions = positions_from(state.length - kept, kept + x.shape[1])

        def read(x):
            key, value, filled, after = ring.append(state, self.key(x), self.value(x), more, span)
            return Keys(key, value, Places(positions, filled.astype(jnp.int32))), after

        own, after = read(x)
        return own, read(lax.stop_gradient(x))[0] if self.stop_gradient else own, after

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.segment_size, self.memory_size)

    def _attended(
        self, x: jax.Array, own: Keys, memory: Keys, aligned: bool, slots: Keys | None = None
    ) -> jax.Array:
        """Outputs `(B, T, D)` of the tokens x, the last ones of the keys."""

        def of_distance(distances):
            return self.distance(sinusoidal_positions(distances, self.distance_features, x.dtype))

        terms = Terms(
            of_distance,
            self.content_bias[...],
            self.position_bias[...],
            self.head_dim**-0.5,
        )
        heads = self.query(x), own, memory
        return self.out(attend(*heads, terms, self._sizes, aligned=aligned, slots=slots))
