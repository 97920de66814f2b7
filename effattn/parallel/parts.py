"""Functions and modules for the tokens of one device, by a form of exchange."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.cores import sequence_parts

# Arguments with numbers of tokens, and the axis of the tokens in the first argument beside them.
_LENGTHS = {"lengths": -2, "query_seq_lengths": -3, "key_value_seq_lengths": -3}


def without_partial(form: str, function: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function in a `functools.partial` of keyword arguments, and these arguments.

    Raises:
      ValueError: the function cannot be called.
    """
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        given = {**function.keywords, **given}
        function = function.func
    if not callable(function):
        advice = f"; pass effattn.registry.get({function!r}).function"
        raise ValueError(
            f"{form} takes a function or a module, got {function!r}"
            f"{advice if isinstance(function, str) else ''}"
        )
    return function, given


def over_parts(form: str, function: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """The function or module for the tokens of this device; lengths count all tokens.

    Args:
      form: a key of `sequence_parts.SUPPORTED`.
      function: a function or module of tokens.
      axis_name: the mesh axis.

    Raises:
      ValueError: the function cannot be called; or, on call, `form` does not support it.
    """
    function, given = without_partial(form, function)
    names = list(inspect.signature(function).parameters)

    def run(*arrays, **options):
        mesh_axes.check_axis(axis_name)
        options = {**given, **options}
        rate = options.get("dropout_rate")
        if rate is not None and not (isinstance(rate, int | float) and rate == 0):
            raise ValueError(f"{form} has no dropout, got dropout_rate; leave it out")
        inputs = {**options, **dict(zip(names, arrays, strict=False))}
        for lengths in _LENGTHS.keys() & options.keys():
            if options[lengths] is not None:
                of_keys = lengths == "key_value_seq_lengths" and "key" in inputs
                x = jnp.asarray(inputs["key" if of_keys else names[0]])
                tokens = x.shape[_LENGTHS[lengths]]
                here = jnp.asarray(options[lengths]) - lax.axis_index(axis_name) * tokens
                options[lengths] = jnp.clip(here, 0, tokens)
        with sequence_parts.along(form, axis_name) as parts:
            if not hasattr(function, "__name__"):
                sequence_parts.check_mixer(function)
            found = function(*arrays, **options)
            if not parts.calls:
                sequence_parts.refuse(getattr(function, "__name__", type(function).__name__))
        return found

    return run
