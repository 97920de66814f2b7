"""Ring attention: equal to one device, and what is moved and held."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn import parallel
from effattn.testing.functions import assert_close
from tests.marks import slow_but_for
from tests.parallel.test_heads import moved

pytestmark = pytest.mark.devices

OF_TOKENS = P("data", "sequence")
IDS = np.array([[1] * 30 + [2] * 50 + [3] * 10 + [0] * 6, [1] * 5 + [2] * 91])

CALLS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "local_window_size": 20},
    "window of neighbours": {"local_window_size": (7, 11)},
    "one-sided": {"local_window_size": (9, 0)},
    "long window": {"local_window_size": (50, 30)},
    "window of all": {"local_window_size": 200},
    "soft cap": {"is_causal": True, "logits_soft_cap": 2.0, "scale": 0.5},
}


def draw(key_heads=4, dtype=jnp.float32, tokens=96):
    rng = np.random.default_rng(0)
    shapes = [(2, tokens, heads, 16) for heads in (4, key_heads, key_heads, 4)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def sharded(devices, ids=None, **options):
    mesh = parallel.make_mesh(data=2, sequence=-1, devices=jax.devices()[: 2 * devices])

    def attend(query, key, value, cotangent, *ids):
        given = {**options, "segment_ids": ids[0] if ids else None}
        call = functools.partial(parallel.ring_attention, axis_name="sequence", **given)
        out, pull_back = jax.vjp(call, query, key, value)
        return out, pull_back(cotangent)

    specs = (OF_TOKENS,) * (4 if ids is None else 5)
    run = jax.shard_map(
        attend, mesh=mesh, in_specs=specs, out_specs=(OF_TOKENS,) + ((OF_TOKENS,) * 3,)
    )
    return jax.jit(run), NamedSharding(mesh, OF_TOKENS)


def alone(arrays, ids=None, **options):
    query, key, value, cotangent = arrays
    call = functools.partial(effattn.dot_product_attention, segment_ids=ids, **options)
    out, pull_back = jax.vjp(call, query, key, value)
    return out, pull_back(cotangent)


@pytest.mark.parametrize(
    "name", slow_but_for(["bidirectional", "causal window", "long window"], CALLS)
)
@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_several_devices_give_what_one_gives(name, devices):
    arrays = draw()
    run, sharding = sharded(devices, **CALLS[name])
    placed = [jax.device_put(x, sharding) for x in arrays]
    assert_close(run(*placed), alone(arrays, **CALLS[name]), 1e-5)


@pytest.mark.parametrize(
    "name",
    slow_but_for(["causal"], ["bidirectional", "causal", "window of neighbours", "long window"]),
)
def test_documents_that_cross_devices_and_shared_key_heads(name):
    arrays, ids = draw(key_heads=2), jnp.asarray(IDS)
    run, sharding = sharded(4, ids=ids, **CALLS[name])
    placed = [jax.device_put(x, sharding) for x in (*arrays, ids)]
    assert_close(run(*placed), alone(arrays, ids, **CALLS[name]), 1e-5)


@pytest.mark.parametrize(
    "documents", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["documents", "one"]
)
@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_zigzag_order(documents, devices):
    """Each device has an early and a late chunk; key heads are shared, documents cross chunks."""
    arrays, ids = draw(key_heads=2), jnp.asarray(IDS) if documents else None
    order = parallel.zigzag_order(96, devices)
    run, sharding = sharded(devices, ids=ids, is_causal=True, order="zigzag")
    given = [x[:, order] for x in (*arrays, ids) if x is not None]
    found = run(*[jax.device_put(x, sharding) for x in given])
    back = jax.tree.map(lambda x: x[:, np.argsort(order)], found)
    assert_close(back, alone(arrays, ids, is_causal=True), 1e-5)


def test_zigzag_order_balances_the_pairs():
    """Tiles with a pair that attends, on the busiest device, for 8 tiles in each of 8 parts."""
    devices, tiles = 8, 8
    orders = {
        "contiguous": np.arange(devices * tiles),
        "zigzag": parallel.zigzag_order(devices * tiles, devices),
    }
    busiest = {}
    for name, order in orders.items():
        attends = order[:, None] >= order
        of_devices = attends.reshape(devices, tiles, devices, tiles).sum((1, 3))
        busiest[name] = of_devices.sum(1).max()
        if name == "zigzag":  # half of the pairs at every hop
            assert (of_devices[~np.eye(devices, dtype=bool)] == tiles**2 / 2).all()
    own = tiles * (tiles + 1) // 2
    assert busiest == {
        "contiguous": (devices - 1) * tiles**2 + own,
        "zigzag": (devices - 1) * tiles**2 // 2 + own,
    }


def test_the_backward_pass_does_not_repeat_the_forward_pass():
    """Backward, a part takes five products of each pair; forward, two."""
    both, _ = sharded(4, implementation="xla")
    call = functools.partial(parallel.ring_attention, axis_name="sequence", implementation="xla")
    mesh = parallel.make_mesh(data=2, sequence=4)
    forward = jax.shard_map(call, mesh=mesh, in_specs=(OF_TOKENS,) * 3, out_specs=OF_TOKENS)
    shape = jax.ShapeDtypeStruct((2, 96, 4, 16), jnp.float32)

    def products(function, arrays):
        return str(jax.make_jaxpr(function)(*[shape] * arrays)).count("dot_general")

    assert products(both, 4) == products(forward, 3) * (2 + 5) / 2 > 0


def test_16_bits():
    """The parts are summed in float32: the error is that of one device."""
    exact = alone(draw(), is_causal=True)
    arrays = draw(dtype=jnp.bfloat16)
    run, sharding = sharded(4, is_causal=True)
    found = run(*[jax.device_put(x, sharding) for x in arrays])
    one = alone(arrays, is_causal=True)
    for ours, theirs, right in zip(*map(jax.tree.leaves, (found, one, exact)), strict=True):
        assert ours.dtype == jnp.bfloat16
        ours, theirs = (jnp.linalg.norm(x.astype(jnp.float32) - right) for x in (ours, theirs))
        assert ours <= 1.5 * theirs


def compiled(devices, tokens, size=16, **options):
    run, sharding = sharded(devices, **options)
    shape = jax.ShapeDtypeStruct((2, tokens, 2, size), jnp.float32, sharding=sharding)
    return run.lower(*[shape] * 4).compile()


def test_memory_of_a_device_falls_with_the_number_of_devices():
    """Forward and backward take thirteen arrays of the size of a device's part of the keys."""
    for devices in (2, 4):
        program = compiled(devices, 32_768, 128, is_causal=True)
        part = 32_768 // devices * 2 * 128 * 4
        assert program.memory_analysis().temp_size_in_bytes <= 13 * part


