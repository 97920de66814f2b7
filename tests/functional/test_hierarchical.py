"""Hierarchical attention against its definition, at its limits, and its cost at many levels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import dot_product_attention
from effattn.analysis import cost
from effattn.functional.hierarchical import hierarchical_attention
from effattn.nn import SelfAttention
from effattn.testing.functions import assert_close
from tests.dense import draw, with_gradients
from tests.marks import slow

LENGTH = 23


@pytest.mark.parametrize("is_causal", [True, slow(False)], ids=["causal", "bidirectional"])
def test_learned_summaries_at_three_levels_with_all_arguments(is_causal, x64):
    """A query meets its own segment, the sibling segment, and units of two segments."""
    arrays = draw(LENGTH, LENGTH)
    rng = np.random.default_rng(0)
    arrays |= {"summary_query": rng.normal(size=(2, 3)), "scale": np.asarray(0.6)}
    arrays["sink"] = rng.normal(size=4)
    options = {"segment_size": 4, "num_levels": 2, "num_summaries": 2, "logits_soft_cap": 2.0}
    options["dropout_rate"] = 0.3
    lengths = {"query_seq_lengths": np.array([20]), "key_value_seq_lengths": np.array([18])}
    arrays = {k: x[:1] if k in ("query", "key", "value") else x for k, x in arrays.items()}
    rng = jax.random.key(1)

    def call(function, arrays, known):
        given = {**arrays, **lengths, **options, "is_causal": is_causal, "dropout_rng": rng}
        return function(**given, return_residual=True)

    ours = functools.partial(call, functools.partial(hierarchical_attention, tile=(8, 8)))
    naive = functools.partial(call, effattn.naive.hierarchical)
    assert_close(with_gradients(ours, arrays), with_gradients(naive, arrays), 1e-12)


def attend(arrays, **options):
    run = functools.partial(hierarchical_attention, return_residual=True, **options)
    return jax.jit(run)(**arrays)


def exact(arrays, **options):
    run = functools.partial(dot_product_attention, return_residual=True, **options)
    return jax.jit(run)(**arrays)


@pytest.mark.parametrize("is_causal", [True, slow(False)], ids=["causal", "bidirectional"])
def test_it_is_exact_where_keys_and_values_are_constant_in_each_piece(is_causal, x64):
    arrays = draw(LENGTH, LENGTH)
    runs = np.arange(LENGTH) // 4 * 4
    arrays |= {name: arrays[name][:, runs] for name in ("key", "value")}
    ours = attend(arrays, segment_size=4, num_levels=2, num_summaries=2, is_causal=is_causal)
    assert_close(ours, exact(arrays, is_causal=is_causal), 1e-12)


def test_it_is_exact_where_one_segment_holds_the_sequence():
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    one = attend(arrays, segment_size=LENGTH + 5, num_levels=3, is_causal=True)
    jax.tree.map(np.testing.assert_array_equal, one, exact(arrays, is_causal=True))


def test_levels_above_one_whose_two_units_hold_the_sequence_change_nothing():
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    two, many = (attend(arrays, segment_size=6, num_levels=levels) for levels in (2, 40))
    jax.tree.map(np.testing.assert_array_equal, two, many)


def test_a_summary_query_of_zeros_takes_means(x64):
    arrays = draw(LENGTH, LENGTH)
    of_zeros = attend({**arrays, "summary_query": np.zeros((2, 3))}, segment_size=6)
    assert_close(of_zeros, attend(arrays, segment_size=6), 1e-14)


def test_a_module_learns_its_summaries():
    x = np.random.default_rng(0).normal(size=(1, 7, 8)).astype(np.float32)

    @nnx.jit
    def gradients():
        mixer = SelfAttention(
            8,
            2,
            "hierarchical",
            segment_size=2,
            num_summaries=1,
            summary_query=nnx.Param(jnp.zeros((2, 4))),
            rngs=nnx.Rngs(0),
        )
        return nnx.grad(lambda mixer: (mixer(x) ** 2).sum())(mixer)

    gradient = np.asarray(gradients()["array_options"]["summary_query"][...])
    assert (gradient != 0).all()


def many_levels(length):
    options = {"segment_size": 64, "num_levels": 16, "num_summaries": 2, "is_causal": True}

    def run(query, key, value):
        attend = functools.partial(hierarchical_attention, **options)
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(out)

    array = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    return jax.jit(run).trace(array, array, array)


@pytest.mark.slow
def test_with_many_levels_time_and_memory_are_linear_but_for_a_logarithm():
    """The test has 16 levels. A single level, in the laws, has as many units as segments."""
    lengths = (4096, 65536)
    programs = [many_levels(length) for length in lengths]
    counts = [cost.operations(program.jaxpr) for program in programs]
    assert 1 <= cost.exponent(lengths, counts) <= 1.1, counts
    found = [cost.temporary_bytes(program) for program in programs]
    assert cost.exponent(lengths, found) <= 1.1, found


@pytest.mark.parametrize(
    "given, message",
    [
        ({"segment_size": 0}, "segment_size must be an int .* multiple of num_summaries=1, got 0"),
        ({"segment_size": 4, "num_summaries": 3}, "a multiple of num_summaries=3, got 4"),
        ({"segment_size": 4, "num_levels": 0}, "num_levels must be an int, 1 or more, got 0"),
        ({"segment_size": 4, "num_summaries": 0.5}, "num_summaries must be an int, .* got 0.5"),
        (
            {"segment_size": 4, "summary_query": np.zeros((4, 3), np.float32)},
            r"summary_query must be floating point of shape \(2, 3\)",
        ),
    ],
)
def test_wrong_arguments_are_named(given, message):
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        hierarchical_attention(**arrays, **given)


def test_query_and_key_have_one_length():
    with pytest.raises(ValueError, match="need the same length, got 11 and 14"):
        hierarchical_attention(**draw(dtype=np.float32), segment_size=3)
