"""Mixer with attention within segments and a recurrent memory across segments."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import within
from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import bounded, check_bound, new_lengths
from effattn.nn import initializers
from effattn.nn.activations import sigmoid, tanh
from effattn.nn.heads import default_head_dim
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import own_copy
from effattn.nn.tokens import tokens_of


class RecurrentMemoryAttention(CausalMixer):
    """Causal attention within segments and to a recurrent memory of earlier segments.

    After Bulatov et al. 2022, "Recurrent Memory Transformer". A sequence is split into segments of
    S tokens. A token attends, in one softmax, to the tokens of its segment up to itself and to M
    memory slots. At the end of a segment, each slot attends to the segment, and a gated recurrent
    unit (Cho et al. 2014) updates the slot:

        y_t = softmax(q_t . [k of the segment up to t, m W_k]) [v, m W_v] W_o
        read = attention(m W_r, k, v) W_o;   m' = GRU(m, read)

    The initial memory is learned. Time is O(T (S + M) D), memory O(T D), decode state
    O((S + M) D).

    Args:
      in_features: D, number of features per token and per slot.
      num_heads: N, number of heads.
      segment_size: S, tokens per segment.
      num_slots: M, number of memory slots.
      head_dim: H, head dimension; default D / N.
      rotary: rotary embedding of token queries and keys by position in the segment; called as
        `rotary(x, positions)`. Memory slots are not rotated.
      stop_gradient: whether gradients stop at a memory or decode state passed to a call. Within a
        call, gradients flow across segments.
      is_causal: must be True.
      dropout_rate: must be 0.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    _state = RecurrentState

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
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            "recurrent_memory",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        if head_dim is None:
            head_dim = default_head_dim(in_features, num_heads)
        self.num_heads = checks.at_least("num_heads", num_heads, 1, "heads")
        self.head_dim = checks.at_least("head_dim", head_dim, 1, "features")
        self.segment_size = checks.at_least("segment_size", segment_size, 1, "tokens")
        self.num_slots = checks.at_least("num_slots", num_slots, 1, "slots")
        self.rotary, self.stop_gradient = own_copy(rotary), stop_gradient

        def heads():
            return nnx.LinearGeneral(
                in_features,
                (num_heads, head_dim),
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )

        self.query, self.key, self.value, self.read = (heads() for _ in range(4))
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim),
            in_features,
            axis=(-2, -1),
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            rngs=rngs,
        )
        self.update = nnx.GRUCell(
            in_features,
            in_features,
            gate_fn=sigmoid,
            activation_fn=tanh,
            recurrent_kernel_init=initializers.orthogonal_init,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        slots = nnx.initializers.normal(1.0)(rngs.params(), (num_slots, in_features), param_dtype)
        self.memory = nnx.Param(slots)

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
                f"x must have whole segments of {self.segment_size} tokens, got {time} tokens"
            )
        dtype = self._computed_in(x)
        if memory is None:
            memory = self._first(batch, dtype)
        else:
            memory = checks.shaped("memory", memory, (batch, self.num_slots, features))
            memory = lax.stop_gradient(memory) if self.stop_gradient else memory
        places = jnp.arange(self.segment_size)

        @jax.checkpoint
        def step(memory, tokens):
            query, key = (self._turned(p(tokens), places) for p in (self.query, self.key))
            value = self.value(tokens)
            y = self._attended(self.query(tokens), query, key, value, memory, places)
            return self._updated(memory, key, value).astype(memory.dtype), y

        number = x.shape[1] // self.segment_size
        segments = x.astype(dtype).reshape(batch, number, self.segment_size, features)
        last, y = lax.scan(step, memory.astype(dtype), jnp.moveaxis(segments, 1, 0))
        return jnp.moveaxis(y, 0, 1).reshape(x.shape), last

    def _mix_all(self, x, lengths, segment_ids):
        time = x.shape[1]
        # Causality: the tokens of x do not read the padding at the end.
        whole = jnp.pad(x, ((0, 0), (0, -time % self.segment_size), (0, 0)))
        return self.mix_segments(whole)[0][:, :time]

    def _empty(self, batch, max_length, dtype):
        slots, bound = bounded(self.segment_size, max_length)
        shape = (batch, slots, self.num_heads, self.head_dim)
        state = self._first(batch, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return RecurrentState(state, jnp.zeros((batch,), jnp.int32), bound)

    def _capacity(self, state):
        return self.segment_size if state.max_length is None else state.max_length

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
            y = self._attended(self.query(token), query, keys, values, memory, place)
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

    def _attended(self, unturned, query, key, value, memory, places):
        """Outputs `(B, T, D)` of tokens at `places`, from the segment's keys and values."""
        seen = within(places + 1, key.shape[1])
        near = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=self._wide(key))
        seen = seen if seen.ndim == 2 else seen[:, None]
        near = jnp.where(seen, near, dtypes.lowest(near.dtype))
        far = jnp.einsum(
            "btnh,bsnh->bnts", unturned, self.key(memory), preferred_element_type=near.dtype
        )
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
