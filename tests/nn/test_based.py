"""BasedSelfAttention: small queries and keys, and layers that alternate with windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import BasedSelfAttention, RotaryEmbedding, TransformerConfig, TransformerLM

X = jax.random.normal(jax.random.key(0), (2, 11, 16))


def test_it_is_based_attention_between_projections():
    mixer = BasedSelfAttention(16, 4, feature_dim=3, num_kv_heads=2, rngs=nnx.Rngs(0))
    query, key, value = (
        jnp.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    assert (query.shape[2:], key.shape[2:], value.shape[2:]) == ((4, 3), (2, 3), (2, 4))
    heads = effattn.based_attention(query, key, value, is_causal=True)
    y = jnp.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(mixer(X), y, rtol=1e-5, atol=2e-6)


def test_a_based_model_alternates_with_windows_and_decodes():
    window = {"name": "sliding_window", "local_window_size": (2, 0)}
    based = {"name": "based", "feature_dim": 4}
    config = TransformerConfig(
        vocab_size=7, num_layers=2, features=16, num_heads=2, qk_norm=True, mixer=[based, window]
    )
    model = jax.jit(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))()
    tokens = np.random.default_rng(1).integers(0, 7, (2, 9))

    @jax.jit
    def pieces_and_whole(model):
        first, state = model.extend(tokens[:, :4], model.init_state(2, 9))
        rest, _ = model.extend(tokens[:, 4:], state)
        return jnp.concatenate([first, rest], 1), model(tokens)

    np.testing.assert_allclose(*pieces_and_whole(model), rtol=1e-4, atol=1e-5)


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
