"""Nystrom attention at its limits, and its parts: segment means, the inverse, the convolution."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import dot_product_attention
from effattn.analysis import cost
from effattn.cores.segment_means import segment_means
from effattn.functional.nystrom import nystrom_attention, pseudo_inverse
from effattn.nn import SelfAttention, nystromformer_from_transformers
from effattn.testing.functions import assert_close
from effattn.xla.depthwise_convolution import convolve
from tests.dense import draw
from tests.marks import slow

LENGTH = 13
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers_nystromformer.npz"


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def well_conditioned(seed=0):
    """Arrays in which each query is nearest to its own key: the weights are almost the identity."""
    rng = np.random.default_rng(seed)
    key = 3 * rng.normal(size=(2, LENGTH, 2, 6))
    return np.repeat(key, 2, -2), key, rng.normal(size=(2, LENGTH, 2, 5))


def test_with_a_landmark_for_each_token_it_is_exact(x64):
    """Padded rows, which have fewer tokens than landmarks, down to none, are exact too."""
    arrays = well_conditioned()
    lengths = np.array([LENGTH, 0]), np.array([9, 1])
    ours = compiled(nystrom_attention, num_landmarks=LENGTH, num_iterations=40)
    exact = compiled(dot_product_attention)
    for of_rows in lengths:
        given = {"query_seq_lengths": of_rows, "key_value_seq_lengths": of_rows}
        assert_close(ours(*arrays, **given), exact(*arrays, **given), 1e-6)


def test_it_is_exact_where_queries_and_keys_are_constant_in_each_segment(x64):
    """Each segment then consists of copies of its landmark."""
    query, key, value = well_conditioned()
    in_threes = np.arange(LENGTH - 1) // 3
    query, key, value = query[:, in_threes], key[:, in_threes], value[:, :-1]
    ours = compiled(nystrom_attention, num_landmarks=4, num_iterations=40)(query, key, value)
    assert_close(ours, compiled(dot_product_attention)(query, key, value), 1e-6)


@pytest.mark.parametrize("count", [1, 4, 13, 20])
def test_segments_are_even_parts_of_the_valid_tokens(count, x64):
    x = np.random.default_rng(0).normal(size=(5, LENGTH, 2, 3))
    lengths = np.array([LENGTH, 12, 7, 3, 0], np.int32)
    cotangent = np.random.default_rng(1).normal(size=(5, min(count, LENGTH), 2, 3))

    @jax.jit
    def run(x):
        means, pull_back, filled = jax.vjp(
            lambda x: segment_means(x, lengths, count), x, has_aux=True
        )
        return means, filled, *pull_back(cotangent)

    means, filled, gradient = run(x)
    expected, of_tokens = np.zeros_like(cotangent), np.zeros_like(x)
    for row, length in enumerate(lengths):
        for n, tokens in enumerate(np.array_split(np.arange(length), min(count, LENGTH))):
            if len(tokens):
                expected[row, n] = x[row, tokens].mean(0)
                of_tokens[row, tokens] = cotangent[row, n] / len(tokens)
    assert_close((means, gradient), (expected, of_tokens), 1e-14)
    np.testing.assert_array_equal(filled, np.minimum(lengths, count))


def stochastic(*shape, seed=0):
    weights = np.random.default_rng(seed).uniform(size=shape) ** 4
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)], ids=str)
def test_the_iteration_converges_to_the_pseudo_inverse(shape, x64):
    weights = stochastic(2, *shape)
    inverse = jax.jit(pseudo_inverse, static_argnums=1)(weights, 20)
    assert_close(inverse, np.linalg.pinv(weights), 1e-9)


def test_rows_and_columns_of_zeros_leave_the_rest_of_the_inverse(x64):
    """The iteration treats each matrix alone, and zeros stay zeros."""
    small, large = stochastic(4, 3), stochastic(6, 6, seed=1)
    both = np.stack([np.zeros((6, 6)), large])
    both[0, :4, :3] = small
    run = jax.jit(pseudo_inverse, static_argnums=1)
    padded, alone = np.asarray(run(both, 6))
    assert_close((padded[:3, :4], alone), (run(small, 6), run(large, 6)), 1e-13)
    assert (padded[3:] == 0).all() and (padded[:, 4:] == 0).all()


def with_skip(kernel, query, key, value, **given):
    return nystrom_attention(query, key, value, num_landmarks=4, skip_kernel=kernel, **given)


@pytest.mark.parametrize(
    "heads", [2, slow(4)], ids=["kernels of key heads", "kernels of query heads"]
)
def test_a_skip_kernel_adds_a_convolution_of_the_values(heads, x64):
    """The kernel's gradient agrees too. The convolution reads zeros in padding and outside."""
    query, key, value = draw(LENGTH, LENGTH).values()
    rng = np.random.default_rng(0)
    kernel, cotangent = rng.normal(size=(heads, 5)), rng.normal(size=(2, LENGTH, 4, 5))
    lengths = np.array([LENGTH, 9])
    given = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    @jax.jit
    def run(kernel):
        plain = nystrom_attention(query, key, value, num_landmarks=4, **given)
        out, pull_back = jax.vjp(lambda k: with_skip(k, query, key, value, **given), kernel)
        return out - plain, *pull_back(cotangent)

    expected, gradient = np.zeros_like(cotangent), np.zeros_like(kernel)
    for row, length in enumerate(lengths):
        for n in range(4):
            for h in range(5):
                column = np.pad(value[row, :length, n // 2, h], 2)
                taps = np.lib.stride_tricks.sliding_window_view(column, 5)
                which = n * heads // 4
                expected[row, :length, n, h] = taps @ kernel[which]
                gradient[which] += cotangent[row, :length, n, h] @ taps
    assert_close(run(kernel), (expected, gradient), 1e-12)


def test_a_wide_skip_kernel_makes_no_copies_of_the_values():
    """Forward and backward: 28 more taps need less memory than one more array of values."""

    def bytes_of(width):
        def run(value, kernel):
            out, pull_back = jax.vjp(convolve, value, kernel)
            return out, pull_back(out)

        value = jax.ShapeDtypeStruct((1, 512, 2, 16), jnp.float32)
        kernel = jax.ShapeDtypeStruct((2, width), jnp.float32)
        return cost.temporary_bytes(jax.jit(run).trace(value, kernel))

    assert bytes_of(33) - bytes_of(5) < 512 * 2 * 16 * 4


def test_a_module_learns_its_skip_kernel():
    x = np.random.default_rng(0).normal(size=(1, 7, 8)).astype(np.float32)

    @nnx.jit
    def gradients():
        mixer = SelfAttention(
            8,
            2,
            "nystrom",
            is_causal=False,
            num_landmarks=2,
            skip_kernel=nnx.Param(jnp.zeros((2, 3))),
            rngs=nnx.Rngs(0),
        )
        return nnx.grad(lambda mixer: (mixer(x) ** 2).sum())(mixer)

    gradient = np.asarray(gradients()["array_options"]["skip_kernel"][...])
    assert (gradient != 0).all()


@pytest.mark.parametrize("case", ["pairs", slow("long"), slow("one")])
def test_it_agrees_with_transformers(case):
    """Outputs and gradients of `NystromformerAttention`, with its convolution (`tests/golden`).

    The golden run uses the exact initial inverse of each head, and no padding, because the default
    behaviour of transformers differs there: its default inverse divides by the largest column sum
    of all heads of all examples, so that one example changes another. Its mask hides padding only
    where landmarks attend to tokens, while the segment means and the convolution include padding.
    Its length must be a multiple of the number of landmarks. With a landmark for each token,
    transformers switches to exact attention.
    """
    with np.load(GOLDEN) as golden:
        arrays = {name: golden[name] for name in golden.files}
    x, cotangent, output, gradient, landmarks = (
        arrays[f"{case}/{name}"]
        for name in ("x", "cotangent", "output", "gradient", "num_landmarks")
    )
    start = "parameter/"
    parameters = {n.removeprefix(start): x for n, x in arrays.items() if n.startswith(start)}
    mixer = nystromformer_from_transformers(parameters, num_heads=4, num_landmarks=int(landmarks))

    @jax.jit
    def with_gradient(mixer, x):
        y, pull_back = jax.vjp(mixer, x)
        return y, *pull_back(cotangent)

    ours = with_gradient(mixer, x)
    np.testing.assert_allclose(ours[0], output, rtol=0, atol=1e-4)
    np.testing.assert_allclose(ours[1], gradient, rtol=1e-4, atol=1e-4)


def test_there_is_no_causal_form():
    with pytest.raises(ValueError, match="is_causal=True was given, .* 'nystrom' lacks 'causal'"):
        SelfAttention(8, 2, "nystrom", rngs=nnx.Rngs(0))


def test_without_queries_or_keys_there_are_zeros():
    query, key, value = draw(0, 3, dtype=np.float32).values()
    out = jax.eval_shape(functools.partial(nystrom_attention, num_landmarks=2), query, key, value)
    assert out.shape == (2, 0, 4, 5)
    query, key, value = draw(3, 0, dtype=np.float32).values()
    out = compiled(nystrom_attention, num_landmarks=2)(query, key, value)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4, 5)))


