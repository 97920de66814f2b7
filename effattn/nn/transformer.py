"""Transformer with any token mixers, from tokens to features."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from effattn.arrays import checks, dtypes, mesh_axes, segments
from effattn.arrays.segments import positions_from, positions_from_segment_ids, within
from effattn.decode.state import check_capacity, check_state, is_concrete, new_lengths, row_lengths
from effattn.nn import initializers, reversible
from effattn.nn.array_options import own_copy
from effattn.nn.block import Block, Routing
from effattn.nn.configuration import TransformerConfig, dtypes_of, final_norm_of
from effattn.nn.dropout import dropout, dropout_key
from effattn.nn.mixture_of_mechanisms import MixtureOfMechanisms
from effattn.nn.module import Module
from effattn.nn.placement import ACTIVATIONS, axes
from effattn.nn.routing import routing_mixers
from effattn.nn.sinusoidal import sinusoidal_positions
from effattn.nn.tokens import indices_of, token_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerState:
    """Decode state of a `TransformerLM`.

    Attributes:
      layers: decode state of each layer: that of its mixer, or a `LayerState`.
      length: `(B,)` int32, number of tokens read.
    """

    layers: tuple[Any, ...]
    length: jax.Array

    @property
    def parts(self) -> tuple[Any, ...]:
        """The states of the parts, which `forget` changes."""
        return self.layers

    def forget(self, n: jax.Array, most: int) -> "TransformerState":
        """The state without the last n tokens of each row, at most `most`."""
        layers = tuple(layer.forget(n, most) for layer in self.layers)
        return TransformerState(layers, self.length - n)


class Transformer(Module):
    """Maps tokens to features: embedding, L blocks and a final norm.

    Vaswani et al. 2017, by default with RMSNorm (Zhang and Sennrich 2019) before each sublayer and
    SwiGLU (Shazeer 2020). The initial weights of projections into the residual stream are divided
    by sqrt(2 L).

    A call applies dropout if it gets `rngs`, and only then. The methods `train()` and `eval()` of
    Flax have no effect on dropout.

    Args:
      config: model configuration.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: options that a mixer or `TransformerConfig.position_kind` does not support.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        if not isinstance(config, TransformerConfig):
            raise ValueError(f"config must be a TransformerConfig, got {config!r}")
        self.config = config
        kind, embedding_init = config.position_kind(), initializers.embedding_init
        if kind == "sinusoidal":  # a call multiplies embeddings by sqrt(D)
            embedding_init = nnx.initializers.normal(config.features**-0.5)
        embed = functools.partial(
            nnx.Embed,
            features=config.features,
            embedding_init=embedding_init,
            param_dtype=dtypes_of(config)["param_dtype"],
            rngs=rngs,
        )
        self.embed = embed(
            num_embeddings=config.vocab_size,
            embedding_metadata=axes("vocabulary", "features"),
        )
        learned = kind == "learned"
        self.positions = embed(num_embeddings=config.max_length or 0) if learned else None
        # Copies the configuration's parameters once, so that two models share none.
        own = dataclasses.replace(config, mixer=own_copy(config.mixer))
        self.blocks = nnx.List(
            [self._make_block(own, layer, rngs) for layer in range(config.num_layers)]
        )
        self.norm = final_norm_of(config, rngs)

    def _make_block(self, config: TransformerConfig, layer: int, rngs: nnx.Rngs) -> Any:
        return Block(config, layer, rngs=rngs)

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
        """Returns the features of each token.

        Args:
          tokens: `(B, T)` int, from 0 to V - 1, checked when concrete; traced
            tokens out of range give NaN. Padding may hold any value.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences: one id per document, 0 is padding.
          global_mask: bool `(B, T)`, True for global tokens, for each mixer whose calls select
            global tokens (`LongformerSelfAttention` with `max_global`).
          rngs: `nnx.Rngs` or a key for dropout; None disables dropout.

        Returns:
          `(B, T, D)`; `(B, T, 2 D)` from a reversible model.
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self._features(tokens, marks, rngs)[0]

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
        """Returns the output of a call, and the `RoutingStats` of each layer that has experts.

        Add the sums of both losses over the layers to the loss of training (see
        `MixtureOfExperts.with_routing`).
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self._features(tokens, marks, rngs)

    def update_centroids(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        decay: float = 0.999,
        axis_name: Any = None,
    ) -> None:
        """Updates the centroids of every `RoutingSelfAttention` from these tokens.

        Layers are updated in order: each layer reads the outputs of the layers below after their
        update. A model without `RoutingSelfAttention` does not change.

        Arguments are those of `__call__`, and of `RoutingSelfAttention.update_centroids`.
        """

        def move(block, x, lengths, segment_ids):
            for mixer, read in routing_mixers(block.mixer, block.mixer_input(x)):
                mixer.update_centroids(
                    read, lengths=lengths, segment_ids=segment_ids, decay=decay, axis_name=axis_name
                )

        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        self._features(tokens, marks, None, before=move)

    def _features_and_costs(self, tokens, marks, rngs):
        """Features, and the costs `(B, T)` of the tokens in mixtures of mechanisms, over layers."""
        costs = [jnp.zeros(jnp.shape(tokens))]

        def collect(block, x, lengths, segment_ids):
            if isinstance(block.mixer, MixtureOfMechanisms):
                read, given = block.mixer_input(x), {"lengths": lengths, "segment_ids": segment_ids}
                costs.append(block.mixer.token_costs(read, **given))

        features, _ = self._features(tokens, marks, rngs, before=collect)
        return features, sum(costs)

    def _features(self, tokens, marks, rngs, *contexts, before=None, name="tokens"):
        """Features `(B, T, D)` of whole sequences, and the statistics of experts.

        `marks` has lengths, segment_ids and global_mask, or None or nothing for each. `contexts`
        are sequences with one further block argument per layer. `before` is called as
        `before(block, x, lengths, segment_ids)` ahead of each block. `name` is the argument name of
        `tokens` in error messages.
        """
        tokens = token_ids(tokens, name)
        lengths, segment_ids = marks.get("lengths"), marks.get("segment_ids")
        self._check_global(marks.get("global_mask"))
        batch, time = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(time), tokens.shape)
        if segment_ids is not None:
            segment_ids = checks.as_array("segment_ids", segment_ids)
            if segment_ids.shape != tokens.shape:
                raise ValueError(
                    f"segment_ids must have the shape {tokens.shape} of tokens, "
                    f"got {segment_ids.shape}"
                )
            positions = positions_from_segment_ids(segment_ids)
        elif self.positions is not None:
            checks.known_length("a model with learned positions", tokens, axis=-1)
            self._check_columns(time, name)
        if lengths is not None:
            lengths = row_lengths(lengths, batch, time)
        valid = segments.valid(lengths, segment_ids, time)
        if valid is not None and self.positions is not None:
            _check_documents(jnp.where(valid, positions, 0), self.positions.num_embeddings)

        marks = {**marks, "lengths": lengths, "segment_ids": segment_ids}
        key = dropout_key(rngs)
        x = self._embed(tokens, positions, valid, name)
        x = dropout(x, self.config.dropout_rate, _fold_in(key, self.config.num_layers))
        if self.config.reversible and before is None:
            x, routing = self._run_reversible(x, marks, key, *contexts)
            return self.norm(x), routing
        x, routing = self._streams(x), ()
        kept: dict[int | None, Any] = {}
        for layer, (block, *context) in enumerate(zip(self.blocks, *contexts, strict=True)):
            x = jax.tree.map(lambda x: mesh_axes.constrained(x, ACTIVATIONS), x)
            if before is not None:
                before(block, x, lengths, segment_ids)
            shared = kept.get(self.config.shared_source(layer))
            given = marks, _fold_in(key, layer), shared, *context
            x, stats, kept[layer] = self._block(block, x, *given)
            routing += stats
        return self.norm(self._joined(x)), routing

    def _streams(self, x):
        """The input of the first layer: embeddings, or two streams of them in at least float32."""
        return (dtypes.widen(x),) * 2 if self.config.reversible else x

    def _joined(self, x):
        """The features that the final norm reads, from the output of the last layer."""
        return jnp.concatenate(x, -1) if self.config.reversible else x

    def _run_reversible(self, x, marks, key, *contexts):
        """Output of a reversible model's layers, without a norm, and the statistics of experts."""

        def call(blocks, x, marks, key, *contexts):
            def placed(part):
                return lambda x: part(mesh_axes.constrained(x, ACTIVATIONS))

            parts = [
                placed(part)
                for layer, (block, *context) in enumerate(zip(blocks, *contexts, strict=True))
                for part in block.parts(*context, **marks, rngs=_fold_in(key, layer))
            ]
            streams, further = reversible.run(parts, *self._streams(x))
            routing = tuple(stats for stats in further if stats is not None)
            return self._joined(streams), routing

        given = self.blocks, x, marks, key, *contexts
        places = PartitionSpec(*mesh_axes.spec(x)), PartitionSpec()
        return mesh_axes.placed(call, x, *places)(*given)

    def _check_columns(self, count, name="tokens"):
        """Raises `ValueError` if there are fewer learned positions than columns of tokens."""
        if self.positions is not None and count > self.positions.num_embeddings:
            raise ValueError(
                f"{name} must have at most {self.positions.num_embeddings} columns, the number of "
                f"learned positions (max_length), got {count}"
            )

    def _check_global(self, global_mask):
        """Raises `ValueError` for a mask that no mixer takes."""
        takes = (getattr(block.mixer, "takes_global_mask", False) for block in self.blocks)
        if global_mask is not None and not any(takes):
            raise ValueError(
                "a mask of global tokens was given, but no mixer of this model takes it; give the "
                'model the mixer {"name": "longformer", "max_global": ...}, without '
                "global_tokens, or leave the mask out"
            )

    def _extend(self, tokens, state, lengths, global_mask, *contexts):
        """Returns the features of new tokens, and the decode state after these tokens."""
        tokens = token_ids(tokens)
        batch, time = tokens.shape
        check_state(state, TransformerState, batch)
        if len(state.layers) != len(self.blocks):
            raise ValueError(
                f"state has {len(state.layers)} layers, and this model needs {len(self.blocks)}; "
                "it is the state of another model"
            )
        lengths = new_lengths(lengths, batch, time)
        self._check_global(global_mask)
        if self.positions is not None:
            check_capacity(state.length, lengths, self.positions.num_embeddings)
        embedded = self._embed(tokens, positions_from(state.length, time), within(lengths, time))
        x = self._streams(embedded)
        layers: list[Any] = []
        kept: dict[int | None, Any] = {}
        several = zip(self.blocks, state.layers, *contexts, strict=True)
        for number, (block, layer, *context) in enumerate(several):
            shared = kept.get(self.config.shared_source(number))
            given = lengths, global_mask, shared, *context
            x, after, values = mesh_axes.extended(_extend_block, block, x, layer, *given, further=1)
            # Keys and values are part of the state.
            kept[number] = after if values is None else values
            layers.append(after)
        return self.norm(self._joined(x)), TransformerState(tuple(layers), state.length + lengths)

    def _embed(self, tokens, positions, valid, name="tokens"):
        if valid is not None:
            # A position past the end of the table reads NaN; padding must not.
            positions = jnp.where(valid, positions, 0)
        x = _rows(self.embed, indices_of(tokens, valid, self.config.vocab_size, name))
        if self.positions is not None:
            x = x + _rows(self.positions, positions)
        if self.config.positions == "sinusoidal":
            features = self.config.features
            x = x * features**0.5 + sinusoidal_positions(positions, features, x.dtype)
        # Cast after the lookup, so that the gradients of repeated tokens are summed in param_dtype:
        # a long sum in 16 bits stops growing.
        return x.astype(dtypes_of(self.config)["dtype"])

    def _block(self, block, x, marks, key, *shared_and_context):
        """The results of `with_shared` of the block."""

        def call(block, x, marks, key, *given):
            return block.with_shared(x, *given, **marks, rngs=key)

        if self.config.remat:
            policy = self.config.remat_policy
            if isinstance(policy, str):
                policy = getattr(jax.checkpoint_policies, policy)
            call = jax.checkpoint(call, policy=policy)
        like = x[0] if self.config.reversible else x
        whole, of_tokens = (PartitionSpec(*mesh_axes.spec(like)[:axes]) for axes in (3, 2))
        given = marks, key, *shared_and_context
        return mesh_axes.placed(call, like, whole, PartitionSpec(), of_tokens)(block, x, *given)


