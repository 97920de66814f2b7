"""Block attention in the Triton language: interpreted, against float64, and compiled."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import effattn
from effattn import dispatch
from effattn.testing.functions import assert_close
from effattn.triton import launch
from tests.marks import slow, slow_but_for
from tests.pallas import block_cases
from tests.pallas.lowering import LEAST_SHARED
from tests.triton.calls import compile_calls

pytest.importorskip("triton")

QUICK = "one query", "batch axes"


@pytest.mark.parametrize("name", slow_but_for(QUICK, block_cases.CASES))
def test_agrees_with_float64(name):
    """Checks outputs, log-sum-exps and every gradient, in float32."""
    case = block_cases.CASES[name]
    assert_close(block_cases.interpreted(case, "jax_triton"), block_cases.exact(case), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_errors_in_sixteen_bits(dtype):
    """At most those of the 16-bit form in XLA, but for one more rounding of the weights."""
    case = block_cases.Case(
        block_cases.square(150), lambda: {"is_causal": True}, rounded_to=np.float16
    )
    (ours, _), gradients = block_cases.interpreted(case, "jax_triton", dtype)
    (exact, _), expected = block_cases.exact(case)
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-3
    assert ours.dtype == dtype
    found = jax.tree.map(lambda x: x.astype(np.float32), (ours, gradients))
    assert_close(found, (exact, expected), tolerance)


def test_a_mask_of_each_mapped_example():
    """A mask is shared by all examples of a call, unless it is mapped."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 20, 1, 8)).astype(np.float32) for _ in range(3))
    mask = rng.random((2, 20, 20)) < 0.7

    def attend(name, *arrays):
        def one(query, key, value, mask):
            return effattn.dot_product_attention(query, key, value, mask=mask, implementation=name)

        return jax.vmap(one)(*arrays)

    with dispatch.interpreted():
        ours = attend("jax_triton", query, key, value, mask)
    assert_close(ours, attend("xla", query, key, value, mask), 1e-5)


