"""Angles of positions: the error in float32 stays at rounding size at any position."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.arrays.angles import angles
from effattn.nn import RotaryEmbedding
from tests.nn.build import floats

PLACES = np.unique(
    [0, 1, 2, 3, 127, 8191, 10**6, 8 * 10**6 + 1, 2**24 - 1, 2**24, 2**24 + 1, 2**30, 2**31 - 1]
)
FREQUENCIES = {
    "rotary": 10000.0 ** (-np.arange(64) / 64),
    "long": 1e6 ** (-np.arange(128) / 128),
    "stretched": 500000.0 ** (-np.arange(32) / 32) / 3.7,
    "fast": 0.01 ** (-np.arange(16) / 16) / 0.3,
    "tiny": 10.0 ** -np.arange(1, 40, 3),
}


def exact(places, frequencies):
    """Cosines and sines computed by NumPy in float64."""
    turn = places[:, None].astype(np.float64) * frequencies
    return np.cos(turn), np.sin(turn)


def errors(angle, places, frequencies):
    both = zip((np.cos, np.sin), exact(places, frequencies), strict=True)
    return max(np.abs(f(np.asarray(angle, np.float64)) - e).max() for f, e in both)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("name", FREQUENCIES)
def test_no_position_is_too_far(name, dtype):
    frequencies = FREQUENCIES[name]
    places = PLACES[PLACES <= 2**24 + 1] if name == "fast" else PLACES
    for one in (places, -places) if dtype != np.uint32 else (places,):
        given = one.astype(dtype)
        known = jax.jit(lambda given=given: angles(given[:, None], frequencies[None], jnp.float32))
        traced = jax.jit(lambda p: angles(p[:, None], frequencies[None], jnp.float32))
        assert errors(known(), one, frequencies) < 1e-6
        np.testing.assert_array_equal(traced(given), known())


def test_small_integers_do_not_overflow():
    """Positions of 8 bits are an example."""
    places = np.array([0, 100, 255], np.uint8)
    one = angles(places[:, None], np.ones((1, 1)), jnp.float32)
    assert errors(one, places, np.ones(1)) < 1e-6


def test_float64_stays_float64():
    places, frequencies = np.arange(0, 2**24, 99991), FREQUENCIES["rotary"]
    with jax.enable_x64(True):
        wide = jax.jit(lambda p: angles(p[:, None], frequencies[None], jnp.float64))(places)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, places[:, None] * frequencies, rtol=1e-15)


# The settings of the test suite leave out these compiler optimisations, so the code below runs in a
# process of its own.
OPTIMISED = """
import jax, jax.numpy as jnp, numpy as np
from effattn.nn import RotaryEmbedding
places = np.array([1_000_000, 8_000_000, 2**24 - 3, 2**24])
x = np.ones((4, 2, 128), np.float32)
x[..., 64:] = 0
turn = 10000.0 ** (-np.arange(0, 128, 2) / 128) * places[:, None]
expected = np.concatenate([np.cos(turn), np.sin(turn)], -1)[:, None]
rotate = RotaryEmbedding()
for out in (
    rotate(x, places),
    jax.jit(rotate)(x, places),
    jax.jit(lambda x: rotate(x, places))(x),
    jax.jit(lambda x, start: rotate(x, start[:, None] + jnp.arange(1)))(x[:, None], places)[:, 0],
    jax.vmap(rotate)(x[:, None], places[:, None])[:, 0],
):
    assert out.dtype == np.float32
    error = np.abs(out - expected).max()
    assert error < 1e-5, error
print("done")
"""


def test_compilers_optimisations_change_nothing():
    environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", OPTIMISED],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().endswith("done"), done.stderr


@pytest.mark.parametrize("start", [0, 1_000_000, 2**24 - 5])
def test_rotated_products_depend_on_distances_far_out_too(start):
    query, key = floats(6, 2, 64), floats(6, 2, 64, seed=1)
    rotate = RotaryEmbedding()

    def products(places):
        return jnp.einsum("inh,jnh->nij", rotate(query, places), rotate(key, places))

    near = jax.jit(products)(np.arange(6))
    far = jax.jit(products)(start + np.arange(6))
    np.testing.assert_allclose(far, near, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", [1_000_000, 2**24 - 5])
@pytest.mark.parametrize("max_length", [8, 16384])
def test_cosformer_depends_on_distances_far_out_too(start, max_length):
    query, key, value = (floats(1, 6, 2, 4, seed=seed) for seed in range(3))
    call = jax.jit(
        lambda p: effattn.cosformer_attention(
            query, key, value, max_length=max_length, positions=p, is_causal=True
        )
    )
    near = np.arange(6)[None]
    np.testing.assert_allclose(call(start + near), call(near), rtol=1e-4, atol=1e-4)


def test_positions_must_be_integers():
    with pytest.raises(ValueError, match="positions must be integers, got dtype float32"):
        RotaryEmbedding()(floats(2, 1, 4), np.arange(2, dtype=np.float32))
