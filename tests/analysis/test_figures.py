"""The contents of the figures, not their appearance."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from flax import nnx

matplotlib.use("agg")

import matplotlib.pyplot as plt

from effattn.analysis import (
    attention_weights,
    draw,
    draw_attention,
    draw_receptive_field,
    receptive_field,
)
from effattn.nn import SelfAttention, TransformerConfig, TransformerLM
from effattn.patterns import BlockMask, Causal, SlidingWindow, bigbird

WINDOW = Causal() & SlidingWindow(7, 0)


@pytest.fixture(autouse=True)
def no_figures_stay():
    yield
    plt.close("all")


def matrix(ax):
    return ax.images[0].get_array().filled(0)


@pytest.mark.parametrize("pattern", [WINDOW, bigbird(4)])
def test_a_pattern_is_drawn_by_its_mask(pattern):
    ax = draw(pattern)
    np.testing.assert_array_equal(matrix(ax), pattern.mask(64))
    assert f"density {100 * pattern.density(64):.3g} %" in ax.get_title()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key position", "query position")
    # Query 0 is at the top, and each cell is centred on its position.
    assert ax.get_xlim() == (-0.5, 63.5) and ax.get_ylim() == (63.5, -0.5)


def test_a_mechanism_is_drawn_as_it_is_called():
    ax = plt.subplots()[1]
    options = {"local_window_size": (7, 0), "is_causal": True}
    assert draw("sliding_window", 24, ax=ax, **options) is ax
    np.testing.assert_array_equal(matrix(ax) > 0, WINDOW.mask(24))
    assert ax.get_title() == f"sliding_window\ndensity {100 * WINDOW.density(24):.3g} %"


def test_a_name_stands_in_the_title_instead():
    assert draw(WINDOW, 16, name="near").get_title().startswith("near\ndensity")
    assert "SlidingWindow(left=7, right=0," in draw(WINDOW, 16).get_title().replace("\n", " ")


def test_a_layout_is_drawn_in_tokens():
    layout = WINDOW.layout(60, tile=(8, 16))
    ax = draw(layout)
    assert (matrix(ax) > 0).tolist() == layout.block_mask().tolist()
    assert ax.images[0].get_extent() == [-0.5, 63.5, 63.5, -0.5]
    assert ax.get_xlim() == (-0.5, 59.5) and ax.get_ylim() == (59.5, -0.5)
    assert f"tiles of 8 x 16\ndensity {100 * layout.density:.3g} %" in ax.get_title()


def test_one_head_is_drawn():
    pattern = BlockMask(np.array([np.eye(4, dtype=bool), ~np.eye(4, dtype=bool)]), 2)
    np.testing.assert_array_equal(matrix(draw(pattern, 8, head=1)), pattern.mask(8)[1])


def test_receptive_fields_are_lines_over_depth():
    ax = draw_receptive_field({"window": WINDOW, "all": "softmax"}, 4, 32)
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    np.testing.assert_array_equal(lines["window"], receptive_field(WINDOW, 4, 32).mean(-1))
    np.testing.assert_array_equal(lines["all"], [1, 32, 32, 32, 32])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["window", "all"]


def panels(figure):
    return [ax for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize(
    "attention, kind", [("softmax", "attention weight"), ("linear", "effective mixing weight")]
)
def test_each_head_is_drawn_with_its_weights(attention, kind):
    module = SelfAttention(12, 6, attention, num_kv_heads=3, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 10, 12))
    figure = draw_attention(module, x, example=1)
    assert [ax.get_title() for ax in panels(figure)] == [f"head {n}" for n in range(6)]
    for ax, expected in zip(panels(figure), attention_weights(module, x)[1], strict=True):
        np.testing.assert_array_equal(matrix(ax), expected)
    assert figure.get_suptitle() == f"{attention}: {kind}"
    assert figure.axes[-1].get_ylabel() == kind


def test_a_layer_of_a_model_is_drawn_into_a_part_of_a_figure():
    config = TransformerConfig(
        vocab_size=7, num_layers=2, features=4, num_heads=1, mixer=("softmax", "linear")
    )
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    part = plt.figure().subfigures(2, 1)[0]
    assert draw_attention(model, jnp.ones((1, 5), int), layer=1, figure=part) is part
    assert part.get_suptitle() == "linear, layer 1: effective mixing weight"


def test_negative_weights_have_a_scale_of_two_sides():
    module = SelfAttention(4, 1, "linear", feature_map="identity", rngs=nnx.Rngs(0))
    ax = panels(draw_attention(module, jax.random.normal(jax.random.key(0), (1, 9, 4))))[0]
    norm = ax.images[0].norm
    assert matrix(ax).min() < 0
    assert norm.vmin == -norm.vmax == -np.abs(matrix(ax)).max()


def test_an_example_that_is_not_there_is_refused():
    module = SelfAttention(4, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="example must be an int from 0 to 1, got 2"):
        draw_attention(module, jnp.ones((2, 3, 4)), example=2)
