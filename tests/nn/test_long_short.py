"""LongShortSelfAttention: its scores and norms, decoding, and models that use it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.analysis import attention_weights
from effattn.nn import LongShortSelfAttention, RotaryEmbedding
from tests.marks import slow
from tests.nn.build import filled, floats

LENGTH = 13
X = floats(2, LENGTH, 16)


def make(**options):
    options = {"window_size": 4, "num_projected": 2, "num_kv_heads": 2, **options}
    return LongShortSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters; the initial norms are identities, and equal."""
    return filled(lambda: make(**options))


@jax.jit
def run(mixer, x, lengths=None):
    return mixer(x, lengths=lengths)


@pytest.mark.parametrize("is_causal", [True, slow(False)], ids=["causal", "bidirectional"])
def test_it_is_long_short_attention_of_scores_of_the_tokens(is_causal):
    mixer = made(is_causal=is_causal)
    query, key, value, scores = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value, mixer.projection)
    )
    assert scores.shape == (2, LENGTH, 2, 2)
    norms = {
        f"{name}_norm": (norm["scale"][...], norm["bias"][...])
        for name, norm in (("window", mixer.window_norm), ("slot", mixer.slot_norm))
    }
    attention = functools.partial(effattn.long_short_attention, window_size=4, is_causal=is_causal)
    heads = jax.jit(attention)(query, key, value, slot_scores=scores, **norms)
    y = np.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(run(mixer, X), y, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_it_decodes_with_norms_scores_and_rotary_positions():
    mixer = made(segment_size=3, rotary=RotaryEmbedding())
    whole = run(mixer, X)
    extend = jax.jit(lambda mixer, x, state: mixer.extend(x, state))
    state, outs = mixer.init_state(2, LENGTH), []
    for piece in np.split(X, [5, 6, 7, 8], axis=1):
        y, state = extend(mixer, piece, state)
        outs.append(y)
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, rtol=2e-5, atol=2e-6)


def test_all_its_parameters_learn():
    gradients = nnx.jit(nnx.grad(lambda mixer: jnp.sum(mixer(X) ** 2)))(made())
    assert len(jax.tree.leaves(gradients)) == 9
    assert all((g != 0).any() for g in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_padding_reaches_nothing():
    mixer, padded = made(is_causal=False), X.copy()
    padded[0, 7:] = np.nan
    y = run(mixer, padded, np.array([7, LENGTH]))
    np.testing.assert_allclose(y[0, :7], run(mixer, X[:1, :7])[0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(y[1], run(mixer, X, np.array([LENGTH] * 2))[1], rtol=1e-5, atol=2e-6)


def test_the_registry_builds_it_and_bfloat16_computes_with_float32_parameters():
    build = registry.get("long_short").build
    mixer = filled(lambda: build(16, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert isinstance(mixer, LongShortSelfAttention)
    assert jax.eval_shape(run, mixer, X).dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(nnx.state(mixer, nnx.Param))} == {jnp.dtype("float32")}


def test_its_weights_are_read_without_norms_of_values():
    """With norms the output is not linear in the values, so such weights do not exist."""
    weights = np.asarray(attention_weights(made(dual_norm=False), X))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="window_norm and slot_norm must be None"):
        attention_weights(made(), X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_projected": 0}, "num_projected must be an int, 1 or more slots, got 0"),
        ({"slot_norm": None}, "no option slot_norm; it makes the scores and the norms"),
        ({"window": 3}, "'long_short' has no option window;"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
