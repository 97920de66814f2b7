"""BasedSelfAttention: small queries and keys, and layers that alternate with windows."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import BasedSelfAttention, RotaryEmbedding, TransformerConfig, TransformerLM
from tests.nn.build import filled, floats

X = floats(2, 11, 16)


def test_it_is_based_attention_between_projections():
    mixer = filled(
        lambda: BasedSelfAttention(16, 4, feature_dim=3, num_kv_heads=2, rngs=nnx.Rngs(0))
    )
    query, key, value = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    assert (query.shape[2:], key.shape[2:], value.shape[2:]) == ((4, 3), (2, 3), (2, 4))
    attention = jax.jit(functools.partial(effattn.based_attention, is_causal=True))
    y = np.einsum("btnh,nhd->btd", attention(query, key, value), mixer.out.kernel[...])
    np.testing.assert_allclose(jax.jit(lambda mixer: mixer(X))(mixer), y, rtol=1e-5, atol=2e-6)


def test_a_based_model_alternates_with_windows_and_decodes():
    window = {"name": "sliding_window", "local_window_size": (2, 0)}
    based = {"name": "based", "feature_dim": 4}
    config = TransformerConfig(
        vocab_size=7, num_layers=2, features=16, num_heads=2, qk_norm=True, mixer=[based, window]
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(1).integers(0, 7, (2, 8))
    extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))
    first, state = extend(model, tokens[:, :4], model.init_state(2, 8))
    rest, _ = extend(model, tokens[:, 4:], state)
    whole = jax.jit(lambda model: model(tokens))(model)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-4, atol=1e-5)


def test_values_may_have_a_size_of_their_own():
    def run():
        mixer = BasedSelfAttention(16, 4, feature_dim=3, value_dim=6, rngs=nnx.Rngs(0))
        return mixer(X), mixer.extend(X, mixer.init_state(2, 11))[0]

    whole, extended = jax.eval_shape(run)
    assert whole.shape == extended.shape == X.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_dim": 0}, "feature_dim must be an int, 1 or more"),
        ({"feature_dim": 3, "rotary": RotaryEmbedding()}, "needs an even feature_dim, got 3"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BasedSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)