def test_biases_of_two_mapped_axes():
    """Each axis is in its place, whatever JAX does with the axes of a loop within a derivative."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 3, 1, 20, 1, 8)).astype(np.float32) for _ in range(3))
    bias = rng.normal(size=(2, 3, 1, 1, 20, 20)).astype(np.float32)

    def attend(name, *arrays):
        def one(query, key, value, bias):
            return effattn.dot_product_attention(query, key, value, bias=bias, implementation=name)

        out, pull_back = jax.vjp(jax.vmap(jax.vmap(one)), *arrays)
        return out, pull_back(out)

    with dispatch.interpreted():
        ours = attend("jax_triton", query, key, value, bias)
    assert_close(ours, attend("xla", query, key, value, bias), 1e-5)


SCORES = {
    "example": lambda logit, b, h, i, j: logit * (1 + b),
    "constant": lambda logit, b, h, i, j: jnp.float32(1),
    "query alone": lambda logit, b, h, i, j: i * 0.1,
    "NaN past the last query": lambda logit, b, h, i, j: logit * jnp.sqrt(20.5 - i),
    "NaN past the last key": lambda logit, b, h, i, j: logit * jnp.sqrt(20.5 - j),
    "no slope at 0": lambda logit, b, h, i, j: jnp.sqrt(jnp.square(logit)),
    "16 bits": lambda logit, b, h, i, j: jnp.tanh(logit.astype(jnp.bfloat16)) * 2,
}


@pytest.mark.parametrize("name", slow_but_for(("example",), SCORES))
@pytest.mark.parametrize("tokens", [21, slow(32)])
def test_functions_of_pairs_under_vmap(name, tokens):
    """`b` is the index in the call; tiles may have padding, or none."""
    if name.startswith("NaN") and tokens > 21:
        pytest.skip("NaN at a token")
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=(3, 2, tokens, 1, 8)).astype(np.float32) for _ in range(3))

    def attend(implementation, *arrays):
        def one(*arrays):
            return effattn.dot_product_attention(
                *arrays, score_mod=SCORES[name], implementation=implementation
            )

        out, pull_back = jax.vjp(jax.vmap(one), *arrays)
        return out, pull_back(out)

    arrays = tuple(arrays)
    with dispatch.interpreted():
        ours = attend("jax_triton", *arrays)
    assert_close(ours, attend("xla", *arrays), 1e-2 if name == "16 bits" else 1e-5)


def slopes(logit, b, h, i, j):
    return logit - jnp.asarray([1.0, 0.5, 0.25, 0.125])[h] * jnp.abs(i - j)


@pytest.mark.parametrize("differing", ["query_offset", slow("segment_ids")])
def test_under_vmap_the_kernel_runs_once(differing):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 1, 20, 1, 8)).astype(np.float32) for _ in range(3))
    options = {
        "query_offset": np.asarray([0, 7], np.int32),
        "segment_ids": np.repeat([[[1, 2]], [[3, 4]]], [5, 15], axis=2).astype(np.int32),
    }

    def attend(name, *arrays):
        def one(query, key, value, option):
            return effattn.dot_product_attention(
                query, key, value, is_causal=True, **{differing: option}, implementation=name
            )

        return jax.vmap(one)(*arrays)

    arrays = query, key, value, options[differing]
    # Without `map`, the kernel cannot run for one example after the other.
    without = mock.Mock(map=None, Precision=lax.Precision)
    with dispatch.interpreted(), mock.patch.object(launch, "lax", without):
        ours = attend("jax_triton", *arrays)
    assert_close(ours, attend("xla", *arrays), 1e-5)


@pytest.mark.devices
def test_several_devices():
    """Inside a `shard_map` each device runs kernels; elsewhere XLA would drop the interpreter."""
    rng = np.random.default_rng(0)
    arrays = tuple(rng.normal(size=(4, 40, n, 8)).astype(np.float32) for n in (4, 2, 2))
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), (AxisType.Auto,) * 2)

    def run(name, *arrays):
        def attend(*arrays):
            return effattn.dot_product_attention(*arrays, is_causal=True, implementation=name)

        out, pull_back = jax.vjp(attend, *arrays)
        return out, pull_back(out)

    specs = PartitionSpec("batch", None, "heads")
    ours = functools.partial(run, "jax_triton")
    with dispatch.interpreted():
        found = jax.jit(jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=specs))(*arrays)
        with pytest.raises(NotImplementedError, match="in programs for one device"):
            jax.jit(ours)(*arrays)
    assert_close(found, run("xla", *arrays), 1e-5)


def test_more_tiles_than_a_grid_holds_are_refused():
    array = jax.ShapeDtypeStruct((1, 2**20, 1, 16), jnp.bfloat16)
    attend = functools.partial(effattn.dot_product_attention, implementation="jax_triton")
    with dispatch.interpreted():
        with pytest.raises(NotImplementedError, match="takes up to 65535 tiles .* got 65536"):
            jax.eval_shape(functools.partial(attend, tile=(16, 16)), array, array, array)
        jax.eval_shape(attend, array, array, array)


# Bytes of shared memory of a program, where there are more than on the smallest cards.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
OPTIONS = {
    "causal": lambda: {"is_causal": True},
    "window of documents": lambda: {
        "local_window_size": (50, 0),
        "segment_ids": np.repeat([[1, 2, 3]], 100, axis=1),
    },
    "soft cap and a mask": lambda: {
        "logits_soft_cap": 5.0,
        "mask": np.tri(300, dtype=bool)[None, None],
    },
    "bias": dict,  # an array, with a gradient
    "a score_mod with a table": lambda: {"score_mod": slopes},
    "dropout": lambda: {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("dtype", "size", "name"),
    [
        *((jnp.bfloat16, size, "causal") for size in (64, 128, 256)),
        *((jnp.float32, size, "causal") for size in (64, 128, 256)),
        *((jnp.bfloat16, 64, name) for name in OPTIONS if name != "causal"),
    ],
)
def test_compiled_it_fits_every_card(capability, dtype, size, name):
    """Products run on tensor cores; registers hold nearly all values, except of wide float32."""
    shapes = {"query": (1, 300, 4, size), "key": (1, 300, 2, size), "value": (1, 300, 2, size)}
    shapes |= {"bias": (1, 4, 300, 300)} if name == "bias" else {}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    attend = functools.partial(
        effattn.dot_product_attention, **OPTIONS[name](), implementation="jax_triton"
    )

    def gradients(arrays):
        out, pull_back = jax.vjp(lambda arrays: attend(**arrays), arrays)
        return pull_back(out)

    for kernel in compile_calls(capability, gradients, arrays):
        assert kernel.shared <= SHARED.get(capability, LEAST_SHARED), kernel
        assert kernel.stack <= (256 if (dtype, size) == (jnp.float32, 256) else 128), kernel
        assert kernel.tensor_cores > 0, kernel
