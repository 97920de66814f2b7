"""ShortConvolution agrees with a loop over tokens and taps: whole, in pieces, packed and padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import ShortConvolution
from tests.nn.build import filled
from tests.nn.calls import call, extend, silu

BATCH, LENGTH, FEATURES, WIDTH = 2, 11, 3, 4
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, FEATURES)).astype(np.float32)


def make(width=WIDTH, **options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: ShortConvolution(FEATURES, width, rngs=nnx.Rngs(0), **options))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 4, 13])
def test_it_is_a_loop_over_tokens_and_taps(width):
    layer = make(width, use_bias=True)
    taps, bias = np.asarray(layer.taps[...]), np.asarray(layer.bias[...])
    expected = np.zeros_like(X)
    for b, t, d in np.ndindex(X.shape):
        reached = range(max(width - 1 - t, 0), width)
        total = bias[d] + sum(taps[j, d] * X[b, t - width + 1 + j, d] for j in reached)
        expected[b, t, d] = silu(total)
    close(call(layer, X), expected)
    linear = make(width, use_bias=True, activation=None)
    close(silu(np.asarray(call(linear, X))), expected)


@pytest.mark.parametrize("width", [1, 4, 5])
def test_a_bidirectional_one_reads_both_sides(width):
    """Whole, padded and packed: it reads no token past the ends of a document."""
    layer = make(width, is_causal=False, activation=None)
    taps, before = np.asarray(layer.taps[...]), width // 2
    ids = np.tile([1] * 6 + [2] * 4 + [0], (BATCH, 1))

    def expected(allowed):
        y = np.zeros_like(X)
        for t, j in np.ndindex(LENGTH, width):
            at = t - before + j
            if 0 <= at < LENGTH and allowed(t, at):
                y[:, t] += taps[j] * X[:, at]
        return y

    close(call(layer, X), expected(lambda t, at: True))
    spoiled = np.where(ids[..., None] > 0, X, np.nan)
    packed = call(layer, spoiled, segment_ids=ids)
    close(packed, expected(lambda t, at: ids[0, t] == ids[0, at] > 0))
    padded = call(layer, spoiled, lengths=np.full(BATCH, 10))
    close(padded, expected(lambda t, at: max(t, at) < 10))
    for decode in (lambda: layer.init_state(BATCH), lambda: layer.extend(X, X)):
        with pytest.raises(ValueError, match="bidirectional ShortConvolution cannot decode"):
            decode()


def test_any_split_equals_the_whole():
    """The rows have pieces of unequal lengths, with NaN after the end of each piece."""
    layer = make(use_bias=True)
    whole = call(layer, X)
    state, at = layer.init_state(BATCH), np.zeros(BATCH, int)
    for piece in ([1, 3], [0, 2], [5, 1], [1, 0], [2, 4], [2, 1]):
        padded = np.full((BATCH, 5, FEATURES), np.nan, np.float32)
        for row, size in enumerate(piece):
            padded[row, :size] = X[row, at[row] : at[row] + size]
        y, state = extend(layer, padded, state, np.array(piece))
        for row, size in enumerate(piece):
            close(y[row, :size], whole[row, at[row] : at[row] + size])
            assert not np.any(y[row, size:])
        at = at + piece
    np.testing.assert_array_equal(at, LENGTH)
    np.testing.assert_array_equal(state, X[:, 1 - WIDTH :])


def test_single_steps_equal_the_whole():
    layer = make()
    state, outs = layer.init_state(BATCH), []
    for token in range(LENGTH):
        y, state = extend(layer, X[:, token : token + 1], state)
        outs.append(y)
    close(np.concatenate(outs, 1), call(layer, X))


def test_packed_documents_give_what_they_give_alone():
    layer = make(use_bias=True)
    ids = np.repeat([3, 0, 1, 2, 0], [4, 1, 2, 3, 1])
    y = call(layer, np.where(ids[:, None] == 0, np.nan, X), None, np.tile(ids, (BATCH, 1)))
    for id in (1, 2, 3):
        close(y[:, ids == id], call(layer, X[:, ids == id]))
    assert not np.any(y[:, ids == 0])


def test_padding_reaches_nothing():
    layer = make(use_bias=True)
    lengths = np.array([7, 0])
    valid = (np.arange(LENGTH) < lengths[:, None])[..., None]

    @jax.jit
    @jax.value_and_grad
    def loss(layer, x):
        return jnp.sum(layer(x, lengths=lengths) ** 2)

    value, gradient = loss(layer, np.where(valid, X, np.nan))
    of_zeros = loss(layer, np.where(valid, X, 0))
    jax.tree.map(np.testing.assert_array_equal, (value, gradient), of_zeros)
    assert np.isfinite(value)
    y = call(layer, np.where(valid, X, np.nan), lengths)
    close(y[0, :7], call(layer, X)[0, :7])
    assert not np.any(y[1])


def test_a_token_changes_nothing_before_it():
    layer = make()
    changed = X.copy()
    changed[:, 6] += 100
    y, z = call(layer, X), call(layer, changed)
    np.testing.assert_array_equal(y[:, :6], z[:, :6])
    assert np.all(y[:, 6 : 6 + WIDTH] != z[:, 6 : 6 + WIDTH])
    np.testing.assert_array_equal(y[:, 6 + WIDTH :], z[:, 6 + WIDTH :])


def test_dtypes():
    layer = make(dtype=jnp.bfloat16, use_bias=True)
    y, state = extend(layer, X, layer.init_state(BATCH))
    assert y.dtype == state.dtype == jnp.bfloat16
    close(y.astype(jnp.float32), call(layer, X).astype(jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), call(make(use_bias=True), X), atol=0.03)
    assert make().init_state(3, jnp.float16).dtype == jnp.float16


def test_it_starts_uniform():
    taps = ShortConvolution(4096, 4, rngs=nnx.Rngs(0)).taps[...]
    assert np.abs(taps).max() <= 0.5
    np.testing.assert_allclose(np.std(taps), 0.5 / 3**0.5, rtol=0.02)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="width must be"):
        make(0)
    layer = make()
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 3\), got \(2, 11\)"):
        layer(X[..., 0])
    with pytest.raises(ValueError, match=r"state must .*\(2, 3, 3\)"):
        layer.extend(X, layer.init_state(1))
    with pytest.raises(ValueError, match="dtype of a decode state must be .* got 'int32'"):
        layer.init_state(2, jnp.int32)
    with pytest.raises(ValueError, match="lengths must lie between 0 and the 11"):
        layer(X, lengths=np.array([12, 0]))
