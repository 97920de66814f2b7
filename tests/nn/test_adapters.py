"""Mechanisms inside Flax's own attention layers."""

import functools
import inspect

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import Alibi, as_attention_fn
from tests.marks import slow
from tests.nn.build import filled, floats

SHAPE = (2, 6, 16)
X = floats(*SHAPE)


def nnx_layer(attention_fn=nnx.dot_product_attention, **options):
    options = {"num_kv_heads": 2, "decode": False, "attention_fn": attention_fn, **options}
    return filled(lambda: nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), **options))


def linen_layer(attention_fn=flax.linen.dot_product_attention, **options):
    layer = flax.linen.MultiHeadDotProductAttention(
        4, attention_fn=attention_fn, deterministic=True, **options
    )
    plain = flax.linen.MultiHeadDotProductAttention(4)
    return layer, filled(lambda: plain.init(jax.random.key(1), X))


@functools.partial(jax.jit, static_argnames="is_causal")
def call(layer, x, mask=None, is_causal=False):
    return layer(x, mask=mask, is_causal=is_causal)


@functools.partial(jax.jit, static_argnums=0)
def apply(layer, variables, x, mask=None):
    return layer.apply(variables, x, mask=mask)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


PADDING = np.array([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0]])[:, None, None, :]
CAUSAL = np.tile(np.tri(6, dtype=np.float32), (2, 1, 1, 1))


def test_its_parameters_are_those_of_flax():
    ours = inspect.signature(as_attention_fn("softmax")).parameters
    theirs = inspect.signature(nnx.dot_product_attention).parameters
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].kind == theirs[name].kind
        assert ours[name].default == theirs[name].default


@pytest.mark.parametrize(
    "mask", [None, slow(PADDING), slow(PADDING[:1]), slow(CAUSAL), CAUSAL * PADDING]
)
def test_softmax_equals_the_attention_of_both_layers(mask):
    attention_fn = as_attention_fn("softmax")
    close(call(nnx_layer(attention_fn), X, mask), call(nnx_layer(), X, mask))
    layer, variables = linen_layer(attention_fn)
    close(apply(layer, variables, X, mask), apply(linen_layer()[0], variables, X, mask))


def test_causality_is_an_argument_of_nnx_and_an_option_for_linen():
    expected = call(nnx_layer(), X, is_causal=True)
    close(call(nnx_layer(as_attention_fn("softmax")), X, is_causal=True), expected)
    close(call(nnx_layer(as_attention_fn("softmax", is_causal=True)), X), expected)
    layer, variables = linen_layer(as_attention_fn("softmax", is_causal=True))
    close(apply(layer, variables, X), apply(linen_layer()[0], variables, X, CAUSAL))


def test_a_bias_reaches_the_logits():
    query, key, value = floats(3, 2, 6, 4, 8)
    bias = floats(1, 4, 6, 6, seed=1)
    ours, flaxs = (
        jax.jit(function)(query, key, value, bias)
        for function in (as_attention_fn("softmax"), nnx.dot_product_attention)
    )
    close(ours, flaxs)
    with pytest.raises(ValueError, match="'linear' lacks 'bias'.*softmax"):
        as_attention_fn("linear")(query, key, value, bias)


def window_mask(left):
    distance = np.arange(6)[:, None] - np.arange(6)
    return ((distance >= 0) & (distance <= left))[None, None]


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_window_equals_its_mask_under_any_padding(padding):
    attention_fn = as_attention_fn("sliding_window", local_window_size=(2, 0))
    mask = window_mask(2) if padding is None else window_mask(2) * padding
    # For a query without keys, Flax gives the mean of all values, and effattn gives zeros.
    some = np.broadcast_to(np.any(mask, -1)[:, 0], (2, 6))
    out = call(nnx_layer(attention_fn), X, padding, is_causal=True)
    close(np.asarray(out)[some], np.asarray(call(nnx_layer(), X, mask))[some])


