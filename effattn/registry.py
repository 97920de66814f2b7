"""Registry of mechanisms: name, paper, function, Flax module, options and capabilities.

Each mechanism registers its entry in its own file, `effattn/functional/<name>.py`. This module does
not import Flax: `Mechanism.builder` is the name of a module class, imported on first use.
"""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from effattn.arrays import checks

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


# Capabilities that follow from each parameter of a mechanism's function.
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

_ANY_FUNCTION = "effattn.nn.self_attention:SelfAttention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Registry entry of a mechanism.

    Attributes:
      name: unique name of the mechanism.
      family: group in the table of mechanisms ("exact", "sparse", "linear", ...).
      paper: authors, year and title of the publication.
      function: the pure function. With `takes_heads` its first arguments are query, key and value.
        None if the mechanism has only a module.
      takes_heads: whether the function needs query, key and value, and no further arrays, so that
        `effattn.nn.SelfAttention` can call it. If not, the mechanism has a mixer of its own.
      naive: the naive form (see `effattn.naive`): a function with the arguments of `function`, or,
        for a mechanism that is a module alone, of the module and its tokens. Default: that of
        `function`, if it has one.
      builder: "module:attribute" of the callable that makes the mechanism's Flax mixer; imported on
        first use. The default is a mixer for any function with `takes_heads`.
      cross_builder: "module:attribute" of a cross-attention module for this mechanism alone; None
        if the cross-attention module for any function can call its function.
      options_at: `(length) -> options`, if the claimed complexity needs options that depend on the
        length; or None.
      knows_order: whether the mechanism distinguishes positions by itself; models then pass no
        rotary embedding.
      by_layer: `(layer, num_layers) -> options` that depend on the index of the layer (from 0) and
        the number of layers of a model, or None.
      decoder: "module:attribute" of a function `(function, options) -> Decoder` (see
        `effattn.decode`), or None.
      pattern: function that returns the `effattn.patterns.Pattern` of a call, or None. Its
        parameters are options of the function, or `length`, `heads`, `key_heads` or `is_causal`.
      capabilities: names from `CAPABILITIES`. With `takes_heads`, pass only capabilities that do
        not follow from the function's parameters: "cross", and the direction if there is no
        parameter `is_causal`. The others are added, except those in `reasons`. "grouped" is added
        too, and "decode" if there is a decoder.
      reasons: for capabilities that the mechanism lacks, the reason, for error messages.
      options: default values of the mechanism's own arguments: those of the function, or of the
        mixer without `takes_heads`.
      time_exponent, memory_exponent: exponents of the length in FLOPs and in temporary bytes.
      complexity: the time complexity without projections, as shown in the table.
      causality: "exact" if later tokens change no bit of an output, "rounding" if they change the
        order of summation.
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
    by_layer: Callable[[int, int], Mapping[str, Any]] | None = None
    takes_heads: bool = True
    naive: Callable[..., Any] | None = None
    builder: str = _ANY_FUNCTION
    cross_builder: str | None = None
    decoder: str | None = None
    pattern: Callable[..., Any] | None = None
    causality: str = "exact"
    knows_order: bool = False

    def __post_init__(self):
        if self.naive is None:
            object.__setattr__(self, "naive", getattr(self.function, "naive", None))
        unknown = (self.capabilities | self.reasons.keys()) - CAPABILITIES.keys()
        if unknown:
            raise ValueError(
                f"mechanism {self.name!r} claims unknown capabilities {sorted(unknown)}; "
                f"known are {sorted(CAPABILITIES)}"
            )
        if self.takes_heads and self.function is None:
            raise ValueError(
                f"mechanism {self.name!r} with takes_heads=True needs function, got None"
            )
        if not self.takes_heads and self.builder == _ANY_FUNCTION:
            raise ValueError(
                f"mechanism {self.name!r} with takes_heads=False needs builder, the 'module:name' "
                "of its mixer, got the default"
            )
        if self.takes_heads:
            object.__setattr__(self, "capabilities", self.capabilities | self._shown())

    def _shown(self) -> frozenset[str]:
        """Capabilities that follow from the function's parameters and the decoder."""
        assert self.function is not None
        parameters = inspect.signature(self.function).parameters
        shown = {each for name in parameters for each in _SHOWN_BY.get(name, ())} | {"grouped"}
        if self.decoder is not None:
            shown.add("decode")
        return frozenset(shown - self.reasons.keys())

    @property
    def home(self) -> str:
        """Module of the function, or of the mixer if there is none."""
        return self.builder.partition(":")[0] if self.function is None else self.function.__module__

    @property
    def mixer(self) -> str:
        """Full name of the builder, for messages."""
        return _full_name(self.builder)

    @property
    def cross_module(self) -> str | None:
        """Full name of the cross-attention module of its own, for messages; None without one."""
        return None if self.cross_builder is None else _full_name(self.cross_builder)

    def options_in_layer(self, layer: int, num_layers: int) -> dict[str, Any]:
        """The mechanism's options that depend on the layer of a model, counted from 0."""
        return {} if self.by_layer is None else dict(self.by_layer(layer, num_layers))

    def mixer_options(self) -> frozenset[str]:
        """Options of the mechanism's mixer that `SelfAttention` does not have."""
        return _parameters(self.builder) - _parameters(_ANY_FUNCTION)

    def mixer_takes(self, option: str) -> bool:
        """Returns whether the mixer takes the option, or forwards it to inner mixers."""
        parameters = _signature(self.builder)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return open_ended or option in parameters

    def takes_rotary(self) -> bool:
        """Returns whether the mechanism's mixer accepts a rotary embedding."""
        return not self.knows_order and self.mixer_takes("rotary")

    def options_of_model(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The model options that this mechanism's mixer accepts.

        Left out are the rotary embedding if the mechanism `knows_order`, `max_length` if it is None
        or the mixer has none, and, of the options that the mixer lacks, those that are None or set
        up parts of other mixers (rotary embedding, normalisation of queries and keys, initialisers
        and dtype of parameters; for a mixer without heads, their number and size).

        Raises:
          ValueError: `max_length` is neither None nor an int, 1 or more.
        """
        parameters = _signature(self.builder)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        left_out = {"rotary"} if self.knows_order else set()
        length = options.get("max_length")
        if length is not None:  # mixers without it ignore it
            checks.at_least("max_length", length, 1, "tokens, or None")
        if "max_length" not in parameters or length is None:
            left_out.add("max_length")
        if not open_ended:
            set_up = {name for name, option in options.items() if option is None} | _OF_PARTS
            if "num_heads" not in parameters:
                set_up |= {"num_kv_heads", "head_dim"}
            left_out |= set_up - parameters.keys()
        return {name: option for name, option in options.items() if name not in left_out}

    def build(self, in_features: int, num_heads: int, **kwargs: Any) -> Any:
        """Builds the mechanism's Flax mixer, a module from tokens `(B, T, D)` to tokens.

        A mixer without heads ignores `num_heads`.

        Raises:
          ValueError: an option is unknown to the mixer, a required option is missing, or the mixer
            rejects an option.
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


# Model options of parts that some mixers do not have.
_OF_PARTS = frozenset(
    {"rotary", "qk_norm", "use_bias", "kernel_init", "out_kernel_init", "param_dtype"}
)

_MECHANISMS: dict[str, Mechanism] = {}


def _full_name(reference: str) -> str:
    module, _, attribute = reference.partition(":")
    return f"{'effattn.nn' if module.startswith('effattn.nn.') else module}.{attribute}"


def _signature(builder: str) -> Mapping[str, inspect.Parameter]:
    make = load(builder)
    is_class = isinstance(make, type)
    # The metaclass of Flax's modules hides their signature.
    return inspect.signature(make.__init__ if is_class else make).parameters


def _parameters(builder: str) -> frozenset[str]:
    return frozenset(_signature(builder))


def load(reference: str) -> Any:
    """Imports and returns the object named "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def register(mechanism: Mechanism) -> Mechanism:
    """Adds an entry.

    A module may register its own name again, as a cell of a notebook does that runs twice: then the
    new entry replaces the old one.

    Raises:
      ValueError: another module has registered the name.
    """
    before = _MECHANISMS.get(mechanism.name)
    if before is not None and before.home != mechanism.home:
        raise ValueError(
            f"a mechanism named {mechanism.name!r} is registered already, by {before.home}; choose "
            "another name"
        )
    _MECHANISMS[mechanism.name] = mechanism
    return mechanism


def get(name: str) -> Mechanism:
    """Returns the entry of that name; `ValueError` with the known names if there is none."""
    if not isinstance(name, str) or name not in _MECHANISMS:
        similar = difflib.get_close_matches(str(name), names(), cutoff=0.7)
        advice = f"; did you mean {' or '.join(similar)}?" if similar else ""
        known = ", ".join(names())
        raise ValueError(f"unknown mechanism {name!r}; registered are {known}{advice}")
    return _MECHANISMS[name]


def entry_of(function: Any) -> Mechanism | None:
    """Returns the first entry with this function, or None."""
    entries = (entry for entry in _MECHANISMS.values() if entry.function is not None)
    return next((entry for entry in entries if entry.function is function), None)


def names(capability: str | None = None) -> tuple[str, ...]:
    """Registered names in order of registration: all, or those with the given capability."""
    if capability is not None and (
        not isinstance(capability, str) or capability not in CAPABILITIES
    ):
        raise ValueError(f"unknown capability {capability!r}; known are {sorted(CAPABILITIES)}")
    return tuple(
        name
        for name, entry in _MECHANISMS.items()
        if capability is None or capability in entry.capabilities
    )