def test_there_may_be_no_examples():
    arrays = draw(6, 5, batch=(0, 2), dtype=np.float32)

    def total(arrays):
        return nystrom_attention(**arrays, num_landmarks=2).sum()

    gradients = jax.eval_shape(jax.grad(total), arrays)
    assert gradients["key"].shape == arrays["key"].shape


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_landmarks": 0}, "num_landmarks must be an int, 1 or more, got 0"),
        (
            {"num_landmarks": 99},
            r"num_landmarks must be at most \d+, the number of tokens, got 99; pass fewer",
        ),
        ({"num_landmarks": 2.0}, "num_landmarks must be an int, 1 or more, got 2.0"),
        ({"num_iterations": 0}, "num_iterations must be an int, 1 or more, got 0"),
        (
            {"skip_kernel": np.zeros((4, 2), np.float32)},
            r"skip_kernel must be .* \(4, width\) or \(2, width\), of odd width, got .* \(4, 2\)",
        ),
        ({"skip_kernel": np.zeros((3, 3), np.float32)}, r"of odd width, got float32 .* \(3, 3\)"),
        ({"skip_kernel": np.zeros(3, np.float32)}, r"got float32 of shape \(3,\)"),
        ({"skip_kernel": np.zeros((4, 3), np.int32)}, "must be floating point .* got int32"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        nystrom_attention(**arrays, **{"num_landmarks": 4, **given})


def test_a_skip_kernel_needs_one_sequence():
    arrays = draw(dtype=np.float32)
    with pytest.raises(ValueError, match="with skip_kernel is self-attention: .* got 11 and 14"):
        nystrom_attention(**arrays, num_landmarks=4, skip_kernel=np.zeros((4, 3), np.float32))


@jax.numpy_dtype_promotion("strict")
def test_no_types_are_promoted_unasked():
    x = np.ones((2, 13, 2, 4), np.float32)
    attend = functools.partial(
        nystrom_attention, num_landmarks=4, key_value_seq_lengths=np.array([5, 13])
    )
    jax.eval_shape(jax.grad(lambda x: attend(x, x, x).sum()), x)
