"""Evaluation of elementwise functions, such as a `score_mod`, on tiles inside a kernel.

The user writes such a function on scalars, `f(logit, b, h, i, j)`; the function may read tables, as
in `slopes[h]`. Kernel compilers can neither `vmap` a function nor gather from arrays in registers.
`Program` therefore traces the function once, evaluates its elementwise operations on whole tiles,
and replaces every read of a table by a load.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Elementwise primitives that Pallas lowers for every kind of device with a kernel.
ELEMENTWISE = frozenset(
    "abs add and atan2 ceil clamp convert_element_type cos div eq exp exp2 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square sub tanh "
    "xor".split()
)
# Primitives that return a single number unchanged; slices of a table with one entry are included.
_SAME_NUMBER = "squeeze", "reshape", "broadcast_in_dim", "copy", "dynamic_slice", "slice"
_CALLS = "jit", "pjit", "closed_call"

Lookup = Callable[[int, jax.Array], jax.Array]


class Unsupported(Exception):
    """Error for a function that kernels cannot evaluate; the message names the operation."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Traced function of scalars and tables.

    Attributes:
      closed: jaxpr of the function; the first arguments are tables, the others scalars.
      tables: arrays that the function reads: constants of the jaxpr, then table arguments.
      arguments: number of table arguments.
    """

    closed: Any
    tables: tuple[jax.Array, ...]
    arguments: int

    @classmethod
    def of(cls, function: Callable[..., Any], tables: Sequence[Any], *scalars: Any) -> "Program":
        """Traces `function(tables, *scalars)`; scalars are given by shape and dtype.

        Raises:
          Unsupported: kernels cannot evaluate the function on tiles.
        """
        closed = jax.make_jaxpr(function)(tuple(tables), *scalars)
        consts = tuple(jnp.asarray(c) for c in closed.consts)
        program = cls(closed, (*consts, *tables), len(tables))

        def lookup(number, at):
            return jnp.zeros(at.shape, program.tables[number].dtype)

        jax.eval_shape(functools.partial(program.run, lookup), *scalars)
        return program

    @property
    def entries(self) -> int:
        """Number of entries of the largest table."""
        return max((table.size for table in self.tables), default=0)

    @property
    def scalars(self) -> list[Any]:
        """Shapes and dtypes of the scalars."""
        return self.closed.in_avals[self.arguments :]

    def run(self, lookup: Lookup, *scalars: jax.Array) -> list[jax.Array]:
        """Returns the results of the function on arrays that broadcast against each other.

        `lookup(number, at)` reads the entries `at` of table number `number`, flattened to one axis.
        """
        views = [_View.whole(number, table) for number, table in enumerate(self.tables)]
        read = functools.partial(_evaluate, self.closed.jaxpr, lookup)
        return read([*views, *scalars])


@dataclasses.dataclass(frozen=True)
class _View:
    """View of a table, some of whose axes are already indexed.

    Attributes:
      number: number of the table.
      shape: shape of the whole table.
      fixed: index along each axis of the table, None for an axis that is not indexed yet.
      axes: axes of the table that are axes of the view.
      dtypes: dtypes to which entries are converted, one after the other.
    """

    number: int
    shape: tuple[int, ...]
    fixed: tuple[Any, ...]
    axes: tuple[int, ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def whole(cls, number, table):
        dims = table.shape
        fixed = tuple(jnp.int32(0) if size == 1 else None for size in dims)
        return cls(number, dims, fixed, tuple(range(len(dims))), (table.dtype,))

    def at(self, starts, sizes):
        """Returns the view of one entry, or of all entries, along each axis."""
        fixed = list(self.fixed)
        for axis, start, size in zip(self.axes, starts, sizes, strict=True):
            if fixed[axis] is None and size == 1:
                fixed[axis] = jnp.clip(start, 0, self.shape[axis] - 1)
            elif fixed[axis] is None and size != self.shape[axis]:
                raise Unsupported("reads slices of an array, not only single entries")
        return dataclasses.replace(self, fixed=tuple(fixed))

    def squeezed(self, dimensions):
        axes = tuple(axis for place, axis in enumerate(self.axes) if place not in dimensions)
        return dataclasses.replace(self, axes=axes)

    def read(self, lookup):
        """Loads the entry if all axes are indexed; otherwise return the view."""
        if any(index is None for index in self.fixed):
            return self
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        at = jnp.int32(0)
        for index, stride in zip(self.fixed, strides, strict=True):
            at = at + index.astype(jnp.int32) * np.int32(stride)
        entry = lookup(self.number, at)
        for dtype in self.dtypes:
            # Mosaic GPU cannot convert numbers to booleans.
            entry = entry != 0 if dtype == jnp.bool_ else entry.astype(dtype)
        return entry


def _evaluate(jaxpr, lookup, values):
    env: dict[Any, Any] = {}

    def get(atom):
        if hasattr(atom, "val"):
            return jnp.asarray(atom.val, atom.aval.dtype)
        value = env[atom]
        return value.read(lookup) if isinstance(value, _View) else value

    env.update(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
    for eqn in jaxpr.eqns:
        name, read = eqn.primitive.name, [get(atom) for atom in eqn.invars]
        if name in _CALLS:
            inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            consts = [_View.whole(-1, c) if np.ndim(c) else jnp.asarray(c) for c in inner.consts]
            if any(isinstance(c, _View) for c in consts):
                raise Unsupported("reads an array inside an inner function")
            env.update(
                zip(eqn.outvars, _evaluate(inner.jaxpr, lookup, [*consts, *read]), strict=True)
            )
            continue
        if isinstance(read[0] if read else None, _View):
            result = _of_view(eqn, *read)
        elif any(isinstance(value, _View) for value in read):
            raise Unsupported("computes with a whole array, not only with single entries")
        elif name in _SAME_NUMBER and math.prod(eqn.outvars[0].aval.shape) == 1:
            result = read[0]
        elif name in ELEMENTWISE and not eqn.primitive.multiple_results:
            shape = jnp.broadcast_shapes(*(value.shape for value in read))
            same = (jnp.broadcast_to(v, shape) if v.shape != shape else v for v in read)
            result = eqn.primitive.bind(*same, **eqn.params)
        else:
            raise Unsupported(f"calls {name!r}, not only elementwise functions and array[index]")
        env[eqn.outvars[0]] = result
    return [get(atom) for atom in jaxpr.outvars]


def _of_view(eqn, view, *indices):
    name, params = eqn.primitive.name, eqn.params
    if name == "dynamic_slice":
        return view.at(indices, params["slice_sizes"])
    if name == "slice" and params["strides"] is None:
        starts, limits = params["start_indices"], params["limit_indices"]
        sizes = [stop - start for start, stop in zip(starts, limits, strict=True)]
        return view.at([jnp.int32(start) for start in starts], sizes)
    if name == "squeeze":
        return view.squeezed(params["dimensions"])
    if name == "convert_element_type":
        return dataclasses.replace(view, dtypes=(*view.dtypes, params["new_dtype"]))
    if name == "gather":
        numbers = params["dimension_numbers"]
        if len(view.axes) == 1 and params["slice_sizes"] == (1,) and not numbers.offset_dims:
            if "CLIP" in str(params["mode"]) or "PROMISE" in str(params["mode"]):
                return view.at(indices, (1,))
    raise Unsupported(f"calls {name!r} on an array, not only array[index]")
