import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.functional import feature_maps


@pytest.mark.parametrize(
    "name, expected, slope",
    [
        ("identity", [-2, 0, 3], [1, 1, 1]),
        ("relu", [0, 0, 3], [0, 0, 1]),
        ("elu", [np.exp(-2), 1, 4], [np.exp(-2), 1, 1]),
    ],
)
def test_values_and_slopes(name, expected, slope):
    phi, x = feature_maps.resolve(name), jnp.asarray([-2.0, 0.0, 3.0])
    np.testing.assert_allclose(phi(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(phi))(x), slope, rtol=1e-6)


def test_elu_neither_overflows_nor_loses_small_features():
    x = jnp.asarray([-1e4, -30.0, 1e4])
    np.testing.assert_allclose(feature_maps.elu(x), [0, np.exp(-30), 10001], rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.grad(feature_maps.elu))(x), [0, np.exp(-30), 1], 1e-5)


def test_a_callable_is_its_own_map():
    assert feature_maps.resolve(jnp.exp) is jnp.exp


@pytest.mark.parametrize("unknown", ["softmax", 3, None, ["elu"]])
def test_an_unknown_map_names_the_known_ones(unknown):
    with pytest.raises(ValueError, match=r"unknown feature_map .*callable.*identity, relu, elu"):
        feature_maps.resolve(unknown)