def test_a_causal_query_that_decodes_reads_what_each_head_may():
    query, key, value = floats(3, 2, 6, 4, 8)
    mask = np.repeat(PADDING, 4, axis=1)
    mask[:, ::2, :, 1:3] = 0
    causal = as_attention_fn("softmax", is_causal=True)(query[:, :1], key, value, mask=mask)
    close(causal, nnx.dot_product_attention(query[:, :1], key, value, mask=mask))


def test_a_query_that_decodes_sits_at_the_last_key_that_is_not_masked():
    query, key, value = floats(3, 2, 6, 4, 8)
    attention_fn = as_attention_fn("sliding_window", local_window_size=(2, 0))
    reached = np.array([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]])[:, None, None, :]
    out = attention_fn(query[:, :1], key, value, mask=PADDING)
    close(out, nnx.dot_product_attention(query[:, :1], key, value, mask=reached))


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_linear_attention_skips_padded_keys_wherever_they_are(is_causal):
    layer = nnx_layer(as_attention_fn("linear", is_causal=is_causal))
    out = np.asarray(call(layer, X, PADDING))
    kept = np.array([0, 2, 3, 4])
    close(out[1, kept], call(layer, X[1:, kept])[0])
    close(out[0, :4], call(layer, X[:1, :4])[0])


@pytest.mark.parametrize("is_causal", [False, True])
def test_cosformer_keeps_its_distances_under_any_padding(is_causal):
    query, key, value = floats(3, 2, 6, 4, 8)
    kept = np.array([[0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], bool)
    attention_fn = as_attention_fn("cosformer", max_length=6, is_causal=is_causal)
    out = jax.jit(attention_fn)(query, key, value, mask=kept[:, None, None, :])
    # A key of zeros has no weight.
    expected = jax.jit(attention_fn)(query, np.where(kept[..., None, None], key, 0), value)
    close(np.asarray(out)[kept], np.asarray(expected)[kept])


@pytest.mark.parametrize("name", ["retention", "sparse_transformer"])
def test_what_looks_one_way_alone_is_told_so_and_takes_no_steps(name):
    attention_fn = as_attention_fn(name)
    query, key, value = floats(3, 2, 6, 4, 8)
    padding = np.ones((2, 1, 1, 6), bool)
    for mask in (None, padding):
        with pytest.raises(ValueError, match=f"is_causal=False .* {name!r} lacks 'bidirectional'"):
            attention_fn(query, key, value, mask=mask)
        causal = functools.partial(attention_fn, is_causal=True)
        assert jax.eval_shape(causal, query, key, value, mask=mask).shape == value.shape
    with pytest.raises(ValueError, match=f"one query and 6 keys .* {name!r} lacks 'cross'"):
        attention_fn(query[:, :1], key, value, mask=padding)


def test_a_window_takes_no_steps_without_an_offset():
    attention_fn = as_attention_fn("based", is_causal=True, local_window_size=2)
    query, key, value = floats(3, 2, 6, 4, 8)
    with pytest.raises(ValueError, match="local_window_size with one query .* lacks 'offset'"):
        attention_fn(query[:, :1], key, value, mask=np.ones((2, 1, 1, 6), bool))


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.1}])
@pytest.mark.parametrize("name", ["sliding_window", "linear"])
def test_a_mask_of_pairs_is_refused_with_advice(name, options):
    layer = nnx_layer(as_attention_fn(name), deterministic=True, **options)
    with pytest.raises(ValueError, match=f"is_causal=True.*{name!r} lacks 'mask'.*softmax"):
        layer(X, mask=CAUSAL)


DECODERS = {
    "softmax": as_attention_fn("softmax"),
    "softmax, causal option": as_attention_fn("softmax", is_causal=True),
    "alibi": as_attention_fn("softmax", score_mod=Alibi(4)),
    "window": as_attention_fn("sliding_window", local_window_size=(2, 0)),
    "linear": as_attention_fn("linear"),
    "cosformer": as_attention_fn("cosformer", max_length=7),
}


@pytest.mark.parametrize("name", DECODERS)
def test_nnx_decodes_as_it_computes_in_parallel(name):
    layer = nnx_layer(DECODERS[name])
    whole = call(layer, X, is_causal=True)
    layer.init_cache(SHAPE)

    @nnx.jit
    def step(layer, x):
        return layer(x, decode=True)

    outs = [step(layer, X[:, t : t + 1]) for t in range(6)]
    close(np.concatenate(outs, 1), whole)


