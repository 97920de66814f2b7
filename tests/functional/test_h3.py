"""H3 is gates around a convolution, and linear attention where its modes do not decay."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import H3

BATCH, LENGTH, HEADS, SIZE, MODES = 2, 7, 3, 2, 4
RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, BATCH, LENGTH, HEADS * SIZE))
POLES = -RNG.uniform(0.1, 1, (HEADS, MODES)) + 1j * RNG.normal(size=(HEADS, MODES))
OUTPUT = RNG.normal(size=(HEADS, MODES)) + 1j * RNG.normal(size=(HEADS, MODES))
SPACE = {"rate": POLES, "output": OUTPUT, "step_size": np.array([0.1, 0.5, 1.0])}
SKIP = np.array([0.0, 1.0, -2.0])


def by_paper(q, k, v, rate, output, step_size, skip):
    """Algorithm 1 of the paper for heads: SSM_diag(k v^T) read by q, one pair of tokens at a time.

    The discretised matrices are those of a zero-order hold, with B of ones.
    """
    q, k, v = (x.reshape(BATCH, LENGTH, HEADS, SIZE) for x in (q, k, v))
    decay = np.exp(step_size[:, None] * rate)
    y = np.einsum("n,btnh,btnh,btnd->btnd", skip, q, k, v)
    for t in range(LENGTH):
        for s in range(t + 1):
            power = output * decay ** (t - s) * (decay - 1) / rate
            kernel = 2 * power.sum(1).real
            y[:, t] += np.einsum("n,bnh,bnh,bnd->bnd", kernel, q[:, t], k[:, s], v[:, s])
    return y.reshape(BATCH, LENGTH, HEADS * SIZE)


def test_it_is_the_gated_convolution_of_the_paper():
    with jax.enable_x64(True):
        y = jax.jit(functools.partial(effattn.h3_mixing, **SPACE, skip=SKIP))(Q, K, V)
    np.testing.assert_allclose(y, by_paper(Q, K, V, **SPACE, skip=SKIP), rtol=1e-9, atol=1e-9)


def test_without_decay_it_is_linear_attention():
    """A mode that hardly decays writes dt, and counts twice, as its conjugate does too."""
    ones = np.ones((HEADS, 1))
    space = {"rate": -1e-9 * (ones + 0j), "output": 0.5 * (ones + 0j), "step_size": ones[:, 0]}
    heads = (x.reshape(BATCH, LENGTH, HEADS, SIZE) for x in (Q, K, V))
    linear = functools.partial(
        effattn.linear_attention, feature_map="identity", scale=1.0, is_causal=True
    )
    with jax.enable_x64(True):
        y = jax.jit(functools.partial(effattn.h3_mixing, **space))(Q, K, V)
        expected = jax.jit(linear)(*heads)
    np.testing.assert_allclose(y, np.reshape(expected, y.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.h3_mixing(Q, K, V, **{**SPACE, "rate": POLES[[0, 1, 2, 0]]}),
            r"rate must have shape \(N, M\), with N heads that divide the 6 features, got \(4, 4\)",
        ),
        (
            lambda: effattn.h3_mixing(Q, K, V, **SPACE, initial_state=np.zeros((2, 3, 4, 2, 2))),
            r"initial_state must be complex of shape \(2, 3, 4, 2, 2\), got float",
        ),
        (
            lambda: effattn.h3_mixing(Q, K, V, **{**SPACE, "rate": -POLES}),
            "rate must have real parts of 0 or less",
        ),
        (
            lambda: effattn.h3_mixing(Q, K, V, **{**SPACE, "step_size": -SPACE["step_size"]}),
            "step_size must be 0 or more, got -",
        ),
        (lambda: effattn.h3_mixing(Q, K[:, 1:], V, **SPACE), "key must be float32 of shape"),
        (
            lambda: H3(6, head_dim=4, rngs=nnx.Rngs(0)),
            r"in_features \(6\) must be a multiple of head_dim \(4\)",
        ),
        (lambda: H3(6, state_size=5, rngs=nnx.Rngs(0)), "state_size must be even, .* got 5"),
        (lambda: H3(6, shift_size=0, rngs=nnx.Rngs(0)), "shift_size must be an int, 1 or more"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
