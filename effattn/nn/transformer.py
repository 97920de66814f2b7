"""Transformers with any token mixers: configuration, layers, encoder stack and language model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import positions_from, positions_from_segment_ids, within
from effattn.decode.state import (
    check_capacity,
    check_init,
    check_state,
    is_concrete,
    new_lengths,
    row_lengths,
)
from effattn.nn import initializers
from effattn.nn.alibi import Alibi
from effattn.nn.dropout import check_dropout_rate, dropout, dropout_key
from effattn.nn.equality import same_fields
from effattn.nn.feed_forward import SwiGLU
from effattn.nn.hybrid import HybridHeads
from effattn.nn.module import Module, check_dtype
from effattn.nn.options import own_copy
from effattn.nn.rotary import RotaryEmbedding
from effattn.nn.routing import routing_mixers
from effattn.nn.tokens import indices_of, token_ids

Mixer = str | Mapping[str, Any]

_POSITIONS = ("rotary", "learned", "alibi", "none")

_REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Static configuration of a `Transformer` or a `TransformerLM`.

    Attributes:
      vocab_size: V, number of token ids.
      num_layers: L, number of layers.
      features: D, number of features per token.
      num_heads: N, number of query heads.
      num_kv_heads: K, number of key and value heads, a divisor of N; default N.
      head_dim: H, head dimension; default D / N.
      hidden_features: hidden size of the feed-forward layer; default 8/3 D, rounded up to a
        multiple of 8.
      mixer: a registered name, a mapping of a name and options
        (`{"name": "sliding_window", "local_window_size": (63, 0)}`), a mapping of groups of heads
        (`{"heads": [{"name": "softmax", "num_heads": 2}, ...]}`, see `HybridHeads`), or a sequence
        of L such mixers. Options are arguments of the mixer, and override the arguments that the
        model passes to the mixer. Some mechanisms have options that depend on the layer: "dilated"
        uses wider steps in later layers. If an option holds parameters or modules, each layer of
        the model trains a separate copy.
      positions: "rotary" (in mixers that take a rotary embedding and do not encode token order
        otherwise), "learned" (one vector per position, added to the token embeddings), "alibi", or
        "none". Default "rotary"; "learned" if no layer encodes token order or takes a rotary
        embedding.
      rotary_theta: see `RotaryEmbedding`.
      rotary_scaling: see `RotaryEmbedding`.
      max_length: maximum number of input tokens, for parameters that depend on positions: learned
        positions, which require `max_length`, and mixers such as Linformer.
      tie_embeddings: the logits reuse the token embedding as output projection.
      parallel: mixer and feed-forward layer read the same normalised input, and their outputs are
        summed, as in GPT-J. With False, the feed-forward layer follows the mixer.
      dropout_rate: dropout rate of the embeddings and of each sublayer's output.
      dtype: computation dtype, such as "bfloat16"; default `param_dtype`.
      param_dtype: dtype of the parameters, and so of the gradients.
      remat: recompute each layer in the backward pass instead of storing its activations.
      remat_policy: the values that remat stores: a function from `jax.checkpoint_policies`, or the
        name of a policy that takes no arguments.
      qk_norm: RMS-normalise queries and keys, in mixers that have queries and keys.
      is_causal: token t reads tokens 0 to t only, for next-token prediction. With False, each token
        reads all tokens, for masked-token prediction, and the model cannot decode.
    """

    vocab_size: int
    num_layers: int
    features: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_features: int | None = None
    # Mappings are not hashable, so the hash leaves this field out.
    mixer: Mixer | tuple[Mixer, ...] | list[Mixer] = dataclasses.field(
        default="softmax", hash=False
    )
    positions: str | None = None
    rotary_theta: float = 10000.0
    rotary_scaling: float = 1.0
    max_length: int | None = None
    tie_embeddings: bool = True
    parallel: bool = False
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    remat: bool = False
    remat_policy: str | Callable[..., Any] | None = None
    qk_norm: bool = False
    is_causal: bool = True

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "features", "num_heads"):
            checks.at_least(name, getattr(self, name), 1)
        for name in ("num_kv_heads", "head_dim", "hidden_features", "max_length"):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), 1, "or None")
        if self.positions not in (None, *_POSITIONS):
            raise ValueError(
                f"positions must be one of {', '.join(_POSITIONS)}, got {self.positions!r}"
            )
        if self.positions == "learned" and self.max_length is None:
            raise ValueError("learned positions need max_length, how many of them there are")
        check_dropout_rate(self.dropout_rate)
        for name in ("tie_embeddings", "parallel", "remat", "qk_norm", "is_causal"):
            checks.flag(name, getattr(self, name))
        check_dtype("dtype", self.dtype)
        checks.dtype("param_dtype", self.param_dtype)
        if self.remat_policy is not None:
            if not self.remat:
                raise ValueError("remat_policy says what remat keeps and needs remat=True")
            if isinstance(self.remat_policy, str) and self.remat_policy not in _REMAT_POLICIES:
                raise ValueError(
                    f"remat_policy must be one of {', '.join(_REMAT_POLICIES)} or a function from "
                    f"jax.checkpoint_policies, got {self.remat_policy!r}"
                )
        if isinstance(self.mixer, (tuple, list)) and len(self.mixer) != self.num_layers:
            raise ValueError(
                f"mixer must be one for all layers or one for each of the {self.num_layers} "
                f"layers, got {len(self.mixer)}"
            )
        for layer in range(self.num_layers):
            for mixer in self.layer_mixer(layer):
                registry.get(mixer["name"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformerConfig) and same_fields(self, other)

    def position_kind(self) -> str:
        """Position encoding of the model: `positions`, or the default for its mixers.

        Raises:
          ValueError: rotary positions that no mixer supports, learned positions without
            `max_length`, or rotary options with another position encoding.
        """
        names = {mixer["name"] for n in range(self.num_layers) for mixer in self.layer_mixer(n)}
        entries = map(registry.get, names)
        able = any(entry.knows_order or entry.takes_rotary() for entry in entries)
        kind = self.positions or ("rotary" if able else "learned")
        if (kind == "rotary" and not able) or (kind == "learned" and self.max_length is None):
            raise ValueError(
                f"mixer={self.mixer!r} cannot tell rotary positions: give max_length and "
                "positions='learned', or positions='none'"
            )
        for name in ("rotary_theta", "rotary_scaling"):
            if kind != "rotary" and getattr(self, name) != getattr(TransformerConfig, name):
                raise ValueError(
                    f"{name} is for rotary positions, and those of this model are {kind!r}; got "
                    f"{name}={getattr(self, name)}"
                )
        return kind

    def layer_mixer(self, layer: int) -> tuple[dict[str, Any], ...]:
        """Name and options of a layer's mixer, one mapping per group of heads."""
        mixer = self.mixer[layer] if isinstance(self.mixer, (tuple, list)) else self.mixer
        named: Any = {"name": mixer} if isinstance(mixer, str) else mixer
        if not isinstance(named, Mapping):
            raise ValueError(
                "mixer must be a registered name, a mapping of a name and options or of groups of "
                f"heads, or one of those for each layer, got {mixer!r}"
            )
        groups: Any = named["heads"] if named.keys() == {"heads"} else (named,)
        if not groups or any(not isinstance(g, Mapping) or "name" not in g for g in groups):
            raise ValueError(
                'a mixer given as a mapping needs the mechanism\'s "name", or as "heads" one or '
                f"more mappings with it, got {dict(named)}"
            )
        return tuple(
            {**registry.get(group["name"]).options_in_layer(layer), **group} for group in groups
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerState:
    """Decode state of a `TransformerLM`.

    Attributes:
      layers: decode state of each layer's mixer.
      length: `(B,)` int32, number of tokens read.
    """

    layers: tuple[Any, ...]
    length: jax.Array


# (norm, layer). A sublayer whose norm is None reads the mixer's normalised input.
Sublayer = tuple[Callable[[jax.Array], jax.Array] | None, Callable[[jax.Array], jax.Array]]


class Layer(Module):
    """Base of `Block` and `DecoderBlock`: pre-norm mixer and SwiGLU with residual connections."""

    def __init__(self, config: TransformerConfig, layer: int, *, rngs: nnx.Rngs):
        dtypes = dtypes_of(config)
        residual_init = initializers.residual_init(config.num_layers)
        self.mixer = _build_mixer(config, layer, out_kernel_init=residual_init, rngs=rngs, **dtypes)
        hidden_features = config.hidden_features
        if hidden_features is None:
            hidden_features = -(-config.features * 8 // 3 // 8) * 8
        self.feed_forward = SwiGLU(
            config.features, hidden_features, out_kernel_init=residual_init, rngs=rngs, **dtypes
        )
        self.mixer_norm = nnx.RMSNorm(config.features, rngs=rngs, **dtypes)
        self.feed_forward_norm = (
            None if config.parallel else nnx.RMSNorm(config.features, rngs=rngs, **dtypes)
        )
        self.dropout_rate = config.dropout_rate

    def _others(self) -> tuple[Sublayer, ...]:
        """The sublayers after the mixer."""
        return ((self.feed_forward_norm, self.feed_forward),)

    def _keys(self, rngs: jax.Array | None, others: int = 1) -> tuple[Any, Any]:
        """Random key of the mixer, and dropout keys of the mixer output and `others` sublayers."""
        if rngs is None:
            return None, None
        mixer_key, *keys = jax.random.split(rngs, 2 + others)
        return mixer_key, keys

    def _sublayers(self, x, mix, others, keys):
        """Adds the outputs of the mixer and of `others` to x; returns x and the mixer's state."""
        keys = iter((None,) * (1 + len(others)) if keys is None else keys)
        read = self.mixer_norm(x)
        mixed, state = mix(read)
        x = x + dropout(mixed, self.dropout_rate, next(keys))
        for norm, layer in others:
            h = layer(read if norm is None else norm(x))
            x = x + dropout(h, self.dropout_rate, next(keys))
        return x, state


class Block(Layer):
    """Transformer layer: mixer and SwiGLU, each with RMSNorm before and a residual connection.

    Args:
      config: configuration of the model.
      layer: index of the layer, from 0.
      rngs: random streams for parameter initialisation.
    """

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Maps x `(B, T, D)` to `(B, T, D)`; `rngs` is a dropout key, or None for no dropout."""
        mixer_key, keys = self._keys(rngs)

        def mix(h):
            return self.mixer(h, lengths=lengths, segment_ids=segment_ids, rngs=mixer_key), None

        return self._sublayers(x, mix, self._others(), keys)[0]

    def extend(
        self, x: jax.Array, state: Any, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Applies the layer to T new tokens; `state` is the mixer's decode state."""
        return self._sublayers(
            x, lambda h: self.mixer.extend(h, state, lengths=lengths), self._others(), None
        )


class Transformer(Module):
    """Maps tokens to features: embedding, L pre-norm blocks and a final RMSNorm.

    Vaswani et al. 2017, with RMSNorm (Zhang and Sennrich 2019) before each sublayer and SwiGLU
    (Shazeer 2020). The initial weights of projections into the residual stream are divided by
    sqrt(2 L).

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
        dtypes = dtypes_of(config)
        embed = functools.partial(
            nnx.Embed,
            features=config.features,
            embedding_init=initializers.embedding_init,
            param_dtype=dtypes["param_dtype"],
            rngs=rngs,
        )
        self.embed = embed(num_embeddings=config.vocab_size)
        learned = config.position_kind() == "learned"
        self.positions = embed(num_embeddings=config.max_length or 0) if learned else None
        # Copies the configuration's parameters once, so that two models share none.
        own = dataclasses.replace(config, mixer=own_copy(config.mixer))
        self.blocks = nnx.List(
            [self._make_block(own, layer, rngs) for layer in range(config.num_layers)]
        )
        self.norm = nnx.RMSNorm(config.features, rngs=rngs, **dtypes)

    def _make_block(self, config: TransformerConfig, layer: int, rngs: nnx.Rngs) -> Any:
        return Block(config, layer, rngs=rngs)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns the features of each token.

        Args:
          tokens: `(B, T)` int, from 0 to V - 1, checked when concrete; traced
            tokens out of range give NaN. Padding may hold any value.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences: one id per document, 0 is padding.
          rngs: `nnx.Rngs` or a key for dropout; None disables dropout.

        Returns:
          `(B, T, D)`.
        """
        return self._features(tokens, lengths, segment_ids, rngs)

    def update_centroids(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        decay: float = 0.999,
        axis_name: Any = None,
    ) -> None:
        """Updates the centroids of every `RoutingSelfAttention` from these tokens.

        Layers are updated in order: each layer reads the outputs of the layers below after their
        update. A model without `RoutingSelfAttention` does not change.

        Args:
          tokens: `(B, T)` int.
          lengths: as in `__call__`.
          segment_ids: as in `__call__`.
          decay: as in `RoutingSelfAttention.update_centroids`.
          axis_name: as in `RoutingSelfAttention.update_centroids`.
        """

        def move(block, x, lengths, segment_ids):
            for mixer, read in routing_mixers(block.mixer, block.mixer_norm(x)):
                mixer.update_centroids(
                    read, lengths=lengths, segment_ids=segment_ids, decay=decay, axis_name=axis_name
                )

        self._features(tokens, lengths, segment_ids, None, before=move)

    def _features(self, tokens, lengths, segment_ids, rngs, *contexts, before=None, name="tokens"):
        """Features `(B, T, D)` of whole sequences.

        Args:
          tokens: `(B, T)` int.
          lengths: as in `__call__`.
          segment_ids: as in `__call__`.
          rngs: as in `__call__`.
          *contexts: sequences with one further block argument per layer.
          before: called as `before(block, x, lengths, segment_ids)` ahead of each block.
          name: the argument name of `tokens` in error messages.
        """
        tokens = token_ids(tokens, name)
        batch, time = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(time), tokens.shape)
        valid = None
        if segment_ids is not None:
            segment_ids = checks.as_array("segment_ids", segment_ids)
            if segment_ids.shape != tokens.shape:
                raise ValueError(
                    f"segment_ids must have the shape {tokens.shape} of tokens, "
                    f"got {segment_ids.shape}"
                )
            valid = segment_ids != 0
            positions = positions_from_segment_ids(segment_ids)
        elif self.positions is not None:
            checks.known_length("a model with learned positions", tokens, axis=-1)
            if time > self.positions.num_embeddings:
                raise ValueError(
                    f"tokens have length {time}, and there are only "
                    f"{self.positions.num_embeddings} learned positions (max_length)"
                )
        if lengths is not None:
            lengths = row_lengths(lengths, batch, time)
            before_end = within(lengths, time)
            valid = before_end if valid is None else valid & before_end
        if valid is not None and self.positions is not None:
            _check_documents(jnp.where(valid, positions, 0), self.positions.num_embeddings)

        key = dropout_key(rngs)
        x = self._embed(tokens, positions, valid, name)
        x = dropout(x, self.config.dropout_rate, _fold_in(key, self.config.num_layers))
        for layer, (block, *context) in enumerate(zip(self.blocks, *contexts, strict=True)):
            if before is not None:
                before(block, x, lengths, segment_ids)
            x = self._block(block, x, lengths, segment_ids, _fold_in(key, layer), *context)
        return self.norm(x)

    def _extend(self, tokens, state, lengths, *contexts):
        """Returns the features of new tokens, and the decode state after these tokens."""
        tokens = token_ids(tokens)
        batch, time = tokens.shape
        check_state(state, TransformerState, batch)
        if len(state.layers) != len(self.blocks):
            raise ValueError(
                f"state is of {len(state.layers)} layers, and the model has {len(self.blocks)}; it "
                "is the state of another model"
            )
        lengths = new_lengths(lengths, batch, time)
        if self.positions is not None:
            check_capacity(state.length, lengths, self.positions.num_embeddings)
        x = self._embed(tokens, positions_from(state.length, time), within(lengths, time))
        layers = []
        for block, layer, *context in zip(self.blocks, state.layers, *contexts, strict=True):
            x, layer = mesh_axes.extended(_extend_block, block, x, layer, lengths, *context)
            layers.append(layer)
        return self.norm(x), TransformerState(tuple(layers), state.length + lengths)

    def _embed(self, tokens, positions, valid, name="tokens"):
        if valid is not None:
            # A position past the end of the table reads NaN; padding must not.
            positions = jnp.where(valid, positions, 0)
        x = _rows(self.embed, indices_of(tokens, valid, self.config.vocab_size, name))
        if self.positions is not None:
            x = x + _rows(self.positions, positions)
        # Cast after the lookup, so that the gradients of repeated tokens are summed in param_dtype:
        # a long sum in 16 bits stops growing.
        return x.astype(dtypes_of(self.config)["dtype"])

    def _block(self, block, x, *args):
        def call(block, x, lengths, segment_ids, key, *context):
            return block(x, *context, lengths=lengths, segment_ids=segment_ids, rngs=key)

        if self.config.remat:
            policy = self.config.remat_policy
            if isinstance(policy, str):
                policy = getattr(jax.checkpoint_policies, policy)
            call = jax.checkpoint(call, policy=policy)
        return mesh_axes.placed_like(x, call, block, x, *args)


class TransformerLM(Transformer):
    """Language model: a `Transformer`, causal or bidirectional, with an output projection.

    Dropout is as in `Transformer`; decoding has no dropout.

    Args:
      config: model configuration.
      rngs: random streams for parameter initialisation.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Linear(
                config.features,
                config.vocab_size,
                use_bias=False,
                kernel_init=initializers.embedding_init,
                preferred_element_type=_logits_dtype(config),
                rngs=rngs,
                **dtypes_of(config),
            )
        )

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of the next token; of the token itself in a bidirectional model.

        Args:
          tokens: `(B, T)` int, from 0 to V - 1, checked when concrete; traced
            tokens out of range give NaN. Padding may hold any value.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences: one id per document, 0 is padding.
          rngs: `nnx.Rngs` or a key for dropout; None disables dropout.

        Returns:
          `(B, T, V)`, at least float32.
        """
        return self._logits(self._features(tokens, lengths, segment_ids, rngs))

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> TransformerState:
        """Returns the empty decode state; arguments as in `SelfAttention.init_state`."""
        if not self.config.is_causal:
            raise ValueError(
                "a bidirectional TransformerLM cannot decode; configure it with is_causal=True"
            )
        check_init(batch, max_length, dtypes_of(self.config)["dtype"] if dtype is None else dtype)
        if self.positions is not None and max_length > self.positions.num_embeddings:
            raise ValueError(
                f"max_length={max_length} was asked for, and there are only "
                f"{self.positions.num_embeddings} learned positions"
            )
        return TransformerState(
            layers=tuple(block.mixer.init_state(batch, max_length, dtype) for block in self.blocks),
            length=jnp.zeros((batch,), jnp.int32),
        )

    @mesh_axes.on_mesh_of_input
    def extend(
        self, tokens: jax.Array, state: TransformerState, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, TransformerState]:
        """Returns the logits for T >= 1 new tokens that follow the tokens in `state`.

        Args:
          tokens: `(B, T)` int, as in `__call__`.
          state: decode state, from `init_state` or an earlier call.
          lengths: `(B,)` int, valid tokens among the T of each right-padded row; default T.

        Returns:
          `(logits (B, T, V), state)`.
        """
        features, state = self._extend(tokens, state, lengths)
        return self._logits(features), state

    def step(
        self, tokens: jax.Array, state: TransformerState
    ) -> tuple[jax.Array, TransformerState]:
        """Calls `extend` with one token per row, `(B, 1)`."""
        tokens = token_ids(tokens)
        if tokens.shape[1] != 1:
            raise ValueError(f"step takes one token a row, (B, 1), got shape {tokens.shape}")
        return self.extend(tokens, state)

    def _logits(self, x):
        dtype = _logits_dtype(self.config)
        if self.head is not None:
            return self.head(x).astype(dtype)
        embedding = self.embed.embedding[...].astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, embedding, preferred_element_type=dtype)


def _extend_block(block, x, state, lengths, *context):
    return block.extend(x, state, *context, lengths=lengths)


def _rows(table: nnx.Embed, indices: jax.Array) -> jax.Array:
    """Rows `(B, T, D)` of the table, sharded like the indices `(B, T)` on explicit mesh axes."""
    indices = jnp.asarray(indices)
    place = PartitionSpec(*mesh_axes.spec(indices), None) if mesh_axes.explicit(indices) else None
    return table(indices, out_sharding=place)


def _build_mixer(config: TransformerConfig, layer: int, **common: Any) -> Any:
    groups = config.layer_mixer(layer)
    positions: dict[str, Any] = {}
    kind = config.position_kind()
    if kind == "rotary":
        positions["rotary"] = RotaryEmbedding(config.rotary_theta, config.rotary_scaling)
    elif kind == "alibi":
        for group in groups:
            if "score_mod" not in registry.get(group["name"]).capabilities:
                raise ValueError(
                    "positions='alibi' needs the capability 'score_mod', which "
                    f"{group['name']!r} lacks; mechanisms that have it: "
                    f"{', '.join(registry.names('score_mod'))}"
                )
        positions["score_mod"] = Alibi(config.num_heads)
    given = {
        **common,
        "is_causal": config.is_causal,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "max_length": config.max_length,
        **positions,
    }
    if len(groups) > 1 or "num_heads" in groups[0]:
        return HybridHeads(config.features, config.num_heads, groups, **given)
    (group,) = groups
    options = {name: option for name, option in group.items() if name != "name"}
    mechanism = registry.get(group["name"])
    given = mechanism.options_of_model(given)
    return mechanism.build(config.features, config.num_heads, **{**given, **options})


def dtypes_of(config: TransformerConfig) -> dict[str, Any]:
    """Computation dtype and parameter dtype, as keyword arguments of modules."""
    param_dtype = jnp.dtype(config.param_dtype)
    return {
        "dtype": param_dtype if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": param_dtype,
    }


def _logits_dtype(config: TransformerConfig) -> Any:
    return dtypes.wide(dtypes_of(config)["dtype"])


def _check_documents(positions: jax.Array, learned: int) -> None:
    """Raises `ValueError` for concrete positions beyond the learned positions."""
    if is_concrete(positions):
        longest = int(np.max(np.asarray(positions), initial=0)) + 1
        if longest > learned:
            raise ValueError(
                f"segment_ids have a document of {longest} tokens, and there are only {learned} "
                "learned positions (max_length)"
            )


def _fold_in(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)