def test_linen_decodes_as_it_computes_in_parallel():
    attention_fn = as_attention_fn("sliding_window", local_window_size=(2, 0), is_causal=True)
    layer, variables = linen_layer(attention_fn)
    whole = apply(layer, variables, X)
    decoder = layer.clone(decode=True)
    cache = jax.jit(decoder.init)(jax.random.key(0), X)["cache"]

    @jax.jit
    def step(cache, x):
        y, mutated = decoder.apply({**variables, "cache": cache}, x, mutable="cache")
        return y, mutated["cache"]

    outs = []
    for t in range(6):
        y, cache = step(cache, X[:, t : t + 1])
        outs.append(y)
    close(np.concatenate(outs, 1), whole)


def test_dropout_is_honoured_or_raises():
    options = {"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}
    layer = nnx_layer(as_attention_fn("softmax"), **options)
    assert not np.allclose(layer(X), nnx_layer()(X))
    close(layer(X, deterministic=True), nnx_layer()(X))
    with pytest.raises(ValueError, match="'linear' lacks 'dropout'"):
        nnx_layer(as_attention_fn("linear"), **options)(X)
    with pytest.raises(ValueError, match="broadcast_dropout=False"):
        nnx_layer(as_attention_fn("softmax"), **(options | {"broadcast_dropout": True}))(X)
    query, key, value = floats(3, 2, 6, 4, 8)
    with pytest.raises(ValueError, match="needs dropout_rng"):
        as_attention_fn("softmax")(query, key, value, dropout_rate=0.5)


def test_dropout_of_both_layers_reaches_the_weights():
    attention_fn = as_attention_fn("softmax")
    layer, variables = linen_layer(attention_fn)
    dropping = layer.clone(dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    out = dropping.apply(variables, X, rngs={"dropout": jax.random.key(0)})
    assert not np.allclose(out, layer.apply(variables, X))


def test_weights_cannot_be_sown():
    with pytest.raises(ValueError, match="sow_weights"):
        nnx_layer(as_attention_fn("softmax"))(X, sow_weights=True)


def test_dtype_and_precision_are_honoured_or_raise():
    attention_fn = as_attention_fn("softmax")
    query, key, value = floats(3, 2, 6, 4, 8)
    narrow = functools.partial(attention_fn, dtype=jnp.bfloat16)
    assert jax.eval_shape(narrow, query, key, value).dtype == jnp.bfloat16
    exact = jax.jit(functools.partial(attention_fn, precision="highest"))
    close(exact(query, key, value), jax.jit(nnx.dot_product_attention)(query, key, value))

    def plain(query, key, value):
        return value

    with pytest.raises(ValueError, match="'plain' takes no precision"):
        as_attention_fn(plain)(query, key, value, precision="highest")


def test_no_batch_or_two_batch_axes():
    attention_fn = as_attention_fn("softmax", is_causal=True)
    query, key, value = floats(3, 2, 3, 6, 4, 8)
    mask = np.arange(6) < np.array([[4, 5, 6], [3, 6, 6]])[..., None]
    out = jax.jit(attention_fn)(query, key, value, mask=mask[:, :, None, None, :])
    query, key, value = query[0, 1], key[0, 1], value[0, 1]
    one = jax.jit(attention_fn)(query, key, value, mask=mask[0, 1, None, None, :])
    close(out[0, 1], one)
    causal = jax.jit(functools.partial(effattn.dot_product_attention, is_causal=True))
    close(one, causal(query, key, value, key_value_seq_lengths=np.array(5)))


def test_unknown_options_are_named_when_it_is_made():
    with pytest.raises(ValueError, match="no option local_window_size"):
        as_attention_fn("linear", local_window_size=3)
    with pytest.raises(ValueError, match="unknown mechanism"):
        as_attention_fn("soft")
    with pytest.raises(ValueError, match="takes no `is_causal`"):
        as_attention_fn(lambda query, key, value: value, is_causal=True)