def test_within_a_window_traffic_does_not_grow_with_the_sequence():
    first, second = (
        moved(compiled(4, tokens, is_causal=True, local_window_size=64)) for tokens in (512, 4096)
    )
    assert first == second
    # Keys and values of 64 tokens forward, and their gradients backward.
    assert first == {"collective-permute": 4 * 64 * 2 * 16}


def test_a_hop_moves_keys_and_values_and_backward_their_gradients_too():
    tokens, devices = 1024, 4
    part = tokens // devices * 2 * 16
    # In the loops: 2 arrays forward, 4 backward; after the loop, 2 go home.
    assert moved(compiled(devices, tokens)) == {"collective-permute": (2 + 4 + 2) * part}


def test_residuals_and_their_gradients():
    arrays = draw()
    mesh = parallel.make_mesh(data=-1, sequence=4)

    def loss(out, lse):
        return (out**2).sum() + jnp.sin(lse).sum()

    def there(*arrays):
        call = functools.partial(
            parallel.ring_attention, axis_name="sequence", is_causal=True, return_residual=True
        )
        return jax.lax.psum(loss(*call(*arrays)), ("data", "sequence"))

    run = jax.shard_map(there, mesh=mesh, in_specs=(OF_TOKENS,) * 3, out_specs=P())

    def here(*arrays):
        return loss(*effattn.dot_product_attention(*arrays, is_causal=True, return_residual=True))

    found = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*arrays[:3])
    assert_close(found, jax.value_and_grad(here, (0, 1, 2))(*arrays[:3]), 1e-4)


def test_other_options_are_one_sentence():
    arrays = draw()
    for options, message in (
        ({"dropout_rate": 0.1}, "takes the options scale, .*, got 'dropout_rate'"),
        ({"scale": jnp.float32(1)}, "without arrays, got 'scale'"),
        ({"order": "ring"}, 'order must be "contiguous" or "zigzag", got \'ring\''),
        ({"local_window_size": 1.5}, "local_window_size must be an int or a pair .*, got 1.5"),
        ({"order": "zigzag"}, "balances causal calls without a window, got is_causal=False"),
    ):
        run, _ = sharded(4, **options)
        with pytest.raises(ValueError, match=message):
            run(*arrays)
    with pytest.raises(ValueError, match="a multiple of 8, two chunks for each of the 4 devices"):
        parallel.zigzag_order(12, 4)
    with pytest.raises(ValueError, match="devices must be an int, 1 or more, got 0"):
        parallel.zigzag_order(12, 0)
    with pytest.raises(ValueError, match="equally many tokens on a device, got 96, 95 and 95"):
        parallel.ring_attention(arrays[0], *(x[:, 1:] for x in arrays[1:3]), axis_name="sequence")
