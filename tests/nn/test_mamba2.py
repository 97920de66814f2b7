"""Mamba2: its initial parameters and wrong options."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Mamba2
from tests.nn.build import filled


def test_it_starts_with_the_rates_and_steps_of_the_authors():
    mixer = jax.jit(lambda: Mamba2(64, 256, head_dim=1, rngs=nnx.Rngs(0)))()
    rate, step = np.exp(mixer.log_rate[...]), np.log1p(np.exp(mixer.step_bias[...]))
    assert rate.min() >= 1 and rate.max() <= 16
    np.testing.assert_allclose(rate.mean(), 8.5, rtol=0.1)
    assert step.min() >= 0.00099 and step.max() <= 0.101
    np.testing.assert_allclose(np.exp(np.log(step).mean()), 0.01, rtol=0.3)
    np.testing.assert_array_equal(mixer.skip[...], 1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": 0}, "num_heads must be an int, 1 or more heads, got 0"),
        ({"num_heads": 5}, r"twice in_features \(32\) must be a multiple of num_heads \(5\)"),
        ({"head_dim": 0}, "head_dim must be an int, 1 or more features, got 0"),
        ({"state_size": 0}, "state_size must be an int, 1 or more features, got 0"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a .* multiple of num_kv_heads \(3\)"),
        ({"convolution_width": 0}, "width must be an int, 1 or more tokens, got 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba2(16, **{"num_heads": 4, **options}, rngs=nnx.Rngs(0))


def test_its_state_is_its_own():
    mixer = filled(lambda: Mamba2(16, 4, rngs=nnx.Rngs(0)))
    x = np.ones((2, 1, 16), np.float32)
    with pytest.raises(ValueError, match="state must be the RecurrentState"):
        mixer.step(x, x)
    with pytest.raises(
        ValueError, match=r"length of shape \(2,\), .* got int32 of shape \(3,\); .* batch=2"
    ):
        mixer.step(x, mixer.init_state(3, 0))
