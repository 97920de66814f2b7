"""S4's two forms agree, and its kernel is that of the HiPPO matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.functional.s4 import hippo, low_rank_kernel
from effattn.nn import S4D
from tests.closeness import close
from tests.marks import slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


@functools.cache
def state_space():
    """The convolution arguments that an S4D layer draws."""

    def drawn():
        layer = S4D(4, state_size=16, rngs=nnx.Rngs(0))
        return {
            "rate": layer._A(jnp.float32),
            "output": jax.lax.complex(*layer.output[...]),
            "step_size": layer._dt(jnp.float32),
            "skip": layer.skip[...],
        }

    return jax.jit(drawn)()


@pytest.mark.parametrize("time", [slow(1), 100, slow(4096)])
def test_s4_is_one_as_convolution_and_as_recurrence(time):
    """The forms agree in float32, and the state continues from any split."""
    options = state_space()
    x = np.random.default_rng(1).normal(size=(2, time, 4)).astype(np.float32)
    forms = [
        compiled(effattn.s4_convolution, method=method, return_state=True)(x, **options)
        for method in ("convolution", "recurrence")
    ]
    jax.tree.map(lambda a, b: close(a, b, 1e-4), *forms)
    half = time // 2
    if half:
        run = compiled(effattn.s4_convolution, return_state=True)
        y, state = run(x[:, :half], **options)
        rest, _ = run(x[:, half:], **options, initial_state=state)
        close(np.concatenate([y, rest], 1), np.asarray(forms[0][0]), 1e-4)


def test_the_outputs_of_modes_start_as_complex_normal_numbers():
    """C = B c with E[|c|^2] = 1 and E[c^2] = 0: every phase is as likely."""
    output = np.asarray(S4D(2000, state_size=16, rngs=nnx.Rngs(0)).output)
    C, B = output[0] + 1j * output[1], hippo(16)[2]
    square = np.abs(B) ** 2
    np.testing.assert_allclose(np.mean(np.abs(C) ** 2, axis=0), square, rtol=0.1)
    assert (np.abs(np.mean(C**2, axis=0)) < 0.1 * square).all()


def test_the_low_rank_kernel_is_that_of_the_dense_hippo_matrix():
    """The test uses the matrix before diagonalisation, in float64, at several lengths."""
    size, step = 6, 0.3
    n = np.arange(size)
    b = np.sqrt(2 * n + 1)
    a = -np.tril(np.outer(b, b), -1) - np.diag(n + 1)
    inverse = np.linalg.inv(2 / step * np.eye(size) - a)
    turn, written = inverse @ (2 / step * np.eye(size) + a), 2 * inverse @ b
    rate, low_rank, to_modes = hippo(size)
    # The output C V reads the state of HiPPO in modes; C holds ones.
    normal = a + np.outer(np.sqrt(n + 0.5), np.sqrt(n + 0.5))
    _, vectors = np.linalg.eigh(-1j * (normal + 0.5 * np.eye(size)))
    for length in (1, 2, 7, 600):
        rest = np.eye(size) - np.linalg.matrix_power(turn, length)
        truncated = (np.ones(size) @ rest @ vectors)[size // 2 :]
        with jax.enable_x64(True):
            given = (np.asarray(p)[None] for p in (rate, low_rank, to_modes, truncated))
            kernel = compiled(low_rank_kernel, length=length)(*given, np.full((1,), step))
            kernel = np.asarray(kernel)
        state, expected = written, []
        for _ in range(length):
            expected.append(state.sum())
            state = turn @ state
        np.testing.assert_allclose(kernel[:, 0], expected, rtol=1e-9, atol=1e-9)


COMPLEX = np.zeros((D, 2), np.complex64)
STATE_SPACE = {"rate": COMPLEX - 1, "output": COMPLEX, "step_size": np.ones(D)}
IDS = np.ones((2, 9), int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, method="fft"),
            'method must be "convolution", "recurrence" or None, got \'fft\'',
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, method="convolution", segment_ids=IDS),
            "segment_ids needs method='recurrence' or None",
        ),
        (
            lambda: effattn.s4_convolution(X, **{**STATE_SPACE, "rate": np.ones((D, 2))}),
            r"rate must be complex of shape \(6, M\)",
        ),
        (
            lambda: effattn.s4_convolution(X, **{**STATE_SPACE, "rate": COMPLEX + 0.5}),
            "rate must have real parts of 0 or less, got up to 0.5",
        ),
        (
            lambda: effattn.s4_convolution(X, **{**STATE_SPACE, "rate": COMPLEX}),
            "rate must be nonzero, because inputs are divided by it, got 0",
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, segment_ids=(IDS, IDS)),
            "segment_ids must be one array .*, because the mechanism has no keys, got a pair",
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, initial_state="x"),
            "initial_state must be an array of numbers, got 'x'",
        ),
        (
            lambda: effattn.s4_convolution(X, **{**STATE_SPACE, "output": COMPLEX[:, :1]}),
            r"output must be complex of shape \(6, 2\), got complex64 of shape \(6, 1\)",
        ),
        (
            lambda: effattn.s4_convolution(X, **{**STATE_SPACE, "step_size": -np.ones(D)}),
            "step_size must be 0 or more, got -1",
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, initial_state=COMPLEX),
            r"initial_state must be complex of shape \(2, 6, 2\), got complex64 of shape \(6, 2\)",
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, initial_state=np.ones((2, D, 2))),
            r"initial_state must be complex of shape \(2, 6, 2\), got float",
        ),
        (lambda: S4D(D, state_size=3, rngs=nnx.Rngs(0)), "state_size must be even"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("method", ["convolution", "recurrence"])
def test_lengths_of_any_dtype_give_the_same_state(method):
    x = np.concatenate([X] * 30, 1)
    lengths = np.array([200, 7])

    def run(dtype):
        given = {"method": method, "lengths": lengths.astype(dtype), "return_state": True}
        return effattn.s4_convolution(x, **{**STATE_SPACE, "output": COMPLEX + 1}, **given)

    jax.tree.map(np.testing.assert_array_equal, run(np.uint8), run(np.int32))
