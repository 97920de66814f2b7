import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.arrays import dropout
from effattn.functional.softmax import dot_product_attention


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_its_authors(key, counter, expected):
    words = [jnp.uint32(word) for word in (*key, *counter)]
    assert tuple(map(int, dropout.threefry2x32(words[:2], words[2:]))) == expected


def draw_keep(rng, rate, heads=3, length=200):
    b, h, i, j = np.ix_(*(np.arange(n) for n in (2, heads, length, length)))
    keep = jax.jit(lambda rng: dropout.keep(dropout.seed_from_rng(rng), rate, b, h, i, j))
    return np.asarray(keep(rng))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_keeps_one_minus_the_rate(rate):
    keep = draw_keep(jax.random.key(0), rate)
    standard_error = np.sqrt(rate * (1 - rate) / keep.size)
    assert abs(keep.mean() - (1 - rate)) < 4 * standard_error


def test_an_almost_certain_rate_keeps_almost_nothing():
    assert draw_keep(jax.random.key(0), 1 - 1e-12).sum() == 0


def test_differs_by_example_head_position_and_key_without_correlation():
    keep = draw_keep(jax.random.key(0), 0.5) - 0.5
    above = np.triu_indices(keep.shape[-1], 1)
    disjoint = [
        (keep, draw_keep(jax.random.key(1), 0.5) - 0.5),
        (keep[0], keep[1]),
        (keep[:, 0], keep[:, 1]),
        (keep[:, :, ::2], keep[:, :, 1::2]),
        (keep[..., ::2], keep[..., 1::2]),
        (keep[..., *above], np.swapaxes(keep, 2, 3)[..., *above]),
    ]
    for one, other in disjoint:
        # The bound is four standard errors of a mean of independent products of +-1/4.
        assert abs((one * other).mean()) < 4 * 0.25 / np.sqrt(one.size)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_takes_any_kind_of_key(kind):
    seeds = [dropout.seed_from_rng(jax.random.key(n, impl=kind)) for n in range(2)]
    assert seeds[0].shape == (2,) and seeds[0].dtype == jnp.uint32
    assert not np.array_equal(*seeds)


def test_takes_an_old_key():
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    np.testing.assert_array_equal(dropout.seed_from_rng(old), dropout.seed_from_rng(new))


def test_leaves_the_mean_of_the_output_as_it_was():
    query, key, value = np.random.default_rng(0).normal(size=(3, 8, 2, 4)).astype(np.float32)

    @jax.jit
    @jax.vmap
    def with_dropout(rng):
        return dot_product_attention(query, key, value, dropout_rate=0.3, dropout_rng=rng)

    draws = np.asarray(with_dropout(jax.random.split(jax.random.key(0), 500)))
    error = draws.mean(0) - dot_product_attention(query, key, value)
    standard_error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(error) < 5 * standard_error).all()
