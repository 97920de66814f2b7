"""Law 9, second half: eight devices give what one does, and talk only of what they share."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.laws import battery
from tests.laws.battery import SQUARE

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def mesh():
    """4 parts of the batch by 2 of the heads."""
    return jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def shard(arrays, **specs):
    return {
        k: jax.device_put(x, NamedSharding(mesh(), specs.get(k, PartitionSpec())))
        for k, x in arrays.items()
    }


def collectives(compiled):
    return COLLECTIVE.findall(compiled.as_text())


BY_HEAD = PartitionSpec("batch", None, "heads")
BY_ROW = PartitionSpec("batch")


def results_and_gradients(mechanism, extent):
    def run(arrays, known, cotangents):
        results, pull_back = jax.vjp(lambda a: battery.call(mechanism, extent, a, known), arrays)
        return results, pull_back(cotangents)[0]

    return jax.jit(run)


def specs_of(arrays):
    specs = {"query": BY_HEAD, "key": BY_HEAD, "value": BY_HEAD}
    specs |= {"out": BY_HEAD, "lse": BY_HEAD, "state": PartitionSpec("batch", "heads")}
    return {k: specs[k] for k in arrays if k in specs}


def test_batch_and_heads_need_no_collective(mechanism):
    """Neither forward nor backward; and the numbers are those of one device."""
    extent = battery.plain(mechanism)
    arrays = battery.draw_plain(mechanism, 0)
    cotangents = battery.plain_cotangents(mechanism)
    expected = battery.run(mechanism, arrays, cotangents)
    args = (
        shard(arrays, **specs_of(arrays)),
        {},
        shard(cotangents, **specs_of(cotangents)),
    )
    lowered = results_and_gradients(mechanism, extent).lower(*args)
    compiled = lowered.compile(compiler_options=battery.QUICK)
    assert collectives(compiled) == []
    battery.assert_close(compiled(*args), expected, 10 * np.finfo(np.float32).eps)


def test_only_the_gradients_of_what_is_shared_are_summed(mechanism):
    """One key head for all query heads, and biases, sinks and slopes for all examples."""
    extent = battery.everything(mechanism)
    key_heads = 1 if mechanism.has("grouped") else SQUARE.key_heads
    sizes = SQUARE._replace(key_heads=key_heads)
    arrays = battery.cast(battery.draw_arrays(mechanism, sizes, everything=True), jnp.float32)
    known = battery.neutral(mechanism, sizes, extent)
    cotangents = battery.cotangents_of(mechanism, extent, arrays, known)
    of_arrays, of_results = specs_of(arrays), specs_of(cotangents)
    if key_heads == 1:
        of_arrays |= {"key": BY_ROW, "value": BY_ROW}
        of_results |= {"state": BY_ROW}
    of_arrays |= {"initial_state": BY_ROW, "bias": PartitionSpec("heads")}
    args = (
        shard(arrays, **of_arrays),
        shard(known, **dict.fromkeys(known, BY_ROW)),
        shard(cotangents, **of_results),
    )
    lowered = results_and_gradients(mechanism, extent).lower(*args)
    found = collectives(lowered.compile(compiler_options=battery.QUICK))
    shared = arrays.keys() - {"query"}
    assert set(found) <= {"all-reduce"}, found
    # Attend, then combine: what both parts share may be summed for each.
    assert len(found) <= 2 * len(shared), (found, shared)


def test_shard_map(mechanism):
    """Inside it everything is local, and what all devices share gets the sum of their gradients."""
    extent = battery.plain(mechanism)
    arrays = battery.draw_plain(mechanism, 0)
    cotangents = battery.plain_cotangents(mechanism)
    expected = battery.run(mechanism, arrays, cotangents)
    local = jax.shard_map(
        lambda a: battery.call(mechanism, extent, a, {}),
        mesh=mesh(),
        in_specs=(specs_of(arrays),),
        out_specs=specs_of(cotangents),
    )

    @functools.partial(jax.jit, compiler_options=battery.QUICK)
    def run(arrays, cotangents):
        results, pull_back = jax.vjp(local, arrays)
        return results, pull_back(cotangents)[0]

    battery.assert_close(run(arrays, cotangents), expected, 10 * np.finfo(np.float32).eps)


def test_explicit_mesh_axes(mechanism):
    """Where types carry the sharding, results and gradients are sharded as queries and keys are."""
    explicit = jax.make_mesh(
        (4, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    extent = battery.plain(mechanism)
    arrays = {k: battery.draw_plain(mechanism, 0)[k] for k in ("query", "key", "value")}
    spec = PartitionSpec("batch", None, "heads", None)

    def loss(arrays, out_spec):
        out = battery.call(mechanism, extent, arrays, {})["out"]
        assert jax.typeof(out).sharding.spec == out_spec
        return (out**2).sum()

    gradient_of = jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient_of(arrays, PartitionSpec(None, None, None, None))
    with jax.set_mesh(explicit):
        placed = {k: jax.device_put(x, NamedSharding(explicit, spec)) for k, x in arrays.items()}
        gradients = gradient_of(placed, spec)
    for name, gradient in gradients.items():
        assert gradient.sharding.spec == spec
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5)
