"""Paged attention in the Triton language: interpreted, against the XLA form, and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dispatch
from effattn.testing.functions import assert_close
from effattn.triton import paged_attention
from tests.functional.test_paged import draw
from tests.marks import slow
from tests.pallas.lowering import LEAST_SHARED
from tests.pallas.test_paged import both
from tests.triton.calls import compile_calls

pytest.importorskip("triton")

LENGTHS = [0, 1, 13, 100, 37]
ours = functools.partial(both, "jax_triton")


@pytest.mark.parametrize(
    "runs, queries, page_size, sizes, options",
    [
        slow(1, 1, 16, (64, 64), {}),
        slow(30, 1, 16, (6, 80), {"local_window_size": 20}),
        slow(1, 3, 32, (96, 5), {"logits_soft_cap": 2.0, "scale": 0.3}),
        (30, 11, 16, (16, 16), {"local_window_size": (5, 0)}),
    ],
)
def test_it_agrees_with_xla(runs, queries, page_size, sizes, options, monkeypatch):
    """Unused entries of pages are NaN; a sequence has one or several runs, some of them empty."""
    monkeypatch.setattr(paged_attention, "RUNS", runs)
    paged_attention.paged.clear_cache()
    arrays, given, _ = draw(LENGTHS, queries, np.float32, page_size=page_size, sizes=sizes)
    assert_close(*ours(*arrays, **given, **options), 1e-6)


def test_bfloat16_and_int8():
    (query, *pages), given, _ = draw(LENGTHS, 2, np.float32, page_size=16, sizes=(32, 24))
    pages = [np.nan_to_num(x) for x in pages]
    (keys, key_scales), (values, value_scales) = map(effattn.quantize_pages, pages)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    assert_close(*ours(query, keys, values, **given, **scales), 1e-6)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (query, *pages)]
    for one in ({}, {"key_scales": key_scales}):
        key_pages = keys if one else narrow[1]
        got, other = ours(narrow[0], key_pages, narrow[2], **given, **one)
        assert got[0].dtype == jnp.bfloat16
        assert_close([x.astype(jnp.float32) for x in got], other, 2e-2)


@pytest.mark.parametrize("mapped", [0, slow(1)])
def test_under_vmap(mapped):
    """Queries of several batches on the same pages, and pages of each."""
    (query, *pages), given, _ = draw(LENGTHS, 1, np.float32, page_size=16, sizes=(16, 16))
    arrays = [query, *map(np.nan_to_num, pages)]
    arrays[mapped] = np.stack([arrays[mapped], arrays[mapped] / 2])
    axes = [0 if place == mapped else None for place in range(3)]

    def attend(name, *arrays):
        return jax.vmap(
            functools.partial(effattn.paged_attention, **given, implementation=name), axes
        )(*arrays)

    with dispatch.interpreted():
        found = attend("jax_triton", *arrays)
    assert_close(found, attend("xla", *arrays), 1e-6)


@pytest.mark.parametrize(
    ("dtype", "page_size", "sizes", "message"),
    [
        (np.float32, 48, (8, 8), "takes pages of 16 to 256 tokens, a power of two, got 48"),
        (np.float32, 16, (8, 260), "takes head sizes up to 256, got 8 and 260"),
        (np.float64, 16, (8, 8), "takes float32, bfloat16 and float16, got float64"),
    ],
)
def test_what_it_does_not_take(dtype, page_size, sizes, message):
    with jax.enable_x64(True), dispatch.interpreted():
        arrays, given, _ = draw([13], dtype=dtype, page_size=page_size, sizes=sizes)
        with pytest.raises(NotImplementedError, match=f"{message}.*implementation='xla' takes"):
            effattn.paged_attention(*arrays, **given, implementation="jax_triton")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_compiled_it_fits_every_card(dtype, capability):
    """The call has 64 sequences of 16 query heads, in pages of 64 tokens."""
    of, quantized = jax.ShapeDtypeStruct, dtype == jnp.int8
    scales = of((512, 64, 2), jnp.float32) if quantized else None

    def attend(query, keys, values, scales, table, lengths):
        return effattn.paged_attention(
            query,
            keys,
            values,
            key_scales=scales,
            value_scales=scales,
            block_table=table,
            lengths=lengths,
            implementation="jax_triton",
        )

    pool, table = of((512, 64, 2, 128), dtype), of((64, 128), jnp.int32)
    query = of((64, 1, 16, 128), jnp.bfloat16 if quantized else dtype)
    arrays = query, pool, pool, scales, table, of((64,), jnp.int32)
    (kernel,) = compile_calls(capability, attend, *arrays)
    assert kernel.shared <= LEAST_SHARED, kernel
    assert kernel.stack <= 64, kernel
    assert kernel.tensor_cores > 0, kernel
