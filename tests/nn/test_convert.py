"""Models whose attention is exchanged keep their projections, and stay whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import nn, registry
from tests.marks import slow_but_for
from tests.nn.pretrained.test_longformer_and_bigbird import golden

TOKENS = np.arange(24).reshape(2, 12) % 7
WINDOW = {"name": "sliding_window", "local_window_size": (11, 0)}
SIZES = {"vocab_size": 7, "num_layers": 2, "features": 16, "num_heads": 4, "num_kv_heads": 2}


def model(**options):
    return nn.TransformerLM(nn.TransformerConfig(**{**SIZES, **options}), rngs=nnx.Rngs(0))


def flat(module):
    return {p: np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(module))}


def assert_close(one, other):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"qk_norm": True}, {"positions": "alibi"}, {"head_dim": 6}])
def test_a_window_over_all_tokens_is_the_same_model(options):
    lm = model(**options)
    windowed = nn.convert(lm, WINDOW)
    assert_close(jax.jit(lambda m, t: m(t))(windowed, TOKENS), lm(TOKENS))
    assert nn.conversion(lm, windowed) == (tuple(flat(lm)), (), ())
    narrow = nn.convert(lm, {"name": "sliding_window", "local_window_size": (2, 0)}, layers=1)
    assert np.abs(narrow(TOKENS) - lm(TOKENS)).max() > 1e-3


def test_the_configuration_describes_the_copy():
    lm = model()
    half = nn.convert(lm, WINDOW, layers=[1])
    assert half.config.mixer == ("softmax", WINDOW) and lm.config.mixer == "softmax"
    assert nn.convert(half, "softmax").config.mixer == "softmax"
    again = nn.TransformerLM(half.config, rngs=nnx.Rngs(0))
    assert nnx.graphdef(again) == nnx.graphdef(half)


def test_the_original_neither_changes_nor_shares_arrays():
    lm = model()
    before = flat(lm)
    copy = nn.convert(lm, "linear", layers=[0])
    nnx.update(copy, jax.tree.map(jnp.zeros_like, nnx.state(copy)))
    after = flat(lm)
    assert all(np.array_equal(after[path], before[path]) for path in before)
    assert type(lm.blocks[0].mixer.attention) is type(lm.blocks[1].mixer.attention)
    copy = nn.convert(lm, "linear")
    pointers = {v[...].unsafe_buffer_pointer() for _, v in nnx.to_flat_state(nnx.state(lm))}
    of_copy = {v[...].unsafe_buffer_pointer() for _, v in nnx.to_flat_state(nnx.state(copy))}
    assert not pointers & of_copy


ABLE = [
    name
    for name in registry.names("causal")
    if issubclass(registry.load(registry.get(name).builder), nn.SelfAttention)
]


QUICK = "softmax", "bigbird", "based", "rwkv6", "kimi_delta", "mamba2", "transformer_xl"


@pytest.mark.parametrize(
    "name",
    slow_but_for(QUICK, [*ABLE, "mixture_of_mechanisms", "recurrent_memory", "transformer_xl"]),
)
def test_every_mechanism_with_projections_takes_them_over(name):
    lm = model(num_layers=1, num_kv_heads=None)
    mechanism = {"name": name, "feature_dim": 4} if name == "based" else name
    converted = nn.convert(lm, mechanism, rngs=nnx.Rngs(1))
    kept, new, dropped = nn.conversion(lm, converted)
    before, after = flat(lm), flat(converted)
    assert not dropped and set(kept) | set(new) == set(after) and not set(kept) & set(new)
    assert len(kept) >= len(before)
    for path in set(before) & set(kept):
        np.testing.assert_array_equal(after[path], before[path])
    assert all("mixer" in path for path in new)
    assert np.isfinite(converted(TOKENS)).all()
    if new:
        with pytest.raises(ValueError, match="rngs must be nnx.Rngs.* adds"):
            nn.convert(lm, mechanism)


def test_gates_come_from_rngs():
    lm = model(num_layers=1)
    one, other, same = (nn.convert(lm, "gated_linear", rngs=nnx.Rngs(s)) for s in (1, 2, 1))
    path = ("blocks", 0, "mixer", "gate", "kernel")
    assert path in nn.conversion(lm, one).new
    assert not np.array_equal(flat(one)[path], flat(other)[path])
    np.testing.assert_array_equal(flat(one)[path], flat(same)[path])


def test_biases_of_an_option_are_kept():
    lm = model(mixer={"name": "softmax", "use_bias": True, "value_dim": 3})
    for mixer in (block.mixer for block in lm.blocks):
        mixer.out.bias[...] = jnp.arange(16.0)
        mixer.key.bias[...] = jnp.ones((2, 4))
    converted = nn.convert(lm, WINDOW)
    assert converted.config.mixer == {**WINDOW, "use_bias": True, "value_dim": 3}
    assert_close(converted(TOKENS), lm(TOKENS))
    groups = [{"name": "softmax", "num_heads": 2}, {**WINDOW, "num_heads": 2}]
    grouped = nn.convert(lm, {"heads": groups})
    assert_close(grouped(TOKENS), lm(TOKENS))
    assert nn.conversion(lm, grouped)[1:] == ((), ())
    again = nn.TransformerLM(grouped.config, rngs=nnx.Rngs(0))
    assert nnx.graphdef(again) == nnx.graphdef(grouped)


def test_values_of_the_default_head_dimension_are_kept_beside_other_heads():
    # The default head dimension of 4 heads in 16 features is 4.
    lm = model(mixer={"name": "softmax", "head_dim": 6, "value_dim": 4})
    converted = nn.convert(lm, WINDOW)
    assert converted.config.mixer == {**WINDOW, "head_dim": 6, "value_dim": 4}
    assert_close(converted(TOKENS), lm(TOKENS))


def test_groups_of_heads_get_their_share_of_key_heads():
    lm = model(num_kv_heads=None, mixer={"name": "softmax", "num_kv_heads": 2})
    groups = [{"name": "softmax", "num_heads": 2}, {**WINDOW, "num_heads": 2}]
    grouped = nn.convert(lm, {"heads": groups})
    assert [group["num_kv_heads"] for group in grouped.config.mixer["heads"]] == [1, 1]
    assert_close(grouped(TOKENS), lm(TOKENS))
    assert_close(nn.convert(lm, {"heads": [{**WINDOW, "num_heads": 4}]})(TOKENS), lm(TOKENS))
    uneven = [{**WINDOW, "num_heads": 3}, {**WINDOW, "num_heads": 1}]
    refused(r"multiple of 2 heads, as 2 query heads .* groups of \[3, 1\]", lm, {"heads": uneven})
    groups[0]["num_kv_heads"] = 2
    refused(r"'key' with a kernel of shape .16, 1, 4.*has .16, 2, 4", lm, {"heads": groups})


@pytest.mark.parametrize("layers", [np.array([1]), np.array(1), np.int8(1)])
def test_layers_of_numpy_are_indices(layers):
    assert nn.convert(model(), WINDOW, layers=layers).config.mixer == ("softmax", WINDOW)


def test_a_converted_model_decodes():
    lm = nn.convert(model(), "linear", layers=[0])
    state, logits = lm.init_state(2, 12), []
    for t in range(12):
        out, state = lm.step(TOKENS[:, t : t + 1], state)
        logits.append(out)
    assert_close(jnp.concatenate(logits, 1), lm(TOKENS))


def test_functions_and_mixer_classes_are_mechanisms():
    def mean_of_all(query, key, value):
        return jnp.broadcast_to(value.mean(-3, keepdims=True), query.shape)

    encoder = model(is_causal=False, num_kv_heads=None)
    converted = nn.convert(encoder, mean_of_all)
    kernel = ("blocks", 1, "mixer", "value", "kernel")
    np.testing.assert_array_equal(flat(converted)[kernel], flat(encoder)[kernel])
    logits = converted(TOKENS)
    assert np.isfinite(logits).all() and np.abs(logits - encoder(TOKENS)).max() > 1e-4

    by_class = nn.convert(model(), nn.HedgehogSelfAttention, rngs=nnx.Rngs(0))
    assert isinstance(by_class.blocks[1].mixer, nn.HedgehogSelfAttention)


@pytest.mark.parametrize(("features", "heads", "size"), [(100, 8, 16), (64, 4, 32)])
def test_heads_of_another_size_than_their_share_are_kept(features, heads, size):
    old = nn.SelfAttention(features, heads, head_dim=size, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 5, features))
    assert_close(nn.convert(old, WINDOW)(x), old(x))
    groups = [{"name": "softmax", "num_heads": heads // 2}] * 2
    assert_close(nn.convert(old, {"heads": groups})(x), old(x))


def test_layers_are_converted_one_after_the_other_with_arrays_of_their_own():
    lm = model(num_kv_heads=None)
    for layer in (0, 1):
        sink = {"name": "softmax", "sink": jnp.arange(4.0) + layer}
        lm = nn.convert(lm, sink, layers=layer, rngs=nnx.Rngs(0))
    first, second = lm.config.mixer
    np.testing.assert_array_equal(second["sink"] - first["sink"], np.ones(4))


def test_one_mixer_is_converted_as_well():
    case = golden("bigbird")
    exact = nn.bigbird_from_transformers(
        case["parameter"], num_heads=4, attention_type="original_full"
    )
    x = next(c["x"] for name, c in case.items() if name != "parameter")
    size = x.shape[1]
    windowed = nn.convert(exact, {"name": "sliding_window", "local_window_size": size})
    assert_close(windowed(x), exact(x))
    rotary = nn.SelfAttention(16, 4, rotary=nn.RotaryEmbedding(500.0), rngs=nnx.Rngs(0))
    converted = nn.convert(rotary, "linear")
    assert converted.rotary == rotary.rotary and converted.dtype is rotary.dtype is None


def test_each_stack_of_an_encoder_decoder():
    sides = nn.TransformerConfig(**SIZES, is_causal=False), nn.TransformerConfig(**SIZES)
    both = nn.EncoderDecoder(nn.EncoderDecoderConfig(*sides), rngs=nnx.Rngs(0))
    wide = {"name": "sliding_window", "local_window_size": 12}
    for layers, encoder, decoder in [
        (None, wide, wide),
        ({"encoder": None}, wide, "softmax"),
        ({"decoder": [0]}, "softmax", (wide, "softmax")),
    ]:
        converted = nn.convert(both, wide, layers=layers)
        assert (converted.config.encoder.mixer, converted.config.decoder.mixer) == (
            encoder,
            decoder,
        )
        assert_close(converted(TOKENS, TOKENS[:, :5]), both(TOKENS, TOKENS[:, :5]))
        again = nn.EncoderDecoder(converted.config, rngs=nnx.Rngs(0))
        assert nnx.graphdef(again) == nnx.graphdef(converted)


def refused(sentence, *args, **kwargs):
    with pytest.raises(ValueError, match=sentence):
        nn.convert(*args, **kwargs)


@pytest.mark.parametrize("name", ["mamba", "convolution", "hyena", "synthesizer_mixture", "lsh"])
def test_mechanisms_without_projections_are_refused(name):
    sentence = f"the mixer of '{name}' has no projections .* have them: softmax, .*sliding_window"
    refused(sentence, model(), name)


def test_bad_arguments_are_named():
    lm = model()
    refused("of 'fnet' has no projections", model(is_causal=False), "fnet")
    refused(
        "the mixer of layer 0 is a Hyena",
        model(mixer="hyena", num_kv_heads=None, max_length=9, positions="none"),
        "softmax",
    )
    refused("unknown mechanism 'windows'", lm, "windows")
    refused("mechanism must be a registered name", lm, ["softmax", "linear"])
    refused("projection 'query' with a kernel of shape .16, 4, 4.*has .16, 4, 16.", lm, "based")
    small = {"name": "based", "feature_dim": 2}
    for heads, mechanism in [
        (4, {"name": "mixture_of_mechanisms", "mechanisms": ["softmax", small]}),
        (2, {"heads": [{"name": "softmax", "num_heads": 2}, {**small, "num_heads": 2}]}),
    ]:
        sentence = f"'query' with a kernel of shape .16, {heads}, 4.*has .16, {heads}, 2"
        refused(sentence, lm, mechanism, rngs=nnx.Rngs(0))
    refused("layers must be different indices .* from 0 to 1, got 2", lm, "linear", layers=2)
    refused("layers must be different .* got .0, 0.", lm, "linear", layers=[0, 0])
    for layers in (True, 1.0, [True], np.array([True, True]), np.array([[0, 1]])):
        refused("layers must be different indices", lm, "linear", layers=layers)
    refused("layers must be indices .* for a TransformerLM", lm, "linear", layers={"encoder": 0})
    refused("layers must be None for one mixer", lm.blocks[0].mixer, "linear", layers=[0])
    refused("rngs must be nnx.Rngs", lm, "linear", rngs=0)
    refused("model must be a Transformer", nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "linear")
    config = nn.TransformerConfig(**SIZES, is_causal=False), nn.TransformerConfig(**SIZES)
    both = nn.EncoderDecoder(nn.EncoderDecoderConfig(*config), rngs=nnx.Rngs(0))
    refused("layers must be a mapping", both, "linear", layers=[0])
    refused("causal", both, "retention", rngs=nnx.Rngs(0))
