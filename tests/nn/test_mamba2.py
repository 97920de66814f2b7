"""Mamba2 agrees with Hugging Face's transformers (`tests/golden`); its initial parameters."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Mamba2
from tests.marks import slow
from tests.nn.build import filled

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers_mamba2.npz"


@functools.cache
def golden(case):
    with np.load(GOLDEN) as arrays:
        return {key.removeprefix(f"{case}/"): arrays[key] for key in arrays if key.startswith(case)}


def from_transformers(arrays, groups):
    """A mixer with the parameters of a `Mamba2Mixer`.

    Both order the features of the projection z, x, B, C, dt alike, and those of the convolution
    x, B, C. Torch stores the outputs of a linear layer first, and the width of a convolution last:

        in_proj.weight (out, D)     project.kernel (D, out)
        conv1d.weight (out, 1, W)   convolution.taps (W, out)
        conv1d.bias                 convolution.bias
        A_log, dt_bias, D           log_rate, step_bias, skip
        norm.weight                 norm_scale
        out_proj.weight (D, N P)    out.kernel (N P, D)
    """
    given = {
        key.removeprefix("parameter/"): value
        for key, value in arrays.items()
        if key.startswith("parameter/")
    }
    sizes = {"head_dim": 8, "state_size": 6, "num_kv_heads": groups}
    mixer = filled(lambda: Mamba2(16, 4, **sizes, rngs=nnx.Rngs(0)))
    for parameter, array in (
        (mixer.project.kernel, given.pop("in_proj.weight").T),
        (mixer.convolution.taps, given.pop("conv1d.weight")[:, 0].T),
        (mixer.convolution.bias, given.pop("conv1d.bias")),
        (mixer.log_rate, given.pop("A_log")),
        (mixer.step_bias, given.pop("dt_bias")),
        (mixer.skip, given.pop("D")),
        (mixer.norm_scale, given.pop("norm.weight")),
        (mixer.out.kernel, given.pop("out_proj.weight").T),
    ):
        assert parameter.shape == array.shape
        parameter[...] = array
    assert not given
    return mixer


@jax.jit
def with_gradient(mixer, x, cotangent):
    y, pull_back = jax.vjp(lambda x: mixer(x), x)
    return y, pull_back(cotangent)[0]


@pytest.mark.parametrize("case, groups", [slow("one_group", 1), ("two_groups", 2)])
def test_it_agrees_with_transformers(case, groups):
    """The norm is over the features of each group, as in the authors' code too."""
    arrays = golden(case)
    mixer = from_transformers(arrays, groups)
    y, gradient = with_gradient(mixer, arrays["x"], arrays["cotangent"])
    np.testing.assert_allclose(y, arrays["output"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient, arrays["gradient"], rtol=1e-4, atol=1e-4)


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
        ValueError, match=r"state must have length of shape \(2,\), .* got \(3,\); .* batch=2"
    ):
        mixer.step(x, mixer.init_state(3, 0))
