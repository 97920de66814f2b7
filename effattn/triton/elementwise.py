"""Elementwise functions of the user, such as a `score_mod`, as functions in the Triton language.

A function of scalars is traced by `effattn.pallas.elements.Program`, which also says what kernels
can evaluate. Here the operations of the traced function are written as Triton source: one line for
each. Every table that the function reads is a part of one of two arrays, of integers or of floating
numbers, and a read is a load at the offset of its table.
"""

import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from effattn.pallas.elements import Program, Unsupported

NAMES = {
    "bool": "tl.int1",
    "int8": "tl.int8",
    "int16": "tl.int16",
    "int32": "tl.int32",
    "int64": "tl.int64",
    "uint8": "tl.uint8",
    "uint16": "tl.uint16",
    "uint32": "tl.uint32",
    "uint64": "tl.uint64",
    "float32": "tl.float32",
    "float64": "tl.float64",
}

_NAN = "propagate_nan=tl.PropagateNan.ALL"
# The expression of each primitive in the Triton language; {0}, {1} and {2} are its operands.
_EXPRESSIONS = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "add_any": "{0} + {1}",
    "and": "{0} & {1}",
    "ceil": "tl.ceil({0})",
    "clamp": f"tl.minimum(tl.maximum({{1}}, {{0}}, {_NAN}), {{2}}, {_NAN})",
    "cos": "tl.cos({0})",
    "eq": "{0} == {1}",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "floor": "tl.floor({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "is_finite": "{0} - {0} == 0",
    "le": "{0} <= {1}",
    "log": "tl.log({0})",
    "log1p": "log1p({0})",
    "logistic": "1 / (1 + tl.exp(-{0}))",
    "lt": "{0} < {1}",
    "max": f"tl.maximum({{0}}, {{1}}, {_NAN})",
    "min": f"tl.minimum({{0}}, {{1}}, {_NAN})",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "-{0}",
    "one_minus_square": "1 - {0} * {0}",
    "or": "{0} | {1}",
    "rem": "{0} % {1}",
    "rsqrt": "tl.rsqrt({0})",
    "shift_left": "{0} << {1}",
    "sign": "tl.where({0} == {0}, ({0} > 0).to({type}) - ({0} < 0).to({type}), {0})",
    "sin": "tl.sin({0})",
    "sqrt": "tl.sqrt({0})",
    "square": "{0} * {0}",
    "sub": "{0} - {1}",
    "tanh": "tanh({0})",
    "xor": "{0} ^ {1}",
}
_SAME = "broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient", "pvary", "reshard"
_CALLS = "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"

_HEAD = """\
import triton
import triton.language as tl

from effattn.triton.mathematics import log1p, tanh


@triton.jit
def {name}({arguments}):
"""


class Tables(NamedTuple):
    """Tables of programs in two arrays.

    Attributes:
      integers: int32, at least one entry.
      numbers: float32, at least one entry.
      places: for each table, whether it is in `numbers`, and the offset of its first entry.
    """

    integers: jax.Array
    numbers: jax.Array
    places: tuple[tuple[bool, int], ...]


def tables_of(tables: Sequence[jax.Array]) -> Tables:
    """Returns the tables one after the other; uint32 is stored as int32 with the same bits."""
    places, sizes = [], {True: 0, False: 0}
    parts: dict[bool, list[jax.Array]] = {True: [], False: []}
    for table in tables:
        is_number = jnp.issubdtype(table.dtype, jnp.floating)
        places.append((is_number, sizes[is_number]))
        flat = table.reshape(-1)
        if table.dtype == jnp.uint32:
            flat = jax.lax.bitcast_convert_type(flat, jnp.int32)
        parts[is_number].append(flat.astype(jnp.float32 if is_number else jnp.int32))
        sizes[is_number] += table.size

    def joined(is_number, dtype):
        return jnp.concatenate(parts[is_number]) if sizes[is_number] else jnp.zeros(1, dtype)

    return Tables(joined(False, jnp.int32), joined(True, jnp.float32), tuple(places))


def refusal(program: Program) -> str | None:
    """The reason why a program cannot be written in the Triton language, or None."""
    try:
        places = [(False, 0)] * len(program.tables)
        for derivative in (False, True):
            if not derivative or _is_floating(program):
                source("f", program, places, derivative=derivative)
        if _is_floating(program) and program.arguments:
            _source_of_reads(program, places)
    except Unsupported as reason:
        return str(reason)
    return None


def _is_floating(program):
    return bool(program.scalars) and jnp.issubdtype(program.scalars[0].dtype, jnp.floating)


def function(
    name: str, program: Program, places: Sequence[Any], *, derivative: bool = False
) -> Any:
    """Returns `name(integers, numbers, *scalars)` as a function with the decorator `triton.jit`.

    Args:
      name: name of the function.
      program: traced function of scalars and tables.
      places: places of its tables, as in `Tables`.
      derivative: whether the function returns its derivative by its first scalar instead.
    """
    return _compiled(name, source(name, program, places, derivative=derivative))


