"""Attention weights measured with one-hot values equal the weights of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.analysis import LONGEST, attention_weights, mixing_weights
from effattn.nn import CrossAttention, SelfAttention, TransformerConfig, TransformerLM
from effattn.patterns import Causal, Dilated, SlidingWindow, longformer, sparse_transformer
from tests.laws.battery import FIRST_NAMES
from tests.marks import slow_but_for
from tests.nn.build import filled, floats

T, D, N, K, H = 13, 8, 4, 2, 2
CAUSAL_WINDOW = Causal() & SlidingWindow(3, 0)

# Options of each module, and the pattern of pairs that its softmax covers.
SPARSE = {
    "softmax": ({}, Causal()),
    "sliding_window": ({"local_window_size": (3, 0)}, CAUSAL_WINDOW),
    "dilated": (
        {"attention": "sliding_window", "local_window_size": (2, 0), "dilation": 3},
        Causal() & Dilated((2, 0), 3),
    ),
    "longformer": ({"local_window_size": (2, 0)}, Causal() & SlidingWindow(2, 0)),
    "sparse_transformer": ({"stride": 4}, sparse_transformer(4)),
    "function": (
        {"attention": effattn.sparse_attention, "pattern": CAUSAL_WINDOW, "is_causal": False},
        CAUSAL_WINDOW,
    ),
}


def make(**options):
    return filled(lambda: SelfAttention(D, N, num_kv_heads=K, rngs=nnx.Rngs(0), **options))


def projected(module, x):
    """Query and key of each query head, in float64: `(B, T, N, H)`."""
    kernels = (np.asarray(p.kernel[...], np.float64) for p in (module.query, module.key))
    query, key = (np.einsum("btd,dnh->btnh", np.asarray(x, np.float64), k) for k in kernels)
    return query, np.repeat(key, N // K, 2)


def softmax(query, key, mask):
    logits = np.einsum("...tnh,...snh->...nts", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * mask
    return weights / weights.sum(-1, keepdims=True)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPARSE)
def test_a_layer_pays_the_softmax_over_its_pattern(name):
    options, pattern = SPARSE[name]
    module, x = make(**{"attention": name} | options), floats(2, T, D)
    weights = attention_weights(module, x)
    mask = pattern.mask(T)
    close(weights, softmax(*projected(module, x), mask))
    assert (np.asarray(weights)[..., ~mask] == 0).all()


def test_linear_attention_shows_its_effective_mixing():
    module, x = make(attention="linear"), floats(2, T, D)
    query, key = (np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in projected(module, x))
    similarity = np.einsum("btnh,bsnh->bnts", query, key) * np.tri(T)
    close(attention_weights(module, x), similarity / similarity.sum(-1, keepdims=True))


# Layers that do more with the outputs of the heads than project them.
GATED = (
    "differential",
    "retention",
    "gated_linear",
    "lightning",
    "hgrn2",
    "mlstm",
    "gated_slot",
    "titans",
    "ttt_linear",
    "mesa",
    "log_linear",
    "mamba",
    "mamba2",
    "mamba3",
    "delta_net",
    "gated_delta_net",
    "delta_product",
    "kimi_delta",
    "gated_delta_net_2",
    "rwkv6",
    "rwkv7",
)


# Mechanisms with heads; mechanisms without heads have no weights of keys.
READ = [n for n in registry.names("causal") if registry.get(n).takes_heads]
READ = [n for n in READ if n not in (*GATED, "routing")]


def test_heads_that_attend_in_several_ways_are_not_read():
    module = filled(lambda: registry.get("routing").build(D, N, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match="must attend by one function, .* got a RoutingSelfAttention"
    ):
        attention_weights(module, floats(1, T, D))


@pytest.mark.parametrize("name", slow_but_for(FIRST_NAMES, READ))
def test_the_weights_of_any_mechanism_mix_its_values_to_its_output(name):
    # Long-short attention has such weights only if it does not normalise the values.
    options = {"dual_norm": False} if name == "long_short" else {}
    build = registry.get(name).build
    module = filled(lambda: build(D, N, qk_norm=True, rngs=nnx.Rngs(0), **options))
    x = floats(1, T, D)
    weights = np.asarray(attention_weights(module, x), np.float64)
    value, out = jax.jit(lambda module, x: (module.value(x), module(x)))(module, x)
    mixed = np.einsum("bnts,bsnh->btnh", weights, value)
    close(np.einsum("btnh,nhd->btd", mixed, module.out.kernel[...]), out)


def test_a_model_is_read_in_the_layer_asked_for_and_left_as_it_is():
    config = TransformerConfig(
        vocab_size=11,
        num_layers=2,
        features=D,
        num_heads=N,
        remat=True,
        mixer=("softmax", {"name": "sliding_window", "local_window_size": (3, 0)}),
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    tokens = np.random.default_rng(0).integers(0, 11, (2, T))
    first = model.blocks[0]
    read = jax.jit(lambda model: model.blocks[0].mixer_norm(model.embed(tokens)))(model)
    alone = attention_weights(first.mixer, read)
    close(attention_weights(model, tokens, layer=0), alone)
    second = np.asarray(attention_weights(model, tokens, layer=-1))
    assert (second[..., ~CAUSAL_WINDOW.mask(T)] == 0).all()
    close(second.sum(-1), 1)
    assert nnx.split(model)[0] == graph and model.config is config
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.split(model)[1], state))


def test_padding_gets_and_gives_no_attention():
    module, x = make(), floats(2, T, D)
    weights = np.asarray(attention_weights(module, x, lengths=np.array([T, 5])))
    assert (weights[1, :, 5:] == 0).all() and (weights[1, :, :, 5:] == 0).all()
    close(weights[1, :, :5, :5], attention_weights(module, x[1:, :5])[0])


def test_cross_attention_has_a_row_a_query_and_a_column_a_key():
    module = filled(lambda: CrossAttention(D, N, context_features=6, rngs=nnx.Rngs(0)))
    weights = np.asarray(attention_weights(module, floats(1, 5, D), floats(1, 7, 6)))
    assert weights.shape == (1, N, 5, 7)
    close(weights.sum(-1), 1)


def test_bfloat16_layers_show_float32_weights():
    weights = attention_weights(make(dtype="bfloat16"), floats(1, T, D))
    assert weights.dtype == jnp.float32
    close(np.asarray(weights).sum(-1), 1)


def test_double_precision_stays():
    query, key = (np.random.default_rng(i).normal(size=(2, T, N, H)) for i in (0, 1))
    with jax.enable_x64(True):
        weights = mixing_weights("softmax", query, key, is_causal=True)
    np.testing.assert_allclose(weights, softmax(query, key, np.tri(T)), rtol=1e-12)


def test_what_global_tokens_gather_by_a_projection_of_their_own_is_mixed_too():
    query, key = floats(T, 1, H), floats(T, 1, H, seed=1)
    is_global = np.isin(np.arange(T), (0, 4))
    options = {"local_window_size": (2, 1), "global_mask": is_global, "max_global": 2}
    expected = softmax(query, key, longformer((2, 1), (0, 4)).mask(T))
    for more in ({}, {"global_value": floats(T, 1, H)}):
        close(mixing_weights("longformer", query, key, **options, **more), expected)


def call_model(**options):
    config = TransformerConfig(vocab_size=5, num_layers=2, features=D, num_heads=N)
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    return attention_weights(model, np.ones((1, 3), int), **options)


def of_many(**options):
    ones = np.ones((LONGEST + 1, 1, 2), np.float32)
    return mixing_weights("softmax", ones, ones, **options)


def with_states(query, key, value):
    return value, None


INNER_MODEL = {
    "learning_rate": np.ones((3, 1)),
    "initial_weights": np.zeros((1, 2, 3)),
    "initial_bias": np.zeros((1, 3)),
    "norm_scale": np.ones((1, 3)),
    "norm_bias": np.zeros((1, 3)),
}


@pytest.mark.parametrize(
    "call, message",
    [
        (call_model, "layer must be an int from -2 to 1, for a model of 2 layers; got None"),
        (lambda: call_model(layer=2), "layer must be an int from -2 to 1"),
        (
            lambda: attention_weights(make(), floats(1, 3, D), layer=0),
            "layer needs a TransformerLM, got layer=0 and a SelfAttention",
        ),
        (
            lambda: attention_weights(
                filled(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))), floats(1, 2)
            ),
            "module must be a SelfAttention .* got Linear",
        ),
        (
            lambda: attention_weights(make(), floats(1, LONGEST + 1, D)),
            f"the number of tokens must be an int from 1 to {LONGEST}",
        ),
        (of_many, f"the number of tokens must be an int from 1 to {LONGEST}"),
        (
            lambda: mixing_weights(with_states, floats(3, 1, 2), floats(3, 1, 2)),
            r"must return one array of shape \(3, 1, 3\) .* got tuple",
        ),
        (
            lambda: mixing_weights("ttt_linear", floats(3, 1, 2), floats(3, 1, 2), **INNER_MODEL),
            "outputs are linear in the values, got one that normalises",
        ),
        (
            lambda: mixing_weights("flash", floats(3, 1, 2), floats(3, 1, 2)),
            "unknown mechanism 'flash'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
