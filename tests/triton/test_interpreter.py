"""The interpreter of Triton kernels: results, and the races that it finds."""

import ml_dtypes
import numpy as np
import pytest

kernels = pytest.importorskip("tests.triton.kernels", exc_type=ImportError)
interpreter = pytest.importorskip("effattn.triton.interpreter", exc_type=ImportError)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("y", [None, numbers(8)])
def test_all_programs_run(y):
    x, out = numbers(8), np.full(8, np.nan, np.float32)
    interpreter.run(kernels.doubled, (2,), [x, y], [out], size=4)
    np.testing.assert_array_equal(out, 2 * x + (0 if y is None else y))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_products_and_sums(dtype):
    x, y = (numbers(16, 16) % 7 - 3).astype(dtype), (numbers(16, 16) % 5 - 2).astype(dtype)
    out = np.full((16, 16), np.nan, np.float32)
    interpreter.run(kernels.products, (1,), [x, y], [out], size=16)
    wide = x.astype(np.float32)
    total = wide @ y.astype(np.float32).T + wide.sum(1, keepdims=True)
    np.testing.assert_array_equal(out, total + total[::-1].cumsum(0)[::-1])


@pytest.mark.parametrize(
    ("kernel", "arrays", "message"),
    [
        ("shifted", [], "two programs write the same entry"),
        ("reads_its_neighbour", [], "reads what it has not written"),
        ("reads_first", [], "reads what it has not written"),
        ("beyond", [numbers(4)], "outside of all arrays"),
        ("writes_its_operand", [numbers(4)], "writes to an operand"),
    ],
)
def test_races_and_wrong_addresses_are_found(kernel, arrays, message):
    with pytest.raises(Exception, match=message):
        grid = (1,) if arrays else (2,)
        interpreter.run(getattr(kernels, kernel), grid, arrays, [numbers(8)], size=4)


def test_the_language_is_as_before_afterwards():
    before = {**vars(kernels.tl)}
    interpreter.run(kernels.doubled, (2,), [numbers(8), None], [numbers(8)], size=4)
    assert before == vars(kernels.tl)
