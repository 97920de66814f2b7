import numpy as np
import pytest

from effattn.patterns.layouts import BlockLayout
from effattn.xla import walks
from effattn.xla.tiling import choose_tile
from effattn.xla.walks import Listed, Walk, Window


@pytest.fixture(autouse=True)
def without_tracing(monkeypatch):
    """Loops in Python, so that a walk can be recorded."""

    def loop(low, high, step, carry):
        for n in range(int(low), int(high)):
            carry = step(n, carry)
        return carry

    monkeypatch.setattr(walks, "_loop", loop)


def make_walk(lengths, tile, left=None, right=None, offset=0, always_masked=False):
    return Window(tile, lengths, always_masked, left, right, offset)


def visits(walk: Walk):
    """Int `(T, S)`: how often each pair is visited as new, and how often without a mask."""
    met, unmasked = np.zeros((2, *walk.lengths), int)

    def key_tile(patch, _):
        first = max(int(patch.query_start), int(patch.new_query))
        rows = slice(first, int(patch.query_start) + patch.queries)
        starts, news = (np.atleast_1d(k) for k in (patch.key_start, patch.new_key))
        for start, new in zip(starts, news, strict=True):
            end = start + patch.keys // len(starts)
            columns = slice(max(start, new) if patch.masked else start, end)
            met[rows, columns] += 1
            unmasked[rows, columns] += not patch.masked

    def query_tile(n, _):
        walk.over_keys(n, key_tile, None)

    walk.over_queries(query_tile, None)
    return met, unmasked


def allowed(lengths, left, right, offset):
    ahead = np.arange(lengths[1]) - (np.arange(lengths[0])[:, None] + offset)
    after = np.full(lengths, True) if left is None else ahead >= -left
    return after if right is None else after & (ahead <= right)


@pytest.mark.parametrize(
    "lengths, tile", [((11, 14), (4, 5)), ((12, 10), (4, 5)), ((5, 7), (8, 9))]
)
@pytest.mark.parametrize("left, right", [(None, 0), (3, None), (3, 1), (0, 0), (None, None)])
@pytest.mark.parametrize("widest_band", [0, 1024])
def test_every_pair_that_may_attend_is_met_once(
    lengths, tile, left, right, widest_band, monkeypatch
):
    monkeypatch.setattr(walks, "_WIDEST_BAND", widest_band)
    for offset in (-20, -6, -1, 0, 3, 5, 12, 40):
        met, unmasked = visits(make_walk(lengths, tile, left, right, offset))
        may = allowed(lengths, left, right, offset)
        assert (met[may] == 1).all()
        assert (met <= 1).all()
        assert may[unmasked > 0].all()


