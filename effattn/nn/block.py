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
from effattn.nn.feed_forward import FeedForward
from effattn.nn.hybrid import HybridHeads
from effattn.nn.module import Module
from effattn.nn.shared_keys import Keys, SharedKeysAttention
from effattn.parallel.mixers import divided

# The statistics of each mixture of experts, from the first layer to the last.
Routing = tuple[RoutingStats, ...]

# (norm, layer). A sublayer whose norm is None reads the mixer's normalised input.
Sublayer = tuple[
    Callable[[jax.Array], jax.Array] | None,
    Callable[[jax.Array], tuple[jax.Array, RoutingStats | None]],
]


# Mechanisms whose mixers have `with_values` and `extend_with_values`.
_WITH_VALUES = ("rwkv7",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """Decode state of a layer whose feed-forward layer also has a decode state.

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
        self.post_norm, self.value_residual = config.post_norm, config.value_residual
        self.dropout_rate = config.dropout_rate

    def mixer_input(self, x: jax.Array) -> jax.Array:
        """The input of the mixer, from the input x `(B, T, D)` of the layer."""
        return x if self.post_norm else self.mixer_norm(x)

    def _after_mixer(self, **padding: Any) -> Sublayer:
        """The sublayer of the feed-forward layer for whole sequences."""

        def feed_forward(h):
            if isinstance(self.feed_forward, MixtureOfExperts):
                return self.feed_forward.with_routing(h, **padding)
            if isinstance(self.feed_forward, ChannelMixing):
                return divided(self.feed_forward, h)(h, **padding), None
            return self.feed_forward(h), None

        return self.feed_forward_norm, feed_forward

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> Any:
        """Returns the empty decode state; arguments as in `SelfAttention.init_state`."""
        state = self.mixer.init_state(batch, max_length, dtype)
        if not isinstance(self.feed_forward, ChannelMixing):
            return state
        return LayerState(state, self.feed_forward.init_state(batch, dtype))

    def _extended(
        self,
        x: jax.Array,
        state: Any,
        lengths: jax.Array | None,
        *between: Sublayer,
        keys: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Applies the layer to new tokens, with the sublayers `between` the others.

        In a model with value residual, the state is a pair of a state and the first values.
        """
        values = None
        if self.value_residual:
            state, values = state
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
            return self.feed_forward(h), None

        shared: Any = {}
        if keys is not None:
            shared = {"keys": keys.mixer if isinstance(keys, LayerState) else keys}

        def mix(h):
            nonlocal values
            if not self.value_residual:
                return self.mixer.extend(h, of_mixer, lengths=lengths, **shared)
            y, after, values = self.mixer.extend_with_values(h, of_mixer, values, lengths=lengths)
            return y, after

        others = (*between, (self.feed_forward_norm, feed_forward))
        x, after, _ = self._sublayers(x, mix, others, None)
        after = LayerState(after, last) if has_state else after
        return x, (after, values) if self.value_residual else after

    def _keys(self, rngs: jax.Array | None, others: int = 1) -> tuple[Any, Any]:
        """Random key of the mixer, and dropout keys of the mixer output and `others` sublayers."""
        if rngs is None:
            return None, None
        mixer_key, *keys = jax.random.split(rngs, 2 + others)
        return mixer_key, keys

    def _sublayers(self, x, mix, others, keys):
        """Adds the outputs of the mixer and of `others` to x.

        Returns:
          `(x, state, routing)`, with the mixer's state and the statistics of experts.
        """
        keys = iter((None,) * (1 + len(others)) if keys is None else keys)
        read = self.mixer_input(x)
        mixed, state = mix(read)
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
        return after(x) if self.post_norm else x, state, routing


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
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Maps x `(B, T, D)` to `(B, T, D)`; `rngs` is a dropout key, or None for no dropout."""
        return self.with_routing(x, lengths=lengths, segment_ids=segment_ids, rngs=rngs)[0]

    @mesh_axes.on_mesh_of_input
    def with_routing(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Returns the output of a call, and the statistics of its experts, if it has experts."""
        return self.with_values(x, None, lengths=lengths, segment_ids=segment_ids, rngs=rngs)[:2]

    @mesh_axes.on_mesh_of_input
    def with_values(
        self,
        x: jax.Array,
        values: jax.Array | None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing, jax.Array | None]:
        """The results of `with_routing`, and the values of the first layer.

        `values` are those of the first layer, for later layers; None in the first layer.
        """
        mixer_key, keys = self._keys(rngs)
        padding = {"lengths": lengths, "segment_ids": segment_ids}

        def mix(h):
            if self.value_residual:
                return self.mixer.with_values(h, values, **padding)
            if mixer_key is not None:  # dropout is not divided
                return self.mixer(h, **padding, rngs=mixer_key), None
            return divided(self.mixer, h)(h, **padding), None

        x, values, routing = self._sublayers(x, mix, (self._after_mixer(**padding),), keys)
        return x, routing, values

    @mesh_axes.on_mesh_of_input
    def with_keys(
        self,
        x: jax.Array,
        keys: Keys | None = None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing, Keys]:
        """The results of `with_routing`, and the keys and values of a layer that shares them.

        `keys` are those of an earlier layer, for a layer without keys.
        """
        mixer_key, dropout_keys = self._keys(rngs)
        padding = {"lengths": lengths, "segment_ids": segment_ids}

        def mix(h):
            return self.mixer.with_keys(h, **padding, rngs=mixer_key, keys=keys)

        x, shared, routing = self._sublayers(x, mix, (self._after_mixer(**padding),), dropout_keys)
        return x, routing, shared

    def extend(
        self, x: jax.Array, state: Any, keys: Any = None, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Applies the layer to T new tokens; `state` is that of `init_state`.

        `keys` is the state of an earlier layer after these tokens, for a layer without keys.
        """
        return self._extended(x, state, lengths, keys=keys)


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
