"""Cross-attention module around any attention function."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import positions_from
from effattn.nn.attention import Attention, check_score_mod
from effattn.nn.options import Attending
from effattn.nn.tokens import padding_of, tokens_of, zero_padding


class CrossAttention(Attention):
    """Cross-attention from tokens to a context, with any attention function.

        q = x Wq;   k, v = c Wk, c Wv;   y = attention(norm(q), norm(k), v) Wo

    Cross-attention is never causal and has no decode state. In a decoder, call the module on the
    new tokens; or call `project_context` once and `attend` for each new token. In both cases
    `query_offset` gives the position of the first new token.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      attention: as in `SelfAttention`.
      context_features: C, number of features per context token; default D.
      **options: the options of `effattn.nn.options.Attending` (rngs, heads, dropout, dtypes,
        initializers, ...), and further arguments of the attention function, as in `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        attention: str | Callable[..., Any] = "softmax",
        *,
        context_features: int | None = None,
        **options: Annotated[Any, Attending],
    ):
        context_features = in_features if context_features is None else context_features
        super().__init__(in_features, context_features, num_heads, attention, **options)
        self.binding.require("cross", "a context")
        self.binding.require("bidirectional", "a context")
        check_score_mod(Attention._options(self).get("score_mod"), num_heads, is_causal=False)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        *,
        lengths: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        context_segment_ids: jax.Array | None = None,
        query_offset: jax.Array | int | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Attends from x to the context.

        Args:
          x: `(B, T, D)`.
          context: `(B, S, C)`.
          lengths: `(B,)` int, valid tokens of x.
          context_lengths: `(B,)` int, valid tokens of the context.
          segment_ids: `(B, T)` int; tokens attend to context tokens with an equal id; 0 is
            padding.
          context_segment_ids: `(B, S)` int; given together with `segment_ids`.
          query_offset: int or `(B,)` int, position of the first token of x, for mechanisms that
            depend on positions; default None.
          rngs: `nnx.Rngs` or a key for dropout of attention weights; None disables dropout.

        Returns:
          `(B, T, D)`.
        """
        if (segment_ids is None) != (context_segment_ids is None):
            given = "segment_ids" if context_segment_ids is None else "context_segment_ids"
            raise ValueError(
                f"segment_ids and context_segment_ids must be given together, got only {given}"
            )
        key, value = self.project_context(
            context, lengths=context_lengths, segment_ids=context_segment_ids
        )
        return self.attend(
            x,
            key,
            value,
            lengths=lengths,
            context_lengths=context_lengths,
            segment_ids=segment_ids,
            context_segment_ids=context_segment_ids,
            query_offset=query_offset,
            rngs=rngs,
        )

    @mesh_axes.on_mesh_of_input
    def project_context(
        self,
        context: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Keys `(B, S, K, H)` and values `(B, S, K, Hv)` of a context, for calls of `attend`.

        Args:
          context: `(B, S, C)`.
          lengths: `(B,)` int, valid tokens of the context.
          segment_ids: `(B, S)` int; 0 is padding.
        """
        context = tokens_of("context", context, self.context_features)
        batch, size = context.shape[:2]
        _, valid = padding_of(self.binding, batch, size, lengths, segment_ids, "context_")
        return self._project_keys(zero_padding(context, valid))

    @mesh_axes.on_mesh_of_input
    def attend(
        self,
        x: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        context_segment_ids: jax.Array | None = None,
        query_offset: jax.Array | int | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Attends from x to the keys and values that `project_context` returned; `(B, T, D)`."""
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        self._check_projected(key, value)
        padding, valid = padding_of(self.binding, batch, time, lengths, segment_ids)
        of_context, _ = padding_of(
            self.binding, batch, key.shape[1], context_lengths, context_segment_ids, "context_"
        )
        keywords = {
            "query_seq_lengths": padding.get("query_seq_lengths"),
            "key_value_seq_lengths": of_context.get("key_value_seq_lengths"),
        }
        keywords = {name: array for name, array in keywords.items() if array is not None}
        if segment_ids is not None:
            keywords["segment_ids"] = (segment_ids, context_segment_ids)
        if query_offset is not None:
            keywords.update(self._placed(checks.as_array("query_offset", query_offset), x, key))
        query = self._project_queries(zero_padding(x, valid))
        keywords = {**self._options(), **keywords, **self._dropout(rngs)}
        self.binding.check_complete(keywords)
        out = self.attention(query, key, value, **keywords)
        return self.out(out)

    def _check_projected(self, key, value):
        heads = self.num_kv_heads
        for name, array, size in (("key", key, self.head_dim), ("value", value, self.value_dim)):
            shape = np.shape(array)
            if len(shape) != 4 or shape[2:] != (heads, size):
                raise ValueError(
                    f"{name} must be an array that project_context returned, of shape "
                    f"(B, S, {heads}, {size}), got shape {shape}"
                )

    def _placed(self, offset: jax.Array, x: jax.Array, key: jax.Array) -> dict[str, Any]:
        """Keyword arguments for the positions of x; empty if the mechanism ignores positions."""
        if self.binding.places_tokens:
            pair = positions_from(offset, x.shape[1]), jnp.arange(key.shape[1])
            lengths = x.shape[1], key.shape[1]
            return {
                "positions": tuple(
                    jnp.broadcast_to(positions, (x.shape[0], length))
                    for positions, length in zip(pair, lengths, strict=True)
                )
            }
        # A mechanism that reads keys through a recurrent state ignores query positions.
        if self.binding.registered and self.binding.has("state"):
            return {}
        self.binding.require("offset", "query_offset")
        return {"query_offset": offset}
