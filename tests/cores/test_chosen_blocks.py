"""Tiles of queries, and sparse mechanisms over several of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.cores import chosen_blocks, chosen_keys, folding, native_sparse, packed_pairs
from effattn.decode.moba import MobaDecoder
from effattn.functional import moba
from effattn.llvm import runtime
from effattn.testing.functions import assert_close
from tests.marks import slow_but_for

LENGTH, TILE = 45, 16


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_tiles_of_queries_give_the_rows_of_one_call(length):
    x = np.arange(2.0 * length, dtype=np.float32).reshape(length, 2)

    def function(given):
        x, y = given
        return 2 * x, (x.sum(-1) + y).astype(jnp.int32)

    found = folding.in_tiles_of_queries(function, (x, x[:, 0]), TILE)
    np.testing.assert_array_equal(found[0], 2 * x)
    np.testing.assert_array_equal(found[1], x.sum(-1) + x[:, 0])


def test_equal_scores_are_ranked_by_index_and_the_lowest_are_none():
    lowest = np.finfo(np.float32).min
    lowest = np.nextafter(lowest, np.float32(0))
    scores = np.array([[3, 5, 5, lowest], [lowest, 0, lowest, lowest]], np.float32)
    found = chosen_blocks.largest(scores, 3)
    np.testing.assert_array_equal(found, [[1, 2, 0], [1, -1, -1]])


def draw(*shape):
    return np.random.default_rng(0).normal(size=(2, LENGTH, *shape))


CASES = {
    "moba": (effattn.moba_attention, {"block_size": 4, "top_k": 3}, {}),
    "native_sparse": (
        effattn.native_sparse_attention,
        {"compression_size": 4, "compression_stride": 2, "block_size": 4, "num_selected": 4},
        {"gates": draw(4, 3)},
    ),
    "indexed": (
        effattn.indexed_attention,
        {"top_k": 5},
        {"index_query": draw(2, 3), "index_key": draw(3), "index_weights": draw(2)},
    ),
}


@pytest.mark.parametrize("name", slow_but_for(["native_sparse"], CASES))
def test_several_tiles_agree_with_the_naive_form(name, monkeypatch):
    """Outputs and gradients; indexed attention gathers keys for tiles of 3 queries."""
    for module in (chosen_keys, moba, native_sparse):
        monkeypatch.setattr(module, "_QUERIES", TILE)
    monkeypatch.setattr(chosen_keys, "_GATHERED", 15)
    function, options, own = CASES[name]
    arrays = {"query": draw(4, 6), "key": draw(2, 6), "value": draw(2, 5), **own}

    def run(implementation, arrays):
        call = functools.partial(function, **options, implementation=implementation)
        out, pull_back = jax.vjp(lambda arrays: call(**arrays), arrays)
        return out, pull_back(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    with jax.enable_x64(True):
        fast, slow = (jax.jit(functools.partial(run, n))(arrays) for n in ("xla", "naive"))
        assert_close(fast, slow, 1e-10)
    if runtime.refusal() is None:
        monkeypatch.setattr(packed_pairs, "_PAIRS", TILE * options.get("top_k", 3))
        arrays = jax.tree.map(np.float32, arrays)
        assert_close(jax.jit(functools.partial(run, "llvm"))(arrays), slow, 1e-5)


@pytest.mark.skipif(runtime.refusal() is not None, reason=f"no kernels: {runtime.refusal()}")
@pytest.mark.parametrize("lengths", [None, (45, 7)])
def test_kernels_and_tiles_of_pairs_agree(lengths):
    """With padded rows, chosen blocks that are partly padding, and the log-sum-exp."""
    query, key, value = (np.float32(draw(heads, 6)) for heads in (4, 2, 2))
    given = None if lengths is None else np.asarray(lengths)
    attend = functools.partial(
        effattn.moba_attention,
        block_size=4,
        top_k=3,
        query_seq_lengths=given,
        key_value_seq_lengths=given,
        return_residual=True,
    )
    kernel, tiles = (attend(query, key, value, implementation=n) for n in ("llvm", "xla"))
    assert_close(kernel, tiles, 1e-5)


def test_decoding_refuses_kernels_of_whole_sequences():
    options = {"block_size": 4, "top_k": 3, "implementation": "llvm"}
    decoder = MobaDecoder(effattn.moba_attention, options)
    query, key, value = (np.float32(draw(heads, 6)) for heads in (4, 2, 2))
    state = decoder.init(2, LENGTH, 2, 6, 6, np.float32)
    with pytest.raises(NotImplementedError, match="takes whole sequences of one document"):
        decoder.extend(query, key, value, state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (5, 9), (100, 20), (3000, 200)])
def test_the_best_scores_are_those_of_a_stable_sort(size, count, dtype):
    """Equal scores go to the smaller index; NaN and -inf are no scores."""
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 3, (7, size)).astype(np.float32)
    for number in (np.nan, -np.inf, np.inf):
        scores[rng.random(scores.shape) < 0.1] = number
    index, is_score = jax.jit(functools.partial(chosen_blocks.ranked, count=count))(
        jnp.asarray(scores, dtype)
    )
    assert index.shape == is_score.shape == (7, min(size, count))
    for row, found, is_found in zip(scores, index, is_score, strict=True):
        present = np.flatnonzero(row > -np.inf)
        expected = present[np.argsort(-row[present], kind="stable")][:count]
        np.testing.assert_array_equal(found[is_found], expected)
        assert np.all(is_found[: len(expected)])
