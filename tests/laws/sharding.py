"""Placement of arrays on several devices, and a program of all claimed options on eight devices."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from effattn.testing import functions
from effattn.testing.functions import SQUARE

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)
BY_HEAD = PartitionSpec("batch", None, "heads")
BY_ROW = PartitionSpec("batch")


def mesh(axis_type=jax.sharding.AxisType.Auto, rows=4):
    """A mesh of `rows` parts of the batch by 2 parts of the heads."""
    devices = jax.devices()[: rows * 2]
    return jax.make_mesh((rows, 2), ("batch", "heads"), (axis_type,) * 2, devices=devices)


def shard(mesh, arrays, **specs):
    return {
        k: jax.device_put(x, NamedSharding(mesh, specs.get(k, PartitionSpec())))
        for k, x in arrays.items()
    }


def collectives(compiled):
    return COLLECTIVE.findall(compiled.as_text())


def specs_of(mechanism, arrays):
    specs = dict.fromkeys(mechanism.of_tokens, BY_HEAD)
    specs |= {"out": BY_HEAD, "lse": BY_HEAD, "state": PartitionSpec("batch", "heads")}
    specs |= dict.fromkeys(mechanism.per_head, PartitionSpec("heads"))
    return {k: specs.get(k, PartitionSpec()) for k in arrays}


def shared_sizes(mechanism):
    """Sizes with one key head for all query heads, if the mechanism can share key heads."""
    key_heads = 1 if mechanism.has("grouped") else SQUARE.key_heads
    return SQUARE._replace(key_heads=key_heads)


def draw_shared(mechanism, seed):
    """Arrays in bfloat16, arguments without gradient, and cotangents, all of `shared_sizes`."""
    sizes, extent = shared_sizes(mechanism), functions.everything(mechanism)
    arrays = functions.draw_arrays(mechanism, sizes, everything=True, seed=seed)
    arrays = functions.cast(mechanism, arrays, jnp.bfloat16)
    known = functions.neutral(mechanism, sizes, extent)
    return arrays, known, functions.cotangents_of(mechanism, extent, arrays, known, seed)


def _placed(mechanism, arrays, known, cotangents):
    """Places arrays on 8 devices; shared arrays are copied to all devices that share them."""
    of_arrays, of_results = specs_of(mechanism, arrays), specs_of(mechanism, cotangents)
    if arrays["key"].shape[-2] == 1:
        of_arrays |= dict.fromkeys(mechanism.of_tokens[1:], BY_ROW)
        of_arrays |= dict.fromkeys(mechanism.per_head, PartitionSpec())
        of_results |= {"state": BY_ROW}
    of_arrays |= {"initial_state": BY_ROW, "bias": PartitionSpec("heads")}
    everywhere = mesh()
    return (
        shard(everywhere, arrays, **of_arrays),
        shard(everywhere, known, **dict.fromkeys(known, BY_ROW)),
        shard(everywhere, cotangents, **of_results),
    )


@functools.cache
def shared_program(mechanism):
    """The compiled program for the arrays of `draw_shared`."""
    run = functions.program(mechanism, functions.everything(mechanism))
    return run.lower(*_placed(mechanism, *draw_shared(mechanism, 0))).compile()


def run_shared(mechanism, arrays, known, cotangents):
    """Results and gradients of `shared_program`, as NumPy arrays."""
    placed = _placed(mechanism, arrays, known, cotangents)
    return functions.to_numpy(shared_program(mechanism)(*placed))
