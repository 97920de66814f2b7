"""Block Linformer: its limits, the gradients of its projections, and refused arguments."""

import functools

import jax
import numpy as np
import pytest

import effattn
from effattn import block_linformer_attention, dot_product_attention
from effattn.testing.functions import assert_close
from tests.dense import draw, with_gradients
from tests.marks import slow

LENGTH, SLOTS, SIZE = 14, 2, 4


def drawn(*before, slots=SLOTS, size=SIZE):
    rng = np.random.default_rng(0)
    of_keys, of_values = rng.normal(size=(2, *before, slots, size)) / size**0.5
    return {"key_projection": of_keys, "value_projection": of_values}


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), slow((2,))], ids=["shared", "by head"])
def test_projections_have_gradients_that_no_padding_reaches(before, x64):
    """NaN in padding; dropout on tokens and slots; keys end inside a block, or there are none."""
    arrays = draw(LENGTH, LENGTH) | drawn(*before)
    lengths = {"query_seq_lengths": np.array([14, 9]), "key_value_seq_lengths": np.array([6, 0])}
    for name, end in (("query", "query"), ("key", "key_value"), ("value", "key_value")):
        for row, length in enumerate(lengths[f"{end}_seq_lengths"]):
            arrays[name][row, length:] = np.nan
    options = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1)}

    def ours(arrays, lengths):
        return block_linformer_attention(**arrays, **lengths, **options, return_residual=True)

    def naive(arrays, lengths):
        given = {**arrays, **lengths, **options}
        return effattn.naive.block_linformer(**given, return_residual=True)

    got = jax.tree.map(np.asarray, with_gradients(ours, arrays, lengths))
    (out, lse), gradients = got
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()
    assert all(np.isfinite(x).all() for x in gradients.values())
    zeros = {name: np.nan_to_num(x) for name, x in arrays.items()}
    assert_close(got, with_gradients(naive, zeros, lengths), 1e-12)


@pytest.mark.parametrize(
    ("slots", "size"), [(SIZE, SIZE), slow(1, LENGTH)], ids=["identities", "one block"]
)
def test_it_is_exact_with_a_slot_a_token_and_in_one_block(slots, size, x64):
    arrays, one = draw(LENGTH, LENGTH), np.eye(slots, size)
    options = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1), "return_residual": True}
    projections = {"key_projection": one, "value_projection": one}
    ours = functools.partial(block_linformer_attention, **projections, tile=(4, 4), **options)
    exact = functools.partial(dot_product_attention, is_causal=True, **options)
    assert_close(jax.jit(ours)(**arrays), jax.jit(exact)(**arrays), 1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"key_projection": np.ones((5, 4))},
            r"no more slots than the block size, got .* \(5, 4\)",
        ),
        (
            {"value_projection": np.ones((2, 5))},
            r"same number of slots and .*, got \(2, 4\) and \(2, 5\)",
        ),
        ({"key_projection": np.ones((3, 2, 4))}, r"or \(2, slots, block size\), for 2 key heads"),
        ({"value_projection": np.ones((2, 4), int)}, "value_projection must be floating point"),
        ({"key_projection": np.ones(4)}, r"got float32 of shape \(4,\)"),
        ({"query": np.ones((2, 13, 4, 3))}, "need the same length, got 13 and 14"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        block_linformer_attention(**{**draw(LENGTH, LENGTH), **drawn(), **changes})
