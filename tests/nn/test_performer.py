"""PerformerSelfAttention: vectors that are drawn, not trained, and drawn anew on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import PerformerSelfAttention, TransformerConfig, TransformerLM

X = jax.random.normal(jax.random.key(0), (2, 11, 16))


def make(**options):
    return PerformerSelfAttention(16, 4, num_features=6, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_performer_attention_between_projections(is_causal):
    mixer = make(num_kv_heads=2, is_causal=is_causal)
    query, key, value = (
        jnp.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    w = mixer.projection[...]
    assert w.shape == (2, 6, 4)
    heads = effattn.performer_attention(query, key, value, projection=w, is_causal=is_causal)
    y = jnp.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(mixer(X), y, rtol=1e-5, atol=2e-6)


def test_the_vectors_are_not_trained():
    _, trained, rest = nnx.split(make(), nnx.Param, ...)
    assert [path[0] for path, _ in nnx.to_flat_state(rest)] == ["projection"]
    assert "projection" not in trained


def test_redraw_applies_other_vectors():
    mixer = make()
    before, y = mixer.projection[...], mixer(X)
    mixer.redraw(nnx.Rngs(1))
    assert mixer.projection[...].shape == before.shape
    assert not np.allclose(mixer.projection[...], before)
    assert not np.allclose(mixer(X), y)


def test_decoding_is_what_training_saw():
    mixer = TransformerLM(
        TransformerConfig(
            vocab_size=7,
            num_layers=1,
            features=16,
            num_heads=4,
            mixer={"name": "performer", "num_features": 6, "hyperbolic": True},
        ),
        rngs=nnx.Rngs(0),
    )
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 7)
    parts, state = [], mixer.init_state(2, 9)
    for piece in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        logits, state = mixer.extend(piece, state)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), mixer(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": jnp.ones((1, 6, 4))}, "has no option projection; it draws num_features"),
        ({"num_features": 0}, "num_features must be an int, 1 or more"),
        ({"num_features": 5, "hyperbolic": True}, "needs an even num_features"),
        ({"window": 3}, "'performer' has no option window"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)