@pytest.mark.parametrize("tile", [(4, 2), (4, 4)])
@pytest.mark.parametrize("left", [None, 0, 3, 5, 11])
@pytest.mark.parametrize(
    "offset, right", [(0, 0), (4, 0), (0, 2), (-4, 8), (3, 5), (-4, 0), (1, 0)]
)
def test_stairs_meet_every_pair_once(tile, left, offset, right, monkeypatch):
    monkeypatch.setattr(walks, "_SMALLEST_STAIR", 2)
    monkeypatch.setattr(walks, "_WIDEST_BAND", 0)
    ahead = offset + right
    for lengths in [(12, 12), (12, 17), (12, 8), (11, 12), (4, 8)]:
        walk = make_walk(lengths, tile, left, right, offset)
        met, unmasked = visits(walk)
        may = allowed(lengths, left, right, offset)
        assert (met[may] == 1).all()
        assert (met <= 1).all()
        assert may[unmasked > 0].all()
        aligned = (
            lengths[0] % 4 == 0
            and ahead in range(0, 5, tile[1])
            and lengths[0] + ahead <= lengths[1]
        )
        assert (walk.stairs is not None) == aligned
        if aligned and left is None:
            # Above the diagonal, only one corner of each key tile on the diagonal is visited.
            assert met.sum() == sum(
                4 * (4 * n + ahead) + 4 * 2 + 2 * 2 for n in range(lengths[0] // 4)
            )


@pytest.mark.parametrize("left, right", [(3, 1), (6, 0), (0, 0)])
def test_a_window_is_met_wherever_each_example_begins(left, right, monkeypatch):
    monkeypatch.setattr(walks, "_WIDEST_BAND", 0)
    lengths, offsets = (11, 34), np.arange(-8, 40)
    walk = make_walk(lengths, (4, 5), left, right, offsets)
    met = np.zeros((len(offsets), *lengths), int)

    def key_tile(patch, _):
        first = max(int(patch.query_start), int(patch.new_query))
        rows = slice(first, int(patch.query_start) + patch.queries)
        begins = np.maximum(patch.key_start, patch.new_key).ravel()
        for example, begin, start in zip(met, begins, np.ravel(patch.key_start), strict=True):
            example[rows, begin : start + patch.keys] += 1

    walk.over_queries(lambda n, _: walk.over_keys(n, key_tile, None), None)
    for example, offset in zip(met, offsets, strict=True):
        assert (example[allowed(lengths, left, right, offset)] == 1).all()


@pytest.mark.parametrize("right", [None, 2])
def test_offsets_that_differ_by_example_leave_no_tile_out(right):
    met, unmasked = visits(make_walk((11, 14), (4, 5), 3, right, offset=None))
    assert (met == 1).all() and (unmasked == 0).all()


def test_a_tile_that_mixes_is_always_masked_if_asked():
    met, unmasked = visits(make_walk((11, 14), (4, 5), None, 0, always_masked=True))
    assert (unmasked == 0).all()
    assert (met[allowed((11, 14), None, 0, 0)] == 1).all()


@pytest.mark.parametrize("left, right", [(None, 0), (3, None), (9, 0)])
def test_tiles_that_are_empty_are_left_out(left, right, monkeypatch):
    monkeypatch.setattr(walks, "_WIDEST_BAND", 0)
    lengths, (t, s) = (40, 60), (4, 5)
    may = allowed(lengths, left, right, 7)
    blocks = may.reshape(lengths[0] // t, t, lengths[1] // s, s)
    met, unmasked = visits(make_walk(lengths, (t, s), left, right, offset=7))
    np.testing.assert_array_equal(met[::t, ::s], blocks.any((1, 3)))
    np.testing.assert_array_equal(unmasked[::t, ::s], blocks.all((1, 3)))


@pytest.mark.parametrize("lengths, tile", [((23, 34), (4, 5)), ((24, 35), (4, 5))])
@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("always_masked", [True, False])
def test_a_layout_names_the_tiles(lengths, tile, width, always_masked):
    shape = [-(-length // side) for length, side in zip(lengths, tile, strict=True)]
    rng = np.random.default_rng(0)
    blocks, full = rng.random((2, *shape)) < 0.6
    blocks[1] = False
    full &= blocks
    layout = BlockLayout.from_block_mask(blocks, full=full, tile=tile, lengths=lengths)
    met, unmasked = visits(Listed.of(tile, lengths, always_masked, layout, width))

    def spread(blocks):
        return blocks.repeat(tile[0], 0).repeat(tile[1], 1)[: lengths[0], : lengths[1]]

    np.testing.assert_array_equal(met, spread(blocks))
    assert (spread(full)[unmasked > 0]).all()
    if width == 1:
        may = not always_masked and lengths == (24, 35)
        np.testing.assert_array_equal(unmasked, may * spread(full))


def count_pairs(walk: Walk):
    """Number of pairs in the visited tiles."""

    def key_tile(patch, count):
        return count + patch.queries * patch.keys

    def query_tile(n, count):
        return walk.over_keys(n, key_tile, count)

    return walk.over_queries(query_tile, 0)


@pytest.mark.parametrize("left, right", [(0, 0), (255, 0), (40, 40), (2000, 0)])
def test_the_work_of_a_window_grows_with_length_alone(left, right):
    counts = []
    for length in (16384, 65536):
        tile = choose_tile((length, length), 4, left, right)
        counts.append(count_pairs(make_walk((length, length), tile, left, right)))
    assert counts[1] < 4.5 * counts[0]
    # At most about the windows of a tile's first and last query, plus one tile on each side.
    assert counts[1] <= 65536 * (left + right + 1 + 3 * max(tile))


def test_causality_saves_half_of_the_work():
    tile = choose_tile((8192, 8192), 4, None, 0)
    whole = count_pairs(make_walk((8192, 8192), tile))
    assert whole == 8192**2
    assert count_pairs(make_walk((8192, 8192), tile, right=0)) < 0.52 * whole


def test_steps_without_a_mask_hold_full_tiles_of_every_head():
    full = np.array([[[1, 1, 1, 1]], [[0, 1, 1, 1]]], bool)
    tile, lengths = (4, 5), (4, 20)
    layout = BlockLayout.from_block_mask(np.ones_like(full), full=full, tile=tile, lengths=lengths)
    walk = Listed.of(tile, lengths, False, layout, 1)
    steps = [patch(m) for low, high, patch in walk.runs(0) for m in range(int(low), int(high))]
    assert len(steps) == 4
    unmasked = [patch for patch in steps if not patch.masked]
    assert len(unmasked) == 3
    for patch in unmasked:
        assert all(full[head, 0, start // 5] for head, (start,) in enumerate(patch.key_start))
