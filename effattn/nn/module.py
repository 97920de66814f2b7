"""Base class of all modules: signatures and argument checks of constructors and public methods."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from effattn.arrays import checks
from effattn.nn.options import signature_of


class _ClassSignature:
    """`__signature__` of a class: its constructor's; the metaclass of Flax's modules hides it."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # an instance has the signature of __call__
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Module(nnx.Module):
    """Base class of all modules.

    Public methods check flags and arrays; `__init__` also checks dtypes and `rngs`, and has the
    signature that its group of options gives it (see `effattn.nn.options`).
    """

    __signature__ = _ClassSignature()

    def __init_subclass__(cls, **kwargs: Any):
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
                setattr(cls, name, checks.checked(method))
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    signature = signature_of(init)
    init.__signature__ = signature  # type: ignore[attr-defined]
    parameters, names = signature.parameters, checks.positional(init)
    check = {name: rule for name, rule in _BY_NAME.items() if name in parameters}
    by_name = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    required = [p.name for p in by_name if p.default is p.empty]
    init = checks.checked(init)

    @functools.wraps(init)
    def checked(*args, **kwargs):
        made = f"{type(args[0]).__name__}()"
        if len(args) > len(names) and not takes_any:
            raise TypeError(
                f"{made} takes {', '.join(names[1:]) or 'nothing'} by position, got "
                f"{len(args) - 1} arguments; pass the others by name"
            )
        missing = [name for name in required if name not in kwargs]
        if missing:
            raise TypeError(f"{made} missing required keyword argument {missing[0]!r}")
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            if name in check:
                check[name](name, value)
        init(*args, **kwargs)

    return checked


def check_dtype(name: str, value: Any) -> None:
    """Raises `ValueError` unless the value is a floating-point dtype or None."""
    if value is not None:
        checks.dtype(name, value)


def _check_rngs(name, value):
    if not isinstance(value, nnx.Rngs):
        raise ValueError(f"{name} must be nnx.Rngs, such as nnx.Rngs(0), got {value!r}")


_BY_NAME: dict[str, Callable[[str, Any], Any]] = {
    "dtype": check_dtype,
    "param_dtype": checks.dtype,
    "rngs": _check_rngs,
}
