"""Resolution of an `attention` argument (name, function or partial) to a function and options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from effattn import registry
from effattn.options import Direction, Dropout, Offset, Packing, Padding, Residual, State

# Groups of parameters that give an unregistered function a capability.
_GROUPS: Mapping[str, Any] = {
    "causal": Direction,
    "offset": Offset,
    "lengths": Padding,
    "segments": Packing,
    "dropout": Dropout,
}
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **{capability: tuple(group.__annotations__) for capability, group in _GROUPS.items()},
    **{name: (name,) for name in ("bias", "mask", "score_mod")},
}

# Arguments that modules pass at each call, so they cannot be options of a module.
_RESERVED = frozenset({"query", "key", "value", "positions"}).union(
    *(group.__annotations__ for group in (*_GROUPS.values(), State, Residual))
)


_OF_ANY_FUNCTION = "effattn.nn.SelfAttention"  # the mixer of mechanisms without one of their own


@dataclasses.dataclass(frozen=True)
class Binding:
    """Static description of an attention function; hashable, as Flax requires of static attributes.

    Attributes:
      name: registered name, or the function's name; used in error messages.
      registered: whether the function is registered.
      parameters: names of the function's parameters; None if the function takes `**kwargs`.
      required: keyword-only parameters without a default, except those that modules pass.
    """

    name: str
    registered: bool
    parameters: frozenset[str] | None
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str) -> "Binding":
        """Binding of a registered mechanism with a dedicated mixer."""
        mechanism = registry.get(name)
        function = mechanism.function
        parameters = frozenset[str]() if function is None else _parameters(function)
        return cls(mechanism.name, True, parameters)

    @property
    def mechanism(self) -> registry.Mechanism | None:
        """The registry entry, or None for an unregistered function."""
        return registry.get(self.name) if self.registered else None

    @property
    def places_tokens(self) -> bool:
        """Returns whether the mechanism depends on positions and takes the argument `positions`."""
        return self.registered and self.takes("positions")

    def takes(self, *names: str) -> bool:
        """Returns whether the function accepts all these parameters."""
        return self.parameters is None or self.parameters.issuperset(names)

    def has(self, capability: str) -> bool:
        """Returns whether the function has a capability.

        A registered mechanism declares its capabilities. For an unregistered function, the
        parameters in its signature decide.
        """
        if self.registered:
            return capability in registry.get(self.name).capabilities
        return self.takes(*_PARAMETERS.get(capability, ()))

    def require(self, capability: str, what: str) -> None:
        """Raises `ValueError` with advice if the function lacks a capability.

        Args:
          capability: a name in `effattn.registry.CAPABILITIES`.
          what: the argument that needs the capability, for the error message.
        """
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
        """Raises `ValueError` with advice if a required parameter is missing in `keywords`."""
        missing = ", ".join(sorted(self.required - keywords.keys()))
        if missing:
            own = (
                ()
                if self.mechanism is None
                else (self.mechanism.mixer, self.mechanism.cross_module)
            )
            modules = " or ".join(name for name in own if name not in (None, _OF_ANY_FUNCTION))
            raise ValueError(
                f"attention {self.name!r} needs {missing}: give it as an option"
                + (f", or use {modules}" if modules else "")
            )


def bind(
    attention: str | Callable[..., Any], options: Mapping[str, Any], module: type | None = None
) -> tuple[Callable[..., Any], Binding, dict[str, Any]]:
    """Resolves `attention` and checks its options.

    Args:
      attention: a registered name, a registered function, a `functools.partial` of a function (its
        keywords become options), or any other function or module of query, key and value.
      options: arguments for the function. They override the keywords of a partial, which override
        the registry's defaults.
      module: the class of the mixer, whose options an error message names.

    Returns:
      The function to call, its `Binding`, and the merged options.

    Raises:
      ValueError: an unknown name, a mechanism without a function of query, key and value, or an
        option that the function does not take.
    """
    function, binding, options = resolve(attention, options)
    name = binding.name
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise ValueError(
            f"attention {name!r} cannot have the option {', '.join(reserved)}, which the module "
            "sets from its own arguments or at each call; leave it out"
        )
    unknown = sorted(option for option in options if not binding.takes(option))
    if unknown:
        known = sorted(_known(binding, module))
        raise ValueError(
            f"attention {name!r} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(known)}"
        )
    # Options become static attributes, which must be hashable; configuration files have lists.
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return function, binding, options


def _known(binding: Binding, module: type | None) -> frozenset[str]:
    """Options of the attention function, and those of a mixer that is for this function alone."""
    known = (binding.parameters or frozenset()) - _RESERVED
    own = None if binding.mechanism is None else binding.mechanism.mixer
    if module is None or own != f"effattn.nn.{module.__name__}" or own == _OF_ANY_FUNCTION:
        return known
    parameters = inspect.signature(module).parameters.values()
    of_mixer = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"rngs"}
    # The mixer computes the arrays that the function requires.
    return known - binding.required | of_mixer


def resolve(
    attention: str | Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Binding, dict[str, Any]]:
    """Resolves `attention` as `bind` does, without checking the options."""
    options = dict(options)
    while isinstance(attention, functools.partial) and not attention.args:
        options = {**attention.keywords, **options}
        attention = attention.func
    mechanism = _entry(attention)
    function: Callable[..., Any]
    if mechanism is not None:
        if mechanism.function is None or not mechanism.takes_heads:
            raise ValueError(
                "attention must be a mechanism of query, key and value, got "
                f"{mechanism.name!r}; use its mixer {mechanism.mixer}"
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
