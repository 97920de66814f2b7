"""The choice of keys and the attention to them by the CPU kernels, against float64 in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.cores import chosen_keys
from effattn.cores.chosen_keys import Chosen, Index, Places
from effattn.llvm import block_attention, runtime
from effattn.testing.functions import assert_close

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

# Batch, tokens, query heads, key heads, features, values, index heads and features; and options.
CASES = {
    "a token": ((1,), 1, 1, 1, 3, 2, 1, 1, {"top_k": 1}),
    "groups": ((2,), 150, 6, 2, 20, 12, 3, 5, {"top_k": 17}),
    "whole vectors": ((), 140, 16, 1, 32, 16, 4, 16, {"top_k": 100}),
    "all keys": ((), 90, 2, 2, 8, 8, 2, 4, {"top_k": 90}),
    "documents": (
        (2,),
        100,
        4,
        2,
        8,
        5,
        2,
        4,
        {
            "top_k": 9,
            "segment_ids": np.array([[3] * 70 + [1] * 30, [2] * 10 + [5] * 80 + [0] * 10]),
        },
    ),
    "lengths": (
        (3,),
        100,
        4,
        2,
        8,
        5,
        2,
        4,
        {
            "top_k": 20,
            "query_seq_lengths": np.array([100, 31, 0]),
            "key_value_seq_lengths": np.array([90, 31, 0]),
        },
    ),
}


def arrays_of(name):
    batch, tokens, heads, key_heads, features, values, index_heads, index_size, _ = CASES[name]
    rng = np.random.default_rng(tokens)
    shapes = {
        "query": (heads, features),
        "key": (key_heads, features),
        "value": (key_heads, values),
        "index_query": (index_heads, index_size),
        "index_key": (index_size,),
        "index_weights": (index_heads,),
    }
    return {
        key: rng.normal(size=(*batch, tokens, *shape)).astype(np.float32)
        for key, shape in shapes.items()
    }


def with_gradients(arrays, implementation, **options):
    """Output, log-sum-exp, and the gradients of queries, keys and values."""
    heads = {name: arrays[name] for name in ("query", "key", "value")}
    call = functools.partial(
        effattn.indexed_attention, implementation=implementation, return_residual=True, **options
    )

    @jax.jit
    def run(arrays, heads):
        results, pull_back = jax.vjp(lambda heads: call(**{**arrays, **heads}), heads)
        weights = [((np.arange(x.size).reshape(x.shape) % 7 - 3) / 4) for x in results]
        cotangents = [
            jnp.where(jnp.isfinite(x), weight, 0).astype(x.dtype)
            for x, weight in zip(results, weights, strict=True)
        ]
        return results, pull_back(tuple(cotangents))[0]

    return run(arrays, heads)


def exact(arrays, **options):
    with jax.enable_x64(True):
        arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
        return with_gradients(arrays, "xla", **options)


def assert_exact(name):
    arrays, options = arrays_of(name), CASES[name][-1]
    ours = with_gradients(arrays, "llvm", **options)
    assert_close(ours, exact(arrays, **options), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name):
    assert_exact(name)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("name", ["groups", "documents"])
def test_vectors_of_every_width_agree(name):
    assert_exact(name)


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_the_tasks_of_a_key_head_add_up_their_gradients(threads, monkeypatch):
    monkeypatch.setattr(block_attention, "threads", lambda: threads)
    jax.clear_caches()
    assert_exact("whole vectors")


def chosen_by(implementation, scores, top_k):
    """The keys that the last query chooses by these scores, which are not negative."""
    scores = np.asarray(scores, np.float32)
    tokens = len(scores)
    index = Index(np.ones((tokens, 1, 1), np.float32), scores[:, None], np.ones((tokens, 1), "f"))
    places = Places(np.arange(tokens, dtype=np.int32), np.int32(tokens))
    found = chosen_keys.choose("a test", index, places, top_k, implementation)
    return sorted(np.asarray(found.at[-1])[np.asarray(found.counts[-1])].tolist())


@pytest.mark.parametrize(
    ("scores", "top_k", "expected"),
    [
        ([1, 3, 2, 3, 0], 3, [1, 2, 3]),
        ([2, 1, 1, 1, 1], 3, [0, 1, 2]),
        ([0, 0, 0, 0], 2, [0, 1]),
        ([0, 2e-38, 1e-30, 1e38], 3, [1, 2, 3]),
        ([1, 2], 5, [0, 1]),
        ([*[1] * 100, 2, 1], 4, [0, 1, 2, 100]),
        ([1, np.inf, 1, 2], 2, [1, 3]),
        ([1, np.nan, 1, 2], 4, [0, 2, 3]),
    ],
)
def test_the_best_scores_are_chosen_and_of_equal_ones_the_first(scores, top_k, expected):
    assert chosen_by("xla", scores, top_k) == expected
    assert chosen_by("llvm", scores, top_k) == expected


@pytest.mark.parametrize("implementation", ["llvm", "xla"])
def test_a_query_that_sees_few_keys_lists_different_ones(implementation):
    index = Index(*(np.ones((90, *shape), np.float32) for shape in ((1, 1), (1,), (1,))))
    ids = np.array([1] * 50 + [2] * 40)
    places = Places(np.arange(90, dtype=np.int32), np.int32(88), (ids, ids))
    found = chosen_keys.choose("a test", index, places, 70, implementation)
    for token, (at, counts) in enumerate(zip(*map(np.asarray, found), strict=True)):
        first = 0 if token < 50 else 50
        assert sorted(at[counts]) == [*range(first, min(token, 87) + 1)]
        assert len({*at.tolist()}) == 70
        assert at.min() >= 0
        assert at.max() < 90


@pytest.mark.parametrize("sign", [1, -1])
def test_any_scores_are_ranked_alike(sign):
    """Scores of both signs over many magnitudes, with repetitions."""
    rng = np.random.default_rng(0)
    tokens = 400
    scores = np.round(rng.normal(size=tokens), 2) * 10.0 ** rng.integers(-20, 20, tokens)
    index = Index(
        np.full((tokens, 2, 1), np.array([[1], [-1]]), np.float32),
        scores[:, None].astype(np.float32),
        sign * np.array([[1, -2]] * tokens, np.float32),
    )
    places = Places(np.arange(tokens, dtype=np.int32), np.int32(tokens))
    both = [chosen_keys.choose("a test", index, places, 30, name) for name in ("llvm", "xla")]
    ours, expected = (np.sort(np.where(found.counts, found.at, -1)) for found in both)
    np.testing.assert_array_equal(ours, expected)


def test_the_keys_of_a_query_may_come_in_any_order():
    arrays = arrays_of("whole vectors")
    heads = arrays["query"], arrays["key"], arrays["value"]
    rng = np.random.default_rng(0)
    at = np.stack([rng.permutation(140)[:70] for _ in range(140)]).astype(np.int32)
    chosen = Chosen(at, rng.random(at.shape) < 0.7)
    ours, expected = (
        chosen_keys.attend("a test", heads, chosen, 0.3, None, name) for name in ("llvm", "xla")
    )
    assert_close(ours, expected, 1e-5)


def test_a_scale_may_be_an_array():
    arrays = arrays_of("groups")
    call = functools.partial(effattn.indexed_attention, implementation="llvm", top_k=9)
    ours = jax.jit(lambda scale: call(**arrays, scale=scale))(jnp.float32(0.3))
    assert_close(ours, call(**arrays, scale=0.3), 1e-6)


def test_forward_mode_derivatives_are_those_in_xla():
    arrays = arrays_of("groups")

    def along(implementation):
        def call(query, value):
            given = {**arrays, "query": query, "value": value}
            return effattn.indexed_attention(**given, top_k=9, implementation=implementation)

        moving = arrays["query"], arrays["value"]
        return jax.jvp(call, moving, tuple(map(jnp.cos, moving)))

    assert_close(along("llvm"), along("xla"), 1e-5)


def test_no_token_before_a_change_notices_it():
    """Earlier outputs and gradients stay equal bit for bit, even if the change is NaN."""
    arrays = arrays_of("groups")
    changed = {name: x.copy() for name, x in arrays.items()}
    for x in changed.values():
        x[:, 70:] = np.nan

    @jax.jit
    def run(arrays):
        def call(query):
            given = {**arrays, "query": query}
            return effattn.indexed_attention(**given, top_k=9, implementation="llvm")[:, :70]

        out, pull_back = jax.vjp(call, arrays["query"])
        return out, pull_back(jnp.cos(out))[0][:, :70]

    for before, after in zip(run(arrays), run(changed), strict=True):
        np.testing.assert_array_equal(before, after)


def test_under_vmap_shared_arrays_stay_shared():
    arrays = arrays_of("whole vectors")
    call = functools.partial(effattn.indexed_attention, top_k=9, implementation="llvm")

    def total(arrays):
        return jnp.sin(call(**arrays)).sum()

    for name in arrays:
        both = jnp.stack([arrays[name], -arrays[name]])

        def of_one(x, name=name):
            return jax.value_and_grad(total)({**arrays, name: x})

        ours = jax.vmap(of_one)(both)
        expected = jax.tree.map(lambda *x: jnp.stack(x), *map(of_one, both))
        assert_close(ours, expected, 1e-5)


def test_queries_may_be_some_tokens_of_the_sequence():
    """As in a chunk of a long prompt: other positions than those of the first keys."""
    rng = np.random.default_rng(3)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    index = Index(draw(2, 20, 3, 4), draw(2, 90, 4), draw(2, 20, 3))
    positions = np.stack([np.arange(70, 90), np.arange(15, 35)]).astype(np.int32)
    places = Places(positions, np.array([85, 90], np.int32))
    heads = draw(2, 20, 4, 8), draw(2, 90, 2, 8), draw(2, 90, 2, 8)

    def run(name):
        found = chosen_keys.choose("a test", index, places, 30, name)
        return chosen_keys.attend("a test", heads, found, 0.3, None, name)

    assert_close(run("llvm"), run("xla"), 1e-5)


def test_it_is_silent_where_programs_are_searched_for_nan():
    arrays = arrays_of("groups")
    with jax.debug_nans(True):
        effattn.indexed_attention(**arrays, top_k=9, implementation="llvm")


def test_limits_beyond_the_keys_choose_no_padding():
    index = Index(np.ones((70, 1, 1), "f"), -np.ones((70, 1), "f"), -np.ones((70, 1), "f"))
    places = Places(np.full(70, 100, np.int32), np.int32(100))
    found = chosen_keys.choose("a test", index, places, 70, "llvm")
    assert (np.sort(found.at) == np.arange(70)).all()
