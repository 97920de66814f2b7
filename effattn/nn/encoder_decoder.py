"""Encoder-decoder Transformer with any token mixers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.decode.rewind import (
    RewindableState,
    extend_rewindable,
    refuse_with_rewind,
    rewind,
    rewindable,
)
from effattn.decode.state import check_state, narrow, row_lengths
from effattn.nn import initializers
from effattn.nn.block import Layer, Routing, Streams, Sublayer
from effattn.nn.build import Mechanism, named
from effattn.nn.configuration import TransformerConfig, dtypes_of, norm_of
from effattn.nn.cross_attention import CrossAttention
from effattn.nn.dropout import dropout_key
from effattn.nn.equality import same_fields
from effattn.nn.language_model import TransformerLM
from effattn.nn.module import Module
from effattn.nn.reversible import Part
from effattn.nn.tokens import one_token, token_ids, tokens_of
from effattn.nn.transformer import Transformer, TransformerState


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """Static configuration of an `EncoderDecoder`.

    Attributes:
      encoder: configuration of the encoder, with `is_causal=False` and bidirectional mixers.
      decoder: configuration of the decoder, with causal mixers; its sizes may differ from those of
        the encoder.
      cross_attention: mechanism from the decoder to the encoder's output: a registered name, an
        attention function, or a mapping of one of those as `"name"` and options. The mechanism
        needs the capability "cross", and "offset" or "state", so that the output of a query does
        not depend on the other queries.
    """

    encoder: TransformerConfig
    decoder: TransformerConfig
    # Mappings are not hashable, so the hash leaves this field out.
    cross_attention: Mechanism = dataclasses.field(default="softmax", hash=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncoderDecoderConfig) and same_fields(self, other)

    def __post_init__(self):
        for name in ("encoder", "decoder"):
            side = getattr(self, name)
            if not isinstance(side, TransformerConfig):
                raise ValueError(f"{name} must be a TransformerConfig, got {side!r}")
        if self.encoder.is_causal or not self.decoder.is_causal:
            raise ValueError(
                "encoder must have is_causal=False and decoder must have is_causal=True, got "
                f"{self.encoder.is_causal} and {self.decoder.is_causal}"
            )
        if self.decoder.keys_from is not None:
            raise ValueError(
                "decoder must have keys_from=None: layers with cross-attention share no keys, got "
                f"{self.decoder.keys_from}"
            )
        named("cross_attention", self.cross_attention, mixers=False)


class Context(NamedTuple):
    """Projected encoder output for the cross-attention of one decoder layer.

    Attributes:
      key: `(B, S, K, H)`.
      value: `(B, S, K, Hv)`.
      lengths: `(B,)` int, valid source tokens of each row; None if all are valid.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EncoderDecoderState:
    """Decode state of an `EncoderDecoder`.

    Attributes:
      contexts: projected encoder output for each decoder layer; constant during decoding.
      decoder: decode state of the decoder's mixers.
    """

    contexts: tuple[Context, ...]
    decoder: TransformerState

    @property
    def length(self) -> jax.Array:
        """Number of tokens read by the decoder, `(B,)` int32."""
        return self.decoder.length

    @property
    def parts(self) -> tuple[TransformerState]:
        """The states of the parts, which `forget` changes."""
        return (self.decoder,)

    def forget(self, n: jax.Array, most: int) -> "EncoderDecoderState":
        """The state without the last n tokens of each row, at most `most`."""
        return dataclasses.replace(self, decoder=self.decoder.forget(n, most))


def _cross_module(attention: Any) -> Callable[..., CrossAttention]:
    """The cross-attention module of a mechanism, or of a function of query, key and value."""
    builder = registry.get(attention).cross_builder if isinstance(attention, str) else None
    if builder is None:
        return functools.partial(CrossAttention, attention=attention)
    return registry.load(builder)


