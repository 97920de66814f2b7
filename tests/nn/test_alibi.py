"""ALiBi lowers logits in proportion to the distance."""

import functools

import jax
import numpy as np
import pytest

import effattn
from effattn.nn import Alibi, alibi_slopes
from tests.nn.build import floats


def test_slopes_of_a_power_of_two_are_geometric():
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])


def test_slopes_of_other_numbers_take_every_second_of_the_next_power():
    np.testing.assert_allclose(
        alibi_slopes(6), 2.0 ** np.array([-2.0, -4.0, -6.0, -8.0, -1.0, -3.0])
    )


def test_it_equals_the_bias_it_stands_for():
    query, key, value = floats(3, 2, 7, 3, 8)
    distance = np.abs(np.arange(7)[:, None] - np.arange(7))
    bias = -alibi_slopes(3)[:, None, None] * distance
    attend = effattn.dot_product_attention
    ours = jax.jit(functools.partial(attend, score_mod=Alibi(3)))(query, key, value)
    expected = jax.jit(attend)(query, key, value, bias[None].astype(np.float32))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_equal_numbers_of_heads_are_equal_so_traces_are_shared():
    assert Alibi(4) == Alibi(4) != Alibi(8)
    assert hash(Alibi(4)) == hash(Alibi(4))


def test_no_heads_is_refused():
    with pytest.raises(ValueError, match="num_heads must be an int, 1 or more heads, got 0"):
        alibi_slopes(0)
    with pytest.raises(ValueError, match="num_heads must be an int, 1 or more heads, got 1.5"):
        Alibi(1.5)
