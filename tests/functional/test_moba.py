"""moba_attention: chosen blocks, causality of the choice, cost, and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.analysis import cost, mixing_weights


def heads(time=11, key_heads=2, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, time, 4, 8), (2, time, key_heads, 8), (2, time, key_heads, 6)]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def attend(*given, **options):
    options = {"block_size": 3, "top_k": 2, **options}
    return jax.jit(functools.partial(effattn.moba_attention, **options))(*given)


def by_the_paper(query, key, value, size, top_k):
    """One head in NumPy: the paper's algorithm, query by query."""
    out = np.zeros((len(query), value.shape[1]))
    for t, q in enumerate(query):
        own = t // size
        means = [key[n * size : (n + 1) * size].mean(0) for n in range(own)]
        ranked = sorted(range(own), key=lambda n: (-(q @ means[n]), n))
        seen = [j for n in ranked[: top_k - 1] for j in range(n * size, (n + 1) * size)]
        seen += range(own * size, t + 1)
        weights = np.exp(key[seen] @ q / len(q) ** 0.5)
        out[t] = weights @ value[seen] / weights.sum()
    return out


@pytest.mark.parametrize(("size", "top_k"), [(3, 2), (4, 3), (1, 4), (16, 2)])
def test_it_is_the_algorithm_of_the_paper(size, top_k):
    with jax.enable_x64(True):
        query, key, value = heads(23, dtype=np.float64)
        out = attend(query, key, value, block_size=size, top_k=top_k)
    for row, head in np.ndindex(2, 4):
        one = (query[row, :, head], key[row, :, head // 2], value[row, :, head // 2])
        expected = by_the_paper(*one, size, top_k)
        np.testing.assert_allclose(out[row, :, head], expected, rtol=1e-10, atol=1e-12)


def test_all_blocks_are_exact_attention():
    query, key, value = heads(23)
    exact = effattn.dot_product_attention(query, key, value, is_causal=True)
    out = attend(query, key, value, top_k=8)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_a_query_reads_its_own_block_and_the_block_that_is_like_it():
    key = np.repeat(np.eye(4, dtype=np.float32), 2, 0)[:, None]  # four blocks of two tokens
    query = key[[0, 0, 0, 0, 0, 0, 2, 2]]
    weights = mixing_weights("moba", query=query, key=key, block_size=2, top_k=2)
    seen = np.asarray(weights)[0] > 0
    assert seen[5].nonzero()[0].tolist() == [0, 1, 4, 5]
    assert seen[6].nonzero()[0].tolist() == [2, 3, 6]


def test_equal_scores_go_to_the_earlier_block():
    ones = np.ones((8, 1, 4), np.float32)
    weights = mixing_weights("moba", query=ones, key=ones, block_size=2, top_k=2)
    assert (np.asarray(weights)[0, 7] > 0).nonzero()[0].tolist() == [0, 1, 6, 7]


def test_the_choice_does_not_read_the_future():
    """Keys of the present and of later blocks do not change what an earlier query chose."""
    query, key, value = heads(24)
    other = heads(24)[1][:, ::-1]
    for token in (4, 12, 17):
        later = np.where(np.arange(24)[:, None, None] > token, 9 * other, key)
        out, changed = attend(query, key, value), attend(query, later, value)
        np.testing.assert_allclose(changed[:, : token + 1], out[:, : token + 1], atol=1e-6)


def test_the_jacobian_is_block_lower_triangular():
    query, key, value = heads(9)

    def of_row(query, key, value):
        arrays = (x[None] for x in (query, key, value))
        return attend(*arrays)[0].sum((-2, -1))

    for jacobian in jax.jacrev(of_row, (0, 1, 2))(query[0], key[0], value[0]):
        reaches = np.abs(jacobian).max((-2, -1))
        assert np.array_equal(np.triu(reaches, 1), np.zeros((9, 9)))


def test_operations_are_a_fourth_of_those_of_exact_attention():
    """At the paper's setting: blocks of 512 tokens and three blocks a query, of 16,384 tokens."""
    x = jax.ShapeDtypeStruct((1, 16384, 1, 64), jnp.float32)
    moba = functools.partial(effattn.moba_attention, block_size=512, top_k=3)
    exact = functools.partial(effattn.dot_product_attention, is_causal=True, implementation="xla")
    ours, most = (cost.operations(jax.make_jaxpr(f)(x, x, x)) for f in (moba, exact))
    assert 4 * ours < most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an int, 1 or more tokens in a block, got 0"),
        ({"top_k": 0}, "top_k must be an int, 1 or more blocks, the own block included, got 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attend(*heads(), **options)


def test_queries_and_keys_are_the_same_tokens():
    query, key, value = heads()
    with pytest.raises(ValueError, match="is self-attention: query and key need the same length"):
        attend(query[:, :5], key, value)
