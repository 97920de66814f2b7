"""Inducing points: pooling of sets, padding, and what the bottleneck cannot do."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import AttentionPooling, InducedSelfAttention
from tests.nn.build import filled, floats

X = floats(2, 9, 8)


def pooling():
    return filled(lambda: AttentionPooling(8, 2, num_points=3, rngs=nnx.Rngs(0)))


def test_pooling_reads_a_set():
    """The order of the tokens and the padding change nothing."""
    pool = jax.jit(lambda m, x, lengths: m(x, lengths=lengths))
    lengths = np.array([9, 6])
    out = pool(pooling(), X, lengths)
    assert out.shape == (2, 3, 8)
    turned = np.stack([X[0, ::-1], np.r_[X[1, 5::-1], np.full((3, 8), np.nan)]])
    np.testing.assert_allclose(pool(pooling(), turned, lengths), out, atol=1e-6)


def test_points_without_tokens_are_finite():
    pool = jax.jit(lambda m, x, lengths: m(x, lengths=lengths))
    alone, other = (pool(pooling(), x, np.array([0, 0])) for x in (X, 2 * X))
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(alone, other)


def test_tokens_are_permuted_with_the_input():
    mixer = filled(lambda: InducedSelfAttention(8, 2, num_points=3, rngs=nnx.Rngs(0)))
    mix = jax.jit(lambda m, x: m(x))
    np.testing.assert_allclose(mix(mixer, X[:, ::-1])[:, ::-1], mix(mixer, X), atol=1e-6)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (AttentionPooling, {"num_points": 0}, "num_points must be an int, 1 or more points, got 0"),
        (InducedSelfAttention, {"num_points": 0}, "num_points must be an int, 1 or more points"),
        (InducedSelfAttention, {"is_causal": True}, "its points attend to all tokens"),
        (InducedSelfAttention, {"head_dim": 0}, "head_dim must be an int, 1 or more features"),
    ],
)
def test_wrong_options_are_named(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(8, 2, **options, rngs=nnx.Rngs(0))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="lengths must lie between 0 and the 9 tokens given"):
        pooling()(X, lengths=np.array([9, 10]))
    mixer = InducedSelfAttention(8, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="each document would need points of its own"):
        mixer(X, segment_ids=np.ones((2, 9), int))
