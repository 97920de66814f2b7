"""The rotary embedding turns pairs of features by angles in proportion to the position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.nn import RotaryEmbedding
from tests.nn.build import floats


def turn(x, positions, **options):
    return jax.jit(RotaryEmbedding(**options))(x, positions)


def test_it_is_a_product_of_complex_numbers():
    x = floats(2, 5, 3, 8)
    positions = np.array([0, 1, 4, 9, 2])
    angle = positions[:, None] / 2.0 * 100.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[:, None]
    out = turn(x, positions, theta=100.0, scaling=2.0)
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_products_depend_on_the_distance_only():
    query, key = floats(1, 1, 1, 16), floats(1, 1, 1, 16, seed=1)

    def product(i, j):
        return np.sum(turn(query, np.array([i])) * turn(key, np.array([j])))

    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-2


def test_scaling_fits_longer_sequences_into_the_same_angles():
    x = floats(1, 4, 1, 8)
    stretched = turn(x, 4 * np.arange(4), scaling=4.0)
    np.testing.assert_allclose(stretched, turn(x, np.arange(4)), rtol=1e-6)


def test_positions_may_differ_between_rows():
    x = floats(2, 3, 1, 8)
    positions = np.array([[0, 1, 2], [5, 6, 7]])
    out = turn(x, positions)
    for row in range(2):
        np.testing.assert_array_equal(out[row], turn(x[row], positions[row]))


def test_bfloat16_goes_in_and_out_and_angles_stay_exact():
    x = floats(1, 1, 1, 8).astype(jnp.bfloat16)
    position = np.array([10_001])  # bfloat16 would round it to 9984
    out = turn(x, position)
    assert out.dtype == jnp.bfloat16
    exact = turn(x.astype(np.float32), position)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=0.01)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="x must have an even head size .*, got 7"):
        RotaryEmbedding()(floats(1, 2, 1, 7), jnp.arange(2))
    with pytest.raises(ValueError, match="rotary theta must be a finite number above 0, got 0.0"):
        RotaryEmbedding(theta=0.0)
    with pytest.raises(
        ValueError, match="rotary scaling must be a finite number above 0, got None"
    ):
        RotaryEmbedding(scaling=None)
