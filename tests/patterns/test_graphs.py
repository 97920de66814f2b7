"""Patterns as graphs: the distance between tokens, and the spectral gap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effattn.patterns import (
    BlockMask,
    Causal,
    Dilated,
    Documents,
    Full,
    Global,
    RandomBlocks,
    SlidingWindow,
)


def floyd_warshall(edges):
    steps = np.where(edges, 1.0, np.inf)
    np.fill_diagonal(steps, 0)
    for k in range(len(steps)):
        steps = np.minimum(steps, steps[:, k : k + 1] + steps[k])
    return steps


@settings(max_examples=40)
@given(st.integers(1, 140), st.integers(0, 9), st.floats(0, 0.1))
def test_graph_distance_is_the_shortest_path(T, seed, density):
    edges = np.random.default_rng(seed).random((T, T)) < density
    steps = floyd_warshall(edges)[~np.eye(T, dtype=bool)]
    reached = steps[np.isfinite(steps)]
    found = BlockMask(edges, 1).graph_distance(T)
    assert found.mean == pytest.approx(reached.mean() if reached.size else 0)
    assert found.largest == reached.max(initial=0)
    assert found.unreachable == pytest.approx(np.isinf(steps).mean() if steps.size else 0)


def test_global_tokens_and_random_blocks_shorten_paths():
    assert SlidingWindow(1, 1).graph_distance(512).largest == 511
    assert (SlidingWindow(1, 1) | Global(1)).graph_distance(512).largest == 2
    assert (SlidingWindow(8, 8, 8) | RandomBlocks(8, 3)).graph_distance(512).largest <= 4
    assert Causal().graph_distance(64) == (1, 1, 0.5)
    either = np.zeros((2, 4, 4), bool)
    either[0, :2], either[1, 2:] = True, True
    assert BlockMask(either, 2).graph_distance(8) == (1, 1, 0)


def test_spectral_gap_of_known_graphs():
    n = 50
    ring = SlidingWindow(1, 1) | Dilated(1, n - 1)
    assert ring.spectral_gap(n) == pytest.approx((2 - 2 * np.cos(2 * np.pi / n)) / 3)
    assert Full().spectral_gap(n) == pytest.approx(1)
    assert Documents((20, 30)).spectral_gap(n) == pytest.approx(0, abs=1e-12)
    window = SlidingWindow(1, 1, 4)
    assert window.spectral_gap(256) < 0.1 < (window | RandomBlocks(4, 3)).spectral_gap(256)


def test_graphs_are_refused_where_they_are_too_large():
    with pytest.raises(ValueError, match="T must be at most 4096 for .*, got 5000"):
        Causal().graph_distance(5000)
    with pytest.raises(ValueError, match="T must be at most 2048 for spectral_gap, .* got 5000"):
        Causal().spectral_gap(5000)
