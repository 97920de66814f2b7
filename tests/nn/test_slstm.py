"""SLSTM is the recurrence of its paper, with gates of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import SLSTM
from tests.nn.build import filled

D, HEADS, LENGTH = 6, 2, 9
X = np.random.default_rng(0).normal(size=(2, LENGTH, D)).astype(np.float32)


def made(**options):
    return filled(lambda: SLSTM(D, HEADS, **options, rngs=nnx.Rngs(0)), seed=1, spread=1 / 2)


def by_paper(mixer, x, gate):
    """Equations 8 to 17 of the paper, with its stabiliser, for tokens `(T, D)`."""

    def of(variable):
        return np.asarray(variable[...], np.float64)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    W, R, b = of(mixer.cell.input.kernel), of(mixer.cell.recurrent), of(mixer.cell.bias)
    c, n, h, m, size = *np.zeros((3, D)), -np.inf, D // HEADS
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        blocks = [np.concatenate([h[k * size :][:size] @ r[k] for k in range(HEADS)]) for r in R]
        z, write, forget, o = (token @ W).reshape(4, D) + np.stack(blocks) + b
        forget = np.log(sigmoid(forget)) if gate == "sigmoid" else forget
        before, m = m, np.maximum(forget + m, write)
        c = np.exp(forget + before - m) * c + np.exp(write - m) * np.tanh(z)
        n = np.exp(forget + before - m) * n + np.exp(write - m)
        h = sigmoid(o) * c / n
        heads = h.reshape(HEADS, size) - h.reshape(HEADS, size).mean(-1, keepdims=True)
        heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6)
        out[t] = (heads * of(mixer.norm.scale)).ravel()
    return out


@pytest.mark.parametrize("gate", ["sigmoid", "exp"])
def test_it_is_the_recurrence_of_the_paper(gate):
    mixer = made(forget_gate=gate)
    y = jax.jit(lambda mixer, x: mixer(x))(mixer, X)
    for found, x in zip(y, X, strict=True):
        expected = by_paper(mixer, x.astype(np.float64), gate)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [-1e4, 1e4])
@pytest.mark.parametrize("gate", [1, 2])
def test_gates_of_any_size_give_finite_results(gate, bias):
    mixer = made(forget_gate="exp")
    biases = np.array(mixer.cell.bias[...])
    biases[gate] = bias
    mixer.cell.bias[...] = biases

    def loss(mixer, x):
        y, state = mixer.extend(x, mixer.init_state(2, LENGTH))
        return jnp.sum(y**2), (y, state)

    results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(mixer, X)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))
    _, (y, _) = results
    assert np.abs(y[:, 0]).max() > 0.1  # the first token is written, whatever its gates


def test_its_state_has_four_numbers_for_each_feature():
    state = jax.eval_shape(lambda: made().init_state(2, 0))
    assert [x.shape for x in jax.tree.leaves(state.state)] == [(2, D)] * 4


def test_forget_gates_start_open_and_outputs_are_not_read():
    mixer = jax.jit(lambda: SLSTM(D, HEADS, rngs=nnx.Rngs(0)))()
    np.testing.assert_allclose(mixer.cell.bias[...][2], [3, 4.5, 6] * HEADS)
    np.testing.assert_array_equal(mixer.cell.recurrent[...], 0)


def test_an_unknown_option_is_refused_with_the_name_of_the_class():
    with pytest.raises(TypeError, match=r"^SLSTM\(\) got an unexpected keyword argument 'width'"):
        SLSTM(D, HEADS, width=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forget_gate": "tanh"}, "forget_gate must be one of sigmoid, exp, got 'tanh'"),
        ({"num_heads": 4}, r"in_features \(6\) must be a multiple of num_heads \(4\)$"),
        ({"num_heads": 0}, "num_heads must be an int, 1 or more heads, got 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SLSTM(D, **{"num_heads": HEADS, **options}, rngs=nnx.Rngs(0))