@functools.cache
def _compiled(name, text):
    """Triton reads the source of a function from its file, so `linecache` gets one for the text."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path, module = f"<effattn {name} {digest}>", f"effattn.triton.elementwise.{name}_{digest}"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    names: dict[str, Any] = {"__name__": module}
    exec(compile(text, path, "exec"), names)
    return names[name]


def source(name: str, program: Program, places: Sequence[Any], *, derivative: bool = False) -> str:
    """Returns the text of a file with the function of `function`."""
    scalars = [jax.ShapeDtypeStruct((), a.dtype) for a in program.scalars]

    def values(*scalars):
        (result,) = program.run(_read(program), *scalars)
        return result

    def slope(first, *others):
        result, pull_back = jax.vjp(lambda x: values(x, *others), first)
        return pull_back(jnp.ones_like(result))[0]

    closed = jax.make_jaxpr(slope if derivative else values)(*scalars)
    arguments = [f"x{place}" for place in range(len(scalars))]
    writer = _Writer(places)
    found = writer.write(closed.jaxpr, [*map(_literal, closed.consts), *arguments])
    head = _HEAD.format(name=name, arguments=", ".join(("integers", "numbers", *arguments)))
    return head + "".join(f"    {line}\n" for line in (*writer.lines, f"return {found[0]}"))


def function_of_reads(program: Program, places: Sequence[Any]) -> Any:
    """A function in the Triton language that adds to the gradients of the tables of a program.

    It is `add_reads(integers, numbers, totals, gradient, *scalars) -> totals`. `gradient` is the
    gradient of the result of the program on a tile. `totals` are the gradients of the entries of
    `numbers` so far, with zeros up to a power of two. Only tables of floating numbers among the
    table arguments have gradients.
    """
    return _compiled("add_reads", _source_of_reads(program, places))


def _source_of_reads(program, places):
    scalars = [jax.ShapeDtypeStruct((), a.dtype) for a in program.scalars]
    own = len(program.tables) - program.arguments
    reads: list[int] = []

    def parts(gradient, *scalars):
        found: list[Any] = []

        def lookup(number, at):
            value = _read(program)(number, at)
            found.append((number, at, value))
            return value

        program.run(lookup, *scalars)
        free = [
            place
            for place, (number, _, value) in enumerate(found)
            if number >= own and jnp.issubdtype(value.dtype, jnp.floating)
        ]

        def again(*values):
            all_values = [value for *_, value in found]
            for place, value in zip(free, values, strict=True):
                all_values[place] = value
            rest = iter(all_values)
            return program.run(lambda *_: next(rest), *scalars)[0]

        _, pull_back = jax.vjp(again, *(found[place][2] for place in free))
        reads[:] = [found[place][0] for place in free]
        return [found[place][1] for place in free], pull_back(gradient)

    closed = jax.make_jaxpr(parts)(scalars[0], *scalars)
    arguments = [f"x{place}" for place in range(len(scalars))]
    writer = _Writer(places)
    results = writer.write(closed.jaxpr, [*map(_literal, closed.consts), "gradient", *arguments])
    tiles = _of_tiles(closed.jaxpr)
    lines = [*writer.lines, "entry = tl.arange(0, totals.shape[0])"]
    for place, number in enumerate(reads):
        at, slope = results[place], results[len(reads) + place]
        first, size = places[number][1], program.tables[number].size
        # Where the gradient is 0, the slope may be infinite.
        lines.append(f"part = tl.where(gradient == 0, 0.0, {slope})")
        if id(closed.jaxpr.outvars[place]) in tiles:
            lines += [
                f"for e in range({size}):",
                f"    here = tl.sum(tl.sum(tl.where({at} == e, part, 0.0), 1), 0)",
                f"    totals += tl.where(entry == {first} + e, here, 0.0)",
            ]
        else:
            lines.append(
                f"totals += tl.where(entry == {first} + {at}, tl.sum(tl.sum(part, 1), 0), 0.0)"
            )
    names = "integers", "numbers", "totals", "gradient", *arguments
    head = _HEAD.format(name="add_reads", arguments=", ".join(names))
    return head + "".join(f"    {line}\n" for line in (*lines, "return totals"))


def _of_tiles(jaxpr):
    """Ids of the variables that are tiles; gradient, logits and positions are, b and h are not."""
    gradient, logits, _, _, *positions = jaxpr.invars
    found = {*map(id, (gradient, logits, *positions))}
    for eqn in jaxpr.eqns:
        if any(id(atom) in found for atom in eqn.invars):
            found.update(map(id, eqn.outvars))
    return found


# A read of a table: a primitive that `_Writer` turns into `tl.load`.
_load_p = Primitive("load_of_a_table")
_load_p.def_abstract_eval(lambda at, **options: jax.core.ShapedArray(at.shape, options["dtype"]))


def _read(program: Program) -> Callable[[int, jax.Array], jax.Array]:
    def lookup(number, at):
        return _load_p.bind(at, number=number, dtype=np.dtype(program.tables[number].dtype))

    return lookup


class _Writer:
    """Writes the operations of a traced function as lines."""

    def __init__(self, places: Sequence[Any]):
        self.lines: list[str] = []
        self._places = places

    def write(self, jaxpr: Any, values: Sequence[str]) -> list[str]:
        """Writes the lines of a jaxpr; returns the names of its results."""
        names = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

        def name_of(atom):
            return (
                _literal(np.asarray(atom.val, atom.aval.dtype))
                if hasattr(atom, "val")
                else names[atom]
            )

        for eqn in jaxpr.eqns:
            read = [name_of(atom) for atom in eqn.invars]
            primitive = eqn.primitive.name
            if primitive in _CALLS:
                inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                consts = [_literal(c) for c in getattr(inner, "consts", ())]
                results = self.write(getattr(inner, "jaxpr", inner), [*consts, *read])
                names.update(zip(eqn.outvars, results, strict=True))
                continue
            (out,) = eqn.outvars
            is_same = primitive in _SAME or (primitive == "reduce_sum" and not eqn.params["axes"])
            text = read[0] if is_same else self._expression(eqn, read)
            if out.aval.dtype in (jnp.bfloat16, jnp.float16) and not is_same:
                text = f"({text}).to(tl.{out.aval.dtype.name}).to(tl.float32)"
            names[out] = f"v{len(self.lines)}"
            self.lines.append(f"{names[out]} = {text}")
        return [name_of(atom) for atom in jaxpr.outvars]

    def _expression(self, eqn, read):
        primitive, params = eqn.primitive.name, eqn.params
        of = eqn.outvars[0].aval.dtype
        if primitive in _EXPRESSIONS:
            return _EXPRESSIONS[primitive].format(*read, type=_type(of))
        if primitive == "load_of_a_table":
            if params["dtype"].itemsize > 4:
                raise Unsupported(f"reads an array of {params['dtype']}")
            is_number, offset = self._places[params["number"]]
            text = f"tl.load({'numbers' if is_number else 'integers'} + {offset} + {read[0]})"
            if params["dtype"] == np.uint32:
                return f"{text}.to(tl.uint32, bitcast=True)"
            return f"{text}.to({_type(params['dtype'])})"
        if primitive == "convert_element_type":
            return f"({read[0]} != 0)" if of == jnp.bool_ else f"{read[0]}.to({_type(of)})"
        if primitive == "div":
            return f"{read[0]} {'//' if jnp.issubdtype(of, jnp.integer) else '/'} {read[1]}"
        if primitive == "not":
            return f"{read[0]} == 0" if of == jnp.bool_ else f"~{read[0]}"
        if primitive == "select_n":
            which, first, *others = read
            if eqn.invars[0].aval.dtype == jnp.bool_:
                return f"tl.where({which}, {others[0]}, {first})"
            text = first
            for number, case in enumerate(others, 1):
                text = f"tl.where({which} == {number}, {case}, {text})"
            return text
        if primitive == "integer_pow":
            return _power(read[0], params["y"]) if params["y"] else f"tl.full([], 1, {_type(of)})"
        if primitive in ("shift_right_logical", "shift_right_arithmetic"):
            is_logical = primitive == "shift_right_logical"
            if is_logical == jnp.issubdtype(of, jnp.unsignedinteger):
                return f"{read[0]} >> {read[1]}"
            other = {"int32": "tl.uint32", "uint32": "tl.int32"}.get(of.name)
            if other:
                shifted = f"({read[0]}.to({other}, bitcast=True) >> {read[1]}.to({other}))"
                return f"{shifted}.to({_type(of)}, bitcast=True)"
        raise Unsupported(f"calls {primitive!r}, which these kernels do not have")


def _type(dtype):
    """The name of a dtype in the Triton language.

    Floating numbers of 16 bits are float32, rounded after each operation: Triton has no functions
    of 16 bits.
    """
    if dtype in (jnp.bfloat16, jnp.float16):
        return "tl.float32"
    if dtype.name not in NAMES:
        raise Unsupported(f"computes in {dtype}")
    return NAMES[dtype.name]


def _power(x, exponent):
    product = " * ".join([x] * abs(exponent))
    return product if exponent > 0 else f"1 / ({product})"


def _literal(value):
    """A number with its type: plain numbers of Python would change the types of results."""
    array = np.asarray(value)
    if array.size != 1:
        raise Unsupported(f"computes with a constant of shape {array.shape}")
    number = array.reshape(()).item()
    if array.dtype.kind in "fV":
        number = float(number)
        text = repr(number) if np.isfinite(number) else f'float("{number}")'
    else:
        text = str(int(number))
    return f"tl.full([], {text}, {_type(array.dtype)})"
