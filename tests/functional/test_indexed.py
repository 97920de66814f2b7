"""indexed_attention: the algorithm of the paper, its limit, causality and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.analysis import cost


def given(time=23, key_heads=2, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {
        "query": (4, 8),
        "key": (key_heads, 8),
        "value": (key_heads, 6),
        "index_query": (3, 5),
        "index_key": (5,),
        "index_weights": (3,),
    }
    return {
        name: rng.normal(size=(2, time, *shape)).astype(dtype) for name, shape in shapes.items()
    }


def attend(arrays, **options):
    run = functools.partial(effattn.indexed_attention, **{"top_k": 4, **options})
    return jax.jit(lambda arrays: run(**arrays))(arrays)


def by_the_paper(row, head, arrays, top_k):
    """One head of one example in NumPy, query by query."""
    query, key, value = (
        arrays[name][row, :, n]
        for name, n in (("query", head), ("key", head // 2), ("value", head // 2))
    )
    p, c, w = (arrays[f"index_{name}"][row] for name in ("query", "key", "weights"))
    out = np.zeros((len(query), value.shape[1]))
    for t, q in enumerate(query):
        scores = [w[t] @ np.maximum(p[t] @ c[s], 0) for s in range(t + 1)]
        seen = sorted(range(t + 1), key=lambda s: (-scores[s], s))[:top_k]
        weights = np.exp(key[seen] @ q / len(q) ** 0.5)
        out[t] = weights @ value[seen] / weights.sum()
    return out


@pytest.mark.parametrize("top_k", [1, 4])
def test_it_is_the_algorithm_of_the_paper(top_k):
    with jax.enable_x64(True):
        arrays = given(dtype=np.float64)
        out = attend(arrays, top_k=top_k)
    for row, head in np.ndindex(2, 4):
        expected = by_the_paper(row, head, arrays, top_k)
        np.testing.assert_allclose(out[row, :, head], expected, rtol=1e-10, atol=1e-12)


def test_it_agrees_with_its_naive_form_with_padding_and_documents():
    arrays = given()
    ids = np.repeat([[1, 2, 0], [3, 4, 5]], [8, 8, 7], axis=1)
    lengths = np.array([23, 19])
    for padding in ({"segment_ids": ids}, {"key_value_seq_lengths": lengths}):
        run = functools.partial(attend, arrays, return_residual=True, **padding)
        for ours, expected in zip(run(), run(implementation="naive"), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_all_keys_are_exact_attention():
    arrays = given()
    heads = (arrays[name] for name in ("query", "key", "value"))
    exact = effattn.dot_product_attention(*heads, is_causal=True)
    np.testing.assert_allclose(attend(arrays, top_k=23), exact, rtol=1e-5, atol=1e-6)


def test_equal_scores_go_to_the_earlier_token():
    arrays = given(8)
    arrays["index_weights"] *= 0
    arrays["query"] *= 0
    arrays["value"] = np.broadcast_to(np.eye(8, dtype=np.float32)[None, :, None], (2, 8, 2, 8))
    weights = np.asarray(attend(arrays, top_k=3))[0, :, 0]
    np.testing.assert_allclose(weights[7], [1 / 3] * 3 + [0] * 5, rtol=1e-6)
    np.testing.assert_allclose(weights[1], [1 / 2] * 2 + [0] * 6, rtol=1e-6)


def test_the_jacobian_is_block_lower_triangular():
    arrays = {name: x[0] for name, x in given(11).items()}
    names = "query", "key", "value"

    def of_row(*heads):
        whole = {**arrays, **dict(zip(names, heads, strict=True))}
        return attend({name: x[None] for name, x in whole.items()})[0].sum((-2, -1))

    for jacobian in jax.jacrev(of_row, (0, 1, 2))(*(arrays[name] for name in names)):
        reaches = np.abs(jacobian).max((-2, -1))
        np.testing.assert_array_equal(np.triu(reaches, 1), np.zeros((11, 11)))


def test_later_index_keys_do_not_change_the_choice():
    arrays = given()
    for token in (4, 12):
        is_later = np.arange(23)[:, None] > token
        later = {**arrays, "index_key": np.where(is_later, 9, arrays["index_key"])}
        before, after = attend(arrays), attend(later)
        np.testing.assert_array_equal(before[:, : token + 1], after[:, : token + 1])
        assert (before[:, token + 1 :] != after[:, token + 1 :]).any()


def test_the_index_has_no_gradient():
    arrays = given()
    gradients = jax.grad(lambda arrays: attend(arrays).sum())(arrays)
    for name, gradient in gradients.items():
        assert np.any(gradient) != name.startswith("index"), name


def test_no_array_has_all_pairs():
    def largest(length):
        arrays = jax.eval_shape(lambda: {n: jnp.asarray(x) for n, x in given(length).items()})

        def run(arrays):
            out, pull_back = jax.vjp(lambda a: effattn.indexed_attention(**a, top_k=16), arrays)
            return pull_back(out)

        return cost.largest(jax.make_jaxpr(run)(arrays))

    assert largest(4096) <= 2 * 1.1 * largest(2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k must be an int, 1 or more keys of a query, got 0"),
        ({"index_key": np.ones((2, 23, 4), np.float32)}, "index_key must be floating point of"),
        ({"index_weights": np.ones((2, 23), np.float32)}, "index_weights must be floating point"),
        ({"index_query": np.ones((2, 23, 3), np.float32)}, "index_query must have shape"),
        ({"index_query": np.ones((2, 23, 0, 4), np.float32)}, r"index_query must .* \(2, 23, 1, "),
        ({"segment_ids": (np.ones((2, 23), int),) * 2}, "segment_ids must be one array"),
        ({"query": np.ones((2, 5, 4, 8), np.float32)}, "is self-attention"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        effattn.indexed_attention(**{**given(), "top_k": 4, **changes})
