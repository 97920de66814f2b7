"""Linear maps with a transpose of their own, and functions whose derivatives are such maps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

# A map of `(known, linear)`, lists of arrays, to a list of arrays.
Map = Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]


def linear_map(
    function: Map, transpose: Map | None, known: Sequence[jax.Array], linear: Sequence[jax.Array]
) -> list[jax.Array]:
    """Calls `function(known, linear)`, whose transpose in reverse mode is `transpose`.

    Unlike `jax.custom_derivatives.linear_call`, the map can be batched, and differentiated in the
    arrays that it knows, by JAX's derivatives of `function`. JAX differentiates `transpose` too.

    Args:
      function: linear in its second argument.
      transpose: `(known, cotangents) -> cotangents` of `linear`; None if there is no `linear`.
      known: arrays that the two functions read.
      linear: arrays in which the function is linear.
    """

    def flat(*arrays):
        return list(function(list(arrays[: len(known)]), list(arrays[len(known) :])))

    arrays = *known, *linear
    return _linear().bind(
        *arrays,
        jaxpr=jax.make_jaxpr(flat)(*arrays),
        function=function,
        transpose=transpose,
        known=len(known),
    )


def _called(*arrays, jaxpr, **_):
    return _run(jaxpr, *arrays)


def _differentiated(primals, tangents, *, jaxpr, function, transpose, known):
    results = _linear().bind(
        *primals, jaxpr=jaxpr, function=function, transpose=transpose, known=known
    )
    zeros = [isinstance(tangent, ad.Zero) for tangent in tangents]
    if all(zeros[:known]):
        moving = [ad.instantiate_zeros(tangent) for tangent in tangents[known:]]
        return results, linear_map(function, transpose, primals[:known], moving)
    moving = [n for n, is_zero in enumerate(zeros) if not is_zero]

    def of_moving(*some):
        arrays = dict(enumerate(primals)) | dict(zip(moving, some, strict=True))
        return _run(jaxpr, *arrays.values())

    both = [primals[n] for n in moving], [tangents[n] for n in moving]
    return results, jax.jvp(of_moving, *both)[1]


def _transposed(cotangents, *arrays, jaxpr, function, transpose, known):
    cotangents = [ad.instantiate_zeros(each) for each in cotangents]
    found = transpose(list(arrays[:known]), cotangents)
    asked = map(ad.is_undefined_primal, arrays[known:])
    return [None] * known + [x if ask else None for x, ask in zip(found, asked, strict=True)]


def _batched(arrays, axes, *, jaxpr, function, transpose, known):
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    in_front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    # Each cotangent has the axis, so each linear array needs it.
    linear = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else x
        for x, axis in list(zip(in_front, axes, strict=True))[known:]
    ]
    mapped = [None if axis is None else 0 for axis in axes[:known]]
    each = functools.partial(jax.vmap, in_axes=(mapped, 0))
    transpose = None if transpose is None else each(transpose)
    results = linear_map(each(function), transpose, in_front[:known], linear)
    return results, [0] * len(results)


@functools.cache
def _linear() -> Any:
    from jax.extend.core import Primitive  # imported on first use: a slow import

    primitive = Primitive("effattn_linear_map")
    primitive.multiple_results = True
    primitive.def_impl(_called)
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
    ad.primitive_jvps[primitive] = _differentiated
    ad.primitive_transposes[primitive] = _transposed
    batching.primitive_batchers[primitive] = _batched
    mlir.register_lowering(primitive, mlir.lower_fun(_called, multiple_results=True))
    return primitive


def _run(jaxpr, *arrays):
    """Runs a closed jaxpr."""
    from jax.extend.core import jaxpr_as_fun  # imported on first use: a slow import

    return jaxpr_as_fun(jaxpr)(*arrays)


def with_derivatives(
    function: Callable[..., Any],
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., Any],
    plain: Callable[..., Any] | None = None,
    finish: Callable[..., tuple[Any, Any]] = lambda static, operands, found: found,
) -> Callable[..., Any]:
    """The function with a backward pass of its own, and with JAX's derivatives in forward mode.

    Args:
      function: `(static, *operands) -> results`.
      forward: `(static, *operands) -> (results, residuals)`.
      backward: `(static, residuals, cotangents) -> gradients of the operands`, with None for a
        subtree without gradients.
      plain: a form of the function that JAX can differentiate in forward mode. Default: the
        function itself.
      finish: `(static, operands, what forward returns) -> (results, residuals)`. It runs outside
        of the operation that hides `forward` (`_as_one`), so that `jax.checkpoint` sees the names
        that it gives to residuals.
    """
    plain = function if plain is None else plain
    run = jax.custom_jvp(function, nondiff_argnums=(0,))

    def jvp(static, operands, tangents):
        found = _as_one(functools.partial(forward, static), operands)
        results, residuals = finish(static, operands, found)
        leaves, structure = jax.tree.flatten(operands)
        is_zero = [isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(tangents)]
        moving = [n for n, zero in enumerate(is_zero) if not zero]
        known, of_known = jax.tree.flatten((leaves, residuals))
        outputs, of_outputs = jax.tree.flatten(results)
        # Integers have no tangents. JAX keeps the functions below in the
        # program, so they must not close over arrays.
        nothing = [None if _is_float(y) else _nothing(y) for y in outputs]

        def along(known, tangents):
            leaves, _ = jax.tree.unflatten(of_known, known)

            def of_moving(*some):
                arrays = dict(enumerate(leaves)) | dict(zip(moving, some, strict=True))
                return plain(static, *jax.tree.unflatten(structure, arrays.values()))

            given = tuple(leaves[n] for n in moving)
            _, found = jax.jvp(of_moving, given, tuple(tangents))
            return [x for x, no in zip(jax.tree.leaves(found), nothing, strict=True) if no is None]

        def back(known, cotangents):
            leaves, residuals = jax.tree.unflatten(of_known, known)
            given = jax.tree.unflatten(of_outputs, _filled(nothing, cotangents))
            found = backward(static, residuals, given)
            found = _leaf_by_leaf(found, jax.tree.unflatten(structure, leaves))
            return [jnp.zeros_like(leaves[n]) if found[n] is None else found[n] for n in moving]

        if not moving:
            zeros = [jnp.zeros_like(y) for y in outputs if _is_float(y)]
            return results, jax.tree.unflatten(of_outputs, _filled(nothing, zeros))
        given = [jax.tree.leaves(tangents)[n] for n in moving]
        found = linear_map(along, back, known, given)
        return results, jax.tree.unflatten(of_outputs, _filled(nothing, found))

    run.defjvp(jvp, symbolic_zeros=True)
    return run


def _as_one(function, operands):
    """Calls the function of known arrays as one operation.

    When JAX linearizes a program, it moves arrays that are equal in all steps of a loop, such as
    masks of keys, out of the loop, and stores a copy for every step, even if the loop has no
    tangents. It does not look into one operation, so nothing is stored for the loops in it.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    if jaxpr.effects:  # interpreted kernels
        return function(*operands)
    arrays = jax.tree.leaves(operands)
    call = functools.partial(_of_known, jaxpr)
    found = _linear().bind(*arrays, jaxpr=jaxpr, function=call, transpose=None, known=len(arrays))
    # Operands among the results are not saved twice.
    operand = dict(zip(jaxpr.jaxpr.invars, arrays, strict=True))
    of_results = zip(jaxpr.jaxpr.outvars, found, strict=True)
    found = [x if hasattr(v, "val") else operand.get(v, x) for v, x in of_results]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _of_known(jaxpr, known, linear):
    return _run(jaxpr, *known)


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _nothing(x):
    """The tangent of an array of integers."""
    return np.zeros(x.shape, jax.dtypes.float0)


def _filled(places, arrays):
    """The list with the arrays, in order, in the places that are None."""
    each = iter(arrays)
    return [next(each) if place is None else place for place in places]


def _leaf_by_leaf(gradients, operands):
    """Gradient of each leaf of the operands; None below a subtree of the gradients that is None."""

    def below(gradient, operand):
        return _Leaves([gradient] * len(jax.tree.leaves(operand)))

    found = jax.tree.map(below, gradients, operands, is_leaf=lambda x: x is None)
    return [gradient for each in jax.tree.leaves(found) for gradient in each.gradients]


class _Leaves:
    """A leaf of a pytree that holds the gradients of several."""

    def __init__(self, gradients: list[Any]):
        self.gradients = gradients
