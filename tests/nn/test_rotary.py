"""The rotary embedding turns pairs of features by angles in proportion to the position."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.nn import RotaryEmbedding
from tests.nn.build import floats

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "decoders.json"


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


@pytest.mark.parametrize("case", ["llama3", "yarn", "yarn_in_few_turns"])
def test_rules_agree_with_transformers(case):
    right = json.loads(GOLDEN.read_text())["rotary"][case]
    given = right["rule"]
    turns = [("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")]
    (turns,) = [[given[n] for n in names] for names in turns if names[0] in given] or [None]
    rotary = RotaryEmbedding(
        theta=given["rope_theta"],
        scaling=given["factor"],
        rule=given["rope_type"],
        trained_length=given["original_max_position_embeddings"],
        turns=None if turns is None else tuple(turns),
    )
    np.testing.assert_allclose(rotary.frequencies(32), right["angles"], rtol=1e-6)
    # A pair at position 0 is not turned, only multiplied.
    out = rotary(floats(1, 1, 1, 32), jnp.zeros(1, int))
    np.testing.assert_allclose(out, right["amplitude"] * floats(1, 1, 1, 32), rtol=1e-6)


def test_the_ntk_rule_slows_the_slowest_pair_alone_by_the_whole_factor():
    plain, longer = RotaryEmbedding(), RotaryEmbedding(scaling=4.0, rule="ntk")
    ratio = plain.frequencies(16) / longer.frequencies(16)
    np.testing.assert_allclose(ratio[[0, -1]], [1, 4])
    assert np.all(np.diff(ratio) > 0)


def test_the_first_features_alone_may_turn():
    x, positions = floats(2, 5, 3, 10), np.arange(5)
    out = turn(x, positions, features=6)
    np.testing.assert_array_equal(out[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(out[..., :6], turn(x[..., :6], positions))
    # The other features of an odd head do not turn.
    assert turn(floats(1, 5, 1, 7), positions, features=4).shape == (1, 5, 1, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rule": "dynamic"},
            "rotary rule must be one of linear, ntk, yarn, llama3, got 'dynamic'",
        ),
        ({"rule": "yarn"}, "rule='yarn' needs trained_length, .* got None"),
        (
            {"trained_length": 8},
            "trained_length is for the rules yarn and llama3, got trained_length=8",
        ),
        ({"turns": (1, 2)}, "turns is for the rules yarn and llama3"),
        ({"rule": "llama3", "trained_length": 8, "turns": (4, 1)}, "the smaller one first, got"),
        ({"rule": "yarn", "trained_length": 8, "turns": 3}, "turns must be two numbers .*, got 3"),
        ({"rule": "yarn", "trained_length": 8, "theta": 1}, "theta must not be 1 with rule='yarn'"),
        ({"features": 3}, "rotary features must be even, got 3"),
        ({"features": 0}, "rotary features must be an int, 2 or more features"),
        ({"amplitude": -1}, "rotary amplitude must be a finite number above 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(**options)


def test_yarn_keeps_the_amplitude_of_shorter_sequences():
    """As in transformers, the factor is 1 for a scaling below 1."""
    x = floats(1, 1, 1, 4)
    rotary = RotaryEmbedding(rule="yarn", scaling=0.5, trained_length=64)
    np.testing.assert_allclose(rotary(x, jnp.zeros(1, int)), x)


def test_a_list_of_turns_has_a_hash():
    rotary = {"rule": "yarn", "scaling": 4.0, "trained_length": 32}
    listed, paired = (RotaryEmbedding(**rotary, turns=of([1, 32])) for of in (list, tuple))
    assert listed == paired and hash(listed) == hash(paired)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="heads of at least the 8 features .* rotates, got 6"):
        RotaryEmbedding(features=8)(floats(1, 2, 1, 6), jnp.arange(2))
    with pytest.raises(ValueError, match="x must have an even head size .*, got 7"):
        RotaryEmbedding()(floats(1, 2, 1, 7), jnp.arange(2))
    with pytest.raises(ValueError, match=r"positions must have shape \(T,\) .* got \(3,\)"):
        RotaryEmbedding()(floats(1, 2, 1, 4), jnp.arange(3))
    with pytest.raises(ValueError, match=r"positions must have shape .* got \(3, 2\)"):
        RotaryEmbedding()(floats(1, 2, 1, 4), jnp.zeros((3, 2), int))
    with pytest.raises(ValueError, match="x must be floating point, got dtype int32"):
        RotaryEmbedding()(jnp.ones((1, 2, 1, 4), int), jnp.arange(2))
    with pytest.raises(ValueError, match="rotary theta must be a finite number above 0, got 0.0"):
        RotaryEmbedding(theta=0.0)
    with pytest.raises(
        ValueError, match="rotary scaling must be a finite number above 0, got None"
    ):
        RotaryEmbedding(scaling=None)
