"""HGRN2 is the layer of its paper, with lower bounds that grow with the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import HGRN2, TransformerConfig, TransformerLM
from tests.nn.build import filled
from tests.nn.calls import sigmoid

FEATURES, HEADS, SIZE, VALUE_SIZE, LENGTH = 12, 3, 5, 4, 7
X = np.random.default_rng(0).normal(size=(LENGTH, FEATURES)).astype(np.float32)


def of(variable):
    return np.asarray(variable[...], np.float64)


def by_hand(mixer, x):
    query, logits, value = (
        np.einsum("td,dnh->tnh", x, of(layer.kernel))
        for layer in (mixer.query, mixer.forget, mixer.value)
    )
    query = query * sigmoid(query)
    forget = mixer.lower_bound + (1 - mixer.lower_bound) * sigmoid(logits)
    out = np.zeros((LENGTH, HEADS, VALUE_SIZE))
    for n in range(HEADS):
        state = np.zeros((SIZE, VALUE_SIZE))
        for t in range(LENGTH):
            f = forget[t, n][:, None]
            state = f * state + (1 - f) * value[t, n]
            out[t, n] = SIZE**-0.5 * query[t, n] @ state
    out = out.reshape(LENGTH, -1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * of(mixer.norm.scale)
    return out @ of(mixer.out.kernel)


@pytest.mark.parametrize("bound", [0.0, 0.6])
def test_it_is_the_layer_of_its_paper(bound):
    sizes = {"head_dim": SIZE, "value_dim": VALUE_SIZE, "lower_bound": bound}
    mixer = filled(lambda: HGRN2(FEATURES, HEADS, **sizes, rngs=nnx.Rngs(0)), seed=1, spread=1 / 2)
    y = jax.jit(lambda mixer, x: mixer(x))(mixer, X[None])[0]
    np.testing.assert_allclose(y, by_hand(mixer, X.astype(np.float64)), rtol=1e-4, atol=1e-4)


def test_lower_bounds_grow_with_the_layer():
    config = TransformerConfig(13, num_layers=3, features=8, num_heads=2, mixer="hgrn2")
    model = jax.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    bounds = [m.lower_bound for _, m in nnx.iter_graph(model) if isinstance(m, HGRN2)]
    assert sorted(bounds) == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("bound", [0.0, 0.5])
def test_gates_that_are_closed_or_open_have_finite_gradients(bound):
    mixer = filled(lambda: HGRN2(FEATURES, HEADS, lower_bound=bound, rngs=nnx.Rngs(0)))
    x = 1e4 * X[None]
    gradient = jax.jit(jax.grad(lambda mixer, x: jnp.sum(mixer(x) ** 2), (0, 1)))(mixer, x)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower_bound": 1.0}, r"lower_bound must be a number in \[0, 1\), .* got 1.0"),
        ({"lower_bound": "0"}, r"lower_bound must be a number in \[0, 1\), .* got '0'"),
        ({"value_dim": 0}, "value_dim must be an int, 1 or more features, got 0"),
        ({"num_kv_heads": 2}, r"num_heads \(3\) must be a positive multiple of num_kv_heads"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HGRN2(FEATURES, HEADS, **options, rngs=nnx.Rngs(0))
