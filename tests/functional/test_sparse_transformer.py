"""Sparse Transformer attention against its definition."""

import itertools

import jax
import numpy as np
import pytest

from effattn.functional.sparse_transformer import sparse_transformer_attention
from effattn.testing.functions import assert_close
from tests.dense import dense_with_gradients, draw, with_gradients
from tests.marks import slow

LENGTH = 23


def allowed(kind, factor, stride, summary):
    """The sets A of section 4.3 of the paper, computed pair by pair."""
    which = np.zeros((LENGTH, LENGTH), bool)
    for i, j in itertools.product(range(LENGTH), repeat=2):
        if kind == "strided":
            first, second = i - j <= stride, (i - j) % stride == 0
        else:
            first = j // stride == i // stride
            second = j % stride in range(stride - summary, stride)
        either = {"first": first, "second": second, "merged": first or second}
        which[i, j] = j <= i and either[factor]
    return which


@pytest.mark.parametrize(
    "factor, stride, summary, kind",
    [
        slow("merged", 5, 1, "strided"),
        slow("merged", 5, 2, "fixed"),
        slow("first", 5, 1, "strided"),
        slow("first", 5, 2, "fixed"),
        slow("second", 5, 1, "strided"),
        ("second", 5, 2, "fixed"),
        slow("merged", 1, 1, "strided"),
        slow("merged", 1, 1, "fixed"),
        slow("merged", 40, 1, "strided"),
        slow("merged", 40, 3, "fixed"),
    ],
)
def test_it_attends_to_the_sets_of_the_paper(kind, factor, stride, summary, x64):
    """Strides between one token and the whole length, with gradients."""
    arrays = draw(LENGTH, LENGTH)
    lengths = np.array([LENGTH, 17])
    given = {
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths,
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(1),
    }
    pattern = {"kind": kind, "factor": factor, "stride": stride, "summary": summary}

    def function(arrays, known):
        return sparse_transformer_attention(
            **arrays, **given, **pattern, tile=(8, 8), return_residual=True
        )

    expected = dense_with_gradients(arrays, **given, mask=allowed(**pattern)[None, None])
    if stride == 5:
        assert_close(with_gradients(function, arrays), expected, 1e-12)
    else:
        assert_close(jax.jit(function)(arrays, None), expected[0], 1e-12)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"stride": 0}, "stride must be an int, 1 or more tokens, got 0"),
        ({"stride": 4, "kind": "banded"}, "kind must be 'strided' or 'fixed', got 'banded'"),
        ({"stride": 4, "factor": "third"}, "factor must be 'merged', 'first' or 'second'"),
        ({"stride": 4, "summary": 5}, "summary must be an int from 1 to stride=4"),
        (
            {"stride": 4, "summary": 2},
            "summary needs kind='fixed', got summary=2 and kind='strided'",
        ),
        (
            {"stride": 4, "kind": "fixed", "segment_ids": np.ones((2, LENGTH), int)},
            "segment_ids need kind='strided', got kind='fixed'",
        ),
    ],
)
def test_wrong_arguments_are_named(given, message):
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        sparse_transformer_attention(**arrays, **given)


def test_query_and_key_have_one_length():
    with pytest.raises(ValueError, match="need the same length, got 11 and 14"):
        sparse_transformer_attention(**draw(dtype=np.float32), stride=3)
