"""routing_attention: tokens that share a cluster, and refused arguments."""

import functools

import jax
import numpy as np
import pytest

import effattn
from effattn.analysis import cost
from effattn.arrays.norms import layer_norm
from tests.marks import slow

CENTROIDS = np.random.default_rng(3).normal(size=(4, 3, 8)).astype(np.float32)


def heads(time=11, key_heads=4):
    rng = np.random.default_rng(0)
    shapes = [(2, time, 4, 8), (2, time, key_heads, 8), (2, time, key_heads, 6)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def attend(*given, centroids=CENTROIDS, **options):
    run = functools.partial(effattn.routing_attention, **{"cluster_size": 4, **options})
    return jax.jit(run)(*given, centroids=centroids)


def one_hot_tokens(clusters):
    """Tokens, each at one centroid, that are queries and keys; and the centroids `(1, C, H)`."""
    centroids = np.asarray(jax.jit(layer_norm, static_argnums=1)(np.eye(4, dtype=np.float32), 1e-6))
    tokens = centroids[np.array(clusters)][None, :, None]
    return tokens, centroids[None]


def test_causal_tokens_see_the_last_of_their_cluster():
    tokens, centroids = one_hot_tokens([0, 1, 0, 0, 1, 2, 0])
    value = np.arange(7, dtype=np.float32)[None, :, None, None]
    out = attend(tokens, tokens, value, centroids=centroids, cluster_size=2, is_causal=True)
    # The tokens of a cluster are equal here, so the outputs are means.
    np.testing.assert_allclose(np.ravel(out), [0, 1, 1, 2.5, 2.5, 5, 4.5], rtol=1e-6)


def test_centroids_may_be_wider_than_the_tokens():
    run = functools.partial(effattn.routing_attention, cluster_size=4, is_causal=True)
    with jax.enable_x64(True):
        out = jax.eval_shape(run, *heads(), centroids=CENTROIDS.astype(np.float64))
    assert out.dtype == np.float32


def test_what_is_in_no_cluster_gives_zeros():
    tokens, centroids = one_hot_tokens([0, 0, 1, 0])
    ones = np.ones((1, 4, 1, 1), np.float32)
    options = {"centroids": centroids[:, :2], "cluster_size": 1, "return_residual": True}
    out, lse = attend(tokens, tokens, ones, **options)
    np.testing.assert_allclose(np.ravel(out), [1, 0, 1, 0])
    np.testing.assert_array_equal(np.isneginf(np.ravel(lse)), [False, True, False, True])


def test_a_key_met_in_two_clusters_counts_twice():
    query, key, value = heads(3)
    twice = np.repeat(CENTROIDS[:, :1], 2, 1)
    once, lse = attend(
        query, key, value, centroids=CENTROIDS[:, :1], cluster_size=3, return_residual=True
    )
    out, more = attend(query, key, value, centroids=twice, cluster_size=3, return_residual=True)
    np.testing.assert_allclose(out, once, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(more, np.asarray(lse) + np.log(2), rtol=1e-5)


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_gradients_are_gathered_and_centroids_have_none(is_causal):
    def total(query, key, value, centroids):
        return attend(query, key, value, centroids=centroids, is_causal=is_causal).sum()

    gradient = jax.grad(total, (0, 1, 2, 3))
    given = (*heads(), CENTROIDS)
    names = {eqn.primitive.name for eqn in cost._equations(jax.make_jaxpr(gradient)(*given).jaxpr)}
    assert "scatter-add" not in names and "scatter_add" not in names
    *_, d_centroids = jax.jit(gradient)(*given)
    np.testing.assert_array_equal(d_centroids, 0)


@pytest.mark.parametrize("is_causal", [False, slow(True)])
def test_the_scale_of_queries_and_keys_does_not_matter(is_causal):
    query, key, value = heads()
    out = attend(100 * query + 3, key / 10, value, is_causal=is_causal)
    np.testing.assert_allclose(out, attend(query, key, value, is_causal=is_causal), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centroids": CENTROIDS[:2]}, r"shape \(4, clusters, 8\), for 4 query heads of size 8"),
        ({"centroids": CENTROIDS[..., :3]}, r"got float32 of shape \(4, 3, 3\)"),
        ({"centroids": CENTROIDS[0]}, r"got float32 of shape \(3, 8\)"),
        (
            {"centroids": np.ones((4, 12, 8))},
            "number of centroids must be at most 11, the number of tokens, got 12",
        ),
        ({"cluster_size": 12}, "cluster_size must be at most 11, the number of tokens, got 12"),
        ({"cluster_size": 0}, "cluster_size must be an int, 1 or more tokens, got 0"),
        ({"segment_ids": (np.ones((2, 11), int),) * 2}, "segment_ids must be one array"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        attend(*heads(), **options)


def test_it_is_self_attention():
    query, key, value = heads()
    with pytest.raises(ValueError, match="need the same length, got 11 and 5"):
        attend(query, key[:, :5], value[:, :5])


def test_packed_documents_in_both_directions_take_linear_memory():
    """Memory stays linear, although one cluster may hold all tokens."""

    def largest(time):
        size = int(time**0.5)
        centroids = np.ones((4, size, 8), np.float32)

        def total(query, key, value):
            given = {"centroids": centroids, "cluster_size": size}
            ids = np.ones((2, time), int)
            return effattn.routing_attention(query, key, value, segment_ids=ids, **given).sum()

        return cost.largest(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*heads(time)))

    lengths = (1024, 4096)
    assert cost.exponent(lengths, [largest(time) for time in lengths]) <= 1.1
