"""SelfAttention and CrossAttention around each mechanism."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import (
    Alibi,
    CrossAttention,
    RotaryEmbedding,
    SelfAttention,
    as_attention_fn,
)
from tests.marks import slow, slow_but_for
from tests.nn.build import filled, floats
from tests.nn.calls import call, extend

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


def made(**options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(**options))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


QUICK = "rotary", "window, alibi", "linear, rotary"


@pytest.fixture(params=slow_but_for(QUICK, MIXERS))
def mixer(request):
    return made(**MIXERS[request.param])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_it_is_attention_between_projections(qk_norm):
    mixer = made(use_bias=True, qk_norm=qk_norm)
    x = floats(2, 5, 16)
    query, key, value = (
        np.einsum("btd,dnh->btnh", x, layer.kernel[...]) + layer.bias[...]
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    assert key.shape == (2, 5, 2, 4)
    if qk_norm:
        query, key = (
            x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * norm.scale[...]
            for x, norm in ((query, mixer.query_norm), (key, mixer.key_norm))
        )
    heads = jax.jit(functools.partial(effattn.dot_product_attention, is_causal=True))
    y = np.einsum("btnh,nhd->btd", heads(query, key, value), mixer.out.kernel[...])
    close(call(mixer, x), y + mixer.out.bias[...])


X = floats(2, 9, 16)


def test_unequal_prompts_continue_as_each_would_alone(mixer):
    """The calls continue by one token and by two, padded to the shape of the prompts."""
    lengths = np.array([5, 2])
    prompt = np.where(np.arange(5)[:, None] < lengths[:, None, None], X[:, :5], np.nan)
    first, state = extend(mixer, prompt, mixer.init_state(2, 8), lengths)
    rest = np.stack([X[0, 5:8], X[1, 2:5]])
    second, state = extend(mixer, rest[:, :1], state)
    two = np.concatenate([rest[:, 1:], np.full((2, 3, 16), np.nan, np.float32)], axis=1)
    third, state = extend(mixer, two, state, np.array([2, 2]))
    whole = call(mixer, X, None, np.ones((2, 9), int))
    whole, first, second, third = map(np.asarray, (whole, first, second, third))
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
        close(second[row], whole[row, length : length + 1])
        close(third[row, :2], whole[row, length + 1 : length + 3])


def test_packed_documents_give_what_they_give_alone(mixer):
    """A document alone is padded to the shape of the packed row, so the program is the same."""
    ids = np.tile([1, 1, 1, 2, 2, 2, 2, 0, 0], (2, 1))
    out = np.asarray(call(mixer, np.where(ids[..., None] == 0, np.nan, X), None, ids))
    for document in (slice(0, 3), slice(3, 7)):
        size = document.stop - document.start
        alone, one = np.full_like(X, np.nan), np.zeros_like(ids)
        alone[:, :size], one[:, :size] = X[:, document], 1
        close(out[:, document], call(mixer, alone, None, one)[:, :size])


def test_padding_changes_no_output_and_no_gradient(mixer):
    x = floats(2, 6, 16)
    lengths = np.array([4, 6])
    valid = np.arange(6)[:, None] < lengths[:, None, None]
    padded = np.where(valid, x, np.nan)

    def loss(mixer, x):
        return jnp.sum(jnp.where(valid, mixer(x, lengths=lengths), 0) ** 2)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for a, b in zip(
        jax.tree.leaves(gradient(mixer, padded)), jax.tree.leaves(gradient(mixer, x)), strict=True
    ):
        close(a, b)


def test_step_is_extend_by_one():
    mixer = made()
    x = floats(2, 1, 16)
    state = mixer.init_state(2, 4)
    step = jax.jit(lambda mixer, x, state: mixer.step(x, state))
    np.testing.assert_array_equal(step(mixer, x, state)[0], extend(mixer, x, state)[0])
    with pytest.raises(ValueError, match="one token"):
        mixer.step(floats(2, 2, 16), state)


def test_bidirectional_attention_sees_the_future():
    x = floats(1, 4, 16)
    changed = x + (np.arange(4) == 3)[:, None].astype(np.float32)
    causal, both = made(), made(is_causal=False)
    np.testing.assert_array_equal(call(causal, x)[:, :3], call(causal, changed)[:, :3])
    before, after = np.asarray(call(both, x)), np.asarray(call(both, changed))
    assert np.any(before != after, axis=-1).all()


@pytest.mark.parametrize("name", ["sliding_window", "dilated", "longformer"])
def test_a_window_is_as_wide_on_both_sides_unless_it_is_causal(name):
    def seen(heads):
        return np.asarray(jax.jit(heads)(*floats(3, 1, 300, 2, 4)))

    for is_causal, window in ((True, (127, 0)), (False, (127, 127))):
        of_itself, told = (
            as_attention_fn(name, is_causal=is_causal, **options)
            for options in ({}, {"local_window_size": window})
        )
        np.testing.assert_array_equal(seen(of_itself), seen(told))
    sizes = [
        [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda m=m: m.init_state(2, 999)))]
        for m in (make(attention=name), make(attention=name, local_window_size=(127, 0)))
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "attention",
    [
        effattn.dot_product_attention,
        functools.partial(effattn.dot_product_attention, logits_soft_cap=None),
    ],
    ids=["function", "partial"],
)
def test_a_registered_function_is_known_by_itself(attention):
    x = floats(2, 4, 16)
    mixer = made(attention=attention)
    state = mixer.init_state(2, 4)
    close(extend(mixer, x, state)[0], call(made(), x))


def test_options_win_over_those_of_a_partial_and_reach_decoding():
    x = floats(1, 6, 16)
    narrow = functools.partial(effattn.sliding_window_attention, local_window_size=(1, 0))
    expected = call(made(attention="sliding_window", local_window_size=(2, 0)), x)
    mixer = made(attention=narrow, local_window_size=[2, 0])
    close(call(mixer, x), expected)
    assert mixer.init_state(1, 6).key.shape[1] == 2
    assert made(attention=narrow).init_state(1, 6).key.shape[1] == 1


def mean_attention(query, key, value, *, is_causal=False):
    weights = jnp.tril(jnp.ones((query.shape[1], key.shape[1]))) if is_causal else 1.0
    mean = jnp.einsum("ts,bskh->btkh", weights / jnp.sum(weights, -1, keepdims=True), value)
    return jnp.repeat(mean, query.shape[2] // value.shape[2], axis=2)


def test_any_function_of_query_key_and_value_will_do():
    x = floats(2, 4, 16)
    mixer = made(attention=mean_attention)
    y = call(mixer, x)
    assert y.shape == x.shape
    close(y[:, 0], call(mixer, x[:, :1])[:, 0])
    with pytest.raises(ValueError, match="takes no `segment_ids`.*softmax"):
        mixer(x, segment_ids=np.ones((2, 4), np.int32))
    with pytest.raises(ValueError, match="takes no `query_seq_lengths`.*softmax"):
        mixer(x, lengths=np.array([1, 2]))
    with pytest.raises(NotImplementedError, match="'mean_attention' cannot decode, .*softmax"):
        mixer.init_state(2, 4)


class LearnedScale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, query, key, value, *, is_causal=False):
        return effattn.dot_product_attention(
            query * self.scale[...], key, value, is_causal=is_causal
        )


def test_a_module_of_query_key_and_value_keeps_its_parameters():
    mixer = made(attention=LearnedScale())
    gradient = jax.jit(jax.grad(lambda mixer, x: jnp.sum(mixer(x) ** 2)))(mixer, floats(1, 4, 16))
    assert gradient.attention.scale[...] != 0


def test_a_param_among_the_options_is_learned():
    mixer = made(sink=nnx.Param(np.zeros(4, np.float32)))
    gradient = jax.jit(jax.grad(lambda mixer, x: jnp.sum(mixer(x) ** 2)))(mixer, floats(1, 4, 16))
    assert np.all(gradient.array_options["sink"][...] != 0)


def test_dropout_needs_rngs_and_is_off_without():
    x = floats(1, 6, 16)
    mixer, plain = made(dropout_rate=0.5), made()
    np.testing.assert_array_equal(mixer(x), plain(x))
    dropped = mixer(x, rngs=nnx.Rngs(dropout=0))
    assert not np.allclose(dropped, plain(x))
    np.testing.assert_array_equal(dropped, mixer(x, rngs=nnx.Rngs(dropout=0)))
    np.testing.assert_array_equal(
        mixer(x, rngs=jax.random.key(3)), mixer(x, rngs=jax.random.key(3))
    )
    np.testing.assert_array_equal(plain(x, rngs=jax.random.key(3)), plain(x))


def test_bfloat16_computes_with_float32_parameters_and_gradients():
    mixer, x = made(dtype=jnp.bfloat16, qk_norm=True), floats(2, 4, 16)
    assert jax.eval_shape(call, mixer, x).dtype == jnp.bfloat16
    states = jax.eval_shape(lambda: [mixer.init_state(2, 4), mixer.init_state(2, 4, jnp.float32)])
    assert [state.key.dtype for state in states] == [jnp.bfloat16, jnp.float32]
    gradient = jax.eval_shape(jax.grad(lambda mixer: jnp.sum(mixer(x).astype(jnp.float32))), mixer)
    for leaf in jax.tree.leaves((mixer, gradient)):
        assert leaf.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "sotfmax"}, "unknown mechanism 'sotfmax'; registered are softmax"),
        ({"attention": 3}, "registered name or a function"),
        ({"attention": "softmax", "window": 3}, "no option window; its options are"),
        ({"attention": "linear", "score_mod": Alibi(4)}, "'linear' has no option score_mod"),
        ({"query_offset": 3}, "cannot have the option query_offset"),
        (
            {"attention": functools.partial(effattn.dot_product_attention, is_causal=True)},
            "cannot have the option is_causal, ",
        ),
        ({"attention": "linear", "dropout_rate": 0.1}, "'linear' lacks 'dropout'.*softmax"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be a number in \[0, 1\), got 1.0"),
        ({"attention": None}, "attention must be a registered name or a function .* got None"),
        ({"rotary": 10000.0}, "rotary must be a RotaryEmbedding"),
        ({"rotary": RotaryEmbedding(), "head_dim": 3}, "rotary needs an even head_dim, got 3"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_what_an_unregistered_function_lacks_is_named():
    def plain(query, key, value):
        return value

    with pytest.raises(ValueError, match="'plain' takes no `is_causal`"):
        make(attention=plain)
    with pytest.raises(ValueError, match="'plain' takes no `dropout_rate` and `dropout_rng`"):
        make(attention=plain, is_causal=False, dropout_rate=0.1)


@pytest.mark.parametrize(
    ("in_features", "num_heads", "num_kv_heads", "message"),
    [
        (16, 3, None, "multiple of num_heads"),
        (16, 4, 3, "multiple of num_kv_heads"),
        (16.0, 4, None, "in_features must be an int, 1 or more features, got 16.0"),
        (16, "4", None, "num_heads must be an int, 1 or more heads, got '4'"),
        (16, True, None, "num_heads must be an int, 1 or more heads, got True"),
        (16, 4, 2.0, "num_kv_heads must be an int, 1 or more heads, or None, got 2.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(in_features, num_heads, num_kv_heads, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(in_features, num_heads, num_kv_heads=num_kv_heads, rngs=nnx.Rngs(0))


def test_what_a_mechanism_needs_besides_is_named():
    x = floats(1, 4, 16)
    with pytest.raises(ValueError, match="'gated_linear' needs log_decay: .*GatedLinearAttention"):
        make(attention="gated_linear")(x)
    with pytest.raises(ValueError, match="'performer' needs projection: give it as an option"):
        CrossAttention(16, 4, "performer", rngs=nnx.Rngs(0))(x, x)
    with pytest.raises(ValueError, match="'performer' needs projection"):
        as_attention_fn("performer")(*floats(3, 1, 4, 2, 8))


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, {"head_dim": 8}),
        ({"attention": "sliding_window"}, {"attention": "sliding_window", "local_window_size": 5}),
        ({"attention": "linear"}, {"attention": "linear", "num_kv_heads": 4}),
    ],
    ids=str,
)
def test_the_state_of_another_layer_is_refused(options, others):
    mixer, other = (
        SelfAttention(16, 4, **{"num_kv_heads": 2, **o}, rngs=nnx.Rngs(0))
        for o in (options, others)
    )
    x, shape = floats(2, 3, 16), jax.eval_shape(lambda: other.init_state(2, 7))
    assert jax.eval_shape(other.extend, x, shape)[0].shape == x.shape
    with pytest.raises(ValueError, match="this SelfAttention needs .* the state of another layer"):
        jax.eval_shape(mixer.extend, x, shape)


@pytest.mark.parametrize(
    ("made_by", "given_to"),
    [
        ("rwkv6", "slstm"),
        ("slstm", "rwkv7"),
        ("hgrn2", "lightning"),
        ("rwkv6", "rwkv7"),
        ("gated_delta_net", "delta_product"),
        ("delta_net", "kimi_delta"),
        ("latent", "indexed"),
        ("lstm", "gru"),
        ("lstm", "convolution"),
        ("s4d", "convolution"),
        ("softmax", "hierarchical"),
    ],
)
def test_the_state_of_another_mechanism_is_refused(made_by, given_to):
    mixer, other = (
        registry.get(name).build(16, 4, rngs=nnx.Rngs(0)) for name in (given_to, made_by)
    )
    state = jax.eval_shape(lambda: other.init_state(2, 13))
    with pytest.raises(ValueError, match=r"state must be the|the state of another layer"):
        jax.eval_shape(mixer.extend, floats(2, 1, 16), state)


def test_a_state_needs_whole_lengths():
    mixer = registry.get("rg_lru").build(16, 4, rngs=nnx.Rngs(0))
    state = mixer.init_state(2, 13)
    for length, got in ((None, "None"), (jnp.zeros(2), "float32 of shape")):
        with pytest.raises(ValueError, match=f"length.* got .*{got}"):
            mixer.extend(floats(2, 1, 16), dataclasses.replace(state, length=length))


def test_segment_ids_may_be_a_list():
    mixer, ids = made(rotary=RotaryEmbedding()), [[1, 1, 2], [1, 2, 0]]
    y = jax.jit(lambda mixer: mixer(X[:, :3], segment_ids=ids))(mixer)
    close(y, call(mixer, X[:, :3], segment_ids=np.array(ids)))


def test_bad_inputs_are_named():
    mixer = made()
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 16\)"):
        mixer(floats(2, 4, 8))
    with pytest.raises(ValueError, match=r"lengths must be integers of shape \(2,\)"):
        mixer(floats(2, 4, 16), lengths=np.array([1]))
    with pytest.raises(ValueError, match=r"segment_ids must be integers of shape \(2, 4\)"):
        mixer(floats(2, 4, 16), segment_ids=np.ones((2, 3), np.int32))
    with pytest.raises(ValueError, match="is_causal=True"):
        made(is_causal=False).init_state(2, 4)
    rotating = made(rotary=RotaryEmbedding())
    with pytest.raises(ValueError, match="call init_state with batch=1"):
        rotating.extend(floats(1, 4, 16), rotating.init_state(2, 4))


def make_cross(**options):
    sizes = {"context_features": 6, "num_kv_heads": 2}
    return filled(lambda: CrossAttention(16, 4, **sizes, rngs=nnx.Rngs(0), **options))


@jax.jit
def call_cross(mixer, x, context, **padding):
    return mixer(x, context, **padding)


@pytest.mark.parametrize("attention", ["softmax", slow("linear")])
def test_cross_attention_ignores_padding_and_other_segments(attention):
    """The reference calls have no padding: all queries, and two keys or all keys."""
    mixer = make_cross(attention=attention, qk_norm=True)
    x, context = floats(2, 5, 16), floats(2, 7, 6, seed=1)
    lengths, context_lengths = np.array([5, 3]), np.array([2, 7])
    nan = np.where(np.arange(7)[:, None] < context_lengths[:, None, None], context, np.nan)
    out = call_cross(mixer, x, nan, lengths=lengths, context_lengths=context_lengths)
    first, second = (call_cross(mixer, x, context[:, keys]) for keys in (slice(2), slice(2, 4)))
    close(out[0], first[0])
    close(out[1, :3], call_cross(mixer, x, context)[1, :3])

    @jax.jit
    @jax.grad
    def gradient(mixer, context):
        return jnp.sum(mixer(x, context, context_lengths=context_lengths))

    for of_nan, of_numbers in zip(
        *(jax.tree.leaves(gradient(mixer, c)) for c in (nan, context)), strict=True
    ):
        close(of_nan, of_numbers)
    ids, context_ids = np.tile([1, 1, 2, 2, 0], (2, 1)), np.tile([1, 1, 2, 2, 0, 0, 0], (2, 1))
    packed = call_cross(mixer, x, context, segment_ids=ids, context_segment_ids=context_ids)
    close(packed[:, :2], first[:, :2])
    close(packed[:, 2:4], second[:, 2:4])


def test_cross_attention_drops_out_and_names_bad_inputs():
    x, context = floats(2, 5, 16), floats(2, 7, 6, seed=1)
    mixer = make_cross(dropout_rate=0.5)
    dropped = call_cross(mixer, x, context, rngs=jax.random.key(0))
    assert not np.allclose(dropped, call_cross(mixer, x, context))
    with pytest.raises(ValueError, match="context must have shape"):
        mixer(x, x)
    with pytest.raises(ValueError, match="given together, got only segment_ids"):
        mixer(x, context, segment_ids=np.ones((2, 5), np.int32))
    with pytest.raises(ValueError, match="context_lengths must be integers of shape"):
        mixer(x, context, context_lengths=np.array([1, 2, 3]))
    key, value = mixer.project_context(context)
    for wrong in ((context, value), (key, value[..., :3])):
        with pytest.raises(
            ValueError, match=r"must be an array that project_context returned, .* \(2, 7"
        ):
            mixer.attend(x, *wrong)
