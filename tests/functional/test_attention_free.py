"""AFT's forms agree in special cases, and packed AFT-full has gradients in linear memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.analysis import cost
from effattn.nn import AFTConv
from tests.closeness import close
from tests.marks import slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


@pytest.mark.parametrize("is_causal", [True, slow(False)])
def test_the_forms_of_aft_agree_in_special_cases(is_causal):
    """With equal biases, full and conv are simple; with a full window, local is full."""
    factors = RNG.normal(size=(2, 9, 3)).astype(np.float32)
    run = functools.partial(compiled, effattn.attention_free, is_causal=is_causal)
    simple = run()(X, X, X)
    with_bias = run()
    equal = with_bias(X, X, X, position_bias=tuple(np.ones_like(factors)))
    close(equal, simple)
    bias = tuple(factors)
    full = with_bias(X, X, X, position_bias=bias)
    local = run(local_window_size=9)(X, X, X, position_bias=bias)
    close(local, full)
    taps = np.zeros((2, 5 if is_causal else 9), np.float32)
    conv = run(local_window_size=4)(X, X, X, position_bias=taps)
    close(conv, simple)


@pytest.mark.parametrize("factors", [None, tuple(X[..., :2])], ids=["simple", "full"])
def test_aft_of_a_document_before_one_of_far_larger_keys(factors):
    key, ids = X.copy(), np.repeat([[1, 2]], [5, 4], 1)
    key[:, 5:] += 3000
    run = compiled(effattn.attention_free, position_bias=factors)
    both = run(X, key, X, segment_ids=np.repeat(ids, 2, 0))
    alone = effattn.attention_free(X[:, :5], key[:, :5], X[:, :5], position_bias=factors)
    close(both[:, :5], alone)


def test_the_memory_of_the_gradient_of_packed_aft_full_is_linear():
    def bytes_at(time):
        shapes = jax.ShapeDtypeStruct((1, time, 8), jnp.float32)
        factors = (jax.ShapeDtypeStruct((time, 3), jnp.float32),) * 2
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)

        def total(x, factors, ids):
            return effattn.attention_free(x, x, x, position_bias=factors, segment_ids=ids).sum()

        return cost.temporary_bytes(jax.jit(jax.grad(total)).trace(shapes, factors, ids))

    lengths = 1024, 4096
    assert cost.exponent(lengths, [bytes_at(time) for time in lengths]) <= 1.1


FILTERS, FACTORS = np.zeros((2, 9, D)), (np.zeros((9, 2)), np.zeros((9, 2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.attention_free(X, X, X, position_bias=(FACTORS[0][:5],) * 2),
            "with T' at least the 9 tokens",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=np.ones((2, 3))),
            "position_bias of taps needs local_window_size",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=(FACTORS[0],)),
            "an array of taps or a pair of factors, got 1",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=(FACTORS[0].astype(int),) * 2),
            "position_bias must be floating point",
        ),
        (
            lambda: effattn.attention_free(
                X, X, X, position_bias=np.ones((2, 3), complex), local_window_size=1
            ),
            "position_bias must be floating point",
        ),
        (
            lambda: effattn.attention_free(
                X, X, X, position_bias=np.ones((0, 3)), local_window_size=1
            ),
            r"\(G, 3\), .* 3 taps .*, got \(0, 3\)",
        ),
        (
            lambda: effattn.attention_free(
                X, X, X, position_bias=np.ones((4, 3)), local_window_size=1
            ),
            r"\(G, 3\), with G a divisor of .* local_window_size=1 in a bidirectional call, got",
        ),
        (
            lambda: effattn.attention_free(X, X, X, local_window_size=1),
            "needs position_bias, got N",
        ),
        (
            lambda: effattn.attention_free(X, X, X, is_causal=True, initial_state=X[:, 0]),
            "initial_state must be the Sums that an earlier call returned",
        ),
        (
            lambda: effattn.attention_free(X, X, X, return_state=True),
            "need is_causal=True and position_bias=None, .* got is_causal=False without",
        ),
        (
            lambda: AFTConv(D, "2", rngs=nnx.Rngs(0)),
            "num_heads must be an int, 1 or more heads, got '2'",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
