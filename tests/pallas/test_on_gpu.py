"""The kernels for NVIDIA GPUs, compiled and run on a GPU.

Without a GPU these tests are skipped: the other files here interpret the same kernels on the same
cases.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dispatch, patterns
from effattn.dispatch import device
from effattn.pallas.triton import paged_attention as paged_triton
from effattn.testing.functions import as_float64, assert_close, to_numpy
from effattn.testing.laws import rms
from effattn.triton import paged_attention as paged_jax_triton
from tests.dense import cotangents, with_gradients
from tests.functional.test_paged import draw as draw_pages
from tests.pallas import (
    block_cases,
    recurrence_cases,
    test_block_mosaic_gpu,
    test_recurrence_mosaic_gpu,
)
from tests.pallas.block_cases import Case, square
from tests.xla.test_linear_recurrence import ALL

KERNELS = "triton", "mosaic_gpu", "jax_triton"
by_triton = pytest.mark.parametrize("kernel", ["triton", "jax_triton"])


@pytest.fixture(autouse=True)
def optimized():
    """Compiles with all optimisations, as users do, which `tests.conftest` switches off."""
    if device.gpu() is None:
        pytest.skip("needs a CUDA GPU")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def on_cpu(function, *arguments, **options):
    """Expected results, computed without a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return to_numpy(function(*arguments, **options))


def demand_hopper(case):
    if reason := device.refusal(lambda major: major == 9, "9.x (Hopper)"):
        pytest.skip(reason)
    options = case.options()
    if jax.__version_info__ < (0, 12) and {"logits_soft_cap", "score_mod"} & options.keys():
        pytest.skip("jax 0.12 lowers the gradient of a function of logits")


# Block attention


@by_triton
@pytest.mark.parametrize("name", block_cases.CASES)
def test_triton_agrees_with_float64(name, kernel):
    """Checks outputs, log-sum-exps and every gradient, in float32."""
    case = block_cases.CASES[name]
    assert_close(case.run(kernel, np.float32), on_cpu(block_cases.exact, case), 1e-5)


@pytest.mark.parametrize("name", test_block_mosaic_gpu.CASES)
def test_mosaic_gpu_agrees_with_float64(name):
    case = test_block_mosaic_gpu.CASES[name]
    demand_hopper(case)
    (out, lse), gradients = case.run("mosaic_gpu", np.float16)
    (exact_out, exact_lse), exact = on_cpu(block_cases.exact, case)
    assert_close(lse, exact_lse, 1e-5)
    assert_close((out, gradients), (exact_out, exact), 2e-3)


@dataclasses.dataclass(frozen=True)
class Half(Case):
    """A case of 16 bits, in the tiles that a kernel chooses for them."""

    rounded_to: type = jnp.bfloat16

    def run(self, implementation, dtype=None):
        return super().run(implementation, self.rounded_to if dtype is None else dtype)


