"""The diagonal recurrence by the CPU kernels, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import effattn
from effattn.llvm import runtime
from effattn.testing.functions import assert_close
from tests.llvm.function_cases import by_kernel, exact

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

# Batch, tokens, query heads, key heads, features and values; and options.
CASES = {
    "a token": ((1,), 1, 1, 1, 3, 2, {}),
    "several blocks": ((1,), 1100, 1, 1, 64, 8, {}),
    "whole pieces": ((), 64, 1, 1, 16, 128, {}),
    "a piece and a part": ((2,), 70, 1, 1, 16, 130, {}),
    "groups": ((2,), 33, 4, 2, 5, 70, {}),
    "lengths": (
        (2,),
        40,
        2,
        1,
        4,
        8,
        {"query_seq_lengths": np.array([40, 7]), "key_value_seq_lengths": np.array([33, 7])},
    ),
    "documents": (
        (2, 1),
        70,
        1,
        1,
        4,
        20,
        {"segment_ids": np.array([[[1] * 20 + [2] * 50], [[0] * 3 + [4] * 60 + [1] * 7]])},
    ),
}


def arrays_of(case):
    batch, tokens, heads, key_heads, features, values, _ = case
    rng = np.random.default_rng(tokens)
    arrays = {
        "query": rng.normal(size=(*batch, tokens, heads, features)),
        "key": rng.normal(size=(*batch, tokens, key_heads, features)),
        "value": rng.normal(size=(*batch, tokens, key_heads, values)),
        "step_size": rng.random(size=(*batch, tokens, key_heads, values)),
        "rate": -rng.random(size=(key_heads, values, features)) * 4,
        "initial_state": rng.normal(size=(*batch, key_heads, features, values)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def assert_exact(case):
    call = functools.partial(effattn.selective_scan, **case[-1])
    assert_close(by_kernel(call, arrays_of(case)), exact(call, arrays_of(case)), 2e-6)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name):
    assert_exact(CASES[name])


@pytest.mark.usefixtures("lanes")
def test_vectors_of_every_width_agree():
    assert_exact(CASES["groups"])


def test_a_rate_that_is_mapped_has_gradients_of_its_own():
    """Under `vmap`, the arrays of one example belong to the rate of that example."""
    given = arrays_of(CASES["whole pieces"])
    rates = np.stack([given["rate"], given["rate"] / 2])

    def gradient(rate, implementation):
        def loss(rate):
            arrays = {**given, "rate": rate}
            return jnp.sum(effattn.selective_scan(**arrays, implementation=implementation) ** 2)

        return jax.grad(loss)(rate)

    ours = jax.vmap(functools.partial(gradient, implementation="llvm"))(rates)
    expected = jnp.stack([gradient(rate, "xla") for rate in rates])
    assert_close(ours, expected, 1e-5)


@pytest.mark.devices
@pytest.mark.parametrize("heads", [2, 4])
def test_query_heads_of_one_key_head_on_several_devices(heads):
    """The gradients of the key head have parts of several tasks, and of several devices."""
    given = arrays_of(((2,), 40, heads, 1, 4, 130, {}))
    mesh = jax.make_mesh((2,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = NamedSharding(mesh, PartitionSpec(None, None, "heads"))

    def run(arrays):
        call = functools.partial(effattn.selective_scan, implementation="llvm")
        out, pull_back = jax.vjp(lambda given: call(**given), arrays)
        return out, *pull_back(jnp.cos(out))

    placed = given | {"query": jax.device_put(given["query"], spec)}
    assert_close(jax.jit(run)(placed), jax.jit(run)(given), 1e-6)


def test_hessians_are_those_of_xla():
    given = arrays_of(((), 20, 1, 1, 2, 3, {}))

    def loss(step, implementation):
        arrays = {**given, "step_size": step}
        return jnp.sum(effattn.selective_scan(**arrays, implementation=implementation) ** 2)

    ours, theirs = (jax.hessian(loss)(given["step_size"], name) for name in ("llvm", "xla"))
    assert_close(ours, theirs, 1e-5)


def test_its_memory_does_not_grow_with_length():
    """Apart from arguments, results and the kernel's own memory, it is that of one block."""

    def temporaries(tokens):
        of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        shapes = [of((1, tokens, 1, size)) for size in (16, 16, 128, 128)]

        def call(query, key, value, dt):
            rate = -jnp.ones((1, 128, 16))
            options = {"step_size": dt, "rate": rate, "implementation": "llvm"}
            return effattn.selective_scan(query, key, value, **options)

        return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(32768) <= 1.01 * temporaries(4096)


def test_it_says_what_it_does_not_take():
    given = {name: jnp.bfloat16(x) for name, x in arrays_of(CASES["a token"]).items()}
    with pytest.raises(NotImplementedError, match="takes float32, got bfloat16"):
        effattn.selective_scan(**given, implementation="llvm")
