"""Compiles a program with kernels for TPUs on a machine without TPUs, by the package libtpu.

python -m tests.pallas.compile_tpu TOPOLOGY CASE

Prints the number of kernels in the compiled program. A process can load the compiler once.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

import effattn
from effattn.nn.alibi import Alibi

FLOAT = jnp.bfloat16


def heads(batch, length, of_query, of_key, size, dtype=FLOAT):
    return {
        name: ((batch, length, count, size), dtype)
        for name, count in (("query", of_query), ("key", of_key), ("value", of_key))
    }


def paged(query, pool, block_table):
    return effattn.paged_attention(
        query,
        pool,
        pool,
        block_table=block_table,
        lengths=jnp.full(len(query), 33),
        implementation="mosaic_tpu",
    )


ATTEND = functools.partial(
    effattn.dot_product_attention, is_causal=True, implementation="mosaic_tpu"
)
PADDED = functools.partial(ATTEND, score_mod=Alibi(8), key_value_seq_lengths=np.array([2000, 77]))
GATED = functools.partial(effattn.gated_linear_attention, implementation="mosaic_tpu")
DELTA = functools.partial(effattn.delta_rule_attention, implementation="mosaic_tpu")


def gated(heads, size, decays, dtype):
    """A gated recurrence with one key head, and decays with these axes after the head."""
    arrays = heads_of(heads, size, dtype)
    return GATED, {**arrays, "log_decay": ((2, 1000, 1, *decays), dtype)}


def heads_of(count, size, dtype):
    return heads(2, 1000, count, 1, size, dtype)


# By name, a function and the shapes and dtypes of its arguments; those with floats have gradients.
CASES = {
    "size 64": (PADDED, heads(2, 2000, 8, 2, 64)),
    "size 256": (PADDED, heads(2, 2000, 8, 2, 256)),
    "many packed rows": (
        ATTEND,
        {**heads(4096, 256, 1, 1, 64), "segment_ids": ((4096, 256), jnp.int32)},
    ),
    "many tables": (
        paged,
        {
            "query": ((8192, 1, 2, 64), FLOAT),
            "pool": ((64, 16, 1, 64), FLOAT),
            "block_table": ((8192, 4), jnp.int32),
        },
    ),
    "decay of the token": gated(4, 128, (), FLOAT),
    "decays of features": gated(4, 128, (128,), FLOAT),
    "as many heads as fit": gated(16, 256, (), jnp.float32),
    "as many features as fit": gated(16, 256, (256,), jnp.float32),
    "delta rule": (DELTA, {**heads_of(1, 128, FLOAT), "beta": ((2, 1000, 1), FLOAT)}),
    "the largest delta rule": (
        DELTA,
        {
            **heads_of(16, 256, jnp.float32),
            "beta": ((2, 1000, 1), jnp.float32),
            "log_decay": ((2, 1000, 1, 256), jnp.float32),
        },
    ),
}


def main(topology: str, name: str) -> None:
    function, arguments = CASES[name]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, (shape, dtype) in arguments.items()
    }
    floats = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, np.floating)]

    def run(arrays):
        if name == "many tables":  # has no gradient
            return function(**arrays)

        def total(of_floats):
            return function(**{**arrays, **of_floats}).astype(jnp.float32).sum()

        return jax.grad(total)({name: arrays[name] for name in floats})

    kind = AbstractDevice(device.device_kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(run).trace(arrays).lower(lowering_platforms=("tpu",))
    print(lowered.compile().as_text().count('custom_call_target="tpu_custom_call"'))


if __name__ == "__main__":
    main(*sys.argv[1:])