def in_blocks(size):
    """Attention to random blocks of `size` tokens, different for each head."""

    def function(query, key, value, **options):
        blocks = -(-query.shape[-3] // size)
        mask = np.random.default_rng(0).random((query.shape[-2], blocks, blocks)) < 0.4
        return effattn.block_sparse_attention(
            query, key, value, block_mask=mask, block_size=size, is_causal=True, **options
        )

    return function


IDS = np.repeat([[1, 2, 3, 0], [5, 2, 9, 9]], [300, 400, 200, 100], axis=1)
HALF = {
    "causal, 64": Half(square(1000, size=64, value_size=64), lambda: {"is_causal": True}),
    "causal, 128": Half(square(1000, size=128, value_size=128), lambda: {"is_causal": True}),
    "causal, 192 and 128": Half(
        square(1000, size=192, value_size=128), lambda: {"is_causal": True}
    ),
    "causal, 256": Half(square(1000, size=256, value_size=256), lambda: {"is_causal": True}),
    "all, 64": Half({"queries": 300, "keys": 1100, "size": 64, "value_size": 64}),
    "all, 128": Half({"queries": 300, "keys": 1100, "size": 128, "value_size": 128}),
    "all, 256": Half({"queries": 300, "keys": 1100, "size": 256, "value_size": 256}),
    "float16": Half(
        square(600, size=128, value_size=128), lambda: {"is_causal": True}, rounded_to=np.float16
    ),
    "one key head": Half(
        square(1000, key_heads=1, size=128, value_size=128), lambda: {"is_causal": True}
    ),
    "window": Half(square(2000, size=128, value_size=128), lambda: {"local_window_size": (300, 0)}),
    "documents": Half(
        square(1000, size=128, value_size=128),
        lambda: {"segment_ids": jnp.asarray(IDS), "is_causal": True},
    ),
    "lengths": Half(
        square(1000, size=64, value_size=64),
        lambda: {"key_value_seq_lengths": jnp.array([1000, 333]), "is_causal": True},
    ),
    "pattern": Half(
        square(1000, size=64, value_size=64),
        lambda: {"pattern": patterns.Causal() & patterns.RandomBlocks(64, 2, seed=0)},
        effattn.sparse_attention,
    ),
    "blocks, whole": Half(square(1000, size=128, value_size=128), dict, in_blocks(128)),
    "blocks, in part": Half(square(1000, size=64, value_size=64), dict, in_blocks(100)),
    "dropout": Half(
        square(600, size=64, value_size=64),
        lambda: {"dropout_rate": 0.2, "dropout_rng": jax.random.key(1), "is_causal": True},
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", HALF)
def test_errors_in_sixteen_bits(name, kernel):
    """The errors of outputs and gradients are a few roundings of their size."""
    case = HALF[name]
    if kernel == "mosaic_gpu":
        demand_hopper(case)
    ours = as_float64(to_numpy(case.run(kernel)))
    expected = on_cpu(block_cases.exact, case)
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        assert rms(a[finite] - b[finite]) <= 0.005 * rms(b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bit_for_bit(kernel):
    case = HALF["documents"]
    if kernel == "mosaic_gpu":
        demand_hopper(case)
    jax.tree.map(np.testing.assert_array_equal, *(to_numpy(case.run(kernel)) for _ in range(2)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_reaches_nothing(kernel):
    """Padding holds NaN."""
    case = Half(square(300, size=64, value_size=64))
    if kernel == "mosaic_gpu":
        demand_hopper(case)
    arrays = case.arrays(jnp.bfloat16)
    known = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), np.array([300, 133]))

    def function(arrays, known):
        return effattn.dot_product_attention(
            **arrays, **known, is_causal=True, implementation=kernel, return_residual=True
        )

    clean = with_gradients(function, arrays, known)
    for array in arrays.values():
        array[1, 133:] = np.nan
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(to_numpy, (with_gradients(function, arrays, known), clean)),
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_slices_may_begin_anywhere(kernel):
    """The slices are contiguous and begin after a row of 128 bytes, or after an id of 4 bytes."""
    if kernel == "mosaic_gpu":
        demand_hopper(Case())
    x = jax.random.normal(jax.random.key(0), (1, 513, 1, 64), jnp.bfloat16)
    ids = (jnp.arange(513) > 100).astype(jnp.int32)[None]

    @functools.partial(jax.jit, static_argnames="implementation")
    def attend(x, ids, implementation):
        filled = ids * 1  # computed in the program, not an argument
        return effattn.sliding_window_attention(
            x[:, 1:],
            x[:, :512],
            x[:, :512],
            local_window_size=(255, 0),
            segment_ids=(filled[:, 1:], filled[:, :512]),
            implementation=implementation,
        )

    assert_close(attend(x, ids, kernel), on_cpu(attend, x, ids, "xla"), 1e-2)


# The linear recurrence

compiled = functools.partial(recurrence_cases.recurrence, interpreted=False)


@by_triton
@pytest.mark.parametrize(
    ("length", "decay", "heads", "sizes", "normalized", "form"),
    [
        (1, "feature", (4, 2, 2), (3, 5), False, "plain"),
        (64, "token", (2, 2, 4), (70, 66), True, "plain"),
        (130, "head", (1, 1, 1), (7, 3), False, "plain"),
        (130, "feature", (4, 2, 2), (70, 66), True, "plain"),
        (300, "none", (4, 2, 2), (128, 128), False, "plain"),
        (300, "token", (4, 2, 2), (256, 255), True, "plain"),
        (300, "feature", (2, 2, 2), (128, 128), False, "bonus"),
        (130, "none", (4, 2, 2), (64, 64), False, "delta"),
        (300, "token", (2, 2, 2), (128, 128), False, "delta"),
        (130, "feature", (2, 2, 2), (256, 64), False, "delta"),
        (300, "feature", (2, 2, 2), (64, 64), False, "own"),
    ],
)
def test_recurrences_agree_with_one_token_at_a_time(
    length, decay, heads, sizes, normalized, form, kernel
):
    args = recurrence_cases.draw(length, decay, heads, sizes, normalized, form)
    ours = recurrence_cases.with_gradients(
        functools.partial(compiled, normalized=normalized, names=(kernel,)), *args
    )
    expected = on_cpu(recurrence_cases.exact, *args, normalized=normalized)
    recurrence_cases.assert_near(ours, expected)


@by_triton
@pytest.mark.parametrize(
    ("decay", "form"),
    [("token", "plain"), ("feature", "plain"), ("feature", "bonus"), ("feature", "delta")],
)
def test_recurrences_over_documents(decay, form, kernel):
    args = recurrence_cases.draw(103, decay, (4, 2, 2), (5, 6), False, form)
    tokens = recurrence_cases.documents()
    run = functools.partial(compiled, tokens=tokens, names=(kernel,))
    ours = recurrence_cases.with_gradients(run, *args)
    recurrence_cases.assert_near(ours, on_cpu(recurrence_cases.exact, *args, tokens=tokens))


@by_triton
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("decay", "form"),
    [("none", "plain"), ("token", "plain"), ("feature", "plain"), ("token", "delta")],
)
def test_recurrences_in_sixteen_bits(decay, form, dtype, kernel):
    """Errors are those of the XLA form on a CPU, except that products round to TensorFloat-32."""
    terms, state = recurrence_cases.draw(300, decay, (4, 2, 2), (64, 64), form=form)
    terms = jax.tree.map(lambda x: np.asarray(x, dtype), terms)
    expected = on_cpu(recurrence_cases.exact, terms, state, ALL)
    run = functools.partial(compiled, names=(kernel,))
    ours = recurrence_cases.with_gradients(run, terms, state)
    by_xla = functools.partial(recurrence_cases.recurrence, names=("xla",))
    xla = on_cpu(recurrence_cases.with_gradients, by_xla, terms, state)
    for error, other, size in recurrence_cases.errors(to_numpy(ours), xla, expected):
        assert error <= 1.2 * other + 2**-11 * size
        assert error < 0.005 * size


@pytest.mark.parametrize(
    ("length", "decay", "heads", "sizes", "form"),
    [
        (1, "token", (1, 1, 1), (3, 5), "plain"),
        (130, "token", (4, 2, 2), (5, 70), "plain"),
        (64, "none", (2, 2, 4), (70, 40), "plain"),
        (300, "head", (2, 2, 2), (128, 192), "bonus"),
        (4000, "token", (1, 1, 1), (64, 64), "plain"),  # walked in pieces
        (300, "token", (2, 2, 4), (128, 128), "delta"),
        (300, "token", (4, 2, 2), (64, 128), "delta"),
        (300, "none", (2, 2, 2), (64, 70), "delta"),
        (300, "feature", (4, 2, 2), (128, 128), "plain"),
        (100, "feature", (2, 2, 2), (40, 70), "bonus"),
        (300, "feature", (2, 2, 2), (64, 64), "delta"),
        (300, "feature", (2, 2, 2), (64, 64), "own"),
    ],
)
def test_recurrences_of_mosaic_gpu_agree_with_one_token_at_a_time(
    length, decay, heads, sizes, form
):
    args = recurrence_cases.draw(length, decay, heads, sizes, form=form)
    args = test_recurrence_mosaic_gpu.narrow(*args)
    run = functools.partial(compiled, names=("mosaic_gpu",))
    ours = to_numpy(recurrence_cases.with_gradients(run, *args))
    test_recurrence_mosaic_gpu.assert_near(ours, on_cpu(recurrence_cases.exact, *to_numpy(args)))


# Pages


@by_triton
@pytest.mark.parametrize(
    "runs, queries, page_size, sizes, options",
    [
        (1, 1, 16, (64, 64), {}),
        (30, 1, 16, (64, 64), {}),
        (30, 1, 16, (6, 80), {"local_window_size": 20}),
        (1, 3, 32, (96, 5), {"logits_soft_cap": 2.0, "scale": 0.3}),
        (264, 1, 64, (128, 128), {}),
    ],
)
def test_pages_agree_with_xla(runs, queries, page_size, sizes, options, kernel, monkeypatch):
    """NaN wherever no token is; one or several runs of pages a sequence, some of them empty."""
    for module in (paged_triton, paged_jax_triton):
        monkeypatch.setattr(module, "RUNS", runs)
        module.paged.clear_cache()
    lengths = [0, 1, 13, 100, 37]
    arrays, given, _ = draw_pages(lengths, queries, np.float32, page_size=page_size, sizes=sizes)
    attend = functools.partial(
        effattn.paged_attention, *arrays, **given, **options, return_residual=True
    )
    assert_close(attend(implementation=kernel), on_cpu(attend), 1e-5)


@by_triton
def test_pages_of_int8(kernel):
    (query, *pages), given, _ = draw_pages(
        [0, 1, 13, 100, 37], 2, np.float32, page_size=16, sizes=(32, 24)
    )
    quantized = [effattn.quantize_pages(np.nan_to_num(x)) for x in pages]
    (keys, key_scales), (values, value_scales) = quantized
    for dtype, rtol in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        attend = functools.partial(
            effattn.paged_attention,
            query.astype(dtype),
            keys,
            values,
            **given,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        ours = attend(implementation=kernel).astype(jnp.float32)
        assert_close(ours, on_cpu(attend).astype(np.float32), rtol)


# Choice of the kernel


def test_tuning_finds_a_kernel():
    """Each kernel that takes the call runs and agrees with XLA, and one kernel is faster."""
    arrays = Half(square(2048, heads=8, size=64, value_size=64)).arrays(jnp.bfloat16)
    found = effattn.tune(effattn.dot_product_attention, *arrays.values(), is_causal=True, rounds=3)
    tried = {row.choice.implementation: row for row in found.rows if not row.choice.tiles}
    assert all(row.seconds is not None for row in tried.values()), found
    assert {"xla", "triton"} <= tried.keys()
    (choice,) = found.chosen.values()
    assert choice.implementation != "xla", found


def test_a_mesh_of_one():
    """The call runs inside `shard_map`, as calls on several devices do."""
    mesh = jax.make_mesh((1,), ("batch",), (jax.sharding.AxisType.Auto,), devices=[device.gpu()])
    spec = jax.sharding.PartitionSpec("batch")
    case = Half(square(300, size=64, value_size=64))
    arrays = case.arrays(jnp.bfloat16)

    def attend(arrays):
        def total(arrays):
            out = effattn.dot_product_attention(**arrays, is_causal=True, implementation="triton")
            return jnp.sum(out.astype(jnp.float32) * cotangents(arrays)[0])

        return jax.grad(total)(arrays)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec,), out_specs=spec)
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(to_numpy, (jax.jit(sharded)(arrays), jax.jit(attend)(arrays))),
    )


def test_a_name_that_does_not_run_here_is_refused():
    arrays = Half(square(64, size=64, value_size=64)).arrays(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="runs by 'mosaic_tpu' on tpu alone"):
        effattn.dot_product_attention(**arrays, implementation="mosaic_tpu")
    assert not dispatch.is_interpreted()


def test_calls_that_name_nothing_take_kernels():
    """Without tuning results, the default gives the same bits as the named kernel."""
    if reason := device.refusal(lambda major: major == 9, "9.x (Hopper)"):
        pytest.skip(reason)
    case = HALF["causal, 128"]
    jax.tree.map(
        np.testing.assert_array_equal, *map(to_numpy, (case.run(None), case.run("mosaic_gpu")))
    )
    arrays = case.arrays(jnp.bfloat16)
    gate = -np.ones(arrays["key"].shape[:-1], np.float32)
    attend = jax.jit(effattn.gated_linear_attention, static_argnames="implementation")
    np.testing.assert_array_equal(
        attend(**arrays, log_decay=gate), attend(**arrays, log_decay=gate, implementation="triton")
    )
