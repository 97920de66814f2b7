"""Dilated windows: windows in steps, computed apart for classes of positions that never meet."""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import dot_product_attention, sliding_window_attention
from effattn.cores import block_attention as core
from effattn.cores.block_attention import block_attention
from effattn.testing.functions import assert_close
from effattn.xla.block_tiles import Tiles
from tests.dense import dense_with_gradients, draw, with_gradients
from tests.xla.test_walks import count_pairs

rng = np.random.default_rng(0)


def slopes_of(arrays):
    def score_mod(logit, b, h, i, j):
        return logit * (1 + 0.1 * b) - arrays["slopes"][h] * jnp.abs(i - j) + 0.01 * j

    return score_mod


def windowed(arrays, known, **options):
    """The fast form, with the score_mod of `slopes` if the arrays have slopes."""
    plain = {name: array for name, array in arrays.items() if name != "slopes"}
    if "slopes" in arrays:
        options["score_mod"] = slopes_of(arrays)
    return sliding_window_attention(**plain, **known, **options, return_residual=True)


def check(options, knowns=({},), **more):
    """Checks results and gradients against the masked definition, for each of `knowns`."""
    arrays = {**draw(), **more}
    score_mod_of = slopes_of if "slopes" in more else None
    function = functools.partial(windowed, **options)
    for known in knowns:
        expected = dense_with_gradients(arrays, score_mod_of=score_mod_of, **options, **known)
        assert_close(with_gradients(function, arrays, known), expected, 1e-12)


WITH_DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}
LENGTHS = {"query_seq_lengths": np.array([10, 7]), "key_value_seq_lengths": np.array([14, 6])}


