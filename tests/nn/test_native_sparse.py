"""NativeSparseSelfAttention: its compression and gates, and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import NativeSparseSelfAttention, TransformerConfig, TransformerLM
from effattn.testing.functions import assert_close
from effattn.testing.subjects import filled_at_random

SIZES = {
    "compression_size": 4,
    "compression_stride": 2,
    "block_size": 4,
    "num_selected": 3,
    "window_size": 3,
}


def made(**options):
    options = {"num_kv_heads": 2, **SIZES, **options}
    return filled_at_random(lambda: NativeSparseSelfAttention(16, 4, rngs=nnx.Rngs(0), **options))


def tokens(time=13):
    return np.random.default_rng(0).normal(size=(2, time, 16)).astype(np.float32)


def network(parameters, blocks):
    flat = blocks + parameters["places"][...]
    flat = flat.reshape(*flat.shape[:-2], -1)
    hidden = jax.nn.gelu(flat @ parameters["up"].kernel[...] + parameters["up"].bias[...])
    return hidden @ parameters["down"].kernel[...] + parameters["down"].bias[...]


def test_it_is_native_sparse_attention_of_gates_and_a_compression():
    mixer, x = made(), tokens()
    gates = jnp.einsum("btd,dng->btng", x, mixer.gates.kernel[...]) + mixer.gates.bias[...]

    def compress(keys, values):
        return network(mixer.key_compression, keys), network(mixer.value_compression, values)

    function = functools.partial(effattn.native_sparse_attention, compress=compress, **SIZES)
    heads = mixer.query(x), mixer.key(x), mixer.value(x)
    expected = mixer.out(jax.jit(function)(*heads, gates=jax.nn.sigmoid(gates)))
    assert_close(jax.jit(lambda mixer, x: mixer(x))(mixer, x), expected, 1e-5)


def test_all_parameters_of_the_compression_learn():
    def loss(mixer, x):
        return (mixer(x) ** 2).sum()

    gradients = jax.jit(nnx.grad(loss))(made(), tokens())
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.any(gradient), path


def test_a_language_model_of_it_runs():
    mixer = {"name": "native_sparse", **SIZES}
    config = TransformerConfig(vocab_size=11, num_layers=1, features=16, num_heads=4, mixer=mixer)
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    assert model(np.zeros((1, 9), np.int32)).shape == (1, 9, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_size": 0}, "compression_size must be an int of tokens, 1 or more"),
        ({"window_size": 0}, "window_size must be an int, 1 or more tokens, got 0"),
        ({"compression_features": 0}, "compression_features must be an int, 1 or more features"),
        ({"gates": np.ones(3)}, "NativeSparseSelfAttention has no option gates; it learns"),
        ({"compress": len}, "NativeSparseSelfAttention has no option compress; it learns"),
        ({"is_causal": False}, "'native_sparse' lacks 'bidirectional'"),
        ({"top_k": 3}, "'native_sparse' has no option top_k"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        registry.get("native_sparse").build(16, 4, rngs=nnx.Rngs(0), **{**SIZES, **options})
