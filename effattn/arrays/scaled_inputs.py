"""Results of a function that are arguments, or arguments times scalars."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Scaled(NamedTuple):
    """An argument, or an argument times a scalar. Indices count the arrays of all arguments.

    Attributes:
      argument: index of the argument.
      factor: index of the scalar, or None without a factor.
    """

    argument: int
    factor: int | None = None


def scaled_inputs(function: Callable[..., Any], *arguments: Any) -> Any:
    """Finds the results that are arguments, or arguments times scalars; computes nothing.

    Args:
      function: function of arrays.
      *arguments: pytrees of arrays, or of their shapes and dtypes.

    Returns:
      The pytree of the results, with a `Scaled` in place of each such result, and None in place of
      the others.
    """
    traced, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    places = {id(var): index for index, var in enumerate(traced.jaxpr.invars)}
    products = {
        id(equation.outvars[0]): equation
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "mul"
    }

    def shape(var: Any) -> tuple[int, ...]:
        return var.aval.shape

    def origin(var):
        if id(var) in places:
            return Scaled(places[id(var)])
        if id(var) not in products:
            return None
        left, right = products[id(var)].invars
        if not shape(left):
            left, right = right, left
        if shape(right) or id(left) not in places or id(right) not in places:
            return None
        return Scaled(places[id(left)], places[id(right)])

    found = [origin(var) for var in traced.jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(results), found)
