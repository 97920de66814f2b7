"""Functions and modules for the tokens of one device, by a form of exchange."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from effattn.cores import sequence_parts

# Arguments with numbers of tokens, and the axis of the tokens in the first argument beside them.
_LENGTHS = {"lengths": -2, "query_seq_lengths": -3, "key_value_seq_lengths": -3}


def over_parts(form: str, function: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """The function or module for the tokens of this device; lengths count all tokens.

    Args:
      form: a key of `sequence_parts.TAKEN`.
      function: a function or module of tokens.
      axis_name: the mesh axis.

    Raises:
      ValueError: on call, the form does not take the function.
    """
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        given = {**function.keywords, **given}
        function = function.func
    name, known = _names_of(function)
    first, *_ = inspect.signature(function).parameters

    def run(*arrays, **options):
        options = {**given, **options}
        if options.get("dropout_rate"):
            raise ValueError(f"{form} has no dropout, got dropout_rate; leave it out")
        x = jnp.asarray(arrays[0] if arrays else options[first])
        for lengths in _LENGTHS.keys() & options.keys():
            if options[lengths] is not None:
                tokens = x.shape[_LENGTHS[lengths]]
                here = jnp.asarray(options[lengths]) - lax.axis_index(axis_name) * tokens
                options[lengths] = jnp.clip(here, 0, tokens)
        with sequence_parts.along(form, axis_name) as parts:
            if known is not None and not known & sequence_parts.TAKEN[form]:
                sequence_parts.refuse(name)
            found = function(*arrays, **options)
            if not parts.calls:
                sequence_parts.refuse(name)
        return found

    return run


def _names_of(function):
    """The name for messages, and for a module the names by which a form may know it.

    A module is refused if it is not known, as it may mix its tokens beside the calls of functions.
    """
    if hasattr(function, "__name__"):
        return function.__name__, None
    name, binding = type(function).__name__, getattr(function, "binding", None)
    of_mechanism = None if binding is None or binding.mechanism is None else binding.mechanism
    called = None if of_mechanism is None else getattr(of_mechanism.function, "__name__", None)
    return name, {name, called}
