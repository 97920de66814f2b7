"""Block attention in Triton: interpreted, against float64; lowered; and compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import effattn
from effattn import dispatch
from effattn.analysis import cost
from effattn.interfaces.block_attention import Config, Inputs
from effattn.nn.alibi import Alibi
from effattn.pallas import block_tiles, visited_tiles
from effattn.testing.functions import as_float64, assert_close
from effattn.testing.laws import rms
from tests.dense import cotangents, draw, with_gradients
from tests.marks import slow, slow_but_for
from tests.pallas import block_cases
from tests.pallas.block_cases import CASES, QUICK, Case, square
from tests.pallas.lowering import LEAST_SHARED, TRITON, compile_triton, kernels_of, mesh_of

attend = functools.partial(effattn.dot_product_attention, implementation="triton")


@pytest.mark.parametrize("name", slow_but_for(QUICK, CASES))
def test_it_agrees_with_float64(name):
    """Checks outputs, log-sum-exps and every gradient."""
    case = CASES[name]
    assert_close(block_cases.interpreted(case, "triton"), block_cases.exact(case), 1e-5)


@pytest.mark.slow
def test_rows_that_a_finite_bias_masks_have_their_gradients():
    ours = block_cases.interpreted(block_cases.BLURRED, "triton")
    assert_close(ours, block_cases.BLURRED.run("xla", np.float32), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_errors_are_at_most_twice_those_of_the_plain_form(dtype):
    case = Case(
        square(200, size=64, value_size=64),
        lambda: {"is_causal": True, "tile": (32, 32)},
        rounded_to=dtype,
    )

    def plain(query, key, value, **_):
        key, value = (jnp.repeat(x, 2, 2) for x in (key, value))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
        logits = jnp.where(jnp.tri(200, dtype=bool), logits.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(logits).astype(value.dtype)
        lse = jax.nn.logsumexp(logits, -1)
        return jnp.einsum("bnts,bsnh->btnh", weights, value), jnp.moveaxis(lse, 1, 2)

    ours = block_cases.interpreted(case, "triton", dtype)
    theirs = dataclasses.replace(case, function=plain).run(None, dtype)
    expected = block_cases.exact(case)
    trees = (jax.tree.leaves(as_float64(tree)) for tree in (ours, theirs, expected))
    for a, b, exact in zip(*trees, strict=True):
        assert rms(a - exact) <= 2 * rms(b - exact)
        assert rms(a - exact) <= 0.005 * rms(exact)


@pytest.mark.slow
def test_padding_reaches_nothing():
    """Padding holds NaN."""
    arrays = draw(70, 70, size=16, value_size=16, dtype=np.float32)
    lengths = np.array([70, 33])
    known = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    def function(arrays, known):
        return attend(**arrays, **known, is_causal=True, tile=(32, 16), return_residual=True)

    with dispatch.interpreted():
        clean = with_gradients(function, arrays, known)
        for array in arrays.values():
            array[1, 33:] = np.nan
        spoilt = with_gradients(function, arrays, known)
    jax.tree.map(np.testing.assert_array_equal, spoilt, clean)


@pytest.mark.slow
@pytest.mark.devices
def test_under_shard_map_remat_and_scan():
    arrays = draw(70, 70, batch=(4,), size=16, value_size=16, dtype=np.float32)
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axes, devices=jax.devices()[:8])
    spec = PartitionSpec("batch", None, "heads")

    def total(implementation, arrays):
        @jax.checkpoint
        def layer(query, key, value):
            return effattn.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )

        if implementation == "triton":
            # The interpreter does not support types with varying mesh axes.
            layer = jax.shard_map(
                layer, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
            )
        key, value = arrays["key"], arrays["value"]
        scanned = jax.lax.scan(
            lambda query, _: (layer(query, key, value), None), arrays["query"], None, length=2
        )
        return scanned[0].sum()

    found = jax.jit(jax.value_and_grad(functools.partial(total, "xla")))(arrays)
    with dispatch.interpreted():
        ours = jax.jit(jax.value_and_grad(functools.partial(total, "triton")))(arrays)
    assert_close(ours, found, 1e-4)


# Lowered and compiled


def shapes(length=512, batch=2, heads=(8, 2), sizes=(64, 64), dtype=jnp.bfloat16):
    of = jax.ShapeDtypeStruct
    return (
        of((batch, length, heads[0], sizes[0]), dtype),
        of((batch, length, heads[1], sizes[0]), dtype),
        of((batch, length, heads[1], sizes[1]), dtype),
    )


def gradients(**options):
    def function(query, key, value):
        def total(query, key, value):
            return attend(query, key, value, **options).astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(query, key, value)

    return function


@pytest.mark.parametrize("name", slow_but_for([*QUICK, "pattern"], CASES))
def test_it_is_lowered_for_gpus(name):
    case = CASES[name]
    call = functools.partial(
        case.function, **case.options(), implementation="triton", return_residual=True
    )

    def function(arrays):
        results, pull_back = jax.vjp(lambda arrays: call(**arrays), arrays)
        return results, pull_back(cotangents(arrays))

    assert kernels_of(function, case.arrays(np.float32)) == {TRITON}


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        slow(jnp.float32, (32, 32)),
        slow(jnp.float16, (64, 64)),
        slow(jnp.bfloat16, (96, 80)),
        slow(jnp.float32, (128, 128)),
        (jnp.bfloat16, (128, 128)),
        slow(jnp.float32, (192, 256)),
        slow(jnp.float16, (192, 256)),
    ],
)
def test_every_size_is_lowered_for_gpus(dtype, sizes):
    arrays = shapes(100, sizes=sizes, dtype=dtype)
    assert kernels_of(gradients(is_causal=True), *arrays) == {TRITON}


@pytest.mark.slow
def test_under_shard_map_it_is_lowered_for_gpus():
    mesh, spec = mesh_of((2, 2), ("batch", "heads"), "cuda"), PartitionSpec("batch", None, "heads")
    function = jax.shard_map(
        gradients(is_causal=True), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*shapes()).lower(lowering_platforms=("cuda",))
    assert TRITON in lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("capability", [89, 90])
def test_compiled_it_fits_every_card(size, capability):
    """All matrix products run on tensor cores, and registers hold nearly all values."""
    arrays = shapes(4096, heads=(16, 4), sizes=(size, size))
    function = gradients(is_causal=True, score_mod=Alibi(16), logits_soft_cap=30.0)
    kernels = compile_triton(capability, function, *arrays)
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel.shared <= LEAST_SHARED, kernel
        assert kernel.stack <= 128, kernel
        assert kernel.tensor_cores > 0, kernel


# Refused arguments

LARGE = np.ones(5000, np.float32)


def test_elsewhere_it_says_who_takes_the_arguments():
    arrays = draw(dtype=np.float32)
    for run in (attend, jax.jit(attend)):
        with pytest.raises(NotImplementedError, match="runs by 'triton' on cuda alone"):
            run(**arrays)
    both = attend(**arrays, implementation=("triton", "xla"))
    np.testing.assert_array_equal(both, effattn.dot_product_attention(**arrays))


@pytest.mark.parametrize(
    ("dtype", "sizes", "options", "message"),
    [
        (np.float64, {}, {}, "takes float32, bfloat16 and float16, got float64"),
        (np.float32, {"size": 257}, {}, "takes head sizes up to 256, got 257 and 5"),
        (np.float32, {}, {"tile": (32, 24)}, r"takes tiles of multiples of 16 .* got \(32, 24\)"),
        (
            np.float32,
            {},
            {"score_mod": lambda logit, b, h, i, j: jax.nn.relu(logit)},
            "cannot evaluate the score_mod or the pattern, which calls 'custom_jvp_call'",
        ),
        (
            np.float32,
            {},
            {"score_mod": lambda logit, b, h, i, j: logit + jnp.asarray(LARGE)[i - j]},
            "which reads an array of 5000 entries, more than 4096",
        ),
    ],
)
def test_what_it_does_not_take_another_does(dtype, sizes, options, message):
    with jax.enable_x64(True):
        arrays = draw(**sizes, dtype=dtype)
        with pytest.raises(NotImplementedError, match=f"{message}.*implementation='xla' takes"):
            attend(**arrays, **options)
        attend(**arrays, **options | {"implementation": ("triton", "xla")})


def test_patterns_read_tables_of_any_size():
    """Blocks that are no whole tiles need a table of all blocks, here of 4900 entries."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 1, 70 * 24, 1, 16)).astype(np.float32)

    def run(implementation):
        return effattn.block_sparse_attention(
            query, key, value, block_mask=np.eye(70, dtype=bool), block_size=24,
            implementation=implementation,
        )  # fmt: skip

    with dispatch.interpreted():
        found = run("triton")
    assert_close(found, run("xla"), 1e-5)


def test_what_would_overflow_its_counters_is_refused():
    arrays = shapes(2**17, batch=4, heads=(64, 64))
    with pytest.raises(NotImplementedError, match=r"fewer than 2\*\*31 numbers"):
        jax.eval_shape(attend, *arrays)


def test_which_tiles_are_visited_is_worked_out_in_linear_memory():
    """A million tokens have tens of thousands of tiles, and the pairs of tiles are not stored."""

    def bytes_at(length):
        def ranges(query, ids):
            operands = Inputs(query, query, query, segments=(ids, ids))
            plan, arrays = block_tiles.arrange(
                Config(tile=None, scale=1.0, right=0), operands, (64, 64)
            )
            return visited_tiles.walk_arrays(plan, arrays, operands, of_keys=False)

        query = jax.ShapeDtypeStruct((1, length, 1, 1), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return cost.temporary_bytes(jax.jit(ranges).trace(query, ids))

    lengths = [2**17, 2**18, 2**19]
    assert cost.exponent(lengths, [bytes_at(length) for length in lengths]) <= 1.1
