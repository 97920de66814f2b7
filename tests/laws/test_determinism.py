"""Law 9, first half: twice the same, bit for bit."""

import jax
import numpy as np
import pytest

from tests.laws import battery
from tests.laws.battery import CALLED, SQUARE


def test_twice_the_same(mechanism):
    arrays = battery.draw_plain(mechanism, 0)
    first, second = (battery.run(mechanism, arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("mechanism", CALLED, ids=str)
def test_twice_the_same_with_all_that_is_claimed(mechanism):
    extent = battery.everything(mechanism)
    with jax.enable_x64(True):
        arrays = battery.draw_arrays(mechanism, SQUARE, everything=True)
        known = battery.neutral(mechanism, SQUARE, extent)
        cotangents = battery.cotangents_of(mechanism, extent, arrays, known)
        first, second = (
            battery.run_everything(mechanism, arrays, known, cotangents) for _ in range(2)
        )
    jax.tree.map(np.testing.assert_array_equal, first, second)
