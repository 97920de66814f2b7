"""RWKV6 and RWKV7 are the layers of their papers, with the initial parameters of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import RWKV6, RWKV7, PipelinedLM, TransformerConfig, TransformerLM
from effattn.nn.token_shift import token_shift
from tests.nn.build import filled
from tests.nn.calls import sigmoid

FEATURES, HEADS, SIZE, LENGTH = 12, 3, 4, 7
X = np.random.default_rng(0).normal(size=(LENGTH, FEATURES)).astype(np.float32)


def randomised(layer, **options):
    """A module with random parameters, because many initial parameters are zero."""
    return filled(lambda: layer(FEATURES, HEADS, rngs=nnx.Rngs(0), **options), seed=1, spread=1 / 2)


def of(variable):
    return np.asarray(variable[...], np.float64)


def heads(x):
    return x.reshape(LENGTH, HEADS, SIZE)


def normalised(mixer, out):
    centred = out - out.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 64e-5)
    return out.reshape(LENGTH, -1) * of(mixer.norm_scale) + of(mixer.norm_bias)


def rwkv6(mixer, x):
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    low = np.tanh((x + (before - x) * of(mixer.shift)) @ of(mixer.mixing_in.kernel))
    mixed = []
    for c, part in enumerate(np.split(low, 5, -1)):
        amount = of(mixer.shifts)[c] + part @ of(mixer.mixing_out)[c]
        mixed.append(x + (before - x) * amount)
    decay = np.tanh(mixed[0] @ of(mixer.decay_in.kernel)) @ of(mixer.decay_out.kernel)
    decay = heads(np.exp(-np.exp(of(mixer.decay) + decay)))
    key, value = heads(mixed[1] @ of(mixer.key.kernel)), heads(mixed[2] @ of(mixer.value.kernel))
    receptance = heads(mixed[3] @ of(mixer.receptance.kernel))
    gate = mixed[4] @ of(mixer.gate.kernel)
    out = np.zeros((LENGTH, HEADS, SIZE))
    for n in range(HEADS):
        state = np.zeros((SIZE, SIZE))
        for t in range(LENGTH):
            written = np.outer(key[t, n], value[t, n])
            out[t, n] = receptance[t, n] @ (state + of(mixer.bonus)[n][:, None] * written)
            state = decay[t, n][:, None] * state + written
    return (normalised(mixer, out) * gate * sigmoid(gate)) @ of(mixer.out.kernel)


def rwkv7(mixer, x, first=None):
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    r, w, k, v, a, g = (x + (before - x) * shift for shift in of(mixer.shifts))
    receptance, key, value = (
        each @ of(layer.kernel)
        for each, layer in ((r, mixer.receptance), (k, mixer.key), (v, mixer.value))
    )
    if first is not None:
        low = v @ of(mixer.value_in.kernel) @ of(mixer.value_out.kernel)
        value = value + (first - value) * sigmoid(of(mixer.value_share) + low)
    decay = np.tanh(w @ of(mixer.decay_in.kernel)) @ of(mixer.decay_out.kernel)
    decay = np.exp(-np.exp(-0.5) * sigmoid(of(mixer.decay) + decay))
    rate = sigmoid(of(mixer.rate) + a @ of(mixer.rate_in.kernel) @ of(mixer.rate_out.kernel))
    gate = sigmoid(g @ of(mixer.gate_in.kernel)) @ of(mixer.gate_out.kernel)
    removal = heads(key * of(mixer.removal_scale))
    removal = removal / np.linalg.norm(removal, axis=-1, keepdims=True)
    key = heads(key * (1 + (rate - 1) * of(mixer.rate_scale)))
    receptance, value, decay, rate = map(heads, (receptance, value, decay, rate))
    out, itself = np.zeros((2, LENGTH, HEADS, SIZE))
    for n in range(HEADS):
        state = np.zeros((SIZE, SIZE))  # values by keys, as in the paper
        for t in range(LENGTH):
            kappa = removal[t, n]
            change = np.diag(decay[t, n]) - np.outer(kappa, rate[t, n] * kappa)
            state = state @ change + np.outer(value[t, n], key[t, n])
            out[t, n] = state @ receptance[t, n]
            itself[t, n] = (receptance[t, n] * of(mixer.bonus)[n] * key[t, n]).sum() * value[t, n]
    return ((normalised(mixer, out) + itself.reshape(LENGTH, -1)) * gate) @ of(mixer.out.kernel)


@pytest.mark.parametrize(("layer", "by_hand"), [(RWKV6, rwkv6), (RWKV7, rwkv7)])
def test_it_is_the_layer_of_its_paper(layer, by_hand):
    mixer = randomised(layer)
    y = jax.jit(lambda mixer, x: mixer(x))(mixer, X[None])[0]
    np.testing.assert_allclose(y, by_hand(mixer, X.astype(np.float64)), rtol=1e-4, atol=1e-4)


def test_later_layers_mix_in_the_values_of_the_first():
    mixer = randomised(RWKV7, value_residual=True, value_rank=2)
    values = np.random.default_rng(1).normal(size=(1, LENGTH, HEADS, SIZE)).astype(np.float32)
    with_shared = jax.jit(lambda mixer, x, values: mixer.with_shared(x, values))
    y, passed_on = with_shared(mixer, X[None], values)
    expected = rwkv7(mixer, X.astype(np.float64), values.reshape(LENGTH, -1))
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(passed_on, values)
    with pytest.raises(
        ValueError, match="shared must be None in a layer with value_residual=False"
    ):
        randomised(RWKV7).with_shared(X[None], values)


def test_outputs_with_shared_values_are_zero_in_the_padding():
    mixer, lengths = randomised(RWKV7), np.array([LENGTH - 3])
    run = jax.jit(lambda m, x, n: (m(x, lengths=n), m.with_shared(x, lengths=n)[0]))
    plain, shared = run(mixer, X[None], lengths)
    np.testing.assert_array_equal(shared, plain)
    assert not np.any(shared[:, LENGTH - 3 :])


SIZES = {"vocab_size": 11, "num_layers": 2, "features": 8, "num_heads": 2}


def test_models_pass_the_values_of_the_first_layer_to_all():
    """Decoding equals training."""
    config = TransformerConfig(**SIZES, mixer="rwkv7", feed_forward="rwkv7", value_residual=True)
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)), spread=1 / 2)
    first, second = (block.mixer for block in model.blocks)
    assert not first.value_residual and second.value_residual
    tokens = np.random.default_rng(0).integers(0, 11, size=(2, 8))
    lengths = np.array([4, 3])

    @jax.jit
    def run(model):
        begun, state = model.extend(tokens[:, :4], model.init_state(2, 8), lengths=lengths)
        rest = np.stack([tokens[row, length : length + 4] for row, length in enumerate(lengths)])
        rest, _ = model.extend(rest, state)
        return model(tokens), begun, rest

    whole, begun, rest = run(model)
    for row, length in enumerate(lengths):
        found = np.concatenate([begun[row, :length], rest[row]])
        np.testing.assert_allclose(found, whole[row, : length + 4], rtol=1e-4, atol=1e-4)


def test_value_residuals_need_mixers_that_pass_values_on():
    for mixer in (
        "rwkv6",
        ["rwkv7", "softmax"],
        {"heads": [{"name": "rwkv7", "num_heads": 2}] * 2},
    ):
        config = TransformerConfig(**SIZES, mixer=mixer, value_residual=True)
        with pytest.raises(ValueError, match="value_residual=True needs the mixer rwkv7 in each"):
            TransformerLM(config, rngs=nnx.Rngs(0))
    config = TransformerConfig(**SIZES, mixer=RWKV7, positions="none", value_residual=True)
    with pytest.raises(ValueError, match="value_residual=True cannot be divided in stages"):
        jax.eval_shape(lambda: PipelinedLM(TransformerLM(config, rngs=nnx.Rngs(0)), 2))


def test_the_token_before():
    x = np.arange(1, 13, dtype=np.float32).reshape(2, 6, 1)
    ids = np.array([[1, 1, 0, 2, 2, 2], [3, 3, 3, 3, 4, 0]])
    shifted, last = token_shift(x, segment_ids=ids)
    np.testing.assert_array_equal(shifted[..., 0], [[0, 1, 0, 0, 4, 5], [0, 7, 8, 9, 0, 0]])
    shifted, last = token_shift(x, np.full((2, 1), 0.5, np.float32), lengths=np.array([0, 2]))
    np.testing.assert_array_equal(shifted[:, :2, 0], [[0.5, 1], [0.5, 7]])
    np.testing.assert_array_equal(last[:, 0], [0.5, 8])


@pytest.mark.parametrize("layer", [RWKV6, RWKV7])
def test_features_start_with_longer_and_shorter_memories(layer):
    """At the start, later layers remember for longer."""

    @jax.jit
    def starts():
        mixers = (layer(16, 2, depth=depth, rngs=nnx.Rngs(0)) for depth in (0.0, 1.0))
        return [(mixer.decay[...], mixer.shifts[...]) for mixer in mixers]

    (first, _), (last, _) = found = starts()
    for decay, shifts in found:
        assert np.all(np.diff(decay) > 0)
        assert np.all((shifts <= 1) & (shifts >= -0.31))
    assert np.all(last[1:-1] < first[1:-1])


@pytest.mark.parametrize("layer", [RWKV6, RWKV7])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": None}, r"depth must be a number in \[0, 1\], .* got None"),
        ({"depth": 1.5}, r"depth must be a number in \[0, 1\], .* got 1.5"),
        ({"num_kv_heads": 2}, r"num_heads \(3\) must be a positive multiple of num_kv_heads"),
        ({"decay_rank": 0}, "decay_rank must be an int, 1 or more features, got 0"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1 was given, but .* lacks 'dropout'"),
    ],
)
def test_wrong_options_are_named(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(FEATURES, HEADS, **options, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_keys_of_zero_have_finite_gradients():
    mixer = randomised(RWKV7)
    mixer.key.kernel[...] = jnp.zeros_like(mixer.key.kernel[...])
    gradient = jax.jit(jax.grad(lambda mixer: jnp.sum(mixer(X[None]) ** 2)))(mixer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