# A mechanism with one of these capabilities computes each query independently of the others.
_ALONE = frozenset({"offset", "state"})


class DecoderBlock(Layer):
    """Decoder layer: mixer, cross-attention and feed-forward layer, with norms and residuals."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        cross_attention: Mechanism,
        context_features: int,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, layer, rngs=rngs)
        attention, options = named("cross_attention", cross_attention, mixers=False)
        dtypes = dtypes_of(config)
        self.cross = _cross_module(attention)(
            config.features,
            config.num_heads,
            **{
                "context_features": context_features,
                "num_kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "qk_norm": config.qk_norm,
                "use_bias": config.use_bias,
                "out_kernel_init": initializers.residual_init(config.num_layers),
                **dtypes,
                **options,
            },
            rngs=rngs,
        )
        if not any(map(self.cross.binding.has, _ALONE)):
            able = [n for n in registry.names("cross") if _ALONE & registry.get(n).capabilities]
            raise ValueError(
                f"cross_attention {self.cross.binding.name!r} cannot decode token by token, as it "
                "lacks 'offset' and 'state'; registered mechanisms that have one of both: "
                f"{', '.join(able)}"
            )
        self.cross_norm = None if config.parallel else norm_of(config, rngs)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: Streams,
        context: Context,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> Streams:
        """Maps x `(B, T, D)` to `(B, T, D)`; `rngs` is a dropout key, or None for no dropout."""
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self.with_routing(x, context, **marks, rngs=rngs)[0]

    @mesh_axes.on_mesh_of_input
    def with_routing(
        self,
        x: Streams,
        context: Context,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[Streams, Routing]:
        """Returns the output of a call, and the statistics of its experts, if it has experts."""
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self.with_shared(x, None, context, **marks, rngs=rngs)[:2]

    @mesh_axes.on_mesh_of_input
    def with_shared(
        self,
        x: Streams,
        shared: jax.Array | None,
        context: Context,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[Streams, Routing, jax.Array | None]:
        """Returns also the values of the first layer, as `Block.with_shared` does."""
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        x, to_share, routing = self._sublayers(x, *self._of_call(shared, context, marks, rngs))
        return x, routing, to_share

    def parts(
        self,
        context: Context,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> list[Part]:
        """The sublayers of a reversible layer, as `Block.parts` returns them."""
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self._parts(*self._of_call(None, context, marks, rngs))

    def _of_call(self, shared, context, marks, rngs):
        mixer_key, keys = self._keys(rngs, 3)

        def mix(h):
            return self._mix(h, shared, mixer_key, **marks)

        cross_key, keys = (None, None) if keys is None else (keys[0], keys[1:])
        cross = self._cross(context, marks["lengths"], rngs=cross_key)
        return mix, (cross, self._after_mixer(**marks)), keys

    @mesh_axes.on_mesh_of_input
    def extend(
        self,
        x: Streams,
        state: Any,
        context: Context,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[Streams, Any]:
        """Applies the layer to T new tokens; `state` is that of `init_state`."""
        given = {"lengths": lengths, "global_mask": global_mask}
        return self.extend_with_shared(x, state, None, context, **given)[:2]

    @mesh_axes.on_mesh_of_input
    def extend_with_shared(
        self,
        x: Streams,
        state: Any,
        shared: jax.Array | None,
        context: Context,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[Streams, Any, jax.Array | None]:
        """Returns also the values of the first layer, as `Block.extend_with_shared` does."""
        cross = self._cross(context, lengths, query_offset=state.length)
        return self._extended(x, state, shared, lengths, cross, global_mask=global_mask)

    def _cross(self, context, lengths, **given) -> Sublayer:
        given = {"lengths": lengths, "context_lengths": context.lengths, **given}
        given = {name: array for name, array in given.items() if array is not None}

        def attend(h):
            return self.cross.attend(h, context.key, context.value, **given), None

        return self.cross_norm, attend


class _Decoder(TransformerLM):
    """Decoder stack: a `TransformerLM` whose blocks take a `Context` each."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.sides = config
        super().__init__(config.decoder, rngs=rngs)

    def _make_block(self, config: TransformerConfig, layer: int, rngs: nnx.Rngs) -> DecoderBlock:
        options, context_features = self.sides.cross_attention, self.sides.encoder.out_features
        return DecoderBlock(config, layer, options, context_features, rngs=rngs)


