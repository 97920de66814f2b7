"""Options of layers that hold arrays: copies of parameters and modules for each layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_PARAMETERS = (nnx.Variable, nnx.Pytree)
_DATA = (jax.Array, np.ndarray, *_PARAMETERS)


def is_data(leaf: Any) -> bool:
    """Returns whether the leaf is an array, a Variable or a module."""
    return isinstance(leaf, _DATA)


def holds_data(option: Any) -> bool:
    """Returns whether an option has an array, a Variable or a module."""
    return any(map(is_data, jax.tree.leaves(option, is_leaf=is_data)))


def own_copy(options: Any) -> Any:
    """The options with all Variables and modules copied; copies share no arrays with the originals.

    A Variable or module that occurs twice is copied once, and the copy occurs twice. Other options
    stay unchanged.
    """
    leaves, structure = jax.tree.flatten(options, is_leaf=is_data)
    given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, _PARAMETERS)}
    if not given:
        return options
    # One split for all, as a Variable may be an option and also part of a module in another option.
    together: Any = list(given.values())
    graph, state = nnx.split(together)
    copies = dict(zip(given, nnx.merge(graph, jax.tree.map(_copied, state)), strict=True))
    return jax.tree.unflatten(structure, [copies.get(id(leaf), leaf) for leaf in leaves])


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits options into static options and options that hold arrays.

    Arrays in the second part become new Variables; Variables and modules are copied.

    Raises:
      ValueError: a function that holds Variables or modules, which no layer would train.
    """
    static, learned = {}, {}
    for name, option in options.items():
        if holds_data(option):
            learned[name] = option
            continue
        check_holds_none(name, option)
        static[name] = option

    def variable(leaf):
        return nnx.Variable(jnp.array(leaf)) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    return static, jax.tree.map(variable, own_copy(learned), is_leaf=is_data)


def check_holds_none(name: str, function: Any) -> None:
    """Raises `ValueError` if a plain function or object holds Variables or modules."""
    if isinstance(function, _PARAMETERS):
        return
    held = next((x for x in _held(function) if isinstance(x, _PARAMETERS)), None)
    if held is not None:
        raise ValueError(
            f"{name} must not hold parameters, as the layer cannot train them, got a "
            f"{type(function).__name__} that holds a {type(held).__name__}; pass an nnx.Module "
            "with the same __call__ instead"
        )


def check_has_none(what: str, function: Any, options: dict[str, Any]) -> None:
    """Raises `ValueError` if `function` or an option has parameters; `what` cannot train them."""
    for name, option in {"mechanism": function, **options}.items():
        check_holds_none(name, option)
        leaves = jax.tree.leaves(option, is_leaf=is_data)
        held = next((x for x in leaves if isinstance(x, _PARAMETERS)), None)
        if held is not None:
            raise ValueError(
                f"{name} must not hold parameters, as {what} cannot train them, got a "
                f"{type(held).__name__}; use effattn.nn.SelfAttention, which trains them"
            )


def values(learned: Any) -> Any:
    """The options with each Variable replaced by its value; modules stay unchanged."""

    def value(leaf):
        return leaf[...] if isinstance(leaf, nnx.Variable) else leaf

    return jax.tree.map(value, learned, is_leaf=is_data)


def _copied(leaf):
    return jnp.array(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _held(option):
    """Yields the objects that a function, method, `functools.partial` or plain object refers to."""
    yield getattr(option, "__self__", None)
    if isinstance(option, functools.partial):
        yield from (option.func, *option.args, *option.keywords.values())
    for cell in getattr(option, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from getattr(option, "__dict__", {}).values()
