"""Eight devices agree with one device, and communicate only shared gradients.

`shard_map` is tested together with remat and scan, the other ways to call from a larger program.
"""

import functools

import jax
import numpy as np
import pytest

from effattn.testing import functions
from tests.laws.battery import ALSO_OF_CORES, CALLED
from tests.laws.sharding import collectives, draw_shared, mesh, shard, shared_program, specs_of

pytestmark = pytest.mark.devices


@pytest.mark.parametrize("mechanism", CALLED, ids=str)
def test_only_the_gradients_of_what_is_shared_are_summed(mechanism):
    """All query heads share one key head, and all examples share biases, sinks and slopes.

    The bfloat16 case of agreement with the naive form runs this program and checks its numbers.
    """
    found = collectives(shared_program(mechanism))
    arrays, *_ = draw_shared(mechanism, 0)
    shared = arrays.keys() - {"query"}
    assert set(found) <= {"all-reduce"}, found
    # Attend, then combine: the gradients of arguments of both parts may be summed for each part.
    assert len(found) <= 2 * len(shared), (found, shared)


@pytest.mark.parametrize("mechanism", CALLED, ids=str)
def test_batch_and_heads_need_no_collective(mechanism):
    """No collective runs forward or backward, and the results are those of one device.

    The test also serves law 4: the sharded call has tiles of the default size, and the call on one
    device has small and uneven tiles.

    If types carry the sharding, results and gradients must stay where queries and keys are. Inside
    the call the compiler places all arrays, as on meshes without such types.
    """
    chosen = functions.plain(mechanism)._replace(tuning=False)
    arrays, cotangents = functions.draw_plain(mechanism, 0), functions.plain_cotangents(mechanism)
    specs = {**specs_of(mechanism, arrays), **specs_of(mechanism, cotangents)}
    # The gradients of the other arguments are sums over all examples.
    names = mechanism.of_tokens

    def assert_placed(tree):
        for name, of_name in tree.items():
            for x in jax.tree.leaves(of_name):
                spec = tuple(specs[name]) + (None,) * (x.ndim - len(specs[name]))
                assert tuple(jax.typeof(x).sharding.spec) == spec, name

    @jax.jit
    def run(arrays, cotangents):
        def call(of_tokens):
            return functions.call(mechanism, chosen, {**arrays, **of_tokens}, {})

        results, pull_back = jax.vjp(call, {k: arrays[k] for k in names})
        (gradients,) = pull_back(cotangents)
        assert_placed(results)
        assert_placed(gradients)
        return results, gradients

    explicit = mesh(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(explicit):
        args = shard(explicit, arrays, **specs), shard(explicit, cotangents, **specs)
        compiled = run.lower(*args).compile()
        assert collectives(compiled) == []
        got = compiled(*args)
    results, gradients = functions.run(mechanism, arrays, cotangents)
    expected = results, {k: gradients[k] for k in names}
    functions.assert_close(got, expected, 10 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("mechanism", ALSO_OF_CORES, ids=str)
def test_shard_map_remat_and_scan(mechanism):
    """Each device scans over its examples, with calls that keep only the named residuals.

    Inside `shard_map` everything is local.
    """
    extent = functions.plain(mechanism)
    arrays, cotangents = functions.draw_plain(mechanism, 0), functions.plain_cotangents(mechanism)
    named = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    @functools.partial(jax.checkpoint, policy=named)
    def call(arrays):
        return functions.call(mechanism, extent, arrays, {})

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

    expected = functions.run(mechanism, arrays, cotangents)
    functions.assert_close(run(arrays, cotangents), expected, 10 * np.finfo(np.float32).eps)
