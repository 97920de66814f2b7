"""Every mechanism by name: what it is, where it was published, what it can do.

An entry is declared beside its mechanism (`effattn/functional/<name>.py`) and collected here.
Nothing in this module imports Flax: `Mechanism.builder` names the module class, imported on use.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "bidirectional": "attends to both sides of a token",
        "causal": "attends to the past and the present only",
        "cross": "query and key sequences may differ in length",
        "grouped": "several query heads may share a key head",
        "offset": "`query_offset` places the queries in the key sequence",
        "lengths": "padding by `query_seq_lengths` and `key_value_seq_lengths`",
        "segments": "packing by `segment_ids`",
        "window": "`local_window_size`",
        "bias": "a dense additive `bias`, with its gradient",
        "mask": "a dense boolean `mask`",
        "score_mod": "`score_mod(logit, b, h, i, j)`",
        "soft_cap": "`logits_soft_cap`",
        "sink": "a learned `sink` logit a head",
        "dropout": "`dropout_rate` and `dropout_rng`",
        "residual": "`return_residual` gives the log-sum-exp",
        "state": "`initial_state` and `return_state`",
        "decode": "`init_state` and `extend` in its module",
    }
)


# The capability that each parameter of a function of query, key and value stands for.
_SHOWN_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "is_causal": ("bidirectional", "causal"),
        "query_offset": ("offset",),
        "key_value_seq_lengths": ("lengths",),
        "segment_ids": ("segments",),
        "local_window_size": ("window",),
        "bias": ("bias",),
        "mask": ("mask",),
        "score_mod": ("score_mod",),
        "logits_soft_cap": ("soft_cap",),
        "sink": ("sink",),
        "dropout_rate": ("dropout",),
        "return_residual": ("residual",),
        "return_state": ("state",),
    }
)

_ANY_FUNCTION = "effattn.nn.attention:SelfAttention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One way of attending.

    Attributes:
      name: what users type.
      family: the row group of the table of mechanisms ("exact", "sparse", "linear", ...).
      paper: authors, year and title of the publication.
      function: the pure function, taking query, key and value first if it `takes_heads`; else
        with inputs of its own, or None where there is only a module.
      takes_heads: the function takes query, key and value, as every attention does. What mixes
        tokens in another way has a mixer of its own, and no other module can call its function.
      builder: "module:attribute" of the callable that makes its Flax mixer; imported on use. The
        default makes one of any function that takes heads; another makes this mechanism alone.
      options_at: the options at a length, where the claimed growth supposes some that follow it.
      knows_order: it tells positions apart by itself, so models give it no rotary embedding.
      by_layer: the options that change with the layer (from 0) in which the mixer stands.
      decoder: "module:attribute" of what makes its decoder, `(function, options) -> Decoder` (see
        `effattn.decode`), or None.
      reach: the keys that each token reaches, for `effattn.decode.GatheredDecoder`, or None.
      capabilities: names from `CAPABILITIES`. Of a function that takes heads, those that its
        parameters do not show: "cross", and the direction where there is no `is_causal`. What the
        parameters show is added, but for what `reasons` says it lacks; so is "grouped", and
        "decode" where there is a decoder.
      reasons: why the mechanism lacks a capability, for the message to those who ask for it.
      options: the function's own arguments, or its mixer's where it takes no heads, with the values
        used when none are given.
      time_exponent, memory_exponent: growth in length of FLOPs and of temporary bytes.
      complexity: the time, as written in the table.
      causality: "exact" (bit for bit), or "rounding" where the order of summation moves.
    """

    name: str
    family: str
    paper: str
    function: Callable[..., Any] | None
    complexity: str
    time_exponent: float
    memory_exponent: float = 1.0
    capabilities: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options_at: Callable[[int], Mapping[str, Any]] | None = None
    by_layer: Callable[[int], Mapping[str, Any]] | None = None
    takes_heads: bool = True
    builder: str = _ANY_FUNCTION
    decoder: str | None = None
    reach: Callable[..., Any] | None = None
    causality: str = "exact"
    knows_order: bool = False

    def __post_init__(self):
        unknown = (self.capabilities | self.reasons.keys()) - CAPABILITIES.keys()
        if unknown:
            raise ValueError(
                f"mechanism {self.name!r} claims unknown capabilities {sorted(unknown)}; "
                f"known are {sorted(CAPABILITIES)}"
            )
        if self.takes_heads and self.function is None:
            raise ValueError(f"mechanism {self.name!r} takes heads and needs a function of them")
        if not self.takes_heads and self.builder == _ANY_FUNCTION:
            raise ValueError(f"mechanism {self.name!r} takes no heads and needs a builder")
        if self.takes_heads:
            object.__setattr__(self, "capabilities", self.capabilities | self._shown())

    def _shown(self) -> frozenset[str]:
        """The capabilities that the function's parameters and the decoder show."""
        assert self.function is not None
        parameters = inspect.signature(self.function).parameters
        shown = {each for name in parameters for each in _SHOWN_BY.get(name, ())} | {"grouped"}
        if self.decoder is not None:
            shown.add("decode")
        return frozenset(shown - self.reasons.keys())

    @property
    def mixer(self) -> str:
        """The full name of its builder, for messages."""
        module, _, attribute = self.builder.partition(":")
        return (
            f"effattn.nn.{attribute}"
            if module.startswith("effattn.nn.")
            else f"{module}.{attribute}"
        )

    def options_in_layer(self, layer: int) -> dict[str, Any]:
        """The options that the mechanism has of itself in a layer of a model, from 0."""
        return {} if self.by_layer is None else dict(self.by_layer(layer))

    def mixer_options(self) -> frozenset[str]:
        """The options that its mixer has beside those of every `SelfAttention`."""
        return _parameters(self.builder) - _parameters(_ANY_FUNCTION)

    def mixer_takes(self, option: str) -> bool:
        """Whether its mixer, or those that it is made of, may have such an option."""
        parameters = _signature(self.builder)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return open_ended or option in parameters

    def takes_rotary(self) -> bool:
        """Whether its mixer may turn something by its position."""
        return not self.knows_order and self.mixer_takes("rotary")

    def options_of_model(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Of what a model says to all its mixers, what this mechanism's is given.

        That is all but a rotary embedding, where it knows the order by itself, and what would set
        up parts that its mixer has not: queries and keys to turn and to norm, projections,
        parameters by position.
        """
        parameters = _signature(self.builder)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        left_out = {"rotary"} if self.knows_order else set()
        if "max_length" not in parameters or options.get("max_length") is None:
            left_out.add("max_length")
        if not open_ended:
            set_up = {name for name, option in options.items() if option is None} | _OF_PARTS
            left_out |= set_up - parameters.keys()
        return {name: option for name, option in options.items() if name not in left_out}

    def build(self, in_features: int, num_heads: int, **kwargs: Any) -> Any:
        """The mechanism's Flax mixer, from tokens `(B, T, D)` to tokens.

        One that has no heads is made for any number of them.

        Raises:
          ValueError: options that its mixer does not have, or needs and was not given; and what the
            mixer raises.
        """
        if self.builder == _ANY_FUNCTION:
            return load(self.builder)(in_features, num_heads, attention=self.name, **kwargs)
        if not self.takes_heads:
            kwargs = {**self.options, **kwargs}
        parameters = _signature(self.builder)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            unknown = sorted(kwargs.keys() - parameters.keys())
            if unknown:
                known = sorted(parameters.keys() - {"self", "in_features", "rngs"})
                raise ValueError(
                    f"the mixer of {self.name!r} has no option {', '.join(unknown)}; its options "
                    f"are {', '.join(known)}"
                )
        if "num_heads" in parameters:
            kwargs["num_heads"] = num_heads
        only_by_name = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        needed = {n for n, p in only_by_name.items() if p.default is p.empty} - {"rngs"}
        missing = sorted(needed - kwargs.keys())
        if missing:
            raise ValueError(
                f"the mixer of {self.name!r} needs {', '.join(missing)}: give it as an option of "
                "the mechanism, or of the model where it has one of that name"
            )
        return load(self.builder)(in_features, **kwargs)


# What a model says of parts that not every mixer has.
_OF_PARTS = frozenset({"rotary", "qk_norm", "kernel_init", "out_kernel_init", "param_dtype"})

_MECHANISMS: dict[str, Mechanism] = {}


def _signature(builder: str) -> Mapping[str, inspect.Parameter]:
    make = load(builder)
    is_class = isinstance(make, type)
    # The metaclass of Flax's modules hides their signature.
    return inspect.signature(make.__init__ if is_class else make).parameters


def _parameters(builder: str) -> frozenset[str]:
    return frozenset(_signature(builder))


def load(reference: str) -> Any:
    """The object named by "module:attribute", imported now."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def register(mechanism: Mechanism) -> Mechanism:
    """Adds an entry; a name can be taken once."""
    if mechanism.name in _MECHANISMS:
        raise ValueError(f"a mechanism named {mechanism.name!r} is registered already")
    _MECHANISMS[mechanism.name] = mechanism
    return mechanism


def get(name: str) -> Mechanism:
    """The entry of that name; `ValueError` with the known names if there is none."""
    if not isinstance(name, str) or name not in _MECHANISMS:
        raise ValueError(f"unknown mechanism {name!r}; registered are {', '.join(names())}")
    return _MECHANISMS[name]


def entry_of(function: Any) -> Mechanism | None:
    """The first entry that has this function, or None."""
    entries = (entry for entry in _MECHANISMS.values() if entry.function is not None)
    return next((entry for entry in entries if entry.function is function), None)


def names(capability: str | None = None) -> tuple[str, ...]:
    """The registered names, in order of registration; all, or those with a capability."""
    if capability is not None and (
        not isinstance(capability, str) or capability not in CAPABILITIES
    ):
        raise ValueError(f"unknown capability {capability!r}; known are {sorted(CAPABILITIES)}")
    return tuple(
        name
        for name, entry in _MECHANISMS.items()
        if capability is None or capability in entry.capabilities
    )


def table() -> str:
    """All mechanisms as a Markdown table, as the README shows it."""
    lines = ["| name | family | time | causal | paper |", "| --- | --- | --- | --- | --- |"]
    for entry in _MECHANISMS.values():
        directions = [d for d in ("causal", "bidirectional") if d in entry.capabilities]
        causal = " and ".join(directions)
        lines.append(
            f"| `{entry.name}` | {entry.family} | {entry.complexity} | {causal} | {entry.paper} |"
        )
    return "\n".join(lines)
