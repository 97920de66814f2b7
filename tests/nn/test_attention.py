"""SelfAttention and CrossAttention around each mechanism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import Alibi, CrossAttention, RotaryEmbedding, SelfAttention

MIXERS = {
    "softmax": {"attention": "softmax"},
    "rotary": {"attention": "softmax", "rotary": RotaryEmbedding(), "qk_norm": True},
    "alibi": {"attention": "softmax", "score_mod": Alibi(4)},
    "window, rotary": {
        "attention": "sliding_window",
        "local_window_size": (2, 0),
        "rotary": RotaryEmbedding(),
    },
    "window, alibi": {
        "attention": "sliding_window",
        "local_window_size": (2, 0),
        "score_mod": Alibi(4),
    },
    "linear, rotary": {"attention": "linear", "rotary": RotaryEmbedding()},
}


def make(rngs=0, **options):
    return SelfAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(rngs), **options)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@jax.jit
def call(mixer, x, lengths=None, segment_ids=None):
    return mixer(x, lengths=lengths, segment_ids=segment_ids)


@jax.jit
def extend(mixer, x, state, lengths=None):
    return mixer.extend(x, state, lengths=lengths)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=MIXERS)
def mixer(request):
    return make(**MIXERS[request.param])


def test_it_is_attention_between_projections():
    mixer = make(use_bias=True)
    x = normal(2, 5, 16)
    query, key, value = (
        jnp.einsum("btd,dnh->btnh", x, layer.kernel[...]) + layer.bias[...]
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    assert key.shape == (2, 5, 2, 4)
    heads = effattn.dot_product_attention(query, key, value, is_causal=True)
    y = jnp.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...]) + mixer.out.bias[...]
    close(mixer(x), y)


def test_unequal_prompts_continue_as_each_would_alone(mixer):
    """By a token, and by two."""
    x = normal(2, 8, 16)
    lengths = np.array([5, 2])
    prompt = jnp.where(np.arange(5)[:, None] < lengths[:, None, None], x[:, :5], jnp.nan)
    state = mixer.init_state(2, 8)
    first, state = extend(mixer, prompt, state, jnp.asarray(lengths))
    rest = jnp.stack([x[0, 5:8], x[1, 2:5]])
    second, state = extend(mixer, rest[:, :1], state)
    third, state = extend(mixer, rest[:, 1:], state)
    whole = call(mixer, x)
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
        close(second[row], whole[row, length : length + 1])
        close(third[row], whole[row, length + 1 : length + 3])


def test_packed_documents_give_what_they_give_alone(mixer):
    """Alone, there is one document and more padding: the same program."""
    x = np.asarray(normal(1, 9, 16))
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]])
    out = call(mixer, np.where(ids[..., None] == 0, np.nan, x), None, ids)
    for document in (slice(0, 3), slice(3, 7)):
        size = document.stop - document.start
        alone, one = np.full_like(x, np.nan), np.zeros_like(ids)
        alone[:, :size], one[:, :size] = x[:, document], 1
        close(out[:, document], call(mixer, alone, None, one)[:, :size])


def test_padding_changes_no_output_and_no_gradient(mixer):
    x = normal(2, 6, 16)
    lengths = jnp.array([4, 6])
    padded = x.at[0, 4:].set(jnp.nan)
    valid = jnp.arange(6)[:, None] < lengths[:, None, None]

    def loss(mixer, x):
        return jnp.sum(jnp.where(valid, mixer(x, lengths=lengths), 0) ** 2)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for a, b in zip(
        jax.tree.leaves(gradient(mixer, padded)), jax.tree.leaves(gradient(mixer, x)), strict=True
    ):
        close(a, b)


def test_step_is_extend_by_one():
    mixer = make()
    x = normal(2, 1, 16)
    state = mixer.init_state(2, 4)
    np.testing.assert_array_equal(mixer.step(x, state)[0], mixer.extend(x, state)[0])
    with pytest.raises(ValueError, match="one token"):
        mixer.step(normal(2, 2, 16), state)


def test_bidirectional_attention_sees_the_future():
    x = normal(1, 4, 16)
    changed = x.at[:, 3].add(1.0)
    causal, both = make(), make(is_causal=False)
    np.testing.assert_array_equal(causal(x)[:, :3], causal(changed)[:, :3])
    assert jnp.all(jnp.any(both(x) != both(changed), axis=-1))


@pytest.mark.parametrize(
    "attention",
    [
        effattn.dot_product_attention,
        functools.partial(effattn.dot_product_attention, logits_soft_cap=None),
    ],
    ids=["function", "partial"],
)
def test_a_registered_function_is_known_by_itself(attention):
    x = normal(2, 4, 16)
    mixer = make(attention=attention)
    state = mixer.init_state(2, 4)
    close(extend(mixer, x, state)[0], call(make(), x))


def test_options_win_over_those_of_a_partial_and_reach_decoding():
    x = normal(1, 6, 16)
    narrow = functools.partial(effattn.sliding_window_attention, local_window_size=(1, 0))
    expected = call(make(attention="sliding_window", local_window_size=(2, 0)), x)
    mixer = make(attention=narrow, local_window_size=[2, 0])
    close(call(mixer, x), expected)
    assert mixer.init_state(1, 6).key.shape[1] == 2
    assert make(attention=narrow).init_state(1, 6).key.shape[1] == 1


def mean_attention(query, key, value, *, is_causal=False):
    weights = jnp.tril(jnp.ones((query.shape[1], key.shape[1]))) if is_causal else 1.0
    mean = jnp.einsum("ts,bskh->btkh", weights / jnp.sum(weights, -1, keepdims=True), value)
    return jnp.repeat(mean, query.shape[2] // value.shape[2], axis=2)


def test_any_function_of_query_key_and_value_will_do():
    x = normal(2, 4, 16)
    mixer = make(attention=mean_attention)
    assert mixer(x).shape == x.shape
    np.testing.assert_array_equal(mixer(x)[:, 0], mixer(x[:, :1])[:, 0])
    with pytest.raises(ValueError, match="takes no `segment_ids`.*softmax"):
        mixer(x, segment_ids=jnp.ones((2, 4), jnp.int32))
    with pytest.raises(ValueError, match="takes no `query_seq_lengths`.*softmax"):
        mixer(x, lengths=jnp.array([1, 2]))
    with pytest.raises(NotImplementedError, match="'mean_attention' decodes is not known.*softmax"):
        mixer.init_state(2, 4)


class LearnedScale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, query, key, value, *, is_causal=False):
        return effattn.dot_product_attention(
            query * self.scale[...], key, value, is_causal=is_causal
        )


def test_a_module_of_query_key_and_value_keeps_its_parameters():
    mixer = make(attention=LearnedScale())
    gradient = jax.jit(jax.grad(lambda mixer, x: jnp.sum(mixer(x) ** 2)))(mixer, normal(1, 4, 16))
    assert gradient.attention.scale[...] != 0


def test_a_param_among_the_options_is_learned():
    mixer = make(sink=nnx.Param(jnp.zeros(4)))
    gradient = jax.jit(jax.grad(lambda mixer, x: jnp.sum(mixer(x) ** 2)))(mixer, normal(1, 4, 16))
    assert jnp.all(gradient.array_options["sink"][...] != 0)


def test_dropout_needs_rngs_and_is_off_without():
    x = normal(1, 6, 16)
    mixer, plain = make(dropout_rate=0.5), make()
    np.testing.assert_array_equal(mixer(x), plain(x))
    dropped = mixer(x, rngs=nnx.Rngs(dropout=0))
    assert not np.allclose(dropped, plain(x))
    np.testing.assert_array_equal(dropped, mixer(x, rngs=nnx.Rngs(dropout=0)))
    np.testing.assert_array_equal(
        mixer(x, rngs=jax.random.key(3)), mixer(x, rngs=jax.random.key(3))
    )
    np.testing.assert_array_equal(plain(x, rngs=jax.random.key(3)), plain(x))


def test_bfloat16_computes_with_float32_parameters_and_gradients():
    mixer = make(dtype=jnp.bfloat16, qk_norm=True)
    x = normal(2, 4, 16)
    assert mixer(x).dtype == jnp.bfloat16
    assert mixer.init_state(2, 4).key.dtype == jnp.bfloat16
    assert mixer.init_state(2, 4, jnp.float32).key.dtype == jnp.float32
    gradient = jax.jit(jax.grad(lambda mixer, x: jnp.sum(mixer(x).astype(jnp.float32))))(mixer, x)
    for leaf in jax.tree.leaves((mixer, gradient)):
        assert leaf.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "sotfmax"}, "unknown mechanism 'sotfmax'; registered are softmax"),
        ({"attention": 3}, "registered name or a function"),
        ({"attention": "softmax", "window": 3}, "no option window; its options are"),
        ({"attention": "linear", "score_mod": Alibi(4)}, "'linear' has no option score_mod"),
        ({"query_offset": 3}, "query_offset cannot be an option"),
        (
            {"attention": functools.partial(effattn.dot_product_attention, is_causal=True)},
            "is_causal cannot be an option",
        ),
        ({"attention": "linear", "dropout_rate": 0.1}, "'linear' lacks 'dropout'.*softmax"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ({"rotary": 10000.0}, "rotary must be a RotaryEmbedding"),
        ({"rotary": RotaryEmbedding(), "head_dim": 3}, "even head size, got 3"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_what_an_unregistered_function_lacks_is_named():
    def plain(query, key, value):
        return value

    with pytest.raises(ValueError, match="'plain' takes no `is_causal`"):
        make(attention=plain)
    with pytest.raises(ValueError, match="'plain' takes no `dropout_rate` and `dropout_rng`"):
        make(attention=plain, is_causal=False, dropout_rate=0.1)


@pytest.mark.parametrize(
    ("in_features", "num_heads", "num_kv_heads", "message"),
    [(16, 3, None, "multiple of num_heads"), (16, 4, 3, "multiple of num_kv_heads")],
)
def test_sizes_that_do_not_fit_are_named(in_features, num_heads, num_kv_heads, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(in_features, num_heads, num_kv_heads=num_kv_heads, rngs=nnx.Rngs(0))


def test_bad_inputs_are_named():
    mixer = make()
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 16\)"):
        mixer(normal(2, 4, 8))
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\)"):
        mixer(normal(2, 4, 16), lengths=jnp.array([1]))
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 4\)"):
        mixer(normal(2, 4, 16), segment_ids=jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="is_causal=True"):
        make(is_causal=False).init_state(2, 4)


def make_cross(**options):
    return CrossAttention(16, 4, context_features=6, num_kv_heads=2, rngs=nnx.Rngs(0), **options)


@jax.jit
def call_cross(mixer, x, context, **padding):
    return mixer(x, context, **padding)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_cross_attention_ignores_padding_and_other_segments(attention):
    mixer = make_cross(attention=attention, qk_norm=True)
    x, context = normal(2, 5, 16), normal(2, 7, 6, seed=1)
    lengths, context_lengths = jnp.array([5, 3]), jnp.array([2, 7])
    nan = context.at[0, 2:].set(jnp.nan)
    out = call_cross(mixer, x, nan, lengths=lengths, context_lengths=context_lengths)
    close(out[0], call_cross(mixer, x[:1], context[:1, :2])[0])
    close(out[1, :3], call_cross(mixer, x[1:], context[1:])[0, :3])
    ids, context_ids = jnp.array([[1, 1, 2, 2, 0]] * 2), jnp.array([[1, 2, 2, 2, 2, 0, 0]] * 2)
    packed = call_cross(mixer, x, context, segment_ids=ids, context_segment_ids=context_ids)
    close(packed[:, :2], call_cross(mixer, x[:, :2], context[:, :1]))
    close(packed[:, 2:4], call_cross(mixer, x[:, 2:4], context[:, 1:5]))


def test_cross_attention_drops_out_and_names_bad_inputs():
    x, context = normal(2, 5, 16), normal(2, 7, 6, seed=1)
    mixer = make_cross(dropout_rate=0.5)
    assert not np.allclose(mixer(x, context, rngs=jax.random.key(0)), mixer(x, context))
    with pytest.raises(ValueError, match="context must have shape"):
        mixer(x, x)
    with pytest.raises(ValueError, match="given together"):
        mixer(x, context, segment_ids=jnp.ones((2, 5), jnp.int32))
    with pytest.raises(ValueError, match="context_lengths must have shape"):
        mixer(x, context, context_lengths=jnp.array([1, 2, 3]))
