import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.cores import feature_maps


@pytest.mark.parametrize(
    "name, expected, slope",
    [
        ("identity", [-2, 0, 3], [1, 1, 1]),
        ("relu", [0, 0, 3], [0, 0, 1]),
        ("elu", [np.exp(-2), 1, 4], [np.exp(-2), 1, 1]),
        ("exp", [np.exp(-2), 1, np.exp(3)], [np.exp(-2), 1, np.exp(3)]),
        ("squared_relu", [0, 0, 9], [0, 0, 6]),
    ],
)
def test_values_and_slopes(name, expected, slope):
    phi, x = feature_maps.resolve(name), np.float32([-2.0, 0.0, 3.0])
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(phi)))(x)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes, slope, rtol=1e-6)


def test_elu_neither_overflows_nor_loses_small_features():
    x = np.float32([-1e4, -30.0, 1e4])
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(feature_maps.elu)))(x)
    np.testing.assert_allclose(values, [0, np.exp(-30), 10001], rtol=1e-5)
    np.testing.assert_allclose(slopes, [0, np.exp(-30), 1], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_products_of_taylor_features_are_a_second_order_series(size):
    x, y = np.random.default_rng(0).normal(size=(2, 7, size)).astype(np.float32)
    features = [np.asarray(jax.jit(feature_maps.taylor)(a)) for a in (x, y)]
    assert features[0].shape == (7, (1 + size) * (2 + size) // 2)
    s = (x * y).sum(-1)
    np.testing.assert_allclose((features[0] * features[1]).sum(-1), 1 + s + s**2 / 2, rtol=1e-5)


def test_a_callable_is_its_own_map():
    assert feature_maps.resolve(jnp.exp) is jnp.exp


@pytest.mark.parametrize("unknown", ["softmax", 3, None, ["elu"]])
def test_an_unknown_map_names_the_known_ones(unknown):
    with pytest.raises(ValueError, match=r"unknown feature_map .*callable.*identity, relu, elu"):
        feature_maps.resolve(unknown)
