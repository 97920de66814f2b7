"""EncoderDecoder: padding on both sides, decoding, and what it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import (
    CrossAttention,
    EncoderDecoder,
    EncoderDecoderConfig,
    TransformerConfig,
    generate,
)

SOURCE = jax.random.randint(jax.random.key(0), (2, 9), 0, 7)
TARGET = jax.random.randint(jax.random.key(1), (2, 6), 0, 5)


def config(encoder=None, decoder=None, **options):
    sizes = {"num_layers": 2, "features": 16, "num_heads": 4}
    return EncoderDecoderConfig(
        encoder=TransformerConfig(7, **{**sizes, "is_causal": False, **(encoder or {})}),
        decoder=TransformerConfig(5, **{**sizes, **(decoder or {})}),
        **options,
    )


call = jax.jit(lambda model, *given, **lengths: model(*given, **lengths))
extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))


def make(*args, **options):
    return EncoderDecoder(config(*args, **options), rngs=nnx.Rngs(0))


MIXERS = [
    "softmax",
    "linear",
    {"name": "sliding_window", "local_window_size": (2, 2)},
    {"name": "nystrom", "num_landmarks": 4},
]


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_padding_changes_nothing(mixer):
    model = make({"mixer": mixer})
    whole = call(model, SOURCE[:, :6], TARGET[:, :4])
    assert whole.shape == (2, 4, 5)
    lengths = {"source_lengths": jnp.array([6, 6]), "target_lengths": jnp.array([4, 4])}
    source, target = SOURCE.at[:, 6:].set(-99), TARGET.at[:, 4:].set(99)
    padded = call(model, source, target, **lengths)[:, :4]
    np.testing.assert_allclose(padded, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("mixer", ["softmax", "retention"])
def test_decoding_is_what_training_saw(mixer, parallel):
    model = make(decoder={"mixer": mixer, "parallel": parallel, "num_layers": 1})
    lengths = jnp.array([9, 4])
    whole = call(model, SOURCE, TARGET, source_lengths=lengths)
    state = model.init_state(model.encode(SOURCE, lengths=lengths), 6, lengths=lengths)
    parts = []
    for piece in (TARGET[:, :3], TARGET[:, 3:4], TARGET[:, 4:]):
        logits, state = extend(model, piece, state)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.length, [6, 6])


def test_every_token_of_the_source_and_the_past_counts():
    model = make()
    before = call(model, SOURCE, TARGET)
    for t in range(SOURCE.shape[1]):
        changed = call(model, SOURCE.at[:, t].set((SOURCE[:, t] + 1) % 7), TARGET)
        assert not np.allclose(changed[:, -1], before[:, -1])
    later = call(model, SOURCE, TARGET.at[:, 3].set((TARGET[:, 3] + 1) % 5))
    np.testing.assert_array_equal(later[:, :3], before[:, :3])
    assert (later[:, 3:] != before[:, 3:]).any((0, 2)).all()


def test_generation_follows_the_source():
    """Greedy, and by hand."""
    model, lengths = make(), jnp.array([9, 4])
    start = jnp.zeros((2, 1), jnp.int32)
    given = model.given(SOURCE, lengths=lengths)
    found = generate(given, start, max_new_tokens=4, temperature=0.0)
    tokens = start
    for _ in range(4):
        logits = call(model, SOURCE, tokens, source_lengths=lengths)
        tokens = jnp.concatenate([tokens, logits[:, -1:].argmax(-1)], 1)
    np.testing.assert_array_equal(found, tokens[:, 1:])


def test_the_sides_may_differ():
    model = make({"features": 24, "num_layers": 1, "positions": "learned", "max_length": 9})
    assert jax.eval_shape(model, SOURCE, TARGET).shape == (2, 6, 5)
    assert model.decoder.blocks[0].cross.context_features == 24


def test_dropout_and_remat():
    model = make({"dropout_rate": 0.5, "remat": True}, {"dropout_rate": 0.5, "remat": True})
    first, again, other = (call(model, SOURCE, TARGET, rngs=jax.random.key(n)) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    gradient = jax.jit(jax.grad(lambda model: model(SOURCE, TARGET).sum()))(model)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_cross_attention_may_have_options():
    named = {"name": "nystrom", "num_landmarks": 4}
    model = make(cross_attention=named)
    assert dict(model.decoder.blocks[0].cross.options)["num_landmarks"] == 4
    assert jax.eval_shape(model, SOURCE, TARGET).shape == (2, 6, 5)


def test_a_context_is_projected_once():
    layer = CrossAttention(16, 4, context_features=8, qk_norm=True, rngs=nnx.Rngs(0))
    x, context = jnp.ones((2, 3, 16)), jax.random.normal(jax.random.key(0), (2, 5, 8))
    lengths = jnp.array([5, 2])
    key, value = layer.project_context(context, lengths=lengths)
    y = layer.attend(x, key, value, context_lengths=lengths)
    np.testing.assert_array_equal(y, layer(x, context, context_lengths=lengths))


def test_refusals():
    with pytest.raises(ValueError, match="needs encoder=TransformerConfig"):
        config({"is_causal": True})
    with pytest.raises(ValueError, match="decoder with is_causal=True"):
        config(decoder={"is_causal": False})
    with pytest.raises(ValueError, match='needs the mechanism\'s "name"'):
        config(cross_attention={"num_landmarks": 4})
    with pytest.raises(ValueError, match="lacks 'cross'"):
        make(cross_attention="retention")
    with pytest.raises(ValueError, match="there are 2 sources, and 3 rows"):
        make().given(SOURCE).init_state(3, 4)
    with pytest.raises(ValueError, match=r"encoded must have shape \(batch, length, 16\)"):
        make().init_state(jnp.ones((2, 3, 8)), 4)
