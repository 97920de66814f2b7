"""PerformerSelfAttention: vectors that are drawn, not trained, and drawn anew on request."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import PerformerSelfAttention, TransformerConfig, TransformerLM
from tests.marks import slow
from tests.nn.build import filled, floats

X = floats(2, 11, 16)


def make(**options):
    """A module with random parameters and vectors in place of its initial values."""
    return filled(
        lambda: PerformerSelfAttention(16, 4, num_features=6, rngs=nnx.Rngs(0), **options)
    )


call = jax.jit(lambda mixer, x: mixer(x))


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_it_is_performer_attention_between_projections(is_causal):
    mixer = make(num_kv_heads=2, is_causal=is_causal)
    query, key, value = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    w = mixer.projection[...]
    assert w.shape == (2, 6, 4)
    attention = jax.jit(functools.partial(effattn.performer_attention, is_causal=is_causal))
    heads = attention(query, key, value, projection=w)
    y = np.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(call(mixer, X), y, rtol=1e-5, atol=2e-6)


def test_the_vectors_are_not_trained():
    _, trained, rest = nnx.split(make(), nnx.Param, ...)
    assert [path[0] for path, _ in nnx.to_flat_state(rest)] == ["projection"]
    assert "projection" not in trained


def test_redraw_applies_other_vectors():
    mixer = make()
    before, y = mixer.projection[...].copy(), call(mixer, X)
    mixer.redraw(nnx.Rngs(1))
    assert mixer.projection[...].shape == before.shape
    assert not np.allclose(mixer.projection[...], before)
    assert not np.allclose(call(mixer, X), y)


@pytest.mark.slow
def test_decoding_is_what_training_saw():
    config = TransformerConfig(
        vocab_size=7,
        num_layers=1,
        features=16,
        num_heads=4,
        mixer={"name": "performer", "num_features": 6, "hyperbolic": True},
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(1).integers(0, 7, (2, 9))
    extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))
    parts, state = [], model.init_state(2, 9)
    for piece in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        logits, state = extend(model, piece, state)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), call(model, tokens), rtol=1e-4, atol=1e-5)


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
