"""From what a user names (a mechanism, a function, a partial of one) to something to call."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from effattn import registry

# What a function must be able to take to have a capability; it tells what an unregistered one can.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "causal": ("is_causal",),
    "offset": ("query_offset",),
    "lengths": ("query_seq_lengths", "key_value_seq_lengths"),
    "segments": ("segment_ids",),
    "bias": ("bias",),
    "mask": ("mask",),
    "score_mod": ("score_mod",),
    "dropout": ("dropout_rate", "dropout_rng"),
}

# Given by the modules at each call, so not among a module's options.
_RESERVED = frozenset(
    {
        "query",
        "key",
        "value",
        "is_causal",
        "query_offset",
        "query_seq_lengths",
        "key_value_seq_lengths",
        "segment_ids",
        "positions",
        "dropout_rate",
        "dropout_rng",
        "initial_state",
        "return_state",
        "return_residual",
    }
)


@dataclasses.dataclass(frozen=True)
class Binding:
    """What is known of an attention function. Hashable, as a static attribute of a module is.

    Attributes:
      name: for messages; the registry's, if it is registered.
      registered: whether it is.
      parameters: the names it takes; None if it takes any keyword.
      required: those of them that have no default, but for what modules give.
    """

    name: str
    registered: bool
    parameters: frozenset[str] | None
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str) -> "Binding":
        """What is known of a registered mechanism that has a mixer of its own."""
        mechanism = registry.get(name)
        function = mechanism.function
        parameters = frozenset[str]() if function is None else _parameters(function)
        return cls(mechanism.name, True, parameters)

    @property
    def mechanism(self) -> registry.Mechanism | None:
        """The registry's entry, or None for a function that is not registered."""
        return registry.get(self.name) if self.registered else None

    @property
    def places_tokens(self) -> bool:
        """Whether the mechanism weighs positions, and takes them as `positions`."""
        return self.registered and self.takes("positions")

    def takes(self, *names: str) -> bool:
        """Whether the function has all these parameters."""
        return self.parameters is None or self.parameters.issuperset(names)

    def has(self, capability: str) -> bool:
        """Whether the mechanism claims it or, if not registered, the signature allows it."""
        if self.registered:
            return capability in registry.get(self.name).capabilities
        return self.takes(*_PARAMETERS.get(capability, ()))

    def require(self, capability: str, what: str) -> None:
        """`ValueError` with advice if `what` was asked of a mechanism that cannot do it."""
        if not self.has(capability):
            names = ", ".join(registry.names(capability)) or "none"
            lacks = f"lacks {capability!r} ({registry.CAPABILITIES[capability]})"
            mechanism = self.mechanism
            if mechanism is not None and capability in mechanism.reasons:
                lacks += f", as {mechanism.reasons[capability]}"
            if mechanism is None:
                takes = " and ".join(f"`{name}`" for name in _PARAMETERS[capability])
                lacks = f"takes no {takes}"
            raise ValueError(
                f"{what} was given, but attention {self.name!r} {lacks}; "
                f"registered mechanisms that have it: {names}"
            )

    def check_complete(self, keywords: Mapping[str, Any]) -> None:
        """`ValueError` with advice if the function needs more than these."""
        missing = ", ".join(sorted(self.required - keywords.keys()))
        if missing:
            own = "" if self.mechanism is None else self.mechanism.mixer
            raise ValueError(
                f"attention {self.name!r} needs {missing}: give it as an option"
                + (f", or use {own}" if own not in ("", "effattn.nn.SelfAttention") else "")
            )


def bind(
    attention: str | Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Binding, dict[str, Any]]:
    """Resolves `attention` and checks its options.

    Args:
      attention: a registered name, a registered function, a `functools.partial` of one (its
        keywords become options), or any other function or module of query, key and value.
      options: arguments for the function; those given here win over those of a partial, and both
        over the registry's defaults.

    Returns:
      The function to call, what is known of it, and all options.

    Raises:
      ValueError: an unknown name, one that is of no function of query, key and value, or an option
        that the function does not take.
    """
    function, binding, options = resolve(attention, options)
    name = binding.name
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise ValueError(
            f"{', '.join(reserved)} cannot be an option of attention {name!r}: "
            "the module sets it, from its own arguments or at each call"
        )
    unknown = sorted(option for option in options if not binding.takes(option))
    if unknown:
        known = sorted((binding.parameters or frozenset()) - _RESERVED)
        raise ValueError(
            f"attention {name!r} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(known)}"
        )
    # Modules keep options as static, hashable attributes, and configurations come as lists.
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return function, binding, options


def resolve(
    attention: str | Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Binding, dict[str, Any]]:
    """As `bind`, but the options are taken as they are."""
    options = dict(options)
    while isinstance(attention, functools.partial) and not attention.args:
        options = {**attention.keywords, **options}
        attention = attention.func
    mechanism = _entry(attention)
    function: Callable[..., Any]
    if mechanism is not None:
        if mechanism.function is None or not mechanism.takes_heads:
            raise ValueError(
                f"{mechanism.name!r} mixes tokens without queries, keys and values; its mixer is "
                f"{mechanism.mixer}"
            )
        function, name = mechanism.function, mechanism.name
        options = {**mechanism.options, **options}
    elif callable(attention):
        function = attention
        name = getattr(attention, "__name__", type(attention).__name__)
    else:
        raise ValueError(
            "attention must be a registered name or a function of query, key and value, "
            f"got {attention!r}; registered are {', '.join(registry.names())}"
        )
    binding = Binding(name, mechanism is not None, _parameters(function), _required(function))
    return function, binding, options


def _entry(attention: Any) -> registry.Mechanism | None:
    if isinstance(attention, str):
        return registry.get(attention)
    return registry.entry_of(attention) if callable(attention) else None


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


def _required(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    return frozenset(named) - _RESERVED
