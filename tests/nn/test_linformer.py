"""LinformerSelfAttention: the sources of its projections, and the layers that share them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import HybridHeads, LinformerSelfAttention, TransformerConfig, TransformerLM
from tests.nn.build import filled, floats
from tests.nn.calls import call

LENGTH, ROWS = 12, 4
X = floats(2, LENGTH, 16)


def make(**options):
    options = {"max_length": LENGTH, "num_projected": ROWS, "num_kv_heads": 2, **options}
    return LinformerSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(**options))


def parameters(mixer):
    """Names and shapes of the parameters that project the sequence."""
    return {
        name: getattr(mixer, name).shape
        for name in ("key_projection", "value_projection")
        if getattr(mixer, name) is not None
    }


@pytest.mark.parametrize(
    ("sharing", "linear", "convolution"),
    [
        ("none", {"key_projection": (2, 4, 12), "value_projection": (2, 4, 12)}, (2, 3)),
        ("heads", {"key_projection": (4, 12), "value_projection": (4, 12)}, (3,)),
        ("key_value", {"key_projection": (4, 12)}, (3,)),
    ],
)
def test_sharing_says_which_parameters_there_are(sharing, linear, convolution):
    assert parameters(made(sharing=sharing)) == linear
    of_windows = parameters(made(sharing=sharing, method="convolution"))
    assert of_windows == dict.fromkeys(linear, convolution)
    assert parameters(made(sharing=sharing, method="mean")) == {}


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_it_is_linformer_attention_between_projections(sharing):
    mixer = made(sharing=sharing)
    of_keys = mixer.key_projection[...]
    of_values = of_keys if sharing == "key_value" else mixer.value_projection[...]
    query, key, value = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    heads = jax.jit(effattn.linformer_attention)(
        query, key, value, key_projection=of_keys, value_projection=of_values
    )
    y = np.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(call(mixer, X), y, rtol=1e-5, atol=2e-6)


def test_a_convolution_of_equal_weights_is_the_mean():
    mean, convolution = (made(method=method) for method in ("mean", "convolution"))
    for name in ("query", "key", "value", "out"):
        getattr(mean, name).kernel[...] = getattr(convolution, name).kernel[...]
    for weights in (convolution.key_projection, convolution.value_projection):
        weights[...] = np.full(3, 1 / 3, np.float32)
    np.testing.assert_allclose(call(mean, X), call(convolution, X), rtol=1e-5, atol=1e-6)


def test_layers_that_share_a_projection_learn_it_together():
    values = floats(ROWS, LENGTH, seed=1) / 4
    shared = nnx.Param(values)

    def layers(*projections):
        return nnx.List([make(sharing="layers", projection=one) for one in projections])

    def gradients(layers):
        of = nnx.jit(nnx.grad(lambda layers: jnp.sum(layers[1](layers[0](X)) ** 2)))(layers)
        return [x for x in jax.tree.leaves(of) if x.shape == values.shape]

    (together,) = gradients(layers(shared, shared))
    apart = gradients(layers(nnx.Param(values), nnx.Param(values)))
    assert len(apart) == 2
    np.testing.assert_allclose(together, sum(apart), rtol=1e-5, atol=1e-5)


def test_padding_reaches_nothing():
    mixer, padded = made(), X.copy()
    padded[0, 7:] = np.nan
    y = call(mixer, padded, np.array([7, LENGTH]))
    np.testing.assert_allclose(y[0, :7], call(mixer, X[:, :7])[0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(y[1], call(mixer, X)[1], rtol=1e-5, atol=2e-6)


def test_the_registry_builds_it_and_bfloat16_computes_with_float32_parameters():
    build = registry.get("linformer").build
    mixer = filled(lambda: build(16, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert isinstance(mixer, LinformerSelfAttention)
    assert jax.eval_shape(call, mixer, X).dtype == jnp.bfloat16
    assert mixer.key_projection.shape == (128, 512)
    assert mixer.key_projection[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "'linformer' lacks 'causal' .* every query sees later tokens"),
        ({"max_length": 0}, "max_length must be an int, 1 or more tokens, got 0"),
        ({"num_projected": 2.0}, "num_projected must be an int, 1 or more rows, got 2.0"),
        ({"sharing": "all"}, "sharing must be one of none, heads, key_value, layers, got 'all'"),
        ({"method": "max"}, "method must be one of linear, convolution, mean, got 'max'"),
        (
            {"method": "mean", "num_projected": 5},
            "a multiple of num_projected 5 for method='mean', got 12",
        ),
        ({"sharing": "layers"}, "given with sharing='layers', and only .* and no projection"),
        ({"projection": nnx.Param(np.ones((4, 12)))}, "got sharing='heads' and a projection"),
        (
            {"projection": nnx.Param(np.ones((4, 11))), "sharing": "layers"},
            r"projection must be an nnx.Param of shape \(4, 12\), got \(4, 11\)",
        ),
        ({"projection": nnx.Param(np.ones(3)), "method": "mean"}, "takes no projection"),
        ({"key_projection": np.ones((4, 12))}, "no option key_projection; it makes the"),
        ({"max_length": 11}, "is for at most 11 tokens, got 12"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)(X)


def test_causal_models_refuse_it():
    config = TransformerConfig(
        vocab_size=7, num_layers=1, features=16, num_heads=4, mixer={"name": "linformer"}
    )
    with pytest.raises(ValueError, match="'linformer' lacks 'causal'"):
        jax.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    groups = [{"name": name, "num_heads": 2} for name in ("softmax", "linformer")]
    with pytest.raises(ValueError, match="all have the same is_causal, got .*linformer False"):
        jax.eval_shape(lambda: HybridHeads(16, 4, groups, rngs=nnx.Rngs(0)))
    y = jax.eval_shape(lambda: HybridHeads(16, 4, groups, is_causal=False, rngs=nnx.Rngs(0))(X))
    assert y.shape == X.shape
