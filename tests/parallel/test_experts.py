"""Expert parallelism: equal to one device, and what is moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effattn import parallel
from effattn.cores.experts import Kernels, route
from effattn.nn import Experts, MixtureOfExperts, TransformerConfig, TransformerLM, expert_specs
from effattn.testing.functions import assert_close
from effattn.testing.subjects import filled_at_random as filled
from tests.laws.sharding import collectives
from tests.parallel.test_heads import moved

pytestmark = pytest.mark.devices

BATCH, TOKENS, FEATURES, HIDDEN, EXPERTS = 8, 16, 12, 8, 16
RNG = np.random.default_rng(0)
X, COTANGENT = (
    jnp.asarray(RNG.normal(size=(BATCH, TOKENS, FEATURES)), jnp.float32) for _ in range(2)
)
LENGTHS = jnp.asarray([16, 3, 8, 0, 16, 16, 5, 16], jnp.int32)
OF_ROWS = P(("data", "expert"))


def layer(factor=None, **options):
    given = {"experts_per_token": 3, "capacity_factor": factor, "activation": "silu", **options}
    return filled(lambda: MixtureOfExperts(FEATURES, HIDDEN, EXPERTS, **given, rngs=nnx.Rngs(0)))


def loss(module, x, lengths, cotangent):
    """A loss that depends on the outputs and on the auxiliary losses, and these."""
    y, stats = module.with_routing(x, lengths=lengths)
    auxiliary = stats.load_balancing_loss + stats.router_z_loss
    return (y * cotangent).sum(), auxiliary, (y, stats)


@functools.partial(jax.jit, static_argnames="parts")
def alone(module, *arrays, parts):
    """Loss, output, statistics and gradients on one device; losses are means over the parts."""

    def total(module, x, *others):
        each = [
            loss(module, *some)
            for some in zip(*(jnp.split(array, parts) for array in (x, *others)), strict=True)
        ]
        sums, auxiliary, results = zip(*each, strict=True)
        y, stats = zip(*results, strict=True)
        stats = jax.tree.map(lambda *parts: sum(parts) / len(parts), *stats)
        return sum(sums) + sum(auxiliary) / parts, (jnp.concatenate(y), stats)

    return jax.value_and_grad(total, (0, 1), has_aux=True)(module, *arrays)


def divided(mesh):
    """`alone` on the devices of a mesh, which divide rows and experts."""

    def total(module, *arrays):
        of_rows, auxiliary, (y, stats) = loss(module, *arrays)
        stats = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), stats)
        of_rows = jax.lax.psum(of_rows, ("data", "expert"))
        return of_rows + jax.lax.pmean(auxiliary, "data"), (y, stats)

    def run(module, *arrays):
        specs = expert_specs(module, mesh)
        return jax.shard_map(
            jax.value_and_grad(total, (0, 1), has_aux=True),
            mesh=mesh,
            in_specs=(specs, OF_ROWS, OF_ROWS, OF_ROWS),
            out_specs=((P(), (OF_ROWS, P())), (specs, OF_ROWS)),
        )(module, *arrays)

    return jax.jit(run)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("factor", [None, 0.8])
def test_several_devices_give_what_one_gives(factor, devices):
    """Also the gradients of shared experts and of the router, with padding and dropped tokens."""
    mesh = parallel.make_mesh(data=-1, expert=devices)
    module = layer(factor, num_shared_experts=1, gated=True)
    arrays = X, LENGTHS, COTANGENT
    (found, results), gradients = divided(mesh)(module, *arrays)
    (value, expected), of_one = alone(module, *arrays, parts=8 // devices)
    assert_close((found, results), (value, expected), 1e-5)
    assert_close(gradients, of_one, 1e-4)
    assert (float(expected[1].dropped) > 0) == (factor is not None)


@pytest.mark.parametrize("devices", [2, 8])
def test_tokens_travel_by_two_exchanges_of_slots(devices):
    """With a capacity, a device has c k slots for each of its tokens."""
    mesh = parallel.make_mesh(expert=devices, devices=jax.devices()[:devices])
    program = compiled(layer(1.0), mesh)
    slots = 3 * BATCH * TOKENS // devices
    assert moved(program) == {"all-to-all": 2 * slots * FEATURES}
    assert collectives(program) == ["all-to-all"] * 2


@pytest.mark.parametrize("devices", [2, 8])
def test_without_a_capacity_all_tokens_travel(devices):
    mesh = parallel.make_mesh(expert=devices, devices=jax.devices()[:devices])
    program = compiled(layer(), mesh)
    tokens = BATCH * TOKENS
    assert moved(program) == {"all-gather": tokens * (FEATURES + 3)}  # with their weights
    assert set(collectives(program)) == {"all-gather", "reduce-scatter"}
    assert collectives(program).count("reduce-scatter") == 1


def compiled(module, mesh):
    specs = expert_specs(module, mesh)
    run = jax.shard_map(
        lambda module, x: module(x), mesh=mesh, in_specs=(specs, OF_ROWS), out_specs=OF_ROWS
    )
    x = jax.device_put(X, NamedSharding(mesh, OF_ROWS))
    module = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), module, specs
    )
    return jax.jit(run).lower(module, x).compile()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("factor", [None, 0.8])
def test_devices_that_divide_the_batch_share_gradients_alone(factor, axis_type):
    """Under `jax.jit` with sharded rows: each device sorts its own tokens."""
    mesh = parallel.make_mesh(data=8, axis_type=axis_type)
    module = layer(factor)

    @jax.jit
    def run(module, x, cotangent):
        y, pull_back = jax.vjp(lambda module, x: module(x), module, x)
        return y, pull_back(cotangent)

    expected = run(module, X, COTANGENT)
    arrays = jax.device_put((X, COTANGENT), NamedSharding(mesh, P("data")))
    there = jax.device_put(module, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        program = run.lower(there, *arrays).compile()
        assert_close(program(there, *arrays), expected, 1e-5)
    assert set(collectives(program)) == {"all-reduce"}


def test_a_model_trains_with_its_experts_on_several_devices():
    config = TransformerConfig(
        vocab_size=7,
        num_layers=2,
        features=16,
        num_heads=2,
        hidden_features=8,
        experts=(None, Experts(8, num_shared_experts=1)),
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(RNG.integers(0, 7, (8, 6)))
    mesh = parallel.make_mesh(expert=8)
    specs = expert_specs(model, mesh)
    assert sum(spec == P("expert") for spec in jax.tree.leaves(specs)) == 3

    def loss(model, tokens, mean=lambda x: x):
        logits, (stats,) = model.with_routing(tokens)
        nats = -jax.nn.log_softmax(logits[:, :-1])
        nats = jnp.take_along_axis(nats, tokens[:, 1:, None], -1).mean()
        return mean(nats) + 0.01 * stats.load_balancing_loss + 0.001 * stats.router_z_loss

    on_devices = functools.partial(loss, mean=lambda x: jax.lax.pmean(x, "expert"))
    run = jax.shard_map(
        jax.value_and_grad(on_devices),
        mesh=mesh,
        in_specs=(specs, P("expert")),
        out_specs=(P(), specs),
    )
    expected = jax.jit(jax.value_and_grad(loss))(model, tokens)
    assert_close(jax.jit(run)(model, tokens), expected, 1e-4)


def test_experts_that_the_devices_do_not_divide_are_one_sentence():
    mesh = parallel.make_mesh(expert=8)
    module = MixtureOfExperts(8, 8, 12, rngs=nnx.Rngs(0))
    message = "num_experts must be a multiple of the 8 devices of the mesh axis 'expert', got 12"
    with pytest.raises(ValueError, match=message):
        expert_specs(module, mesh)
    with pytest.raises(ValueError, match="mesh must have an axis 'expert', got the axes 'rows'"):
        expert_specs(module, jax.make_mesh((8,), ("rows",)))


def test_kernels_of_other_experts_are_refused():
    module = layer()
    kernels = Kernels(None, module.up_kernels[...], module.down_kernels[...])

    def call(x):
        routing = route(jnp.zeros((*x.shape[:2], EXPERTS)), 2)
        return parallel.exchange_tokens(x, routing, kernels, jax.nn.silu, axis_name="expert")[0]

    mesh = parallel.make_mesh(data=4, expert=2)
    run = jax.shard_map(call, mesh=mesh, in_specs=OF_ROWS, out_specs=OF_ROWS)
    with pytest.raises(ValueError, match="those of 16 experts / 2 devices .* kernels of 16 exp"):
        jax.eval_shape(run, X)
