"""The matrices behind the pictures, and the pictures drawn in characters."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import BlockLayout
from effattn.analysis import LONGEST, receptive_field, text
from effattn.analysis.pictures import picture
from effattn.patterns import (
    BlockMask,
    Causal,
    Full,
    SlidingWindow,
    bigbird,
    longformer,
    sparse_transformer,
)

IS_GLOBAL = np.isin(np.arange(24), (0, 9))
MECHANISMS = [
    ("softmax", {}, Full()),
    ("sliding_window", {"local_window_size": (3, 1)}, SlidingWindow(3, 1)),
    (
        "longformer",
        {"local_window_size": 2, "global_mask": IS_GLOBAL, "max_global": 2},
        longformer(2, (0, 9)),
    ),
    ("sparse_transformer", {"stride": 5}, sparse_transformer(5)),
    (effattn.sparse_attention, {"pattern": bigbird(3)}, bigbird(3)),
    ("linear", {"is_causal": True}, Causal()),
]


def shown(what, length=None, head=0, **options):
    return picture(what, length, head, options)


@pytest.mark.parametrize("mechanism, options, pattern", MECHANISMS)
def test_a_mechanism_that_is_called_shows_its_pattern(mechanism, options, pattern):
    seen = shown(mechanism, 24, **options)
    np.testing.assert_array_equal(seen.shades > 0, pattern.mask(24))
    # Equal keys get equal weights.
    np.testing.assert_allclose(seen.shades[seen.shades > 0], 1, rtol=1e-5)
    assert seen.density == pytest.approx(pattern.density(24))


def test_a_mechanism_may_be_a_partial_and_a_function():
    function = functools.partial(effattn.sliding_window_attention, local_window_size=(2, 0))
    one, other = shown(function, 9), shown("sliding_window", 9, local_window_size=(2, 0))
    np.testing.assert_array_equal(one.shades, other.shades)
    assert one.name == "sliding_window(local_window_size=(2, 0))"
    assert other.name == "sliding_window"


def test_shades_are_shares_of_the_largest_weight_of_a_row():
    key = np.log([1, 2, 4, 1e-9]).reshape(4, 1, 1)
    seen = shown("softmax", 4, query=np.ones((4, 1, 1)), key=key)
    np.testing.assert_allclose(seen.shades, np.tile([0.25, 0.5, 1, 0], (4, 1)), rtol=1e-5)


def test_heads_that_differ_are_shown_one_by_one():
    heads = np.array([np.eye(4, dtype=bool), np.ones((4, 4), bool)])
    pattern, ones = BlockMask(heads, 2), np.ones((8, 2, 4))
    for head in (0, 1):
        mask = pattern.mask(8)[head]
        np.testing.assert_array_equal(shown(pattern, 8, head).shades, mask)
        called = shown(effattn.sparse_attention, 8, head, pattern=pattern, query=ones, key=ones)
        np.testing.assert_array_equal(called.shades > 0, mask)
        layout = shown(pattern.layout(8, tile=(2, 2)), head=head)
        np.testing.assert_array_equal(layout.shades, heads[head])


def test_a_layout_shows_its_tiles():
    layout = (Causal() & SlidingWindow(9, 0)).layout(15, tile=(4, 8))
    seen = shown(layout)
    np.testing.assert_array_equal(seen.shades, [[0.5, 0], [0.5, 0], [0.5, 0.5], [0.5, 0.5]])
    assert seen.density == layout.density and seen.lengths == (15, 15) and seen.tile == (4, 8)


def test_pictures_in_characters():
    layout = (Causal() & SlidingWindow(9, 0)).layout(16, tile=(4, 4))
    assert text(layout).split("\n") == ["▒▒······", "██▒▒····", "▒▒██▒▒··", "▒▒▒▒██▒▒"]
    assert text(Causal(), 3).split("\n") == ["██····", "████··", "██████"]
    assert text("softmax", 3, is_causal=True) == text(Causal(), 3)
    large = text(Causal().layout(4096, tile=(32, 32)), width=16).split("\n")
    assert large[0] == "▒▒" + "·" * 14 and large[-1] == "█" * 14 + "▒▒"
    assert len(large) == 8 and all(len(row) == 16 for row in large)
    # The last cell of each side stands for fewer tokens.
    assert text(Full(), 5, width=4).split("\n") == ["████", "████"]


def test_a_layout_is_drawn_where_it_is_known():
    layout = Causal().layout(16, tile=(4, 4))
    seen = []
    jax.jit(lambda x: seen.append(text(layout)) or x)(0)
    assert seen == [text(layout)]
    with pytest.raises(ValueError, match="must have known arrays .* outside of jit"):
        jax.jit(text)(jax.tree.map(jnp.asarray, layout))


@pytest.mark.parametrize(
    "pattern", [bigbird(2, seed=1), sparse_transformer(6), SlidingWindow(1, 0)]
)
def test_the_receptive_field_counts_the_ones_of_boolean_powers(pattern):
    step = (pattern.mask(30) | np.eye(30, dtype=bool)).astype(float)
    expected = [(np.linalg.matrix_power(step, depth) > 0).sum(-1) for depth in range(6)]
    np.testing.assert_array_equal(receptive_field(pattern, 5, 30), expected)


def test_a_window_reaches_further_by_its_width_in_each_layer():
    field = receptive_field("sliding_window", 3, 20, local_window_size=(4, 0))
    depth, position = np.ogrid[:4, :20]
    np.testing.assert_array_equal(field, np.minimum(4 * depth, position) + 1)


def test_layers_join_the_pairs_of_all_heads():
    heads = np.array([np.eye(4, dtype=bool), np.eye(4, k=-1, dtype=bool)])
    assert receptive_field(BlockMask(heads, 1), 2, 4)[:, -1].tolist() == [1, 2, 3]


def test_numbers_need_no_matplotlib_and_figures_say_so():
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from effattn import analysis\n"
        "print(*analysis.receptive_field('softmax', 1, 2))\n"
        "try: analysis.draw('softmax')\n"
        "except ImportError as error: print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout.splitlines() == [
        "[1 1] [2 2]",
        "figures of effattn.analysis need matplotlib, which is not installed: "
        "pip install 'effattn[analysis]'",
    ], output.stderr


LAYOUT = BlockLayout.from_block_mask(np.ones((2, 2), bool), tile=(4, 4), lengths=(8, 8))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: text(Full(), LONGEST + 1), f"length must be an int from 1 to {LONGEST}"),
        (lambda: text("softmax", 0), f"length must be an int from 1 to {LONGEST}"),
        (lambda: text(LAYOUT, 8), "length must be None for a layout, .* got 8"),
        (
            lambda: text(Full().layout(LONGEST + 1, tile=(1, 64))),
            "the number of query tiles must be an int",
        ),
        (lambda: text(Full(), 8, is_causal=True), "a pattern takes no options, got is_causal"),
        (lambda: text(LAYOUT, is_causal=True), "a layout takes no options, got is_causal"),
        (lambda: text(Full(), 8, head=1), "head must be an int from 0 to 0, got 1"),
        (lambda: text(Full(), 8, width=1), "width must be an int, 2 or more, got 1"),
        (lambda: text(3, 8), "attention must be a registered name or a function .* got 3"),
        (
            lambda: text("softmax", 8, query=np.ones((7, 1, 2))),
            r"query must have shape \(8, heads, features\), got \(7, 1, 2\)",
        ),
        (lambda: receptive_field(Full(), -1), "depth must be an int, 0 or more layers, got -1"),
        (lambda: receptive_field(Full(), 1, LONGEST + 1), "length must be an int from 1"),
        (
            lambda: receptive_field(LAYOUT, 1),
            "what must be a pattern or a mechanism, got a BlockLayout",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
