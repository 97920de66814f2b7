"""Pipelines: equal to one device, for both schedules; what a device stores and sends."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from effattn import parallel
from tests.laws.sharding import collectives
from tests.marks import slow

pytestmark = pytest.mark.devices

ROWS, SIZE, CLASSES = 4, 8, 5
DRAW = np.random.default_rng(0)


def numbers(*shape, dtype=jnp.float32):
    return jnp.asarray(DRAW.normal(size=shape), dtype)


def stage(params, x):
    # The norm of zeros has NaN as its gradient: idle devices must not compute one.
    return x + jnp.tanh(x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ params["kernel"])


def loss(head, y, target):
    return -jnp.take_along_axis(jax.nn.log_softmax(y @ head), target[:, None], -1).mean()


def drawn(stages, count, dtype=jnp.float32):
    params = {"kernel": numbers(stages, SIZE, SIZE, dtype=dtype)}
    head, inputs = numbers(SIZE, CLASSES, dtype=dtype), numbers(count, ROWS, SIZE, dtype=dtype)
    return (params, head, inputs), jnp.asarray(DRAW.integers(0, CLASSES, (count, ROWS)))


def on_one_device(targets, params, head, inputs):
    def of_microbatch(x, target):
        for number in range(len(params["kernel"])):
            x = stage({"kernel": params["kernel"][number]}, x)
        return loss(head, x, target)

    return jax.vmap(of_microbatch)(inputs, targets).mean()


def on_stages(schedule, targets, *arrays, lockstep=False, **sizes):
    run = parallel.pipeline(stage, loss, "stage", schedule, lockstep=lockstep)

    def on_device(targets, params, head, inputs):
        params = jax.tree.map(lambda x: x[0], params)
        return jax.lax.pmean(run(params, head, inputs, targets), "data")

    return jax.shard_map(
        on_device,
        mesh=parallel.make_mesh(**sizes),
        in_specs=(P(None, "data"), P("stage"), P(), P(None, "data")),
        out_specs=P(),
    )(targets, *arrays)


def gradients(function, arrays, targets):
    run = functools.partial(function, targets)
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(*arrays)


@pytest.mark.parametrize("schedule", parallel.SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "count", "lockstep"),
    [
        (4, 6, False),
        (4, 6, True),
        (4, 1, False),
        slow(4, 1, True),
        slow(8, 3, False),
        (1, 3, False),
    ],
)
def test_equals_one_device(schedule, stages, count, lockstep):
    arrays, targets = drawn(stages, count)
    sizes = {"stage": stages, "data": min(8 // stages, 4), "fsdp": -1}
    run = functools.partial(on_stages, schedule, lockstep=lockstep, **sizes)
    for x, y in zip(
        jax.tree.leaves(gradients(run, arrays, targets)),
        jax.tree.leaves(gradients(on_one_device, arrays, targets)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert jax.jit(run)(targets, *arrays) == pytest.approx(on_one_device(targets, *arrays))


@pytest.mark.parametrize("schedule", parallel.SCHEDULES)
def test_a_traced_call_has_gradients(schedule):
    arrays, targets = drawn(4, 3)
    run = functools.partial(on_stages, schedule, targets, data=2, stage=4)
    found = jax.grad(jax.checkpoint(jax.jit(run)), (0, 1, 2))(*arrays)
    expected = gradients(on_one_device, arrays, targets)[1]
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def program(schedule, count, arguments=(0, 1, 2)):
    arrays, targets = drawn(4, count)
    run = functools.partial(on_stages, schedule, targets, data=2, stage=4)
    return jax.jit(jax.grad(run, argnums=arguments)).lower(*arrays).compile()


def test_1f1b_stores_no_more_for_more_microbatches():
    # Without the gradients of the inputs, which each microbatch needs, GPipe stores the input of a
    # stage for each microbatch.
    of_input = ROWS // 2 * SIZE * 4
    growth = {}
    for schedule in parallel.SCHEDULES:
        programs = (program(schedule, count, (0, 1)) for count in (32, 96))
        few, many = (each.memory_analysis().temp_size_in_bytes for each in programs)
        growth[schedule] = (many - few) / 64 / of_input
    assert growth["1f1b"] < 0.5
    assert growth["gpipe"] > 1


@pytest.mark.parametrize(("schedule", "steps"), [("gpipe", [6 + 3, 6 + 3]), ("1f1b", [6 + 2 * 3])])
def test_steps_of_the_schedules(schedule, steps):
    # By 1F1B, the first and the last three of the steps are forward alone or backward alone.
    arrays, targets = drawn(4, 6)
    run = functools.partial(on_stages, schedule, targets, data=2, stage=4)
    traced = jax.jit(jax.grad(run, argnums=(0, 1, 2))).trace(*arrays)
    assert re.findall(r"\blength=(\d+)", str(traced.jaxpr)) == [str(n) for n in steps]


@pytest.mark.parametrize("schedule", parallel.SCHEDULES)
def test_neighbours_exchange_one_activation_and_one_gradient(schedule):
    found = collectives(program(schedule, 6))
    assert found.count("collective-permute") == 2
    # Sums outside the loop: of the loss, and of what devices share.
    assert set(found) == {"collective-permute", "all-reduce"}


def test_sixteen_bits():
    arrays, targets = drawn(4, 8, jnp.bfloat16)
    value, found = gradients(functools.partial(on_stages, "1f1b", data=2, stage=4), arrays, targets)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    exact, expected = gradients(on_one_device, wide, targets)
    assert float(value) == pytest.approx(float(exact), rel=0.02) and value.dtype == jnp.float32
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.bfloat16
        assert np.abs(np.float32(x) - y).max() < 0.05 * np.abs(y).max()


def call(stage=stage, count=2):
    arrays, targets = drawn(8, 2)
    run = parallel.pipeline(stage, loss, "stage")
    on_device = jax.shard_map(
        lambda params, head, inputs: run(params, head, inputs, targets[:count]),
        mesh=parallel.make_mesh(stage=8),
        in_specs=(P("stage"), P(), P()),
        out_specs=P(),
    )
    return on_device(*arrays)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of 1f1b, gpipe, got 'other'"):
        parallel.pipeline(stage, loss, "stage", "other")
    with pytest.raises(ValueError, match="must be that of the microbatches, got the lengths 1, 2"):
        call(count=1)
    with pytest.raises(ValueError, match=r"stage must return the shapes .*float32\[4, 8\], got"):
        call(stage=lambda params, x: x[:, :2])
