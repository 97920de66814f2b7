import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import combine, dot_product_attention
from tests.dense import draw, with_gradients
from tests.laws.battery import assert_close

attend = functools.partial(dot_product_attention, return_residual=True)


def of_parts(borders):
    def function(arrays, known):
        parts = [
            attend(arrays["query"], arrays["key"][:, part], arrays["value"][:, part])
            for part in map(slice, borders, borders[1:])
        ]
        return combine(*zip(*parts, strict=True))

    return function


@pytest.mark.parametrize("borders", [(0, 14), (0, 5, 5, 14)])
def test_a_split_of_the_keys_gives_the_whole_with_gradients(borders):
    with jax.enable_x64(True):
        arrays = draw()
        whole = with_gradients(lambda a, known: attend(**a), arrays)
        assert_close(with_gradients(of_parts(borders), arrays), whole, 1e-12)


def test_a_part_empty_for_some_rows_adds_nothing():
    def in_parts(arrays, known):
        split = np.arange(14) < 5
        # Causal: the first rows see none of the second part.
        parts = [attend(**arrays, is_causal=True, mask=m) for m in (split, ~split)]
        return combine(*zip(*parts, strict=True))

    with jax.enable_x64(True):
        arrays = draw()
        whole = with_gradients(lambda a, known: attend(**a, is_causal=True), arrays)
        assert_close(with_gradients(in_parts, arrays), whole, 1e-12)


def test_parts_that_are_all_empty_give_zeros_with_zero_gradients():
    out, lse = jnp.zeros((2, 3, 1, 4)), jnp.full((2, 3, 1), -jnp.inf)
    (out, lse), pull_back = jax.vjp(combine, (out, out), (lse, lse))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    outputs, lses = pull_back((jnp.ones_like(out), jnp.ones_like(lse)))
    np.testing.assert_array_equal(jnp.stack(outputs), 0)
    np.testing.assert_array_equal(jnp.stack(lses), 0)


def test_logits_may_be_huge():
    out = jnp.arange(2.0).reshape(2, 1, 1, 1, 1)
    lse = jnp.array([1e4, 1e4 + np.log(3)]).reshape(2, 1, 1, 1)
    mixed, total = combine(out, lse)
    np.testing.assert_allclose(mixed, 0.75, rtol=1e-3)
    np.testing.assert_allclose(total, 1e4 + np.log(4), rtol=1e-6)


def test_the_output_has_the_dtype_of_the_first():
    out, lse = jnp.ones((1, 1, 1, 1), jnp.bfloat16), jnp.zeros((1, 1, 1))
    mixed, total = combine((out, out), (lse, lse))
    assert mixed.dtype == jnp.bfloat16 and total.dtype == jnp.float32


@pytest.mark.parametrize(
    "outputs, lses, message",
    [
        ([], [], "at least one, got 0 outputs and 0 lses"),
        ([(2, 3, 1, 4)], [(2, 3, 1)] * 2, "got 1 outputs and 2 lses"),
        ([(2, 3, 1, 4), (2, 3, 1, 5)], [(2, 3, 1)] * 2, r"\(2, 3, 1, 5\)"),
        ([(2, 3, 1, 4)], [(2, 1, 3)], r"got .* \[\(2, 1, 3\)\]"),
    ],
)
def test_says_what_it_got_and_needs(outputs, lses, message):
    with pytest.raises(ValueError, match=message):
        combine([jnp.ones(s) for s in outputs], [jnp.ones(s) for s in lses])
