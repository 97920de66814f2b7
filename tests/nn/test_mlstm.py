"""MLSTM is the layer of its paper, and its gates start as in the authors' code."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import MLSTM
from tests.nn.build import filled
from tests.nn.calls import sigmoid

FEATURES, HEADS, SIZE, VALUE_SIZE, LENGTH = 12, 3, 5, 4, 7
X = np.random.default_rng(0).normal(size=(LENGTH, FEATURES)).astype(np.float32)


def of(variable):
    return np.asarray(variable[...], np.float64)


def by_hand(mixer, x, gate):
    """The layer without a stabiliser, with the gates themselves."""
    query, key, value = (
        np.einsum("td,dnh->tnh", x, of(layer.kernel))
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    write = np.exp(x @ of(mixer.input.kernel) + of(mixer.input.bias))
    forget = gate(x @ of(mixer.forget.kernel) + of(mixer.forget.bias))
    out = np.zeros((LENGTH, HEADS, VALUE_SIZE))
    for n in range(HEADS):
        C, norm = np.zeros((VALUE_SIZE, SIZE)), np.zeros(SIZE)
        for t in range(LENGTH):
            k = write[t, n] * key[t, n] / SIZE**0.5
            C = forget[t, n] * C + np.outer(value[t, n], k)
            norm = forget[t, n] * norm + k
            out[t, n] = C @ query[t, n] / max(abs(norm @ query[t, n]), 1)
    centred = out - out.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * of(mixer.norm.scale)
    opened = sigmoid(np.einsum("td,dnh->tnh", x, of(mixer.gate.kernel)) + of(mixer.gate.bias))
    return np.einsum("tnh,nhd->td", opened * out, of(mixer.out.kernel))


@pytest.mark.parametrize(("forget_gate", "gate"), [("sigmoid", sigmoid), ("exp", np.exp)])
def test_it_is_the_layer_of_its_paper(forget_gate, gate):
    sizes = {"head_dim": SIZE, "value_dim": VALUE_SIZE, "forget_gate": forget_gate}
    mixer = filled(lambda: MLSTM(FEATURES, HEADS, **sizes, rngs=nnx.Rngs(0)), seed=1, spread=1 / 2)
    y = jax.jit(lambda mixer, x: mixer(x))(mixer, X[None])[0]
    expected = by_hand(mixer, X.astype(np.float64), gate)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_heads_start_with_longer_and_shorter_memories():
    mixer = jax.jit(lambda: MLSTM(FEATURES, HEADS, rngs=nnx.Rngs(0)))()
    np.testing.assert_allclose(mixer.forget.bias[...], [3, 4.5, 6])
    assert np.abs(mixer.input.bias[...]).max() < 0.5
    np.testing.assert_array_equal(mixer.forget.kernel[...], 0)
    np.testing.assert_array_equal(mixer.input.kernel[...], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forget_gate": "tanh"}, "forget_gate must be one of sigmoid, exp, got 'tanh'"),
        ({"log_input_gate": X}, "MLSTM has no option log_input_gate; it computes the gates"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MLSTM(FEATURES, HEADS, **options, rngs=nnx.Rngs(0))
