"""Table of the implementations of one core."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from effattn.dispatch.choice import Call, Chosen, Limits, on_platform, open_length
from effattn.dispatch.partition import placed_by


class Implementations(NamedTuple):
    """The implementations of one core: modules, imported on first use.

    The module of "xla" accepts every call. Each other module has `LIMITS`, and a function `refusal`
    that returns the reason why the implementation rejects a call, or None.

    Attributes:
      core: name of the core, for messages.
      modules: full name of the module, for each implementation.
    """

    core: str
    modules: Mapping[str, str]

    def module(self, name: str) -> Any:
        """Imports and returns the module of an implementation."""
        return importlib.import_module(self.modules[name])

    def call(
        self, mechanism: str, *arguments: Any, lengths: tuple[Any, ...] = (), **fields: Any
    ) -> Call:
        """Description of a call for `choose`.

        Args:
          mechanism: name of the mechanism, for messages.
          arguments: arguments of `refusal`.
          lengths: lengths that kernels need to know when the call is traced.
          fields: further fields of `Call`.
        """

        def refusal(name):
            return open_length(*lengths) or self.module(name).refusal(*arguments)

        refusals = {name: functools.partial(refusal, name) for name in self.modules}
        return Call(
            mechanism,
            refusals | {"xla": lambda: None},
            limits=lambda name: Limits() if name == "xla" else self.module(name).LIMITS,
            **fields,
        )

    def call_in_xla(self, mechanism: str, reason: str) -> Call:
        """Description of a call that all implementations but "xla" reject, for this reason."""
        return Call(
            mechanism, {name: lambda: reason for name in self.modules} | {"xla": lambda: None}
        )

    def run(self, chosen: Chosen, form: Callable[[Any], Callable], *operands: Any) -> Any:
        """Runs `form(module)(*operands)` for the first chosen module, as `on_platform` does."""
        forms = {name: form(self.module(name)) for name in chosen.names}
        with placed_by(chosen.places):
            return on_platform(chosen, self.core, forms, *operands)
