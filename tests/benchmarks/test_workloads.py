import numpy as np
import pytest

from benchmarks.workloads import (
    HEAD_SIZE,
    HEADS,
    SPARSE_GLOBAL,
    SPARSE_WINDOW,
    WINDOW,
    WORKLOADS,
    checked_rows,
    draw,
    expected,
    relative_error,
)


def allowed(name, length):
    i, j = np.arange(length)[:, None], np.arange(length)
    return {
        "causal": j <= i,
        "bidirectional": j >= 0,
        "window": (i - j <= WINDOW[0]) & (j - i <= WINDOW[1]),
        "sparse": (abs(i - j) <= SPARSE_WINDOW) | (i < SPARSE_GLOBAL) | (j < SPARSE_GLOBAL),
    }[name] & np.ones((length, length), bool)


@pytest.mark.parametrize("name", ["causal", "bidirectional", "window", "sparse"])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_pairs_are_those_that_the_pattern_allows(name, length):
    pairs = allowed(name, length).sum()
    assert WORKLOADS[name].flops(length, "forward") == 4 * HEADS * pairs * HEAD_SIZE
    assert WORKLOADS[name].flops(length, "forward + backward") == 14 * HEADS * pairs * HEAD_SIZE
    assert WORKLOADS[name].exps(length, "forward") == HEADS * pairs
    assert WORKLOADS[name].exps(length, "forward + backward") == 2 * HEADS * pairs


@pytest.mark.parametrize("name", ["causal", "bidirectional", "window", "sparse"])
def test_expected_output_is_softmax_attention_over_the_pattern(name):
    length = 300
    arrays = draw(length)
    query, key, value = (a[0].astype(np.float64) for a in arrays[:3])
    rows = checked_rows(length)
    (out,) = expected(WORKLOADS[name].weights, arrays, rows, "forward")
    for head in range(HEADS):
        weights = np.exp(query[rows, head] @ key[:, head].T / np.sqrt(HEAD_SIZE))
        weights *= allowed(name, length)[rows]
        wanted = weights @ value[:, head] / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[:, head], wanted, rtol=1e-12, atol=1e-12)


def test_relative_error_sees_one_wrong_element_of_a_gradient():
    rows = np.array([0, 2])
    right = [np.ones((1, 4, 2, 3)) for _ in range(4)]
    wanted = [right[0][0, rows], *(a[0].copy() for a in right[1:])]
    assert relative_error(right, wanted, rows) == 0
    right[2][0, 1, 1, 1] = 1.5
    assert relative_error(right, wanted, rows) == 0.5
    right[2][0, 1, 1, 1] = np.nan
    assert not relative_error(right, wanted, rows) <= 1e-4


@pytest.mark.parametrize("length", [16, 17, 100])
def test_no_row_is_checked_twice(length):
    rows = checked_rows(length)
    assert len(set(rows)) == len(rows) and rows[-1] == length - 1
