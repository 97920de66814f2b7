"""Random calls of the functions of query, key and value, against their naive forms in float64."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.testing import functions
from tests.random_programs.errors import compare, jittered, largest_difference
from tests.random_programs.programs import MAPPED, Program, draw_program
from tests.random_programs.values import draw_case, named, with_nan


def draw(rng: np.random.Generator, only: re.Pattern[str]) -> "Runner | None":
    """A program and its functions, or None if the drawn mechanism does not match `only`."""
    program = draw_program(rng, only)
    return None if program is None else Runner(program)


def as_given(program: Program, known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the container of the call."""

    def convert(name, x):
        if name not in program.integers or program.container == "numpy":
            return x
        return jnp.asarray(x) if program.container == "jax" else x.tolist()

    return {
        name: tuple(convert(name, one) for one in x) if isinstance(x, tuple) else convert(name, x)
        for name, x in known.items()
    }


def run(program: Program, arrays, constants, known, cotangents) -> Any:
    """Results and gradients of the arrays."""

    def call(arrays):
        given = {**known, "implementation": program.implementation}
        return functions.call(program.subject, program.extent, {**arrays, **constants}, given)

    if program.transformation == "forward":
        # A `score_mod` reads `slope` at traced indices, which NumPy arrays do not support.
        arrays = {name: jnp.asarray(x) if name == "slope" else x for name, x in arrays.items()}
        return call(arrays), {}
    if program.transformation == "remat":
        call = jax.checkpoint(call)
    results, pull_back = jax.vjp(call, arrays)
    return results, pull_back(cotangents)[0]


class Runner:
    """A program and its compiled functions."""

    def __init__(self, program: Program):
        self.program = program
        self.jitted = jax.jit(functools.partial(run, program))

    def __str__(self) -> str:
        return str(self.program)

    def may_refuse(self) -> bool:
        """Returns whether the program names an implementation that may refuse the call."""
        return self.program.implementation == "llvm"

    def failures(self, rng: np.random.Generator) -> Iterator[str]:
        """Yields the failures of one case."""
        program = self.program
        with jax.enable_x64(program.x64):
            values = draw_case(program, rng)
            given = values
            # If calls share an array, the padding of one call may be a valid token of another.
            alone = not program.mapped or {*program.subject.of_tokens} <= program.mapped.keys()
            if program.dirty and alone:
                given = [(with_nan(program, *one[:2]), *one[1:]) for one in values]
            found = [functions.to_numpy(result) for result in self.call(given)]
        for results, one in zip(found, values, strict=True):
            yield from differences(program, results, one, rng)

    def call(self, values: list[tuple[Any, Any, Any]]) -> list[Any]:
        """Results and gradients for each call: one call, or all mapped calls."""
        program = self.program
        if program.mapped:
            return self.mapped(values)
        ((arrays, known, cotangents),) = values
        constants = {name: x for name, x in arrays.items() if name in program.constant}
        arrays = {name: x for name, x in arrays.items() if name not in program.constant}
        given = as_given(program, known)
        if program.transformation in ("eager", "forward"):
            return [run(program, arrays, constants, given, cotangents)]
        if program.transformation == "constants":
            of_arrays = jax.jit(lambda *args: run(program, *args[:-1], given, args[-1]))
            return [of_arrays(arrays, constants, cotangents)]
        return [self.jitted(arrays, constants, given, cotangents)]

    def mapped(self, values):
        """vmap or scan over some of the arguments."""
        axes = self.program.mapped
        stacked = {
            name: jax.tree.map(
                lambda *xs, axis=axis: np.moveaxis(np.stack(xs), 0, axis),
                *(named(one)[name] for one in values),
            )
            for name, axis in axes.items()
            if name in named(values[0])
        }
        shared = {name: x for name, x in named(values[0]).items() if name not in stacked}
        results = self.over(stacked, shared)
        return [jax.tree.map(lambda x, j=j: x[j], results) for j in range(len(values))]

    @functools.cached_property
    def over(self):
        program = self.program

        def one(mapped, shared):
            given = {**mapped, **shared}
            cotangents = given.pop("cotangents")
            known = {name: given.pop(name) for name in program.given if name in given}
            return run(program, given, {}, known, cotangents)

        def vmap(stacked, shared):
            axes = {name: program.mapped[name] for name in stacked}
            return jax.vmap(one, in_axes=(axes, None), axis_size=MAPPED)(stacked, shared)

        def scan(stacked, shared):
            def step(carry, mapped):
                return carry, one(mapped, shared)

            return jax.lax.scan(step, None, stacked, length=MAPPED)[1]

        return jax.jit(vmap if program.transformation == "vmap" else scan)


# Comparison with the naive form


def amplification(mechanism: str, options: Mapping[str, Any]) -> float:
    """Factor by which rounding of the sums outweighs rounding of the arguments.

    ReLU features near zero make a small normaliser. Gradients are then differences of numbers as
    large as the inverse of the normaliser, and a change of an argument changes both numbers alike.
    """
    has_relu = mechanism == "cosformer" or options.get("feature_map") == "relu"
    return 8.0 if has_relu else 1.0


def differences(program: Program, ours: Any, values: Any, rng: np.random.Generator):
    """Yields differences between our results and gradients and the naive form in float64."""
    refer = functools.partial(functions.run_naive, program.subject, program.sizes, program.extent)
    arrays, known, cotangents = values

    def in_float64(arrays):
        with jax.enable_x64(True):
            wide = functions.as_float64(arrays), known, functions.as_float64(cotangents)
            return like_ours(functions.to_numpy(refer(*wide)))

    def like_ours(of_naive):
        results, gradients = of_naive
        return {k: results[k] for k in ours[0]}, {k: gradients[k] for k in ours[1]}

    @functools.cache
    def likely():
        """Errors that no bug causes: those of the naive form, and those of rounded arguments."""
        with jax.enable_x64(jnp.float64 in (program.dtype, program.value_dtype)):
            errors = [like_ours(functions.to_numpy(refer(*values)))]
        for _ in range(3):
            errors.append(in_float64(jax.tree.map(functools.partial(jittered, rng), arrays)))
        return [jax.tree.map(largest_difference, error, true) for error in errors]

    true = in_float64(arrays)
    narrowest = max((program.dtype, program.value_dtype), key=lambda d: jnp.finfo(d).eps)
    eps = float(jnp.finfo(narrowest).eps)
    amplified = amplification(program.subject.name, program.subject.options)
    yield from compare(ours, true, likely, eps, program.subject.case.decays, amplified)
