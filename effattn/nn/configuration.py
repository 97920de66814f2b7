"""Static configuration of Transformers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.nn import build
from effattn.nn.channel_mixing import (
    ChannelMixing,
    RWKV4ChannelMix,
    RWKV6ChannelMix,
    RWKV7ChannelMix,
)
from effattn.nn.dropout import check_dropout_rate
from effattn.nn.equality import same_fields
from effattn.nn.experts import Experts
from effattn.nn.module import check_dtype
from effattn.nn.rotary import RotaryEmbedding

# Options of `FeedForward`, and classes, by the names in the configuration.
FEED_FORWARDS: Mapping[str, dict[str, Any]] = {
    "swiglu": {"activation": "silu", "gated": True},
    "geglu": {"activation": "gelu", "gated": True},
    "gelu": {"activation": "gelu", "gated": False},
    "relu": {"activation": "relu", "gated": False},
}
# Feed-forward layers that read the token before each token, and so have a decode state.
CHANNEL_MIXINGS: Mapping[str, Callable[..., ChannelMixing]] = {
    "rwkv4": RWKV4ChannelMix,
    "rwkv6": RWKV6ChannelMix,
    "rwkv7": RWKV7ChannelMix,
}
NORMS: Mapping[str, Callable[..., nnx.Module]] = {"rms": nnx.RMSNorm, "layer": nnx.LayerNorm}

_POSITIONS = ("rotary", "learned", "sinusoidal", "alibi", "none")

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
      feed_forward: feed-forward layer: "swiglu" or "geglu", which have a gate, or "gelu" or "relu"
        (see `FeedForward`); or a channel mixing, which also reads the token before each token:
        "rwkv4", "rwkv6" or "rwkv7" (see `RWKV4ChannelMix`, `RWKV6ChannelMix`, `RWKV7ChannelMix`).
      hidden_features: hidden size of the feed-forward layer; default 8/3 D, rounded up to a
        multiple of 8, with a gate, for channel mixings the default of their class, and else 4 D.
      experts: `Experts`, for a `MixtureOfExperts` of such feed-forward layers in place of one; a
        sequence of L entries, one for each layer, with None for a single feed-forward layer; or
        None.
      norm: normalisation before each sublayer and at the end, "rms" or "layer", with scale (and
        bias).
      norm_epsilon: epsilon of the norms.
      post_norm: normalise after each residual sum instead, and not at the end, as in the original
        Transformer and BERT.
      use_bias: whether projections of mixers, where they have this option, and of the feed-forward
        layer have biases. Experts and channel mixings have none.
      mixer: a registered name; a mixer class or an attention function (see `effattn.nn.build`); a
        mapping of one of those and options
        (`{"name": "sliding_window", "local_window_size": (63, 0)}`); a mapping of groups of heads
        (`{"heads": [{"name": "softmax", "num_heads": 2}, ...]}`, see `HybridHeads`); or a sequence
        of L such mixers. Options are arguments of the mixer, and override the arguments that the
        model passes to the mixer. Some mechanisms have options that depend on the layer: "dilated"
        uses wider steps in later layers. If an option holds parameters or modules, each layer of
        the model trains a separate copy.
      keys_from: for each of the L layers, the index of the layer whose keys and values it reads:
        its own index, or that of an earlier layer that reads its own. With None, each layer reads
        its own. Cross-layer attention (Brandon et al. 2024, "Reducing Transformer Key-Value Cache
        Size with Cross-Layer Attention") in groups of two is (0, 0, 2, 2, ...). YOCO (Sun et al.
        2024, "You Only Cache Once") is `tuple(min(n, L // 2) for n in range(L))` with an efficient
        mixer in the first half of the layers. Layers that share must have a mechanism that
        `SharedKeysAttention` takes, and the decode state holds shared keys and values once.
      positions: "rotary" (in mixers that take a rotary embedding and do not encode token order
        otherwise), a `RotaryEmbedding` in such mixers, "learned" (one vector per position, added to
        the token embeddings), "sinusoidal" (fixed vectors, added to the embeddings times sqrt(D)),
        "alibi", or "none". Default "rotary"; "learned" if no layer encodes token order or takes a
        rotary embedding.
      rotary_theta: see `RotaryEmbedding`; for positions "rotary".
      rotary_scaling: see `RotaryEmbedding`; for positions "rotary".
      max_length: maximum number of input tokens, for parameters that depend on positions: learned
        positions, which require `max_length`, and mixers such as Linformer.
      tie_embeddings: the logits reuse the token embedding as output projection.
      parallel: mixer and feed-forward layer read the same normalised input, and their outputs are
        summed, as in GPT-J. With False, the feed-forward layer follows the mixer.
      reversible: two streams of D features, as in RevNet and Reformer. A mixer reads the second
        stream and adds to the first one, the feed-forward layer reads the first one and adds to the
        second, and so on (see `ReversibleStack`). Both streams start as the embeddings, and the
        final norm and the output projection read both, 2 D features; so a `TransformerLM` needs
        `tie_embeddings=False`. The backward pass recomputes the activations of one sublayer at a
        time, so their memory does not grow with L. `TransformerLM.with_costs` is the exception: it
        stores them.
      feed_forward_chunk_size: tokens per chunk; feed-forward layers compute one chunk after the
        other, and recompute it in the backward pass, so that hidden features take the memory of one
        chunk (Kitaev et al. 2020, "Reformer"; see `ChunkedFeedForward`). Default all at once.
      dropout_rate: dropout rate of the embeddings and of each sublayer's output.
      dtype: computation dtype, such as "bfloat16"; default `param_dtype`.
      param_dtype: dtype of the parameters, and so of the gradients.
      remat: recompute each layer in the backward pass instead of storing its activations.
      remat_policy: the values that remat stores: a function from `jax.checkpoint_policies`, or the
        name of a policy that takes no arguments.
      qk_norm: RMS-normalise queries and keys in the mixers with an option of that name, as
        `effattn.registry.get(mixer).mixer_takes("qk_norm")` says; other mixers stay as they are.
      value_residual: mix the values of the first layer into those of later layers, as in RWKV-7;
        for mixers "rwkv7". Along a mesh axis that divides the tokens, such mixers gather them.
      is_causal: token t reads tokens 0 to t only, for next-token prediction. With False, each token
        reads all tokens, for masked-token prediction, and the model cannot decode.
    """

    vocab_size: int
    num_layers: int
    features: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    feed_forward: str = "swiglu"
    hidden_features: int | None = None
    experts: Experts | Sequence[Experts | None] | None = None
    norm: str = "rms"
    norm_epsilon: float = 1e-6
    post_norm: bool = False
    use_bias: bool = False
    # Mappings are not hashable, so the hash leaves this field out.
    mixer: build.Mechanism | tuple[build.Mechanism, ...] | list[build.Mechanism] = (
        dataclasses.field(default="softmax", hash=False)
    )
    keys_from: Sequence[int] | None = None
    positions: str | RotaryEmbedding | None = None
    rotary_theta: float = 10000.0
    rotary_scaling: float = 1.0
    max_length: int | None = None
    tie_embeddings: bool = True
    parallel: bool = False
    reversible: bool = False
    feed_forward_chunk_size: int | None = None
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    remat: bool = False
    remat_policy: str | Callable[..., Any] | None = None
    qk_norm: bool = False
    value_residual: bool = False
    is_causal: bool = True

    def __post_init__(self):
        for name in ("keys_from", "experts"):  # tuples are hashable
            if isinstance(given := getattr(self, name), Sequence | np.ndarray):
                object.__setattr__(self, name, tuple(given))
        self._check_numbers_and_flags()
        self._check_choices()
        self._check_layers()
        if self.reversible:
            self._check_reversible()
        for layer in range(self.num_layers):
            for mixer in self.layer_mixer(layer):
                build.mechanism(mixer["name"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformerConfig) and same_fields(self, other)

    def _check_numbers_and_flags(self) -> None:
        for name in ("vocab_size", "num_layers", "features", "num_heads"):
            checks.at_least(name, getattr(self, name), 1)
        sizes = "num_kv_heads", "head_dim", "hidden_features", "max_length"
        for name in (*sizes, "feed_forward_chunk_size"):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), 1, "or None")
        checks.positive("norm_epsilon", self.norm_epsilon)
        check_dropout_rate(self.dropout_rate)
        flags = "tie_embeddings", "parallel", "post_norm", "use_bias", "remat", "qk_norm"
        for name in (*flags, "value_residual", "is_causal", "reversible"):
            checks.flag(name, getattr(self, name))
        check_dtype("dtype", self.dtype)
        checks.dtype("param_dtype", self.param_dtype)

    def _check_choices(self) -> None:
        choices: dict[str, Iterable[str]] = {
            "positions": _POSITIONS,
            "feed_forward": (*FEED_FORWARDS, *CHANNEL_MIXINGS),
            "norm": NORMS,
        }
        if self.positions is None or isinstance(self.positions, RotaryEmbedding):
            del choices["positions"]
        for name, known in choices.items():
            checks.one_of(name, getattr(self, name), known)
        if self.positions == "learned" and self.max_length is None:
            raise ValueError(
                "positions='learned' needs max_length, the number of positions, got None"
            )
        if self.positions == "sinusoidal" and self.features % 2:
            raise ValueError(
                f"positions='sinusoidal' needs an even number of features, got {self.features}"
            )
        if self.remat_policy is not None:
            if not self.remat:
                raise ValueError("remat_policy needs remat=True, got False; leave remat_policy out")
            if isinstance(self.remat_policy, str) and self.remat_policy not in _REMAT_POLICIES:
                raise ValueError(
                    f"remat_policy must be one of {', '.join(_REMAT_POLICIES)} or a function from "
                    f"jax.checkpoint_policies, got {self.remat_policy!r}"
                )

    def _check_layers(self) -> None:
        if isinstance(self.mixer, (tuple, list)) and len(self.mixer) != self.num_layers:
            raise ValueError(
                f"mixer must be one mixer for all layers, or num_layers={self.num_layers} mixers, "
                f"one for each layer, got {len(self.mixer)}"
            )
        if self.keys_from is not None:
            if self.value_residual:
                raise ValueError(
                    "value_residual=True is for layers with values of their own; leave out "
                    f"keys_from, got {self.keys_from}"
                )
            self._check_sources(self.keys_from)
        several = self.experts if isinstance(self.experts, tuple) else (self.experts,)
        if not all(each is None or isinstance(each, Experts) for each in several) or (
            isinstance(self.experts, tuple) and len(several) != self.num_layers
        ):
            raise ValueError(
                "experts must be Experts or None for all layers, or a sequence of "
                f"{self.num_layers}, one for each layer, got {self.experts!r}"
            )
        if self.feed_forward in CHANNEL_MIXINGS and any(several):
            raise ValueError(
                f"experts need feed_forward to be one of {', '.join(FEED_FORWARDS)}, got "
                f"{self.feed_forward!r}, which reads the token before each token"
            )
        if self.feed_forward_chunk_size is not None and (
            self.feed_forward in CHANNEL_MIXINGS or any(several)
        ):
            raise ValueError(
                "feed_forward_chunk_size is for feed-forward layers that map each token alone, "
                f"{', '.join(FEED_FORWARDS)} without experts, got "
                f"{self.feed_forward!r} with experts={self.experts!r}; leave it out"
            )

    def _check_reversible(self) -> None:
        alone = "the backward pass recomputes each layer alone, without what earlier layers share"
        reasons = {
            "parallel": "its sublayers read one stream after the other",
            "post_norm": "a norm of the sum of a stream has no inverse",
            "remat": "it recomputes each layer already",
            "value_residual": alone,
            "keys_from": alone,
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ValueError(
                    f"a model with reversible=True takes no {name}, as {reason}, got "
                    f"{name}={getattr(self, name)}; leave {name} out"
                )

    @property
    def out_features(self) -> int:
        """Number of features per token of a `Transformer`'s output: D, or 2 D if reversible."""
        return (1 + self.reversible) * self.features

    def _check_sources(self, given: Any) -> None:
        is_tuple = isinstance(given, tuple) and len(given) == self.num_layers
        if not is_tuple or not all(
            checks.is_integer(source) and 0 <= source <= layer and given[source] == source
            for layer, source in enumerate(given)
        ):
            raise ValueError(
                f"keys_from must be a sequence of num_layers={self.num_layers} ints, for each "
                "layer its own index or that of an earlier layer with keys and values of its own, "
                "got "
                f"{given!r}"
            )

    def key_source(self, layer: int) -> int | None:
        """The layer whose keys and values this layer reads; None for a layer that shares none."""
        if self.keys_from is None or self.keys_from.count(self.keys_from[layer]) == 1:
            return None
        return self.keys_from[layer]

    def shared_source(self, layer: int) -> int | None:
        """The layer whose keys and values, or values alone, this layer reads, or None."""
        return 0 if self.value_residual else self.key_source(layer)

    def position_kind(self) -> str:
        """Position encoding of the model: `positions`, or the default for its mixers.

        Raises:
          ValueError: rotary positions, if no mixer takes a rotary embedding or encodes token order
            itself; learned positions without `max_length`; or rotary options with another position
            encoding.
        """
        groups = [group for n in range(self.num_layers) for group in self.layer_mixer(n)]
        entries = [build.mechanism(group["name"]) for group in groups]
        able = any(entry.knows_order or entry.takes_rotary() for entry in entries)
        chosen = "rotary" if self._rotary is not None else self.positions
        kind = str(chosen or ("rotary" if able else "learned"))
        if (kind == "rotary" and not able) or (kind == "learned" and self.max_length is None):
            raise ValueError(
                f"mixer={self.mixer!r} takes no rotary positions: give positions='learned' and "
                "max_length, or positions='none'"
            )
        for name in ("rotary_theta", "rotary_scaling"):
            if getattr(self, name) == getattr(TransformerConfig, name):
                continue
            if kind != "rotary" or self._rotary is not None:
                of_model = kind if self._rotary is None else self._rotary
                raise ValueError(
                    f"{name} needs positions='rotary', but the positions of this model are "
                    f"{of_model!r}, got {name}={getattr(self, name)}; leave {name} out"
                )
        return kind

    @property
    def _rotary(self) -> RotaryEmbedding | None:
        return self.positions if isinstance(self.positions, RotaryEmbedding) else None

    def rotary(self) -> RotaryEmbedding:
        """The rotary embedding of mixers, for positions "rotary"."""
        return self._rotary or RotaryEmbedding(self.rotary_theta, self.rotary_scaling)

    def layer_experts(self, layer: int) -> Experts | None:
        """The experts of a layer; None for a single feed-forward layer."""
        if self.experts is None or isinstance(self.experts, Experts):
            return self.experts
        return self.experts[layer]

    def layer_mixer(self, layer: int) -> tuple[dict[str, Any], ...]:
        """Name (or callable) and options of a layer's mixer, one mapping per group of heads."""
        mixer = self.mixer[layer] if isinstance(self.mixer, (tuple, list)) else self.mixer
        groups: Any = (mixer,)
        if isinstance(mixer, Mapping) and mixer.keys() == {"heads"}:
            groups = mixer["heads"]
            if not groups or not isinstance(groups, (tuple, list)):
                raise ValueError(
                    f'mixer must have a list of one or more groups in "heads", got {groups!r}'
                )
        described = [build.named("mixer", group) for group in groups]
        return tuple(
            {
                **build.mechanism(name).options_in_layer(layer, self.num_layers),
                **options,
                "name": name,
            }
            for name, options in described
        )


def dtypes_of(config: TransformerConfig) -> dict[str, Any]:
    """Computation dtype and parameter dtype, as keyword arguments of modules."""
    param_dtype = jnp.dtype(config.param_dtype)
    return {
        "dtype": param_dtype if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": param_dtype,
    }


def norm_of(config: TransformerConfig, rngs: nnx.Rngs, features: int | None = None) -> Any:
    """A normalisation of the model's features, or of another number of features."""
    features = config.features if features is None else features
    return NORMS[config.norm](features, epsilon=config.norm_epsilon, rngs=rngs, **dtypes_of(config))


def final_norm_of(config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    """The normalisation after the last layer; with `post_norm` that layer ends with one."""
    return _unchanged if config.post_norm else norm_of(config, rngs, config.out_features)


def _unchanged(x: jax.Array) -> jax.Array:
    return x
