"""GPUs that the Triton kernels support; the Mosaic GPU kernels have tests of their own."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dispatch
from tests.pallas.lowering import operands_of

HEADS = {name: np.ones((1, 16, 2, 16), np.float32) for name in ("query", "key", "value")}
PAGES = {"block_table": np.zeros((1, 1), np.int32), "lengths": np.ones(1, np.int32)}

# For each kernel, a function that may run it and arguments that it takes.
CALLS = {
    "block attention": (effattn.dot_product_attention, HEADS),
    "linear recurrence": (effattn.linear_attention, {**HEADS, "is_causal": True}),
    "delta form": (
        effattn.delta_rule_attention,
        {**HEADS, "beta": np.ones((1, 16, 2), np.float32)},
    ),
    "paged attention": (
        lambda query, key, value, **given: effattn.paged_attention(
            query, key_pages=key, value_pages=value, **given
        ),
        {**HEADS, **PAGES},
    ),
}


@pytest.fixture
def beside(monkeypatch):
    """Simulates a GPU of a given compute capability that is not the default device."""

    def gpu(capability):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda backend: {"cuda": [device]}[backend])

    return gpu


def program(name, implementation="triton"):
    """A function of the arrays, and the arrays."""
    function, given = CALLS[name]
    arrays = {k: x for k, x in given.items() if isinstance(x, np.ndarray)}
    options = {k: x for k, x in given.items() if k not in arrays}
    return lambda arrays: function(**arrays, **options, implementation=implementation), arrays


def traced(name, implementation="triton"):
    return jax.eval_shape(*program(name, implementation))


@pytest.mark.parametrize("capability", ["7.0", "7.5"])
@pytest.mark.parametrize("name", CALLS)
def test_gpus_before_ampere_are_refused(beside, name, capability):
    """The error names the capability and `xla`, and a call that also allows `xla` runs."""
    beside(capability)
    message = rf"of compute capability 8\.0 and later \(Ampere\), got {capability}; .*'xla' takes"
    with pytest.raises(NotImplementedError, match=message):
        traced(name)
    assert traced(name, ("triton", "xla")).dtype == jnp.float32


@pytest.mark.parametrize("capability", ["8.0", "12.1"])
@pytest.mark.parametrize("name", CALLS)
def test_ampere_and_later_are_taken(beside, name, capability):
    beside(capability)
    assert traced(name).dtype == jnp.float32


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_refused_without_a_gpu_or_interpreted(beside, name):
    traced(name)  # on a machine without a GPU
    beside("7.5")
    with dispatch.interpreted():
        traced(name)


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_gets_slices_in_place(name):
    assert operands_of(*program(name)) == {"stablehlo.optimization_barrier"}


def test_nor_does_that_of_mosaic_gpu():
    heads = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)

    def attend(query, key, value):
        return effattn.dot_product_attention(query, key, value, implementation="mosaic_gpu")

    assert operands_of(attend, heads, heads, heads) == {"stablehlo.optimization_barrier"}