class EncoderDecoder(Module):
    """Encoder-decoder model (Vaswani et al. 2017, "Attention Is All You Need").

        encoded = encoder(source),   logits = decoder(target, encoded)

    The encoder is a `Transformer` with bidirectional mixers. Each decoder layer has a causal mixer,
    cross-attention to the encoder's output, and a feed-forward layer, each after a norm.

    For training (teacher forcing), `model(source, target)` returns the next-token logits at every
    target position. For generation, encode the source with `given` and call `effattn.nn.generate`:

        generate(model.given(source), start, max_new_tokens=n, temperature=0.0, eos_id=end)

    Dropout is as in `Transformer`; decoding has no dropout.

    Args:
      config: model configuration.
      rngs: random streams for parameter initialisation.
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        if not isinstance(config, EncoderDecoderConfig):
            raise ValueError(f"config must be an EncoderDecoderConfig, got {config!r}")
        self.config = config
        self.encoder = Transformer(config.encoder, rngs=rngs)
        self.decoder = _Decoder(config, rngs=rngs)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_lengths: jax.Array | None = None,
        target_lengths: jax.Array | None = None,
        source_global_mask: jax.Array | None = None,
        target_global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns the next-token logits at every target position, given the source.

        Args:
          source: `(B, S)` int, tokens as in `Transformer.__call__`.
          target: `(B, T)` int; the first token is a start token.
          source_lengths: `(B,)` int, valid source tokens of each right-padded row.
          target_lengths: `(B,)` int, valid target tokens of each right-padded row.
          source_global_mask: bool `(B, S)`, as `global_mask` of a `Transformer`.
          target_global_mask: bool `(B, T)`, likewise.
          rngs: `nnx.Rngs` or a key for dropout; None disables dropout.

        Returns:
          `(B, T, V)`, at least float32.
        """
        return self.with_routing(
            source,
            target,
            source_lengths=source_lengths,
            target_lengths=target_lengths,
            source_global_mask=source_global_mask,
            target_global_mask=target_global_mask,
            rngs=rngs,
        )[0]

    @mesh_axes.on_mesh_of_input
    def with_routing(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_lengths: jax.Array | None = None,
        target_lengths: jax.Array | None = None,
        source_global_mask: jax.Array | None = None,
        target_global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Returns the logits of a call, and the `RoutingStats` of each layer that has experts.

        The layers of the encoder come first. See `Transformer.with_routing`.
        """
        key = dropout_key(rngs)
        keys = (None, None) if key is None else jax.random.split(key)
        of_source = {"lengths": source_lengths, "global_mask": source_global_mask}
        of_target = {"lengths": target_lengths, "global_mask": target_global_mask}
        encoded, of_encoder = self.encoder._features(source, of_source, keys[0], name="source")
        contexts = self._contexts(encoded, source_lengths)
        features, of_decoder = self.decoder._features(
            target, of_target, keys[1], contexts, name="target"
        )
        return self.decoder._logits(features), (*of_encoder, *of_decoder)

    @mesh_axes.on_mesh_of_input
    def encode(
        self,
        source: jax.Array,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Encoder output `(B, S, out_features)` for source tokens `(B, S)`."""
        marks = {"lengths": lengths, "global_mask": global_mask}
        return self.encoder._features(source, marks, rngs, name="source")[0]

    @mesh_axes.on_mesh_of_input
    def given(
        self,
        source: jax.Array,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> "Given":
        """Encodes the source; returns a model of the target for `effattn.nn.generate`."""
        encoded = self.encode(source, lengths=lengths, global_mask=global_mask)
        return Given(self, encoded, lengths)

    def init_state(
        self,
        encoded: jax.Array,
        max_length: int,
        dtype: Any = None,
        *,
        lengths: jax.Array | None = None,
        max_rewind: int = 0,
    ) -> Any:
        """Returns the decode state before the first target token.

        The state holds the projected keys and values of the source, so that decoding steps do not
        project the source again.

        Args:
          encoded: the output of `encode`.
          max_length: maximum number of target tokens per row.
          dtype: dtype of the decoder's caches; default the decoder's dtype.
          lengths: `(B,)` int, valid source tokens; default S.
          max_rewind: most target tokens that `rewind` can forget; default 0, none.
        """
        encoded = tokens_of("encoded", encoded, self.config.encoder.out_features)
        batch = encoded.shape[0]
        state = EncoderDecoderState(
            contexts=self._contexts(encoded, lengths),
            decoder=self.decoder.init_state(batch, max_length, dtype),
        )
        return rewindable(state, max_rewind, jax.ShapeDtypeStruct((batch, 1), np.int32))

    @mesh_axes.on_mesh_of_input
    def extend(
        self,
        tokens: jax.Array,
        state: Any,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the logits for T >= 1 new target tokens, and the state: see `TransformerLM`."""
        tokens = token_ids(tokens)

        def extend(tokens, state, lengths):
            check_state(state, EncoderDecoderState, tokens.shape[0])
            given = state.decoder, lengths, global_mask, state.contexts
            features, decoder = self.decoder._extend(tokens, *given)
            return self.decoder._logits(features), dataclasses.replace(state, decoder=decoder)

        if isinstance(state, RewindableState):
            refuse_with_rewind("global_mask", global_mask)
            return extend_rewindable(extend, narrow(tokens), state, lengths)
        return extend(tokens, state, lengths)

    def rewind(self, state: Any, n: int | jax.Array) -> Any:
        """Forgets the last n target tokens of each row: see `effattn.decode.rewind`."""
        return rewind(state, n)

    def step(self, tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Calls `extend` with one token per row, `(B, 1)`."""
        return self.extend(one_token(tokens), state)

    def _contexts(self, encoded, lengths) -> tuple[Context, ...]:
        if lengths is not None:
            lengths = checks.as_array("lengths", row_lengths(lengths, *encoded.shape[:2]))
        return tuple(
            Context(key, value, lengths)
            for block in self.decoder.blocks
            for key, value in [block.cross.project_context(encoded, lengths=lengths)]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """An `EncoderDecoder` with an encoded source; decodes like a language model.

    Attributes:
      model: the encoder-decoder model.
      encoded: the encoder's output, as `EncoderDecoder.encode` returns it.
      lengths: `(B,)` int, valid source tokens of each row; None if all are valid.
    """

    model: EncoderDecoder
    encoded: jax.Array
    lengths: jax.Array | None

    def init_state(
        self, batch: int, max_length: int, dtype: Any = None, *, max_rewind: int = 0
    ) -> Any:
        """Returns the decode state before the first target token; one row per source."""
        if batch != self.encoded.shape[0]:
            raise ValueError(
                f"batch must be {self.encoded.shape[0]}, the number of encoded sources, got "
                f"{batch}; give a source for each row"
            )
        return self.model.init_state(
            self.encoded, max_length, dtype, lengths=self.lengths, max_rewind=max_rewind
        )

    def extend(
        self,
        tokens: jax.Array,
        state: Any,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Calls `EncoderDecoder.extend`."""
        return self.model.extend(tokens, state, lengths=lengths, global_mask=global_mask)

    def rewind(self, state: Any, n: int | jax.Array) -> Any:
        """Calls `EncoderDecoder.rewind`."""
        return self.model.rewind(state, n)
