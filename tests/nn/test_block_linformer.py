"""BlockLinformerSelfAttention: the sources of its projections, and models that use it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import BlockLinformerSelfAttention, TransformerConfig, TransformerLM, generate
from tests.marks import slow
from tests.nn.build import filled, floats

LENGTH = 13
X = floats(2, LENGTH, 16)


def make(**options):
    options = {"block_size": 4, "num_projected": 2, "num_kv_heads": 2, **options}
    return BlockLinformerSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(**options))


call = jax.jit(lambda mixer, x: mixer(x))


@pytest.mark.parametrize(
    ("sharing", "of_keys", "of_values"),
    [
        slow("none", (2, 2, 4), (2, 2, 4)),
        ("heads", (2, 4), (2, 4)),
        ("key_value", (2, 4), None),
    ],
)
def test_it_is_block_linformer_attention_between_projections(sharing, of_keys, of_values):
    mixer = made(sharing=sharing)
    assert mixer.key_projection.shape == of_keys
    assert getattr(mixer.value_projection, "shape", None) == of_values
    keys = mixer.key_projection[...]
    query, key, value = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    heads = jax.jit(effattn.block_linformer_attention)(
        query,
        key,
        value,
        key_projection=keys,
        value_projection=keys if of_values is None else mixer.value_projection[...],
    )
    y = np.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(call(mixer, X), y, rtol=1e-5, atol=2e-6)


def test_all_its_parameters_learn():
    gradients = nnx.jit(nnx.grad(lambda mixer: jnp.sum(mixer(X) ** 2)))(made())
    assert all((g != 0).any() for g in jax.tree.leaves(gradients))


def test_the_registry_builds_it_and_bfloat16_computes_with_float32_parameters():
    build = registry.get("block_linformer").build
    mixer = filled(lambda: build(16, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert isinstance(mixer, BlockLinformerSelfAttention)
    assert jax.eval_shape(call, mixer, X).dtype == jnp.bfloat16
    assert mixer.key_projection.shape == (8, 64)
    assert mixer.key_projection[...].dtype == jnp.float32


@pytest.mark.slow
def test_a_model_generates_past_a_block():
    mixer = {"name": "block_linformer", "block_size": 4, "num_projected": 2}
    config = TransformerConfig(vocab_size=7, num_layers=1, features=16, num_heads=4, mixer=mixer)
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    prompt = np.array([[1, 2, 3, 4, 5, 6]])
    new = generate(model, prompt, max_new_tokens=7, temperature=0.0)
    tokens = np.concatenate([prompt, new[:, -7:]], 1)
    greedy = np.argmax(call(model, tokens), -1)
    np.testing.assert_array_equal(tokens[:, 6:], greedy[:, 5:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": False}, "'block_linformer' lacks 'bidirectional'"),
        ({"block_size": 0}, "block_size must be an int, 1 or more tokens, got 0"),
        ({"num_projected": 5}, "num_projected must be at most block_size 4, got 5"),
        ({"sharing": "layers"}, "sharing must be one of none, heads, key_value, got 'layers'"),
        ({"key_projection": np.ones((2, 4))}, "no option key_projection; it makes the projections"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
