"""Law 4: tile and chunk sizes change nothing but the rounding."""

import numpy as np
import pytest

from tests.laws import battery


def test_the_default_and_a_small_uneven_one_agree(mechanism):
    """13 tokens in tiles that do not divide them, and in the size that is chosen for them."""
    if not mechanism.reference.tuning:
        pytest.skip("has nothing to tune")
    arrays = battery.draw_plain(mechanism, 0)
    tuned = battery.run(mechanism, arrays)
    extent = battery.plain(mechanism)._replace(tuning=False)
    cotangents = battery.plain_cotangents(mechanism)
    chosen = battery.program(mechanism, extent)(arrays, {}, cotangents)
    battery.assert_close(tuned, chosen, 20 * np.finfo(np.float32).eps)
