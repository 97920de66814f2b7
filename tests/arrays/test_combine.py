import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import combine, dot_product_attention
from effattn.testing.functions import assert_close
from tests.dense import dense_with_gradients, draw, with_gradients

attend = functools.partial(dot_product_attention, return_residual=True)


def in_parts(arrays, known):
    """Attention over three parts of the keys, of which one is empty, combined."""
    parts = [
        attend(arrays["query"], arrays["key"][:, part], arrays["value"][:, part])
        for part in (slice(0, 5), slice(5, 5), slice(5, 14))
    ]
    return combine(*zip(*parts, strict=True))


def test_a_split_of_the_keys_gives_the_whole_with_gradients():
    with jax.enable_x64(True):
        arrays = draw()
        whole = dense_with_gradients(arrays)
        assert_close(with_gradients(in_parts, arrays), whole, 1e-12)


def test_a_part_empty_for_some_rows_adds_nothing():
    def function(arrays, known):
        split = np.arange(14) < 5
        # Under causality, the first rows see no key of the second part.
        parts = [attend(**arrays, is_causal=True, mask=m) for m in (split, ~split)]
        return combine(*zip(*parts, strict=True))

    with jax.enable_x64(True):
        arrays = draw()
        whole = dense_with_gradients(arrays, is_causal=True)
        assert_close(with_gradients(function, arrays), whole, 1e-12)


def test_parts_that_are_all_empty_give_zeros_with_zero_gradients():
    out = np.zeros((2, 3, 1, 4), np.float32)
    lse = np.full((2, 3, 1), -np.inf, np.float32)

    @jax.jit
    def program(out, lse):
        results, pull_back = jax.vjp(lambda out, lse: combine((out, out), (lse, lse)), out, lse)
        return results, pull_back((jnp.ones_like(out), jnp.ones_like(lse)))

    results, gradients = program(out, lse)
    jax.tree.map(np.testing.assert_array_equal, results, (out, lse))
    jax.tree.map(np.testing.assert_array_equal, gradients, (0 * out, np.zeros_like(lse)))


def test_logits_may_be_huge():
    out = np.arange(2, dtype=np.float32).reshape(2, 1, 1, 1, 1)
    lse = np.float32([1e4, 1e4 + np.log(3)]).reshape(2, 1, 1, 1)
    mixed, total = jax.jit(combine)(out, lse)
    np.testing.assert_allclose(mixed, 0.75, rtol=1e-3)
    np.testing.assert_allclose(total, 1e4 + np.log(4), rtol=1e-6)


def test_the_output_has_the_dtype_of_the_first():
    out, lse = np.ones((1, 1, 1, 1), jnp.bfloat16), np.zeros((1, 1, 1), np.float32)
    mixed, total = jax.eval_shape(combine, (out, out), (lse, lse))
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
