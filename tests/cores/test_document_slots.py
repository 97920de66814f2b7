"""Sums over packed documents, and softmax over their tokens."""

import jax
import numpy as np
import pytest

from effattn.cores.document_slots import document_sums, softmax_over_documents


def ids_of(*sizes):
    return np.repeat(np.arange(len(sizes), 0, -1, dtype=np.int32), sizes)[None]


# Documents that end at, before and after the ends of chunks of 64 tokens.
PACKINGS = [(1,), (64, 64), (63, 2, 63), (200,), (10, 150, 40), (64, 130, 1, 1, 4), (1,) * 70]


@pytest.mark.parametrize("sizes", PACKINGS, ids=str)
def test_each_token_has_the_sum_of_its_document_forward_and_backward(sizes):
    ids = ids_of(*sizes)
    rng = np.random.default_rng(0)
    x, cotangent = rng.normal(size=(2, *ids.shape, 3))
    is_same = (ids[..., :, None] == ids[..., None, :]).astype(float)
    with jax.enable_x64(True):
        out, pull_back = jax.vjp(lambda x: document_sums(x, ids), x)
        (gradient,) = pull_back(cotangent)
    np.testing.assert_allclose(out, is_same @ x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gradient, is_same @ cotangent, rtol=1e-12, atol=1e-12)


def test_a_large_score_in_a_document_leaves_the_weights_of_another():
    ids, scores = ids_of(3, 4), np.zeros((1, 7, 1, 2), np.float32)
    scores[0, 1] = 1e4
    present = np.arange(7)[None] < 6
    weights = softmax_over_documents(scores, ids, present)[0, :, 0, 0]
    np.testing.assert_allclose(weights, [0, 1, 0, 1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)
