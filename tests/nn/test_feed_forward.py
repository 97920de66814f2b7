"""ChunkedFeedForward: the results of its module, in the memory of a chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import cost
from effattn.nn import ChunkedFeedForward, FeedForward, SwiGLU, activations
from effattn.nn.dropout import dropout
from tests.marks import slow
from tests.nn.build import filled, floats

FEATURES, LENGTH = 8, 11


class Dropped(nnx.Module):
    """A feed-forward layer with dropout."""

    def __init__(self, rate=0.0):
        self.layer = SwiGLU(FEATURES, 3 * FEATURES, rngs=nnx.Rngs(0))
        self.rate = rate

    def __call__(self, x, *, rngs=None):
        return dropout(self.layer(x), self.rate, rngs)


def draw(seed):
    return floats(2, LENGTH, FEATURES, seed=seed)


@pytest.mark.parametrize("chunk_size", [slow(1), 4, 11, slow(50)])
def test_chunks_change_nothing(chunk_size):
    """The gradients do not change either; 11 tokens are no multiple of 4."""
    module = filled(Dropped)
    chunked = ChunkedFeedForward(module, chunk_size=chunk_size)

    @jax.jit
    def run(module, x):
        y, pull_back = jax.vjp(lambda m, x: m(x), module, x)
        return y, pull_back(draw(7))

    for ours, expected in zip(
        jax.tree.leaves(run(chunked, draw(0))), jax.tree.leaves(run(module, draw(0))), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_each_chunk_has_its_own_dropout():
    module = filled(lambda: Dropped(0.5))
    # 14 tokens are three chunks and a rest.
    x = np.ones((1, 14, FEATURES), np.float32)

    @jax.jit
    def run(module, key):
        chunked = ChunkedFeedForward(module, chunk_size=4)
        return module(x), chunked(x), chunked(x, rngs=key)

    whole, chunked, y = map(np.asarray, run(module, jax.random.key(0)))
    assert not np.array_equal(y[:, :4] == 0, y[:, 4:8] == 0)
    assert not np.array_equal(y[:, :2] == 0, y[:, 12:] == 0)
    # Products of other shapes round by the size of their terms, not of the sum, which cancels.
    np.testing.assert_allclose(y[y != 0], 2 * whole[y != 0], rtol=1e-6, atol=1e-6)
    assert not np.any(chunked == 0)


def test_memory_falls_with_the_chunk():
    """Forward and backward hold the hidden features of one chunk only."""

    def bytes_of(chunk_size):
        def make():
            module = SwiGLU(16, 512, rngs=nnx.Rngs(0))
            return ChunkedFeedForward(module, chunk_size=chunk_size)

        def run(module, x):
            y, pull_back = jax.vjp(lambda m, x: m(x), module, x)
            return y, pull_back(y)

        x = jax.ShapeDtypeStruct((2, 2048, 16), jnp.float32)
        return cost.temporary_bytes(jax.jit(run).trace(jax.eval_shape(make), x))

    whole, some, few = map(bytes_of, (2048, 512, 128))
    assert some < 0.45 * whole and few < 0.5 * some, (whole, some, few)


def test_there_are_hidden_features():
    with pytest.raises(ValueError, match="hidden_features must be an int, 1 or more .*, got 0"):
        SwiGLU(8, 0, rngs=nnx.Rngs(0))


def test_chunks_have_a_token():
    with pytest.raises(ValueError, match="chunk_size must be an int, 1 or more tokens, got 0"):
        ChunkedFeedForward(lambda x: x, chunk_size=0)
    with pytest.raises(
        ValueError, match=r"x must have shape \(..., length, features\), got \(3,\)"
    ):
        ChunkedFeedForward(lambda x: x, chunk_size=2)(jnp.ones(3))
    with pytest.raises(ValueError, match="module must be a token-wise module or .*, got 3"):
        ChunkedFeedForward(3, chunk_size=2)


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, lambda up, gate: jax.nn.gelu(up, approximate=False)),
        ({"activation": "relu"}, lambda up, gate: jax.nn.relu(up)),
        ({"activation": "silu", "gated": True}, lambda up, gate: jax.nn.silu(gate) * up),
        (
            {"activation": "gelu", "gated": True},
            lambda up, gate: jax.nn.gelu(gate, approximate=False) * up,
        ),
    ],
)
def test_a_feed_forward_layer_is_its_formula(options, formula):
    module = FeedForward(FEATURES, 12, **options, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (2, 3, FEATURES))
    gate = None if module.gate is None else x @ module.gate.kernel[...]
    expected = formula(x @ module.up.kernel[...], gate) @ module.down.kernel[...]
    np.testing.assert_allclose(module(x), expected, rtol=1e-5, atol=1e-6)
    assert (module.gate is not None) == options.get("gated", False)


def test_gelu_has_a_gradient_on_several_devices_and_in_float64():
    mesh = jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P("rows"), "out_specs": jax.P("rows")}
    with jax.enable_x64(True):
        x = jnp.linspace(-6.0, 6.0, 101)
        on_device = jax.shard_map(jax.vmap(jax.grad(activations.gelu)), mesh=mesh, **specs)
        exact = functools.partial(jax.nn.gelu, approximate=False)
        for found in (on_device, jax.vmap(jax.jacfwd(activations.gelu))):
            np.testing.assert_allclose(found(x), jax.vmap(jax.grad(exact))(x), 1e-12, 1e-14)
        second = jax.vmap(jax.grad(jax.grad(activations.gelu)))(x)
        np.testing.assert_allclose(second, jax.vmap(jax.grad(jax.grad(exact)))(x), 1e-10, 1e-12)


def test_an_activation_is_one_of_those_known():
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, relu, got 'tanh'"):
        FeedForward(8, 8, activation="tanh", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"activation must be one of .*, got \['silu'\]"):
        FeedForward(8, 8, activation=["silu"], rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((2, 3, 7)), r"x must have shape \(..., 8\), got \(2, 3, 7\)"),
        (np.ones((2, 3, 8), np.complex64), "x must be real, got dtype complex64"),
    ],
)
def test_tokens_that_do_not_fit_are_named(x, message):
    with pytest.raises(ValueError, match=message):
        FeedForward(8, 8, rngs=nnx.Rngs(0))(x)
