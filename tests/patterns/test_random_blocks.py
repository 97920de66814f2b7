"""Random blocks are distinct, uniform, and drawn row by row from the seed."""

import numpy as np
import pytest

from effattn.patterns import RandomBlocks, SlidingWindow, bigbird


def test_each_head_draws_random_blocks_with_its_own_seed():
    heads = bigbird(4, seed=5, num_heads=3).mask(64)
    np.testing.assert_array_equal(heads, [bigbird(4, seed=5 + h).mask(64) for h in range(3)])


def test_random_blocks_are_distinct_and_uniform():
    blocks = RandomBlocks(1, 4, seed=3).blocks((5000, 20))
    assert (np.diff(blocks) > 0).all() and blocks.min() == 0 and blocks.max() == 19
    # Each of the 20 blocks is drawn in a fifth of 5000 rows; the bound is five standard deviations.
    counts = np.bincount(blocks.ravel())
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(5000 * 0.2 * 0.8)
    pairs = np.zeros((20, 20))
    np.add.at(pairs, (blocks[:, 0], blocks[:, 1]), 1)
    assert np.abs(pairs[0, 1] - 5000 * 4 * 3 / (20 * 19)) < 5 * np.sqrt(158)


def test_rows_of_random_blocks_depend_on_the_seed_and_the_row_alone():
    pattern = RandomBlocks(8, 3, seed=5)
    short, long, wide = (pattern.blocks(n) for n in ((80, 400), (800, 400), (80, 808)))
    np.testing.assert_array_equal(short, long[:10])
    for before, after in zip(short, wide, strict=True):
        assert all(c in before or c >= 50 for c in after)
    assert (RandomBlocks(8, 3, seed=6).blocks((800, 400)) != long).any()
    assert len(np.unique(long, axis=0)) > 95


def test_sized_random_blocks_answer_by_element():
    pattern = (RandomBlocks(4, 2) | ~bigbird(4)) & SlidingWindow(20, 20)
    sized = pattern.sized(24, 40)
    assert sized.sized(24, 40) == sized != pattern
    np.testing.assert_array_equal(sized.mask(64), pattern.mask(64))
    rule = sized.allows(np.arange(24)[:, None], np.arange(40))
    np.testing.assert_array_equal(rule, pattern.mask(24, 40))


def test_causal_random_blocks_lie_before_their_row():
    blocks = RandomBlocks(4, 3, causal=True).blocks((200, 200))
    assert blocks[0].tolist() == [-1, -1, -1] and blocks[2].tolist() == [-1, 0, 1]
    assert (blocks < np.arange(50)[:, None]).all() and (blocks[3:] >= 0).all()
    np.testing.assert_array_equal(blocks[:25], RandomBlocks(4, 3, causal=True).blocks((100, 100)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ends", [(2, 1), (0, 0)])
def test_excluded_blocks_are_not_drawn(causal, ends):
    pattern = RandomBlocks(4, 3, seed=1, causal=causal, window=5, ends=ends)
    blocks = pattern.blocks((200, 200))
    for row, chosen in enumerate(blocks):
        stop = row - 2 if causal else 50 - ends[1]
        allowed = {b for b in range(ends[0], stop) if abs(b - row) > 2}
        drawn = [b for b in chosen if b >= 0]
        assert len(set(drawn)) == len(drawn) == min(3, len(allowed)) and set(drawn) <= allowed
    # Each candidate is drawn in about 3 of the 50 rows.
    if not causal:
        counts = np.bincount(blocks[blocks >= 0], minlength=50)[ends[0] : 50 - ends[1]]
        assert counts.max() < 12 and (counts > 0).mean() > 0.8


@pytest.mark.parametrize("ends", [(2, 0), (1, 1)])
def test_bigbird_is_window_global_and_random_blocks_apart(ends):
    mask = bigbird(4, num_global_blocks=ends, num_window_blocks=3, num_random_blocks=2).mask(64)
    blocks = mask.reshape(16, 4, 16, 4)
    assert (blocks.all((1, 3)) == blocks.any((1, 3))).all()
    blocks = blocks.any((1, 3))
    is_global = (np.arange(16) < ends[0]) | (np.arange(16) >= 16 - ends[1])
    assert blocks[is_global].all() and blocks[:, is_global].all()
    near = abs(np.arange(16) - np.arange(16)[:, None]) <= 1
    assert blocks[near].all()
    more = blocks & ~near & ~is_global & ~is_global[:, None]
    assert (more.sum(-1) == np.where(is_global, 0, 2)).all()
    causal = bigbird(4, num_global_blocks=ends, causal=True).mask(64)
    assert not np.triu(causal, 1).any() and causal.diagonal().all()
    assert causal[:, : 4 * ends[0]].sum() == np.tril(np.ones((64, 64)))[:, : 4 * ends[0]].sum()
