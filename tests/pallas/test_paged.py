"""The kernels of paged attention: interpreted, against the XLA form; lowered; and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import effattn
from effattn import dispatch
from effattn.interfaces.paged_attention import Pages
from effattn.pallas.triton import paged_attention as paged_triton
from effattn.testing.functions import assert_close
from tests.functional.test_paged import draw
from tests.marks import slow
from tests.pallas.lowering import (
    LEAST_SHARED,
    MOSAIC_TPU,
    TRITON,
    compile_triton,
    kernels_of,
    mesh_of,
)

LENGTHS = [0, 1, 13, 100, 37]


KERNELS = {"triton": ("cuda", TRITON), "mosaic_tpu": ("tpu", MOSAIC_TPU)}


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


def both(kernel, *arrays, **given):
    """Outputs and log-sum-exps by the kernel and by XLA."""
    attend = functools.partial(effattn.paged_attention, return_residual=True)
    with dispatch.interpreted():
        ours = attend(*arrays, **given, implementation=kernel)
    return ours, attend(*arrays, **given)


@pytest.mark.parametrize(
    "runs, queries, page_size, sizes, options",
    [
        slow(1, 1, 16, (64, 64), {}),
        slow(30, 1, 16, (64, 64), {}),
        slow(30, 1, 16, (6, 80), {"local_window_size": 20}),
        slow(1, 3, 32, (96, 5), {"logits_soft_cap": 2.0, "scale": 0.3}),
        (30, 11, 16, (16, 16), {"local_window_size": (5, 0)}),
    ],
)
def test_it_agrees_with_xla(kernel, runs, queries, page_size, sizes, options, monkeypatch):
    """NaN wherever no token is; one or several runs of pages a sequence, some of them empty."""
    if kernel == "mosaic_tpu" and runs > 1 and not options:
        pytest.skip("has one run of pages")
    monkeypatch.setattr(paged_triton, "RUNS", runs)
    paged_triton.paged.clear_cache()
    arrays, given, _ = draw(LENGTHS, queries, np.float32, page_size=page_size, sizes=sizes)
    assert_close(*both(kernel, *arrays, **given, **options), 1e-6)


@pytest.mark.slow
def test_bfloat16_and_int8(kernel):
    (query, *pages), given, _ = draw(LENGTHS, 2, np.float32, page_size=16, sizes=(32, 24))
    pages = [np.nan_to_num(x) for x in pages]
    (keys, key_scales), (values, value_scales) = map(effattn.quantize_pages, pages)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    assert_close(*both(kernel, query, keys, values, **given, **scales), 1e-6)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (query, *pages)]
    assert both(kernel, *narrow, **given)[0][0].dtype == jnp.bfloat16
    for one in ({}, {"key_scales": key_scales}):
        key_pages = keys if one else narrow[1]
        ours, other = both(kernel, narrow[0], key_pages, narrow[2], **given, **one)
        assert_close([x.astype(jnp.float32) for x in ours], other, 2e-2)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (jnp.float32, (96, 80)),
        (jnp.float32, (128, 256)),
        (jnp.bfloat16, (64, 64)),
        (jnp.bfloat16, (128, 256)),
        (jnp.float16, (96, 80)),
    ],
)
def test_it_is_lowered(kernel, dtype, sizes):
    if kernel == "mosaic_tpu" and dtype == jnp.float16:
        pytest.skip("takes no float16")
    platform, name = KERNELS[kernel]
    of = jax.ShapeDtypeStruct
    found = kernels_of(
        lambda query, keys, values, scales, table, lengths: effattn.paged_attention(
            query,
            keys,
            values,
            value_scales=scales,
            block_table=table,
            lengths=lengths,
            local_window_size=100,
            logits_soft_cap=2.0,
            implementation=kernel,
        ),
        of((4, 1, 8, sizes[0]), dtype),
        of((64, 16, 2, sizes[0]), dtype),
        of((64, 16, 2, sizes[1]), jnp.int8),
        of((64, 16, 2), jnp.float32),
        of((4, 8), jnp.int32),
        of((4,), jnp.int32),
        platform=platform,
    )
    assert found == {name}


def test_under_shard_map_it_is_lowered(kernel):
    platform, name = KERNELS[kernel]
    mesh, spec = mesh_of((2,), ("batch",), platform), PartitionSpec("batch")
    (query, *pages), given, _ = draw([13, 6], dtype=np.float32, page_size=16, sizes=(16, 16))

    def attend(query, table, lengths):
        return effattn.paged_attention(
            query, *pages, block_table=table, lengths=lengths, implementation=kernel
        )

    function = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(query, *given.values())
        assert name in traced.lower(lowering_platforms=(platform,)).as_text()


def test_elsewhere_it_says_who_takes_the_arguments(kernel):
    arrays, given, _ = draw([13], dtype=np.float32, page_size=16)
    attend = functools.partial(effattn.paged_attention, **given)
    for run in (attend, jax.jit(attend, static_argnames="implementation")):
        with pytest.raises(
            NotImplementedError, match=f"runs by '{kernel}' on {KERNELS[kernel][0]} alone"
        ):
            run(*arrays, implementation=kernel)
        other = run(*arrays, implementation=(kernel, "xla"))
        np.testing.assert_array_equal(other, run(*arrays, implementation="xla"))


@pytest.mark.parametrize(
    ("name", "dtype", "page_size", "sizes", "message"),
    [
        ("pallas", np.float64, 16, (8, 8), "takes float32, bfloat16 and float16, got float64"),
        ("pallas", np.float32, 4, (8, 8), "takes pages of 16 to 256 tokens, a power of two, got 4"),
        ("pallas", np.float32, 4, (8, 8), "takes pages of multiples of 16 tokens, got 4"),
        ("triton", np.float32, 48, (8, 8), "takes pages of 16 to 256 tokens, a power of two"),
        ("mosaic_tpu", np.float16, 16, (8, 8), "takes float32 and bfloat16, got float16"),
        ("pallas", np.float32, 16, (8, 260), "takes head sizes up to 256, got 8 and 260"),
    ],
)
def test_what_it_does_not_take_another_does(name, dtype, page_size, sizes, message):
    with jax.enable_x64(True):
        arrays, given, _ = draw([13], dtype=dtype, page_size=page_size, sizes=sizes)
        with pytest.raises(NotImplementedError, match=f"{message}.*implementation='xla' takes"):
            effattn.paged_attention(*arrays, **given, implementation=name)
        # A tuple of names is tried in order.
        either = functools.partial(effattn.paged_attention, **given, implementation=(name, "xla"))
        jax.jit(either).lower(*arrays)


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_fit_in_a_tile_are_refused(kernel):
    arrays, given, _ = draw([80], queries=65, dtype=np.float32, page_size=16)
    with pytest.raises(
        NotImplementedError, match="up to 128 queries times query heads of a key head, got 65 x 2"
    ):
        effattn.paged_attention(*arrays, **given, implementation=kernel)


@pytest.mark.parametrize(("dtype", "refused"), [(jnp.int8, True), (jnp.bfloat16, False)])
def test_pools_of_which_offsets_would_overflow_are_refused(dtype, refused):
    """Pallas takes 64-bit offsets beyond 2**32 bytes, and these pools have 2**31 numbers."""
    shape = jax.ShapeDtypeStruct((2**17 + 8, 16, 8, 128), dtype)
    scales = jax.ShapeDtypeStruct(shape.shape[:3], jnp.float32) if refused else None
    query = jax.ShapeDtypeStruct((1, 1, 8, 128), jnp.bfloat16)
    reason = paged_triton.refusal(query, Pages(shape, scales), Pages(shape, scales)) or ""
    assert ("no int8 pages with 2**31 to 2**32 numbers" in reason) == refused


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("capability", [89, 90])
def test_compiled_it_fits_every_card(dtype, capability):
    """The call has 64 sequences of 16 query heads, in pages of 64 tokens."""
    of = jax.ShapeDtypeStruct
    scales = of((512, 64, 2), jnp.float32) if dtype == jnp.int8 else None

    def attend(query, keys, values, scales, table, lengths):
        return effattn.paged_attention(
            query,
            keys,
            values,
            key_scales=scales,
            value_scales=scales,
            block_table=table,
            lengths=lengths,
            implementation="triton",
        )

    pool, table = of((512, 64, 2, 128), dtype), of((64, 128), jnp.int32)
    query, lengths = of((64, 1, 16, 128), jnp.bfloat16), of((64,), jnp.int32)
    (kernel,) = compile_triton(capability, attend, query, pool, pool, scales, table, lengths)
    assert kernel.shared <= LEAST_SHARED, kernel
    assert kernel.stack <= 64, kernel
    assert kernel.tensor_cores > 0, kernel