def _extend_block(block, x, state, lengths, global_mask, *shared_and_context):
    given = {"lengths": lengths, "global_mask": global_mask}
    return block.extend_with_shared(x, state, *shared_and_context, **given)


def _rows(table: nnx.Embed, indices: jax.Array) -> jax.Array:
    """Rows `(B, T, D)` of the table, sharded like the indices `(B, T)` on explicit mesh axes."""
    indices = jnp.asarray(indices)
    place = PartitionSpec(*mesh_axes.spec(indices), None) if mesh_axes.explicit(indices) else None
    if mesh_axes.are_divided(indices.shape, ACTIVATIONS, 1):
        # XLA would divide the features that it reads, and warn that it has to gather them again.
        table = jax.tree.map(lambda leaf: mesh_axes.whole(leaf, -1), table)
    return table(indices, out_sharding=place)


def _check_documents(positions: jax.Array, learned: int) -> None:
    """Raises `ValueError` for concrete positions beyond the learned positions."""
    if is_concrete(positions):
        longest = int(np.max(np.asarray(positions), initial=0)) + 1
        if longest > learned:
            raise ValueError(
                f"segment_ids must have documents of at most {learned} tokens, the number of "
                f"learned positions (max_length), got a document of {longest} tokens"
            )


def _fold_in(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)
