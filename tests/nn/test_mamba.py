"""Mamba: groups, and its initial parameters."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Mamba
from tests.nn.build import filled, floats


def test_groups_have_inputs_and_outputs_of_their_own():
    """Two groups with repeated parameters of one group give the layer of one group."""
    one, two = (
        filled(lambda n=n: Mamba(8, state_size=3, step_rank=2, num_kv_heads=n, rngs=nnx.Rngs(0)))
        for n in (1, 2)
    )
    parts = np.split(one.select.kernel[...], [2, 5], -1)
    parts = [parts[0], *(part for part in parts[1:] for _ in range(2))]
    state = nnx.state(one)
    nnx.update(two, {name: state[name] for name in state if name != "select"})
    two.select.kernel[...] = np.concatenate(parts, -1)
    x = floats(2, 5, 8)
    np.testing.assert_allclose(*jax.jit(lambda one, two: (one(x), two(x)))(one, two), atol=1e-6)


def test_it_starts_with_the_rates_and_steps_of_the_authors():
    mixer = jax.jit(lambda: Mamba(128, rngs=nnx.Rngs(0)))()
    rate = np.exp(mixer.log_rate[...])
    np.testing.assert_allclose(rate, np.tile(np.arange(1, 17), (256, 1)), 1e-6)
    step = np.log1p(np.exp(mixer.step_bias[...]))
    assert step.min() >= 0.00099 and step.max() <= 0.101
    assert mixer.step_projection.kernel.shape == (8, 256)
    assert np.abs(mixer.step_projection.kernel[...]).max() <= 8**-0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, r"inner features \(32, .*\) must be a .* of num_kv_heads \(3\)"),
        ({"head_dim": 0}, "head_dim must be an int, 1 or more features, got 0"),
        ({"num_kv_heads": "2"}, "num_kv_heads must be an int, 1 or more heads, or None, got '2'"),
        ({"num_heads": 5}, r"twice in_features \(32\) must be a multiple of num_heads \(5\)"),
        ({"state_size": 0}, "state_size must be an int, 1 or more features, got 0"),
        ({"step_rank": 0}, "step_rank must be an int, 1 or more features, got 0"),
        ({"is_causal": False}, "is_causal=False was given, but .* lacks 'bidirectional'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba(16, **{"num_heads": 4, **options}, rngs=nnx.Rngs(0))
