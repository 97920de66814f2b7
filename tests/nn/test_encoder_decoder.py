"""EncoderDecoder: padding on both sides, decoding, and its components."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import (
    AdditiveCrossAttention,
    CrossAttention,
    EncoderDecoder,
    EncoderDecoderConfig,
    TransformerConfig,
    generate,
)
from effattn.testing.laws import rows_first
from tests.marks import slow
from tests.nn.build import filled, floats

SOURCE = np.random.default_rng(0).integers(0, 7, (2, 9))
TARGET = np.random.default_rng(1).integers(0, 5, (2, 6))


def config(encoder=None, decoder=None, **options):
    sizes = {"num_layers": 1, "features": 16, "num_heads": 4}
    return EncoderDecoderConfig(
        encoder=TransformerConfig(7, **{**sizes, "is_causal": False, **(encoder or {})}),
        decoder=TransformerConfig(5, **{**sizes, **(decoder or {})}),
        **options,
    )


call = jax.jit(lambda model, *given, **lengths: model(*given, **lengths))
extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))


def make(*args, **options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: EncoderDecoder(config(*args, **options), rngs=nnx.Rngs(0)))


MIXERS = [
    "softmax",
    slow("linear"),
    slow({"name": "sliding_window", "local_window_size": (2, 2)}),
    slow({"name": "nystrom", "num_landmarks": 4}),
]


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_padding_changes_nothing(mixer):
    model = make({"mixer": mixer})
    whole = call(model, SOURCE[:, :6], TARGET[:, :4])
    assert whole.shape == (2, 4, 5)
    lengths = {"source_lengths": np.array([6, 6]), "target_lengths": np.array([4, 4])}
    source = np.where(np.arange(9) < 6, SOURCE, -99)
    target = np.where(np.arange(6) < 4, TARGET, 99)
    padded = call(model, source, target, **lengths)[:, :4]
    np.testing.assert_allclose(padded, whole, rtol=1e-4, atol=1e-5)


def test_tokens_outside_a_vocabulary_are_named():
    model = make()
    for source, target, name in ((SOURCE + 99, TARGET, "source"), (SOURCE, TARGET - 99, "target")):
        with pytest.raises(ValueError, match=f"{name} must hold tokens of the vocabulary, from 0"):
            model(source, target)
    state = model.init_state(model.encode(SOURCE), 6)
    with pytest.raises(ValueError, match="tokens must hold tokens of the vocabulary, from 0"):
        model.step(TARGET[:, :1] + 99, state)
    with pytest.raises(ValueError, match="tokens must fit in int32"):
        model.extend(TARGET.astype(np.int64) + 2**32, state)


def test_every_array_of_a_state_has_the_rows_first():
    model = make()
    lengths = np.array([9, 4, 2, 1, 1])

    def begin(rows):
        encoded = model.encode(np.zeros((rows, 9), int), lengths=lengths[:rows])
        return model.init_state(encoded, 6, lengths=lengths[:rows])

    rows_first(begin)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("mixer", ["softmax", "retention"])
def test_decoding_is_what_training_saw(mixer, parallel):
    check_decoding(make(decoder={"mixer": mixer, "parallel": parallel}))


def test_the_classical_recurrent_translator():
    model = make({"mixer": "bidirectional"}, {"mixer": "gru"}, cross_attention="additive")
    assert isinstance(model.decoder.blocks[0].cross, AdditiveCrossAttention)
    check_decoding(model)


def check_decoding(model):
    """Decoding in pieces gives what one call gives."""
    lengths = np.array([9, 4])

    @jax.jit
    def begin(model):
        return model.init_state(model.encode(SOURCE, lengths=lengths), 6, lengths=lengths)

    state, parts = begin(model), []
    for piece in (TARGET[:, :2], TARGET[:, 2:3], TARGET[:, 3:4], TARGET[:, 4:]):
        logits, state = extend(model, piece, state)
        parts.append(logits)
    whole = call(model, SOURCE, TARGET, source_lengths=lengths)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.length, [6, 6])


def changed(tokens, token, kinds):
    """The tokens, with another token at one place."""
    tokens = tokens.copy()
    tokens[:, token] = (tokens[:, token] + 1) % kinds
    return tokens


def test_every_token_of_the_source_and_the_past_counts():
    model = make()
    before = np.asarray(call(model, SOURCE, TARGET))
    for t in range(SOURCE.shape[1]):
        after = np.asarray(call(model, changed(SOURCE, t, 7), TARGET))
        assert not np.allclose(after[:, -1], before[:, -1])
    later = np.asarray(call(model, SOURCE, changed(TARGET, 3, 5)))
    np.testing.assert_array_equal(later[:, :3], before[:, :3])
    assert (later[:, 3:] != before[:, 3:]).any((0, 2)).all()


def test_generation_follows_the_source():
    """Generation agrees with a greedy loop, in which tokens that are not drawn yet do not count."""
    model, lengths = make(), np.array([9, 4])
    given = jax.jit(lambda model: model.given(SOURCE, lengths=lengths))(model)
    found = generate(given, np.zeros((2, 1), int), max_new_tokens=4, temperature=0.0)
    tokens = np.zeros((2, 5), int)
    for t in range(4):
        logits = np.asarray(call(model, SOURCE, tokens, source_lengths=lengths))
        tokens[:, t + 1] = logits[:, t].argmax(-1)
    np.testing.assert_array_equal(found, tokens[:, 1:])


def test_the_sides_may_differ():
    model = make({"features": 24, "positions": "learned", "max_length": 9})
    assert jax.eval_shape(model, SOURCE, TARGET).shape == (2, 6, 5)
    assert model.decoder.blocks[0].cross.context_features == 24


@pytest.mark.slow
def test_dropout_and_remat():
    options = {"dropout_rate": 0.5, "remat": True, "positions": "none"}
    model = make(options, options)

    @jax.jit
    def run(model, key):
        logits, pull_back = jax.vjp(lambda model: model(SOURCE, TARGET, rngs=key), model)
        return logits, pull_back(jnp.ones_like(logits))

    (first, gradient), (again, _), (other, _) = (run(model, jax.random.key(n)) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_cross_attention_may_have_options():
    named = {"name": "softmax", "logits_soft_cap": 4.0, "sink": nnx.Param(jnp.zeros(4))}
    model = make(cross_attention=named)
    assert dict(model.decoder.blocks[0].cross.options)["logits_soft_cap"] == 4
    assert jax.eval_shape(model, SOURCE, TARGET).shape == (2, 6, 5)


NEAR = {"name": "sliding_window", "local_window_size": 1}


def test_a_window_on_the_source_follows_the_target():
    model = make(cross_attention=NEAR)

    @jax.jit
    def run(model):
        state, parts = model.init_state(model.encode(SOURCE), 6), []
        for piece in (TARGET[:, :4], TARGET[:, 4:]):
            logits, state = model.extend(piece, state)
            parts.append(logits)
        return model(SOURCE, TARGET), jnp.concatenate(parts, 1)

    whole, pieces = run(model)
    np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [NEAR, {"name": "cosformer", "max_length": 9}], ids=str)
def test_queries_may_stand_after_others(attention):
    name, options = attention["name"], {k: v for k, v in attention.items() if k != "name"}
    layer = filled(lambda: CrossAttention(16, 4, name, rngs=nnx.Rngs(0), **options))
    x, context, before = floats(2, 6, 16), floats(2, 9, 16, seed=1), np.array([2, 4])

    @jax.jit
    def run(layer):
        later = jnp.stack([x[0, 2:4], x[1, 4:]])
        return layer(x, context), layer(later, context, query_offset=before)

    whole, later = run(layer)
    np.testing.assert_allclose(later, [whole[0, 2:4], whole[1, 4:]], rtol=1e-5, atol=1e-6)


def test_a_context_is_projected_once():
    layer = filled(
        lambda: CrossAttention(16, 4, context_features=8, qk_norm=True, rngs=nnx.Rngs(0))
    )
    x, context, lengths = floats(2, 3, 16), floats(2, 5, 8), np.array([5, 2])

    @jax.jit
    def run(layer):
        key, value = layer.project_context(context, lengths=lengths)
        y = layer.attend(x, key, value, context_lengths=lengths)
        return y, layer(x, context, context_lengths=lengths)

    np.testing.assert_array_equal(*run(layer))


def test_refusals():
    with pytest.raises(ValueError, match="encoder must have is_causal=False .* got True"):
        config({"is_causal": True})
    with pytest.raises(ValueError, match="decoder must have is_causal=True, .* False$"):
        config(decoder={"is_causal": False})
    with pytest.raises(ValueError, match='cross_attention must be .* as "name" and options'):
        config(cross_attention={"num_landmarks": 4})
    with pytest.raises(ValueError, match="lacks 'cross'"):
        make(cross_attention="retention")
    with pytest.raises(ValueError, match="'nystrom' cannot decode .* one of both: softmax"):
        make(cross_attention="nystrom")
    with pytest.raises(ValueError, match="query_offset was given, but attention 'nystrom' lacks"):
        layer = CrossAttention(16, 4, "nystrom", rngs=nnx.Rngs(0))
        layer(np.ones((2, 3, 16)), np.ones((2, 3, 16)), query_offset=1)
    with pytest.raises(ValueError, match="batch must be 2, the number of encoded sources, got 3"):
        jax.eval_shape(lambda: make().given(SOURCE).init_state(3, 4))
    with pytest.raises(ValueError, match=r"encoded must have shape \(batch, length, 16\)"):
        make().init_state(np.ones((2, 3, 8)), 4)
    for init_state in (
        lambda: make().init_state(np.ones((2, 3, 16)), 4, bool),
        lambda: make().given(SOURCE).init_state(2, 4, bool),
    ):
        with pytest.raises(ValueError, match="dtype of a decode state must be .* got 'bool'"):
            jax.eval_shape(init_state)
