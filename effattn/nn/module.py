"""Base class of all modules: argument checks of constructors and public methods."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from effattn.arrays import checks


class Module(nnx.Module):
    """Base class of all modules.

    Public methods check flags and arrays; `__init__` also checks dtypes and `rngs`.
    """

    def __init_subclass__(cls, **kwargs: Any):
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
                setattr(cls, name, checks.checked(method))
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    parameters, names = inspect.signature(init).parameters, checks.positional(init)
    check = {name: rule for name, rule in _BY_NAME.items() if name in parameters}
    init = checks.checked(init)

    @functools.wraps(init)
    def checked(*args, **kwargs):
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
