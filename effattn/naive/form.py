"""Decorator that gives a function its naive form."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from effattn import dispatch
from effattn.arrays import checks

Function = TypeVar("Function", bound=Callable[..., Any])


def with_naive(naive: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorator: `implementation="naive"` runs the naive form, as does the attribute `naive`.

    A function without an argument `implementation` gets one: None, "xla" or "naive".

    Args:
      naive: the naive form, from `over_pairs`, `over_tokens` or `over_examples`; it takes the
        arguments of the function by name.
    """

    def decorate(function):
        signature = inspect.signature(function)
        has_option = "implementation" in signature.parameters

        def fast(args, kwargs, implementation):
            if has_option:
                return function(*args, **kwargs, implementation=implementation)
            dispatch.take_xla(function.__name__, implementation)
            return function(*args, **kwargs)

        @functools.wraps(naive)
        def form(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return naive(**given.arguments)

        @functools.wraps(function)
        def wrapped(*args, implementation=None, **kwargs):
            names = _names(implementation)
            if "naive" not in names:
                return fast(args, kwargs, implementation)
            if before := names[: names.index("naive")]:
                with contextlib.suppress(NotImplementedError):
                    return fast(args, kwargs, before)
            # The checks of arguments are those of the fast form.
            jax.eval_shape(lambda: function(*args, **kwargs))
            return with_arrays(*args, **kwargs)

        form.__signature__ = signature  # type: ignore[attr-defined]
        with_arrays = checks.checked(form)  # lists and numbers become arrays
        call: Any = wrapped
        if not has_option:
            option = inspect.Parameter(
                "implementation", inspect.Parameter.KEYWORD_ONLY, default=None
            )
            parameters = [*signature.parameters.values(), option]
            call.__signature__ = signature.replace(parameters=parameters)
        call.naive = form
        return call

    return decorate


def given_option(
    name: str, form: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """The naive form `form` if the caller gives that option, and `otherwise` if it is None."""

    @functools.wraps(form)
    def call(**given):
        return (otherwise if given.get(name) is None else form)(**given)

    return call


def _names(implementation: Any) -> tuple[Any, ...]:
    is_several = isinstance(implementation, tuple | list)
    return tuple(implementation) if is_several else (implementation,)
