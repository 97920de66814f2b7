"""vmap over any argument changes no results and gradients; forward mode agrees with gradients."""

import functools
import itertools

import jax
import numpy as np
import pytest

from effattn.testing import functions
from effattn.testing.functions import SQUARE
from tests.laws.battery import (
    FIRST_OF_CORE,
    FIRST_OF_FAMILY,
    MECHANISMS,
    OF_CORES_IN_FLOAT32,
)
from tests.marks import slow_but_for

# On CPUs, XLA passes fused products to a library that ends the process if a product has eight axes.
UNFUSED = {"xla_cpu_experimental_ynn_fusion_type": ""}


@pytest.mark.parametrize("mechanism", OF_CORES_IN_FLOAT32, ids=str)
def test_vmap_over_any_argument(mechanism):
    """Three nested maps, each over a third of the arguments.

    Two thirds of the arguments are not batched in the innermost map. For one mechanism of each
    family, whose members share a core, all claimed arguments are mapped; for the others, query, key
    and value.
    """
    all_claimed = mechanism in FIRST_OF_FAMILY
    extent = functions.everything(mechanism) if all_claimed else functions.plain(mechanism)
    with jax.enable_x64(True):
        first, second = (
            functions.draw_arrays(mechanism, SQUARE, everything=True, seed=seed)
            if all_claimed
            else functions.draw_plain(mechanism, seed)
            for seed in (0, 1)
        )
        known = functions.neutral(mechanism, SQUARE, extent) if all_claimed else {}
        cotangents = functions.cotangents_of(mechanism, extent, first, known)
        names = sorted([*first, *known])
        # The halved values are shorter lengths, padding in place of a segment, and an empty mask.
        other = {**second, **{k: (x // 2).astype(x.dtype) for k, x in known.items()}}
        every = {
            k: jax.tree.map(lambda *rows: np.stack(rows), {**first, **known}[k], other[k])
            for k in names
        }

        def one(run, *values):
            given = dict(zip(names, values, strict=True))
            return run({k: given[k] for k in first}, {k: given[k] for k in known}, cotangents)

        program = functions.program(mechanism, extent)
        mapped = functools.partial(one, functions.traced_once(mechanism, extent))
        for part in range(3):
            axes = [0 if n % 3 == part else None for n in range(len(names))]
            mapped = jax.vmap(mapped, axes)
        mapped = jax.jit(mapped, compiler_options=UNFUSED)
        got = functions.to_numpy(mapped(*every.values()))
        for outer, middle, inner in itertools.product(range(2), repeat=3):
            rows = (inner, middle, outer)
            values = (
                jax.tree.map(lambda x, row=rows[n % 3]: x[row], every[k])
                for n, k in enumerate(names)
            )
            here = jax.tree.map(lambda x, at=(outer, middle, inner): x[at], got)
            alone = one(program, *values)
            functions.assert_close(here, alone, 1e-12 if all_claimed else 1e-5)


@pytest.mark.parametrize("mechanism", slow_but_for(FIRST_OF_CORE, MECHANISMS), ids=str)
def test_forward_mode_agrees_with_reverse_mode(mechanism):
    """Derivatives along a tangent, in float64: by `jax.jvp`, and by the gradients."""
    with jax.enable_x64(True):
        arrays, tangents = (
            functions.as_float64(functions.draw_plain(mechanism, seed)) for seed in (0, 1)
        )
        extent = functions.plain(mechanism)
        cotangents = functions.cotangents_of(mechanism, extent, arrays, {})
        call = functools.partial(functions.call, mechanism, extent, known={})

        @jax.jit
        def both(arrays, tangents):
            forward = jax.jvp(call, (arrays,), (tangents,))[1]
            gradients = jax.vjp(call, arrays)[1](cotangents)[0]
            return _product(forward, cotangents), _product(gradients, tangents)

        along, by_gradients = both(arrays, tangents)
        np.testing.assert_allclose(along, by_gradients, rtol=1e-9)


def _product(left, right):
    """Sum of the products of all entries of two trees."""
    return sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), left, right)))
