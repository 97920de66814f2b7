"""Law 9, second half: eight devices give what one does, and talk only of what they share.

By `shard_map` together with remat and scan, the other ways to call from a larger program.
"""

import functools
import re

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.laws import battery
from tests.laws.battery import SQUARE

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def mesh(axis_type=jax.sharding.AxisType.Auto, rows=4):
    """4 parts of the batch, or as many as `rows`, by 2 of the heads."""
    devices = jax.devices()[: rows * 2]
    return jax.make_mesh((rows, 2), ("batch", "heads"), (axis_type,) * 2, devices=devices)


def shard(mesh, arrays, **specs):
    return {
        k: jax.device_put(x, NamedSharding(mesh, specs.get(k, PartitionSpec())))
        for k, x in arrays.items()
    }


def collectives(compiled):
    return COLLECTIVE.findall(compiled.as_text())


BY_HEAD = PartitionSpec("batch", None, "heads")
BY_ROW = PartitionSpec("batch")


def specs_of(mechanism, arrays):
    specs = dict.fromkeys(mechanism.of_tokens, BY_HEAD)
    specs |= {"out": BY_HEAD, "lse": BY_HEAD, "state": PartitionSpec("batch", "heads")}
    specs |= dict.fromkeys(mechanism.reference.per_head, PartitionSpec("heads"))
    return {k: specs.get(k, PartitionSpec()) for k in arrays}


def test_only_the_gradients_of_what_is_shared_are_summed(mechanism):
    """Nothing else is talked of, forward or backward; and the numbers are those of one device.

    Of law 4 too: here in tiles of the size that is chosen, there in small and uneven ones.
    """
    extent = battery.everything(mechanism)
    chosen = battery.program(mechanism, extent._replace(tuning=False))
    with jax.enable_x64(True):
        arrays = battery.draw_arrays(mechanism, SQUARE, everything=True)
        known = battery.neutral(mechanism, SQUARE, extent)
        cotangents = battery.cotangents_of(mechanism, extent, arrays, known)
        of_arrays = specs_of(mechanism, arrays) | {
            "initial_state": PartitionSpec("batch", "heads"),
            "bias": PartitionSpec("heads"),
        }
        args = (
            shard(mesh(), arrays, **of_arrays),
            shard(mesh(), known, **dict.fromkeys(known, BY_ROW)),
            shard(mesh(), cotangents, **specs_of(mechanism, cotangents)),
        )
        compiled = chosen.lower(*args).compile()
        got = compiled(*args)
        expected = battery.run_everything(mechanism, arrays, known, cotangents)
        battery.assert_close(got, expected, 1e-12)
    found = collectives(compiled)
    shared = arrays.keys() - {*mechanism.of_tokens, "initial_state"}
    assert set(found) <= {"all-reduce"}, found
    # Attend, then combine: what both parts share may be summed for each.
    assert len(found) <= 2 * len(shared), (found, shared)


def test_types_say_that_everything_stays_in_its_place(mechanism):
    """Where types carry the sharding, results and gradients stay where queries and keys are."""
    extent = battery.plain(mechanism)
    arrays, cotangents = battery.draw_plain(mechanism, 0), battery.plain_cotangents(mechanism)
    specs = {**specs_of(mechanism, arrays), **specs_of(mechanism, cotangents)}
    # The gradients of the others are sums over all examples.
    names = mechanism.of_tokens

    def run(arrays, cotangents):
        def call(of_tokens):
            return battery.call(mechanism, extent, {**arrays, **of_tokens}, {})

        results, pull_back = jax.vjp(call, {k: arrays[k] for k in names})
        return results, pull_back(cotangents)[0]

    explicit = mesh(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(explicit):
        args = shard(explicit, arrays, **specs), shard(explicit, cotangents, **specs)
        for tree in jax.eval_shape(run, *args):
            for name, of_name in tree.items():
                for x in jax.tree.leaves(of_name):
                    spec = tuple(specs[name]) + (None,) * (x.ndim - len(specs[name]))
                    assert tuple(x.sharding.spec) == spec, name


def test_shard_map_remat_and_scan(mechanism):
    """On each device, a scan over its examples of calls that keep only what has a name.

    Inside `shard_map` everything is local.
    """
    extent = battery.plain(mechanism)
    arrays, cotangents = battery.draw_plain(mechanism, 0), battery.plain_cotangents(mechanism)
    named = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    @functools.partial(jax.checkpoint, policy=named)
    def call(arrays):
        return battery.call(mechanism, extent, arrays, {})

    def local(arrays):
        examples = {k: arrays[k] for k in mechanism.of_tokens}

        def step(_, example):
            one = {**arrays, **jax.tree.map(lambda x: x[None], example)}
            return None, jax.tree.map(lambda x: x[0], call(one))

        return jax.lax.scan(step, None, examples)[1]

    @jax.jit
    def run(arrays, cotangents):
        specs = specs_of(mechanism, arrays), specs_of(mechanism, cotangents)
        mapped = jax.shard_map(local, mesh=mesh(rows=2), in_specs=specs[:1], out_specs=specs[1])
        results, pull_back = jax.vjp(mapped, arrays)
        return results, pull_back(cotangents)[0]

    expected = battery.run(mechanism, arrays, cotangents)
    battery.assert_close(run(arrays, cotangents), expected, 10 * np.finfo(np.float32).eps)
