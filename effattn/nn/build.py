"""Mixers from a description: a mechanism, registered or not, and its options.

A mechanism is described by a registered name, by a callable, or by a mapping that has a name or a
callable under `"name"` and options beside it, such as
`{"name": "sliding_window", "local_window_size": (63, 0)}`. There are two kinds of callables:

- A *mixer class* is a subclass of `nnx.Module`, or a function with a parameter `rngs` that makes a
  mixer; also a `functools.partial` of either. The model calls
  `make(in_features, num_heads=, is_causal=, dtype=, param_dtype=, rngs=, ...)`, and passes only
  options that the signature of `make` names. The result maps tokens `(B, T, D)` to tokens, and is
  called as `mixer(x, lengths=, segment_ids=, rngs=)`. A model decodes if its mixers have
  `init_state` and `extend`, as `SelfAttention` has.
- An *attention function* is any other callable of query, key and value, also an instance of a
  module. `SelfAttention` calls it.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from effattn import registry
from effattn.nn.self_attention import SelfAttention

# Description of a mechanism.
Mechanism = str | Callable[..., Any] | Mapping[str, Any]


def named(argument: str, given: Any, mixers: bool = True) -> tuple[Any, dict[str, Any]]:
    """Name (or callable) and options of a mechanism; the other arguments are for messages."""
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", None)
    if not isinstance(name, str) and not callable(name):
        kinds = "a mixer class, a function" if mixers else "a function"
        raise ValueError(
            f"{argument} must be a registered name, {kinds} of query, key and value, or a mapping "
            f'with one of those as "name" and options, got {given!r}'
        )
    return name, options


def mechanism(name: Any) -> "registry.Mechanism | Unregistered":
    """The registry's entry of a name, or an `Unregistered` for a callable."""
    return Unregistered(name) if callable(name) else registry.get(name)


class Unregistered:
    """A mixer class or an attention function, with the methods of a registry entry that build it.

    Attributes:
      name: name of the callable, for error messages.
      knows_order: whether the mechanism is known to distinguish positions by itself.
      capabilities: "score_mod" if the mixer takes a `score_mod`; else empty.
    """

    def __init__(self, make: Callable[..., Any]):
        plain = make
        while isinstance(plain, functools.partial):
            plain = plain.func
        entry = registry.entry_of(plain)
        self.name = getattr(plain, "__name__", type(plain).__name__)
        self.knows_order = entry is not None and entry.knows_order
        parameters = _parameters(plain)
        if not isinstance(plain, nnx.Module) and (_is_module(plain) or "rngs" in parameters):
            self._make, self._parameters = make, parameters
        else:
            self._make = functools.partial(SelfAttention, attention=make)
            of_function = {n: p for n, p in parameters.items() if n == "score_mod"}
            self._parameters = {**_parameters(SelfAttention), **of_function}
        self.capabilities = frozenset({"score_mod"} & self._parameters.keys())

    def options_in_layer(self, layer: int, num_layers: int) -> dict[str, Any]:
        """Options that depend on the layer: none."""
        return {}

    def mixer_takes(self, option: str) -> bool:
        """Returns whether the mixer accepts the option."""
        return option in self._parameters or self._open_ended()

    def takes_rotary(self) -> bool:
        """Returns whether the mixer accepts a rotary embedding."""
        return not self.knows_order and "rotary" in self._parameters

    def options_of_model(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The model options that the mixer's signature names.

        Raises:
          ValueError: a number of key heads or a head dimension that the mixer does not take.
        """
        for name in ("num_kv_heads", "head_dim"):
            if options.get(name) is not None and name not in self._parameters:
                raise ValueError(
                    f"the mixer {self.name!r} has no argument {name}, got {name}={options[name]!r} "
                    "in the model; leave it out, or add the argument to the mixer"
                )
        left_out = {"rotary"} if self.knows_order else set()
        left_out |= {"max_length"} if options.get("max_length") is None else set()
        names = self._parameters.keys() - left_out
        return {name: option for name, option in options.items() if name in names}

    def build(self, in_features: int, num_heads: int, **options: Any) -> Any:
        """Builds the mixer; `ValueError` for an option that it does not take."""
        unknown = sorted(name for name in options if not self.mixer_takes(name))
        if unknown:
            known = sorted(self._parameters.keys() - {"self", "in_features", "rngs"})
            raise ValueError(
                f"the mixer {self.name!r} has no option {', '.join(unknown)}; its options are "
                f"{', '.join(known) or 'none'}"
            )
        if "num_heads" in self._parameters:
            options["num_heads"] = num_heads
        return self._make(in_features, **options)

    def _open_ended(self):
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())


def _is_module(plain):
    return isinstance(plain, type) and issubclass(plain, nnx.Module)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        # The metaclass of Flax's modules hides the signature of a class.
        return inspect.signature(function.__init__ if _is_module(function) else function).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        return {}
