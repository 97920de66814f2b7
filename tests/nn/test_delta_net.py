"""Mixers with a delta rule: the papers' layers, their states, decays and options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    RotaryEmbedding,
    TransformerConfig,
    TransformerLM,
    initializers,
)
from tests.marks import slow
from tests.nn.build import filled
from tests.nn.calls import call, extend, sigmoid, silu

FEATURES, HEADS, LENGTH = 16, 4, 12
LAYERS = [DeltaNet, GatedDeltaNet]

X = np.random.default_rng(0).normal(size=(2, LENGTH, FEATURES)).astype(np.float32)
ONE_DOCUMENT = np.ones((2, LENGTH), int)


def make(layer, **options):
    return layer(FEATURES, HEADS, rngs=nnx.Rngs(0), **{"num_kv_heads": 2, **options})


def made(layer, **options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(layer, **options))


@pytest.fixture(params=LAYERS, ids=lambda layer: layer.__name__)
def layer(request):
    return request.param


@pytest.fixture
def mixer(layer):
    return made(layer)


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def by_hand(mixer, x):
    """The formulas of the docstrings in float64, token by token, for one row `(T, D)`.

    A write is `(key, erased, strength of each value feature, value)`: it removes what is stored
    under the key, read by `erased`, and adds the value times its strength.
    """

    def of(variable):
        return np.asarray(variable[...], np.float64)

    def projected(layer, x=x):
        if isinstance(layer, nnx.Sequential):
            return projected(layer.layers[1], projected(layer.layers[0]))
        kernel = of(layer.kernel)
        y = np.tensordot(x, kernel, 1)
        return y if layer.bias is None else y + of(layer.bias)

    def convolved(projection, convolution):
        inputs = projected(projection)
        taps = of(convolution.taps).reshape(-1, *inputs.shape[1:])
        padded = np.concatenate([np.zeros_like(inputs[: len(taps) - 1]), inputs])
        windows = [padded[t : t + len(taps)] for t in range(len(x))]
        return silu(np.stack([(taps * window).sum(0) for window in windows]))

    q = convolved(mixer.query, mixer.query_convolution)
    k = convolved(mixer.key, mixer.key_convolution)
    v = convolved(mixer.value, mixer.value_convolution)

    def unit(a):
        return a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)

    q, k, writes = unit(q), unit(k), []
    if isinstance(mixer, GatedDeltaNet2):
        erase = mixer.max_erase * sigmoid(projected(mixer.erase))
        writes.append((k, erase * k, sigmoid(projected(mixer.write)), v))
    else:
        beta = mixer.max_strength * sigmoid(projected(mixer.strength)).reshape(*k.shape[:2], -1)
        writes.append((k, beta[..., :1] * k, beta[..., :1], v))
    if isinstance(mixer, GatedDeltaProduct):
        later = unit(convolved(mixer.later_key, mixer.later_key_convolution))
        values = convolved(mixer.later_value, mixer.later_value_convolution)
        writes.append((later, beta[..., 1:] * later, beta[..., 1:], values))
    gate, alpha = 1, np.ones_like(k[..., :1])
    if hasattr(mixer, "log_rate"):
        act = silu if isinstance(mixer, GatedDeltaNet) else sigmoid
        gate, step = act(projected(mixer.gate)), getattr(mixer, "step_size", None)
        steps = np.log1p(np.exp(projected(step or mixer.decay) + of(mixer.step_bias)))
        steps = steps.reshape(*k.shape[:2], -1)  # one a head, or one a feature
        alpha = np.exp(-np.exp(of(mixer.log_rate))[:, None] * steps)
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for head in range(q.shape[1]):
        of_head = head // (q.shape[1] // k.shape[1])
        state = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            state = alpha[t, of_head][:, None] * state
            for key, erased, strength, value in ([a[t, of_head] for a in w] for w in writes):
                state = state + np.outer(key, strength * value - erased @ state)
            out[t, head] = state.T @ q[t, head] / len(key) ** 0.5
    out /= np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5)
    return np.einsum("tnh,nhd->td", gate * out * of(mixer.norm.scale), of(mixer.out.kernel))


@pytest.mark.parametrize(
    "layer", [slow(DeltaNet), GatedDeltaNet, KimiDeltaAttention, GatedDeltaNet2, GatedDeltaProduct]
)
def test_it_is_the_layer_of_its_paper(mixer):
    y = call(mixer, X, np.full(2, LENGTH), ONE_DOCUMENT)
    for row in range(2):
        close(y[row], by_hand(mixer, X[row]))


def test_with_negative_eigenvalues_the_strength_reaches_two(layer):
    mixer = made(layer, allow_negative_eigenvalues=True)
    large = np.full_like(X, 1e3) * np.sign(mixer.strength.kernel[:, 0])
    assert mixer._per_token(large)["beta"][..., 0].min() == 2
    y = call(mixer, X, np.full(2, LENGTH), ONE_DOCUMENT)
    for row in range(2):
        close(y[row], by_hand(mixer, X[row]))


@pytest.mark.slow
def test_unequal_prompts_continue_as_each_would_alone(layer):
    mixer = made(layer, rotary=RotaryEmbedding(), qk_norm=True)
    whole, lengths = np.asarray(call(mixer, X)), np.array([7, 2])
    prompt = np.where(np.arange(7)[:, None] < lengths[:, None, None], X[:, :7], np.nan)
    first, state = extend(mixer, prompt, mixer.init_state(2, 0), lengths)
    rows, after = np.arange(2)[:, None], lengths[:, None] + np.arange(5)
    # The padding makes these tokens as many as the prompts, so the program is the same.
    rest = np.concatenate([X[rows, after], np.full_like(X[:, :2], np.nan)], 1)
    second, state = extend(mixer, rest, state, np.full(2, 5))
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
    close(second[:, :5], whole[rows, after])
    np.testing.assert_array_equal(state.length, lengths + 5)


def test_the_state_has_one_size(mixer):
    state = jax.eval_shape(lambda: mixer.init_state(3, 10**9, jnp.bfloat16))
    hv = mixer.value_dim
    assert [x.shape for x in state.inputs] == [(3, 3, 16), (3, 3, 8), (3, 3, 2 * hv)]
    assert all(x.dtype == jnp.bfloat16 for x in state.inputs)
    assert state.state.shape == (3, 2, 4, hv) and state.state.dtype == jnp.float32
    _, after = jax.eval_shape(mixer.step, np.ones((3, 1, FEATURES), jnp.bfloat16), state)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, after, state)
    assert all(jax.tree.leaves(same))


def test_gates_and_strengths_of_16_bit_tokens_stay_in_float32(layer):
    narrow = make(layer, dtype=jnp.bfloat16)
    tokens = jax.eval_shape(narrow._per_token, X.astype(jnp.bfloat16))
    assert {x.dtype for x in tokens.values()} == {np.dtype("float32")}


def test_decays_start_between_a_thousandth_and_most_of_the_state():
    """Rates are from 1 to 16, and the steps of a token of zeros are from 0.001 to 0.1."""
    rate = np.exp(initializers.log_rate_init(jax.random.key(0), (1000,)))
    step = np.log1p(np.exp(initializers.step_bias_init(jax.random.key(0), (1000,))))
    for drawn, low, high in ((rate, 1, 16), (np.log(step), np.log(0.001), np.log(0.1))):
        assert low - 1e-4 <= drawn.min() and drawn.max() <= high + 1e-4
        np.testing.assert_allclose(drawn.mean(), (low + high) / 2, atol=(high - low) / 20)
        np.testing.assert_allclose(drawn.std(), (high - low) / 12**0.5, rtol=0.05)

    @jax.jit
    def of_a_layer():
        mixer = make(GatedDeltaNet)
        return mixer.log_rate[...], mixer.step_bias[...]

    assert all(np.ptp(drawn) > 0 for drawn in of_a_layer())


def test_as_many_parameters_as_in_the_paper():
    """6 D^2 parameters, and a few for strengths, steps, convolutions and the norm."""
    features, heads, size = 64, 4, 12
    mixer = jax.eval_shape(lambda: GatedDeltaNet(features, heads, head_dim=size, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(mixer, nnx.Param)))
    few = 2 * features * heads + 2 * heads + 4 * heads * (size + size + 2 * size) + 2 * size
    assert count == 6 * features**2 + few


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
def test_a_model_has_it_by_name(name):
    mixer = {"name": name, "convolution_width": 2, "chunk_size": 8, "value_dim": 3}
    config = TransformerConfig(
        vocab_size=7, num_layers=1, features=FEATURES, num_heads=4, mixer=mixer
    )
    found = jax.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0))).blocks[0].mixer
    assert type(found) is registry.load(registry.get(name).builder)
    assert found.query_convolution.width == 2 and dict(found.options)["chunk_size"] == 8
    # The recurrence knows the order of tokens without positions, as in the papers.
    assert found.value_dim == 3 and found.rotary is None


def test_wrong_arguments_of_layers_with_more_gates_are_named():
    with pytest.raises(ValueError, match="GatedDeltaNet2 has no option erase; it computes"):
        make(GatedDeltaNet2, erase=jnp.ones(2))
    with pytest.raises(ValueError, match="gate_rank must be an int, 1 or more features, or None"):
        make(KimiDeltaAttention, gate_rank=0)
    with pytest.raises(ValueError, match="num_steps must be an int, 2 or more steps"):
        make(GatedDeltaProduct, num_steps=1)


def test_wrong_arguments_are_named(layer, mixer):
    for name in ("beta", "log_decay"):
        with pytest.raises(ValueError, match=f"{layer.__name__} has no option {name}; it computes"):
            make(layer, **{name: jnp.ones(2)})
    with pytest.raises(ValueError, match="convolution_width must be an int, 1 or more"):
        make(layer, convolution_width=0)
    with pytest.raises(ValueError, match=r"in_features \(\d+\) must be a multiple of num_heads"):
        layer(FEATURES, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="state must be the DeltaRuleState"):
        mixer.extend(X, X)


def test_several_steps_of_no_tokens():
    mixer = GatedDeltaProduct(FEATURES, HEADS, rngs=nnx.Rngs(0))
    assert mixer(jnp.zeros((2, 0, FEATURES))).shape == (2, 0, FEATURES)
