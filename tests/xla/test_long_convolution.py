"""Long convolutions of packed documents."""

import jax
import numpy as np

from effattn.xla.long_convolution import long_convolution


def test_packed_documents_are_convolved_one_by_one():
    """Documents shorter and longer than the blocks that a matrix product convolves."""
    borders = [0, 3, 4, 60, 110, 130]
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(1, 130, 2)), rng.normal(size=(70, 2))
    later = rng.normal(size=(20, 2))
    ids = np.repeat(np.arange(1, 6), np.diff(borders))[None]
    with jax.enable_x64(True):
        packed = jax.jit(long_convolution)(x, taps, segment_ids=ids)
        both = jax.jit(long_convolution)(x, taps, later, ids)
    for start, stop in zip(borders, borders[1:], strict=False):
        for feature in range(2):
            alone = np.convolve(x[0, start:stop, feature], taps[:, feature])[: stop - start]
            np.testing.assert_allclose(packed[0, start:stop, feature], alone, atol=1e-12)
            reversed_taps = np.concatenate([[0], later[:, feature]])
            of_later = np.convolve(x[0, start:stop, feature][::-1], reversed_taps)
            expected = alone + of_later[: stop - start][::-1]
            np.testing.assert_allclose(both[0, start:stop, feature], expected, atol=1e-12)
