"""Language model: a Transformer with an output projection, and its decoding."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn import registry
from effattn.arrays import dtypes, mesh_axes
from effattn.decode.rewind import (
    RewindableState,
    extend_rewindable,
    refuse_with_rewind,
    rewind,
    rewindable,
)
from effattn.decode.state import check_init, narrow
from effattn.nn import initializers
from effattn.nn.block import Routing
from effattn.nn.configuration import TransformerConfig, dtypes_of
from effattn.nn.placement import axes
from effattn.nn.projection import dot_general
from effattn.nn.tokens import one_token, token_ids
from effattn.nn.transformer import Transformer, TransformerState


class TransformerLM(Transformer):
    """Language model: a `Transformer`, causal or bidirectional, with an output projection.

    Dropout is as in `Transformer`; decoding has no dropout.

    Args:
      config: model configuration.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: as `Transformer`; also for a reversible model with tied embeddings.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if config.tie_embeddings and config.reversible:
            raise ValueError(
                f"reversible=True gives the output projection {config.out_features} features (both "
                f"streams), but the token embeddings have {config.features}, so "
                "tie_embeddings=True cannot share them; give tie_embeddings=False"
            )
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Linear(
                config.out_features,
                config.vocab_size,
                use_bias=False,
                kernel_init=initializers.embedding_init,
                preferred_element_type=_logits_dtype(config),
                dot_general=dot_general,
                kernel_metadata=axes("features", "vocabulary"),
                rngs=rngs,
                **dtypes_of(config),
            )
        )

    @staticmethod
    def from_transformers(
        parameters: Mapping[str, Any], config: Any, **options: Any
    ) -> "TransformerLM":
        """Loads a pretrained decoder; see `effattn.nn.decoder_from_transformers`."""
        load = registry.load("effattn.nn.pretrained.decoder:decoder_from_transformers")
        return load(parameters, config, **options)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of the next token; of the token itself in a bidirectional model.

        Arguments are those of `Transformer`; the logits `(B, T, V)` are at least float32.
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self._logits(self._features(tokens, marks, rngs)[0])

    @mesh_axes.on_mesh_of_input
    def with_routing(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Returns the logits of a call, and the `RoutingStats` of each layer that has experts.

        See `Transformer.with_routing`.
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        features, routing = self._features(tokens, marks, rngs)
        return self._logits(features), routing

    @mesh_axes.on_mesh_of_input
    def with_costs(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the logits of a call, and the cost of each token, `(B, T)`.

        The cost is the sum over the layers of `MixtureOfMechanisms.token_costs`; 0 in other layers
        and in the padding. Add its mean to the loss to discourage costly mechanisms.
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        features, costs = self._features_and_costs(tokens, marks, rngs)
        return self._logits(features), costs

    def init_state(
        self, batch: int, max_length: int, dtype: Any = None, *, max_rewind: int = 0
    ) -> Any:
        """Returns the empty decode state; arguments as in `SelfAttention.init_state`."""
        if not self.config.is_causal:
            raise ValueError(
                "a bidirectional TransformerLM cannot decode; configure it with is_causal=True"
            )
        for block in self.blocks:
            if not hasattr(block.mixer, "init_state"):
                raise NotImplementedError(
                    f"the mixer {type(block.mixer).__name__} has no init_state and extend, so the "
                    "model cannot decode; add both to the mixer, as SelfAttention has them"
                )
        check_init(batch, max_length, dtypes_of(self.config)["dtype"] if dtype is None else dtype)
        if self.positions is not None and max_length > self.positions.num_embeddings:
            raise ValueError(
                f"max_length must be at most {self.positions.num_embeddings}, the number of "
                f"learned positions, got {max_length}; configure the model with a larger max_length"
            )
        state = TransformerState(
            layers=tuple(block.init_state(batch, max_length, dtype) for block in self.blocks),
            length=jnp.zeros((batch,), jnp.int32),
        )
        return rewindable(state, max_rewind, jax.ShapeDtypeStruct((batch, 1), jnp.int32))

    @mesh_axes.on_mesh_of_input
    def extend(
        self,
        tokens: jax.Array,
        state: Any,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the logits for T >= 1 new tokens that follow the tokens in `state`.

        Arguments are those of `SelfAttention.extend`, with tokens `(B, T)` as in `__call__` in
        place of x, and `global_mask` for the new tokens. Returns `(logits (B, T, V), state)`.
        """

        def extend(tokens, state, lengths):
            features, state = self._extend(tokens, state, lengths, global_mask)
            return self._logits(features), state

        if isinstance(state, RewindableState):
            refuse_with_rewind("global_mask", global_mask)
            return extend_rewindable(extend, narrow(token_ids(tokens)), state, lengths)
        return extend(tokens, state, lengths)

    def rewind(self, state: Any, n: int | jax.Array) -> Any:
        """Forgets the last n tokens of each row: see `effattn.decode.rewind`."""
        return rewind(state, n)

    def step(self, tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Calls `extend` with one token per row, `(B, 1)`."""
        return self.extend(one_token(tokens), state)

    def _logits(self, x):
        dtype = _logits_dtype(self.config)
        if self.head is not None:
            return self.head(x).astype(dtype)
        embedding = self.embed.embedding[...].astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, embedding, preferred_element_type=dtype)


def _logits_dtype(config: TransformerConfig) -> Any:
    return dtypes.wide(dtypes_of(config)["dtype"])