@pytest.mark.slow
def test_everything_together(x64):
    known = {"segment_ids": (np.arange(22).reshape(2, 11) // 9, np.arange(28).reshape(2, 14) // 9)}
    options = {"local_window_size": (2, 1), "dilation": 2, "logits_soft_cap": 2.0, **WITH_DROPOUT}
    learned = {"slopes": rng.normal(size=4), "sink": rng.normal(size=4), "scale": np.float64(0.7)}
    check(options, [known | LENGTHS], **learned)


@pytest.mark.slow
def test_an_offset_may_be_an_int(x64):
    options = {"local_window_size": (3, 2), "dilation": 3, "is_causal": True, "query_offset": 4}
    check(options | WITH_DROPOUT, slopes=rng.normal(size=4))


@pytest.mark.slow
def test_an_offset_may_be_traced(x64):
    options = {"local_window_size": (3, 2), "dilation": 3, "is_causal": True}
    knowns = [{"query_offset": np.int64(offset), **LENGTHS} for offset in (-4, 0, 2, 30)]
    check(options, knowns, slopes=rng.normal(size=4))


@pytest.mark.slow
def test_an_offset_may_differ_by_example(x64):
    options = {"local_window_size": 2, "dilation": 3, **WITH_DROPOUT}
    knowns = [{"query_offset": np.array(offsets), **LENGTHS} for offsets in ([5, -2], [0, 7])]
    check(options, knowns, slopes=rng.normal(size=4))


@pytest.mark.parametrize("window, dilation", [(0, 2), (2, 40)])
def test_few_may_be_met(window, dilation, x64):
    check({"local_window_size": window, "dilation": dilation})


def test_there_need_be_no_batch_and_the_tile_changes_nothing(x64):
    arrays = draw(23, 9, batch=())
    options = {"local_window_size": (2, 1), "dilation": 2}
    expected = dense_with_gradients(arrays, **options)
    for tile in (None, (4, 3)):
        function = functools.partial(windowed, **options, tile=tile)
        assert_close(with_gradients(function, arrays), expected, 1e-12)


@pytest.mark.slow
def test_vmap_goes_over_the_offset(x64):
    arrays = draw(batch=())
    function = functools.partial(windowed, local_window_size=(2, 1), dilation=3)
    offsets = np.array([0, 4, -2])
    known = {"query_offset": offsets}
    together = jax.jit(jax.vmap(lambda known: with_gradients(function, arrays, known)))(known)
    for n, offset in enumerate(offsets):
        one = jax.tree.map(lambda x, n=n: x[n], together)
        options = {"local_window_size": (2, 1), "dilation": 3, "query_offset": offset}
        assert_close(one, dense_with_gradients(arrays, **options), 1e-12)


def test_without_dilation_is_exact_attention_with_a_window():
    arrays = draw(dtype=np.float32)
    out, expected = (
        jax.jit(functools.partial(function, local_window_size=(3, 1), is_causal=True))(**arrays)
        for function in (sliding_window_attention, dot_product_attention)
    )
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("window", [2**31 - 1, sys.maxsize, (sys.maxsize, 2**31)])
def test_a_window_of_all_that_there_can_be_is_exact_attention(window):
    arrays = draw(dtype=np.float32)
    out = jax.jit(functools.partial(sliding_window_attention, local_window_size=window))(**arrays)
    exact = jax.jit(dot_product_attention)(**arrays)
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dilation", [1, 3, 64])
def test_the_work_of_a_dilated_window_is_that_of_a_window(dilation, monkeypatch):
    seen = []

    def spy(rule, x):
        walk = Tiles(rule, x).walk
        examples = math.prod(x.query.shape[:-3])
        seen.append((examples, dataclasses.replace(walk, offset=0)))
        return block_attention(rule, x)

    monkeypatch.setattr(core, "block_attention", spy)
    for length in (65536, 262144):
        query = jax.ShapeDtypeStruct((length, 2, 4), jnp.float32)
        call = functools.partial(
            sliding_window_attention, local_window_size=(63, 0), dilation=dilation
        )
        jax.eval_shape(call, query, query, query)
    pairs = [examples * count_pairs(walk) for examples, walk in seen]
    assert pairs[1] < 4.5 * pairs[0]
    # A tile holds 64 queries and all keys that any of its queries sees.
    assert pairs[1] <= 262144 * (64 + 64 + 1)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_step_beyond_all_keys_reaches_none(offset):
    """The call takes no memory for tokens that do not exist."""
    query, key = jnp.ones((4, 1, 2)), jnp.ones((6, 1, 2))
    value = jnp.arange(6.0)[:, None, None]
    out = sliding_window_attention(
        query, key, value, local_window_size=1, dilation=2**31 - 1, query_offset=offset
    )
    np.testing.assert_array_equal(out[..., 0, 0], np.arange(4.0) + offset)


@pytest.mark.parametrize("dilation", [0, -1, 1.5, True, np.float32(2), None])
def test_a_wrong_dilation_is_named(dilation):
    query = jnp.ones((4, 1, 2))
    with pytest.raises(ValueError, match="dilation must be an int, 1 or more tokens, got"):
        sliding_window_attention(query, query, query, local_window_size=1, dilation=dilation)


def test_the_window_is_needed():
    query = jnp.ones((4, 1, 2))
    with pytest.raises(TypeError, match="local_window_size"):
        sliding_window_attention(query, query, query)
    with pytest.raises(ValueError, match="local_window_size must be an int .*got None"):
        sliding_window_attention(query, query, query, local_window_size=None)


@pytest.mark.slow
def test_a_dilation_for_each_head(x64):
    """The result is that of exact attention with a mask, score_mod and dropout by head."""
    dilations = (3, 3, 1, 1)
    learned = {"slopes": rng.normal(size=4), "sink": rng.normal(size=4)}
    options = {"is_causal": True, "query_offset": 2, **LENGTHS, **WITH_DROPOUT}
    back = np.arange(11)[:, None] + 2 - np.arange(14)
    mask = np.stack([(back % d == 0) & (back <= 2 * d) for d in dilations])

    def dense(arrays, known):
        learned = {"score_mod": slopes_of(arrays), "sink": arrays["sink"]}
        plain = {name: arrays[name] for name in ("query", "key", "value")}
        return dot_product_attention(
            **plain, **learned, **options, mask=mask[None], return_residual=True
        )

    ours = functools.partial(windowed, **options, local_window_size=2, dilation=dilations)
    arrays = {**draw(), **learned}
    assert_close(with_gradients(ours, arrays), with_gradients(dense, arrays), 1e-12)


@pytest.mark.parametrize(
    "dilation, message",
    [
        ((1, 1, 2), r"one for each of the 4 query heads, got \(1, 1, 2\)"),
        ((1, 1, 0, 0), "1 or more tokens"),
        ((1, 2, 2, 2), "the same for the 2 query heads of each key head"),
    ],
)
def test_dilations_that_do_not_fit_the_heads(dilation, message):
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(**draw(dtype=np.float32), local_window_size=2, dilation=dilation)


@pytest.mark.parametrize("implementation", ["xla", "llvm", "naive"])
@pytest.mark.parametrize("offset", [2**29, -(2**29)])
def test_the_widest_window_at_the_furthest_offset_has_no_end(implementation, offset):
    query = np.random.default_rng(0).normal(size=(1, 32, 1, 4)).astype(np.float32)
    for window in (2**30, 2**40):
        out = dot_product_attention(
            query,
            query,
            query,
            query_offset=offset,
            local_window_size=(window, window),
            implementation=implementation,
        )
        expected = dot_product_attention(query, query, query)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
