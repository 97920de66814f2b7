"""Layer of a Transformer: a mixer and a feed-forward layer with residual connections."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from effattn import registry
from effattn.arrays import mesh_axes
from effattn.cores.experts import RoutingStats
from effattn.nn import initializers
from effattn.nn.alibi import Alibi
from effattn.nn.build import mechanism
from effattn.nn.channel_mixing import ChannelMixing
from effattn.nn.configuration import (
    CHANNEL_MIXINGS,
    FEED_FORWARDS,
    TransformerConfig,
    dtypes_of,
    norm_of,
)
from effattn.nn.dropout import dropout
from effattn.nn.experts import MixtureOfExperts
from effattn.nn.feed_forward import FeedForward, in_chunks
from effattn.nn.hybrid import HybridHeads
from effattn.nn.module import Module
from effattn.nn.reversible import Part
from effattn.nn.shared_keys import SharedKeysAttention
from effattn.nn.tokens import with_global_mask
from effattn.parallel.mixers import divided

# The statistics of each mixture of experts, from the first layer to the last.
Routing = tuple[RoutingStats, ...]

# The input of a layer, `(B, T, D)`, or the two streams `(x1, x2)` of a reversible layer.
Streams = jax.Array | tuple[jax.Array, jax.Array]

# (norm, layer). A sublayer whose norm is None reads the mixer's normalised input.
Sublayer = tuple[
    Callable[[jax.Array], jax.Array] | None,
    Callable[[jax.Array], tuple[jax.Array, RoutingStats | None]],
]


# Mechanisms whose mixers take the values of the first layer, in `with_shared`.
_WITH_VALUES = ("rwkv7",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """Decode state of a layer whose feed-forward layer has one, too.

    Attributes:
      mixer: the state of the mixer.
      feed_forward: the state of the feed-forward layer.
    """

    mixer: Any
    feed_forward: Any

    @property
    def length(self) -> jax.Array:
        """Number of tokens read, `(B,)` int32."""
        return self.mixer.length


class Layer(Module):
    """Base of `Block` and `DecoderBlock`: mixer and feed-forward layer with norms and residuals."""

    def __init__(self, config: TransformerConfig, layer: int, *, rngs: nnx.Rngs):
        dtypes = dtypes_of(config)
        residual_init = initializers.residual_init(config.num_layers)
        self.mixer = build_mixer(config, layer, out_kernel_init=residual_init, rngs=rngs, **dtypes)
        self.feed_forward = build_feed_forward(
            config, layer, out_kernel_init=residual_init, rngs=rngs, **dtypes
        )
        self.mixer_norm = norm_of(config, rngs)
        self.feed_forward_norm = None if config.parallel else norm_of(config, rngs)
        self.post_norm = config.post_norm
        self.reversible = config.reversible
        self.chunk_size = config.feed_forward_chunk_size
        self.shares = config.shared_source(layer) is not None
        self.dropout_rate = config.dropout_rate

    def mixer_input(self, x: jax.Array) -> jax.Array:
        """The input of the mixer, from the input x of the layer: `(B, T, D)`, or two streams."""
        if self.reversible:
            _, x = x
        return x if self.post_norm else self.mixer_norm(x)

    def _mix(
        self,
        h: jax.Array,
        shared: Any,
        rngs: jax.Array | None,
        *,
        global_mask: jax.Array | None = None,
        **padding: Any,
    ) -> Any:
        """The output of the mixer, and what it shares with later layers, or None."""
        padding |= with_global_mask(self.mixer, global_mask)
        if self.shares:
            return self.mixer.with_shared(h, shared, **padding, rngs=rngs)
        if rngs is not None:  # dropout is not divided
            return self.mixer(h, **padding, rngs=rngs), None
        return divided(self.mixer, h)(h, **padding), None

    def _after_mixer(self, *, global_mask: jax.Array | None = None, **padding: Any) -> Sublayer:
        """The feed-forward sublayer for whole sequences; `global_mask` is for the mixer alone."""

        def feed_forward(h):
            if isinstance(self.feed_forward, MixtureOfExperts):
                return self.feed_forward.with_routing(h, **padding)
            if isinstance(self.feed_forward, ChannelMixing):
                return divided(self.feed_forward, h)(h, **padding), None
            return self._feed_forward(h), None

        return self.feed_forward_norm, feed_forward

    def _feed_forward(self, h: jax.Array) -> jax.Array:
        return in_chunks(self.feed_forward, h, self.chunk_size)

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> Any:
        """The empty decode state; batch, max_length and dtype as in `SelfAttention.init_state`."""
        state = self.mixer.init_state(batch, max_length, dtype)
        if not isinstance(self.feed_forward, ChannelMixing):
            return state
        return LayerState(state, self.feed_forward.init_state(batch, dtype))

    def _extended(
        self,
        x: Streams,
        state: Any,
        shared: Any,
        lengths: jax.Array | None,
        *between: Sublayer,
        global_mask: jax.Array | None = None,
    ) -> tuple[Streams, Any, Any]:
        """Applies the layer to new tokens, with the sublayers `between` the others."""
        has_state = isinstance(self.feed_forward, ChannelMixing)
        if has_state != isinstance(state, LayerState):
            raise ValueError(
                f"state of a layer must be {'a LayerState' if has_state else 'that of its mixer'}, "
                f"got {type(state).__name__}; it is the state of another model"
            )
        of_mixer: Any = state.mixer if has_state else state
        last: Any = state.feed_forward if has_state else None

        def feed_forward(h):
            nonlocal last
            if isinstance(self.feed_forward, ChannelMixing):
                y, last = self.feed_forward.extend(h, last, lengths=lengths)
                return y, None
            if isinstance(self.feed_forward, MixtureOfExperts):
                return self.feed_forward.extend(h, lengths=lengths), None
            return self._feed_forward(h), None

        def mix(h):
            if not self.shares:
                mask = with_global_mask(self.mixer, global_mask)
                y, after = self.mixer.extend(h, of_mixer, lengths=lengths, **mask)
                return y, (after, None)
            of_source = shared.mixer if isinstance(shared, LayerState) else shared
            y, *after = self.mixer.extend_with_shared(h, of_mixer, of_source, lengths=lengths)
            return y, after

        others = (*between, (self.feed_forward_norm, feed_forward))
        x, (after, to_share), _ = self._sublayers(x, mix, others, None)
        return x, LayerState(after, last) if has_state else after, to_share

    def _keys(self, rngs: jax.Array | None, others: int = 1) -> tuple[Any, Any]:
        """Random key of the mixer, and dropout keys of the mixer output and `others` sublayers."""
        if rngs is None:
            return None, None
        mixer_key, *keys = jax.random.split(rngs, 2 + others)
        return mixer_key, keys

    def _sublayers(self, x, mix, others, keys):
        """Adds the outputs of the mixer and of `others` to x.

        Returns:
          `(x, further, routing)`, with what `mix` returns after its output, and the statistics of
          experts.
        """
        if self.reversible:
            return self._run_two_streams(x, mix, others, keys)
        keys = iter((None,) * (1 + len(others)) if keys is None else keys)
        read = self.mixer_input(x)
        mixed, further = mix(read)
        x = x + dropout(mixed, self.dropout_rate, next(keys))
        # The norm of the residual sum that has not been normalised yet, if the layer is post-norm.
        after = self.mixer_norm
        routing: Routing = ()
        for norm, layer in others:
            if norm is None:
                h, stats = layer(read)
            elif self.post_norm:
                x, after = after(x), norm
                h, stats = layer(x)
            else:
                h, stats = layer(norm(x))
            x = x + dropout(h, self.dropout_rate, next(keys))
            if stats is not None:
                routing += (stats,)
        return after(x) if self.post_norm else x, further, routing

    def _run_two_streams(self, streams, mix, others, keys):
        """The results of `_sublayers` for the two streams of a reversible layer."""
        if not isinstance(streams, tuple):
            raise ValueError(
                "x must be two streams (x1, x2) for a reversible layer, got "
                f"{type(streams).__name__}"
            )
        kept, read = streams
        each = []
        for part in self._parts(mix, others, keys):
            added, more = part(read)
            kept, read = read, kept + added
            each.append(more)
        further, *routing = each
        return (kept, read), further, tuple(stats for stats in routing if stats is not None)

    def _parts(self, mix, others, keys) -> list[Part]:
        """The sublayers as functions of what they read, with their norms and dropout."""

        def part(norm, layer, key):
            def run(x):
                y, further = layer(norm(x))
                return dropout(y, self.dropout_rate, key), further

            return run

        several = (self.mixer_norm, mix), *others
        keys = (None,) * len(several) if keys is None else keys
        each = zip(several, keys, strict=True)
        return [part(norm, layer, key) for (norm, layer), key in each]


class Block(Layer):
    """Transformer layer: mixer and feed-forward layer, each after a norm, with residuals.

    Args:
      config: configuration of the model.
      layer: index of the layer, from 0.
      rngs: random streams for parameter initialisation.
    """

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: Streams,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> Streams:
        """Maps x `(B, T, D)` to `(B, T, D)`; `rngs` is a dropout key, or None for no dropout.

        `global_mask` is for a mixer that takes it, see `LongformerSelfAttention`.
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self.with_routing(x, **marks, rngs=rngs)[0]

    @mesh_axes.on_mesh_of_input
    def with_routing(
        self,
        x: Streams,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[Streams, Routing]:
        """Returns the output of a call, and the statistics of its experts, if it has experts."""
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self.with_shared(x, **marks, rngs=rngs)[:2]

    @mesh_axes.on_mesh_of_input
    def with_shared(
        self,
        x: Streams,
        shared: Any = None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[Streams, Routing, Any]:
        """The results of `with_routing`, and what the layer shares with later layers, or None.

        `shared` is what an earlier layer shares: keys and values, or values alone.
        """
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        x, to_share, routing = self._sublayers(x, *self._of_call(shared, marks, rngs))
        return x, routing, to_share

    def parts(
        self,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> list[Part]:
        """The sublayers of a reversible layer, for `reversible.run`; arguments as in a call."""
        marks = {"lengths": lengths, "segment_ids": segment_ids, "global_mask": global_mask}
        return self._parts(*self._of_call(None, marks, rngs))

    def _of_call(self, shared, marks, rngs):
        """The mixer, the other sublayers and the dropout keys, as arguments of `_sublayers`."""
        mixer_key, keys = self._keys(rngs)

        def mix(h):
            return self._mix(h, shared, mixer_key, **marks)

        return mix, (self._after_mixer(**marks),), keys

    @mesh_axes.on_mesh_of_input
    def extend(
        self,
        x: Streams,
        state: Any,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[Streams, Any]:
        """Applies the layer to T new tokens; `state` is that of `init_state`."""
        return self.extend_with_shared(x, state, lengths=lengths, global_mask=global_mask)[:2]

    @mesh_axes.on_mesh_of_input
    def extend_with_shared(
        self,
        x: Streams,
        state: Any,
        shared: Any = None,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[Streams, Any, Any]:
        """The results of `extend`, and what the layer shares with later layers, or None.

        `shared` is what an earlier layer shares: its state after these tokens, or its values.
        """
        return self._extended(x, state, shared, lengths, global_mask=global_mask)


def build_feed_forward(config: TransformerConfig, layer: int, **common: Any) -> Any:
    """The feed-forward layer; `common` are the random streams, dtypes and initializers."""
    features, hidden = config.features, config.hidden_features
    if config.feed_forward in CHANNEL_MIXINGS:
        depth = layer / max(config.num_layers - 1, 1)
        return CHANNEL_MIXINGS[config.feed_forward](features, hidden, depth=depth, **common)
    kind, experts = FEED_FORWARDS[config.feed_forward], config.layer_experts(layer)
    if hidden is None:
        hidden = -(-features * 8 // 3 // 8) * 8 if kind["gated"] else 4 * features
    if experts is not None:
        sizes = dataclasses.asdict(experts)
        return MixtureOfExperts(features, hidden, **sizes, **kind, **common)
    return FeedForward(features, hidden, use_bias=config.use_bias, **kind, **common)


def build_mixer(config: TransformerConfig, layer: int, **common: Any) -> Any:
    """The mixer of a layer; `common` are the random streams, dtypes and initializers."""
    groups = config.layer_mixer(layer)
    if config.value_residual:
        _check_values(groups)
        common["value_residual"] = layer > 0
    positions: dict[str, Any] = {}
    kind = config.position_kind()
    if kind == "rotary":
        positions["rotary"] = config.rotary()
    elif kind == "alibi":
        for group in groups:
            entry = mechanism(group["name"])
            if "score_mod" not in entry.capabilities:
                raise ValueError(
                    "positions='alibi' needs the capability 'score_mod', which "
                    f"{entry.name!r} lacks; registered mechanisms that have it: "
                    f"{', '.join(registry.names('score_mod'))}"
                )
        positions["score_mod"] = Alibi(config.num_heads)
    given = {
        **common,
        "is_causal": config.is_causal,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "use_bias": config.use_bias,
        "max_length": config.max_length,
        **positions,
    }
    source = config.key_source(layer)
    if source is not None:
        return _sharing_mixer(config, groups, source == layer, given)
    if len(groups) > 1 or "num_heads" in groups[0]:
        return HybridHeads(config.features, config.num_heads, groups, **given)
    (group,) = groups
    options = {name: option for name, option in group.items() if name != "name"}
    entry = mechanism(group["name"])
    given = entry.options_of_model(given)
    return entry.build(config.features, config.num_heads, **{**given, **options})


def _sharing_mixer(config, groups, has_keys, given):
    """The mixer of a layer that shares keys and values with others."""
    group, *others = groups
    options = {name: option for name, option in group.items() if name != "name"}
    entry = mechanism(group["name"])
    if others or "num_heads" in options or not isinstance(entry, registry.Mechanism):
        raise ValueError(
            "layers that share keys and values (keys_from) must have one registered mechanism, "
            f"such as 'softmax', got {config.mixer!r}"
        )
    options = {**entry.options_of_model(given), **options, "has_keys": has_keys}
    return SharedKeysAttention(config.features, config.num_heads, entry.name, **options)


def _check_values(groups):
    """Raises `ValueError` unless the mixer passes on the values of the first layer."""
    names = [mechanism(group["name"]).name for group in groups]
    # A class as a mixer has its own name.
    if len(names) > 1 or names[0].lower() not in _WITH_VALUES:
        raise ValueError(
            f"value_residual=True needs the mixer {' or '.join(_WITH_VALUES)} in each layer, got "
            f"{', '.join(names)}"
        )
