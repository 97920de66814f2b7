"""S5 is the recurrence of the paper, in one direction or both, and starts as HiPPO-N."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import S5

BATCH, LENGTH, D, P = 2, 70, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, D))
REAL, IMAG = RNG.normal(size=(2, 2, D, P))
RATE = -RNG.uniform(0.1, 1, P) + 1j * RNG.normal(size=P)
SPACE = {"rate": RATE, "input": (REAL + 1j * IMAG)[0].T, "step_size": RNG.uniform(0.1, 1, P)}
OUTPUT, SKIP = (IMAG + 1j * REAL), np.array([0.0, 1.0, -2.0])
IDS = np.array([[3] * 20 + [0] * 5 + [4] * 40 + [0] * 5, [7] * 70])


def by_paper(x, rate, input, output, step_size, state):
    """Equation 6 of the paper token by token: the outputs `(T, D)` of one row, and the state."""
    decay, y = np.exp(step_size * rate), np.zeros_like(x)
    for t, token in enumerate(x):
        state = decay * state + (decay - 1) / rate * (input @ token)
        y[t] = 2 * (output @ state).real
    return y, state


def test_it_is_the_recurrence_of_the_paper():
    first = RNG.normal(size=(BATCH, P)) + 1j
    options = {"skip": SKIP, "is_causal": True, "return_state": True}
    run = functools.partial(effattn.s5_scan, **SPACE, output=OUTPUT[0], **options)
    with jax.enable_x64(True):
        y, state = jax.jit(run)(X, initial_state=first)
    for row in range(BATCH):
        expected, last = by_paper(X[row], **SPACE, output=OUTPUT[0], state=first[row])
        np.testing.assert_allclose(y[row], expected + SKIP * X[row], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(state[row], last, rtol=1e-9, atol=1e-9)


def test_documents_are_read_alone_in_both_directions():
    run = functools.partial(effattn.s5_scan, **SPACE, output=OUTPUT, is_causal=False)
    with jax.enable_x64(True):
        y = jax.jit(run)(X, segment_ids=IDS)
    for row, part in ((0, slice(0, 20)), (0, slice(25, 65)), (1, slice(0, 70))):
        x = X[row, part]
        both = (
            by_paper(x[::step], **SPACE, output=OUTPUT[n], state=np.zeros(P))[0][::step]
            for n, step in enumerate((1, -1))
        )
        np.testing.assert_allclose(y[row, part], sum(both), rtol=1e-9, atol=1e-9)


def test_it_starts_as_blocks_of_the_normal_part_of_hippo():
    """The modes make up the real matrix; B and C are real matrices with it."""
    size, blocks = 8, 2
    mixer = S5(300, state_size=size, num_blocks=blocks, rngs=nnx.Rngs(0))
    n = np.arange(size // blocks)
    root = np.sqrt(2 * n + 1)
    normal = -np.tril(np.outer(root, root), -1) - np.diag(n + 1)
    normal = normal + np.outer(np.sqrt(n + 0.5), np.sqrt(n + 0.5))
    rates = -np.exp(mixer.log_rate[...]) + 1j * np.asarray(mixer.turn[...])
    eigenvalues = np.concatenate(
        [rates[: size // 2 // blocks], rates[size // 2 // blocks :].conj()]
    )
    expected = np.linalg.eigvals(normal)
    for found in eigenvalues:
        assert np.abs(expected - found).min() < 1e-4
    B, C = (np.asarray(m[...]) for m in (mixer.input, mixer.output))
    power = (B**2).sum(0).mean(), (C**2).sum(0).mean()
    np.testing.assert_allclose(power, (1 / 300, 1 / size), rtol=0.15)


SPACE_OF = {**SPACE, "output": OUTPUT[0], "is_causal": True}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.s5_scan(X, **{**SPACE_OF, "output": OUTPUT}),
            r"output must be complex of shape \(3, 4\), got complex64 of shape \(2, 3, 4\)",
        ),
        (
            lambda: effattn.s5_scan(X, **{**SPACE_OF, "input": REAL[0].T}),
            r"input must be complex of shape \(4, 3\), got float32",
        ),
        (
            lambda: effattn.s5_scan(X, **SPACE_OF, initial_state=jnp.zeros((BATCH, P))),
            r"initial_state must be complex of shape \(2, 4\), got float32",
        ),
        (
            lambda: effattn.s5_scan(X, **SPACE, output=OUTPUT, return_state=True),
            "initial_state and return_state need is_causal=True",
        ),
        (
            lambda: effattn.s5_scan(X, **{**SPACE_OF, "rate": RATE[None]}),
            r"rate must be complex of shape \(P,\), got complex64 of shape \(1, ",
        ),
        (
            lambda: effattn.s5_scan(X, **{**SPACE_OF, "rate": -RATE}),
            "rate must have real parts of 0 or less",
        ),
        (
            lambda: S5(8, state_size=6, num_blocks=2, rngs=nnx.Rngs(0)),
            "state_size must be a multiple of 4, as each of 2 blocks has pairs of modes, got 6",
        ),
        (
            lambda: S5(8, num_blocks=0, rngs=nnx.Rngs(0)),
            "num_blocks must be an int, 1 or more blocks, got 0",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
