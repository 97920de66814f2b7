"""Self-attention mixer around any attention function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn import registry
from effattn.arrays import mesh_axes
from effattn.arrays.gathers import rows_at, scatter
from effattn.arrays.segments import positions_from
from effattn.cores import attention, sequence_parts
from effattn.decode.decoder import without_naive
from effattn.nn.attention import Attention, check_score_mod
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.rotary import RotaryEmbedding, check_rotary
from effattn.nn.tokens import padding_of, tokens_of, zero_padding
from effattn.parallel.heads import attend_in_parts


def _attend_from(where, query, key, value, keywords):
    """Exact attention of queries `(B, C, N, H)` that stand at the tokens `where`, `(B, C)`."""
    keywords = {name: x for name, x in keywords.items() if name != "query_seq_lengths"}
    ids = keywords.get("segment_ids")
    if ids is not None:
        keywords["segment_ids"] = rows_at(ids, where), ids
    everywhere = jnp.broadcast_to(jnp.arange(key.shape[1], dtype=jnp.int32), key.shape[:2])
    given = attention.check("dot_product_attention", query, key, value, **keywords)
    given = dataclasses.replace(given, positions=(where, everywhere))
    return attention.attend(query, key, value, given)[0]


class _Chosen:
    """Exact attention of the queries at some tokens, as a function over heads; zeros elsewhere."""

    def __init__(self, where: jax.Array):
        self.where = where

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **keywords: Any
    ) -> jax.Array:
        chosen = rows_at(query, self.where)
        out = _attend_from(self.where, chosen, key, value, keywords)
        return scatter(out, self.where, query.shape[1])


class SelfAttention(Attention, CausalMixer):
    """Self-attention mixer around any attention function.

        q, k, v = x Wq, x Wk, x Wv;   y = attention(rotary(norm(q)), rotary(norm(k)), v) Wo

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      attention: a registered name (`effattn.registry.names()`), or a function of query
        `(B, T, N, H)`, key and value `(B, T, K, H)`: a function of `effattn`, a
        `functools.partial` of such a function, or any other function. The registry tells which
        further arguments a registered function takes; the signature tells it for other functions.
        With `is_causal=False`, an unregistered function is called without `is_causal`, so its
        default applies.
      **options: the options of `effattn.nn.options.SelfAttending` (rngs, heads, rotary, direction,
        dropout, dtypes, initializers, ...), and further arguments of the attention function, such
        as `local_window_size=(255, 0)`. An `nnx.Param` is learned
        (`sink=nnx.Param(jnp.zeros(num_heads))`); the parameters of an `nnx.Module` are learned too
        (a `score_mod` with a learned bias). The layer copies all parameters and modules that it is
        given, `attention` included, so two layers given the same object share no parameters.

    Raises:
      ValueError: inconsistent sizes, an unknown name or option, or an option that the mechanism
        does not support; the message names the mechanisms that support the option.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        attention: str | Callable[..., Any] = "softmax",
        *,
        rotary: RotaryEmbedding | None = None,
        is_causal: bool = True,
        **options: SelfAttentionOptions,
    ):
        super().__init__(in_features, in_features, num_heads, attention, **options)
        check_rotary(rotary, head_dim=self.head_dim)
        check_score_mod(Attention._options(self).get("score_mod"), num_heads, is_causal)
        direction = "causal" if is_causal else "bidirectional"
        self.binding.require(direction, f"is_causal={is_causal}")
        self.rotary = rotary
        self.is_causal = is_causal

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences.

        Args:
          x: `(B, T, D)`.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences: tokens attend within equal ids, 0 is
            padding, and positions count from the start of each document.
          rngs: `nnx.Rngs` or a key for dropout of attention weights; None disables dropout.

        Returns:
          `(B, T, D)`. Valid tokens do not depend on the padding.
        """
        sequence_parts.check_mixer(self)
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        heads = self._heads(x, positions, lengths=lengths, segment_ids=segment_ids)
        keywords = {**keywords, **self._per_token(x), **self._dropout(rngs)}
        return self._finish(self._attend(heads, **keywords), x)

    def attends_from_any_tokens(self) -> bool:
        """Returns whether `outputs_at` works: for exact attention without a bias or a mask."""
        exact = self.binding.registered and self.binding.name == "softmax"
        of_pairs = {"bias", "mask"} & self._options().keys()
        return type(self) is SelfAttention and exact and not of_pairs

    def outputs_at(
        self,
        x: jax.Array,
        where: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Outputs of chosen tokens, without the cost of attention from the other tokens.

        Keys and values are those of all tokens; there is no dropout.

        Args:
          x: `(B, T, D)`.
          where: `(B, C)` int32, indices of different tokens, in any order; if devices divide the
            sequence, indices into the whole sequence.
          lengths: as in a call.
          segment_ids: as in a call.

        Returns:
          `(B, T, D)`, the outputs in their places; the other rows are undefined.
        """
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        keywords = dict(without_naive(keywords))
        if sequence_parts.current() is not None:
            heads = self._heads(x, positions)
            return self.out(attend_in_parts(_Chosen(where), heads, keywords))
        query = self._project_queries(rows_at(x, where))
        key, value = self._project_keys(x)
        if self.rotary is not None and positions is not None:
            positions = jnp.broadcast_to(positions, x.shape[:2])
            query = self.rotary(query, rows_at(positions, where))
            key = self.rotary(key, positions)
        return scatter(
            self.out(_attend_from(where, query, key, value, keywords)), where, x.shape[1]
        )

    def _attend(self, heads: tuple[jax.Array, ...], **keywords: Any) -> jax.Array:
        """Calls the attention function on (query, key, value); returns `(B, T, N, Hv)`."""
        self.binding.check_complete(keywords)
        return attend_in_parts(self.attention, heads, keywords)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        """Further per-token arguments of the attention function, by name."""
        return {}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """Output `(B, T, D)` from the head outputs `(B, T, N, Hv)` and the input tokens x."""
        return self.out(out)

    def _whole(
        self, x: jax.Array, lengths: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, dict[str, Any]]:
        """Inputs for whole sequences.

        Returns:
          x with zeros in the padding; token positions, or None without rotary embedding; keyword
          arguments of the attention function.
        """
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        padding, valid = padding_of(self.binding, batch, time, lengths, segment_ids)
        if self.is_causal and self.binding.takes("is_causal"):
            padding["is_causal"] = True
        positions = None
        if self.rotary is not None:
            positions = sequence_parts.positions(time, padding.get("segment_ids"))
        return zero_padding(x, valid), positions, {**self._options(), **padding}

    def _heads(
        self,
        x: jax.Array,
        positions: jax.Array | None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value of x; query and key are rotated if `rotary` is set.

        Lengths and segment ids are those of x, for subclasses whose heads read several tokens.
        """
        key, value = self._project_keys(x)
        return *self._rotated(self._project_queries(x), key, positions), value

    def _rotated(
        self, query: jax.Array, key: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if self.rotary is None or positions is None:
            return query, key
        return self.rotary(query, positions), self.rotary(key, positions)

    def _cached_sizes(self) -> tuple[int, int, int]:
        """Number of key heads, and head dimensions of keys and values in decode states."""
        return self.num_kv_heads, self.head_dim, self.value_dim

    def _empty(self, batch, max_length, dtype):
        of_token = self._arguments_of_token(batch, dtype)
        return self._decoder().init(batch, max_length, *self._cached_sizes(), dtype, **of_token)

    def _arguments_of_token(self, batch: int, dtype: Any) -> dict[str, Any]:
        """Shapes and dtypes of the further arguments of the attention function, for one token."""
        token = jax.ShapeDtypeStruct((batch, 1, self.in_features), dtype)
        return dict(jax.eval_shape(self._per_token, token))

    def _extend(self, x, state, lengths):
        heads = self._heads(x, self._positions(x, state))
        out, state = self._decoder().extend(*heads, state, lengths, **self._per_token(x))
        return self._finish(out, x), state

    def _positions(self, x: jax.Array, state: Any) -> jax.Array | None:
        """Positions of new tokens, or None without rotary embedding."""
        return None if self.rotary is None else positions_from(state.length, x.shape[1])

    def _decoder(self) -> Any:
        mechanism = self.binding.mechanism
        if mechanism is None or mechanism.decoder is None:
            raise NotImplementedError(
                f"attention {self.binding.name!r} cannot decode, as it is not registered with a "
                f"decoder; use a mechanism that decodes ({', '.join(registry.names('decode'))}), "
                "its function, or a functools.partial of its function"
            )
        return registry.load(mechanism.decoder)(mechanism.function, self._options())
