"""Layers that share keys and values: cross-layer attention, YOCO, decode states, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import planning
from effattn.decode import ContiguousState, generate
from effattn.nn import (
    EncoderDecoderConfig,
    Experts,
    PipelinedLM,
    SharedKeysAttention,
    TransformerConfig,
    TransformerLM,
    convert,
    prune_heads,
)
from tests.nn.build import filled
from tests.nn.calls import call, extend

CONFIG = TransformerConfig(
    vocab_size=13, num_layers=4, features=16, num_heads=4, num_kv_heads=2, qk_norm=True
)
WINDOW = {"name": "sliding_window", "local_window_size": (2, 0)}
CROSS_LAYER = {"keys_from": (0, 0, 2, 2)}
YOCO = {
    "keys_from": tuple(min(n, 2) for n in range(4)),
    "mixer": (WINDOW, "linear", "softmax", "softmax"),
}
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)


def make(**changes):
    return TransformerLM(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


def made(**changes):
    return filled(lambda: make(**changes), spread=0.1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(YOCO, id="yoco"),
        pytest.param(CROSS_LAYER, id="cross-layer", marks=pytest.mark.slow),
    ],
)
def model(request):
    return made(**request.param)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def by_hand(model, tokens):
    """The model with layers 2 and 3 written out; layer 3 reads the keys and values of layer 2."""
    x = model.embed(jnp.asarray(tokens))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rotate = model.config.rotary()
    time = np.arange(tokens.shape[1])
    for number, block in enumerate(model.blocks):
        h, mixer = block.mixer_norm(x), block.mixer
        if model.config.key_source(number) is None:
            x = x + mixer(h)
        else:
            query = rotate(mixer.query_norm(mixer.query(h)), positions)
            if model.config.key_source(number) == number:
                key, value = rotate(mixer.key_norm(mixer.key(h)), positions), mixer.value(h)
            logits = jnp.einsum("btnh,bsnh->bnts", query, key.repeat(2, 2)) / query.shape[-1] ** 0.5
            logits = jnp.where(time <= time[:, None], logits, -jnp.inf)
            weights = jax.nn.softmax(logits)
            x = x + mixer.out(jnp.einsum("bnts,bsnh->btnh", weights, value.repeat(2, 2)))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.norm(x) @ model.embed.embedding[...].T


def test_later_layers_read_the_keys_and_values_of_earlier_ones(model):
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(by_hand)(model, TOKENS)
    close(call(model, TOKENS), expected)


def test_any_split_equals_the_whole_with_shared_keys_in_the_state_once(model):
    whole, state, start = call(model, TOKENS), model.init_state(2, 9), 0
    caches = [layer for layer in state.layers if isinstance(layer, ContiguousState)]
    sources = {model.config.key_source(n) for n in range(4)} - {None}
    assert len(caches) == len(sources)
    for layer in range(4):
        if model.config.key_source(layer) not in (None, layer):
            assert sum(x.size for x in jax.tree.leaves(state.layers[layer])) == 2
    for size in (4, 1, 4):
        logits, state = extend(model, TOKENS[:, start : start + size], state)
        close(logits, whole[:, start : start + size])
        start += size


def test_padding_and_documents_do_as_they_do_alone():
    model = made(num_layers=2, keys_from=(0, 0))
    ids = np.repeat([[1, 2, 0]], [4, 3, 2], 1).repeat(2, 0)
    packed = call(model, TOKENS, segment_ids=ids)
    close(packed[:, :4], call(model, TOKENS[:, :4]))
    close(packed[:, 4:7], call(model, TOKENS[:, 4:7]))
    # Rows of unequal length continue as each would alone.
    whole, lengths = call(model, TOKENS), np.array([4, 2])
    _, state = extend(model, TOKENS[:, :4], model.init_state(2, 9), lengths)
    logits, _ = extend(model, np.stack([TOKENS[0, 4:6], TOKENS[1, 2:4]]), state)
    close(logits[0], whole[0, 4:6])
    close(logits[1], whole[1, 2:4])


def test_gradients_reach_shared_projections_also_with_remat():
    def loss(model):
        return jnp.mean(model(TOKENS, rngs=jax.random.key(0)) ** 2)

    two = {"num_layers": 2, "keys_from": (0, 0), "dropout_rate": 0.1}
    kept, again = (jax.jit(jax.grad(loss))(made(**two, remat=remat)) for remat in (False, True))
    jax.tree.map(close, nnx.state(again), nnx.state(kept))
    assert np.any(kept.blocks[0].mixer.key.kernel[...] != 0)
    assert not hasattr(kept.blocks[1].mixer, "key")


@pytest.mark.slow
def test_generation_and_experts():
    model = made(**CROSS_LAYER, experts=Experts(2, 1))
    out = generate(model, TOKENS[:, :3], max_new_tokens=4, temperature=0.0)
    logits, stats = model.with_routing(out)
    assert len(stats) == 4
    np.testing.assert_array_equal(np.argmax(logits, -1)[:, 2:-1], out[:, 3:])


@pytest.mark.parametrize("several", [list, np.array])
def test_any_sequence_names_the_layers(several):
    changes = {**CROSS_LAYER, "keys_from": several(CROSS_LAYER["keys_from"])}
    ours, expected = (dataclasses.replace(CONFIG, **each) for each in (changes, CROSS_LAYER))
    assert ours == expected and hash(ours) == hash(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys_from": (0, 0, 1, 3)}, "keys_from must be a sequence of num_layers=4 ints"),
        ({"keys_from": (0, 2, 2, 2)}, "keys_from must be a sequence of num_layers=4 ints"),
        ({"keys_from": (0, 0)}, "keys_from must be a sequence of num_layers=4 ints"),
        (
            {**CROSS_LAYER, "mixer": WINDOW},
            "layers that share keys and values must have a mechanism among softmax, .* got 'sl",
        ),
        (
            {**CROSS_LAYER, "mixer": {"heads": [{"name": "softmax", "num_heads": 4}]}},
            r"layers that share keys and values \(keys_from\) must have one registered mechanism",
        ),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: make(**changes))


def test_layers_with_other_sizes_cannot_read():
    mixers = ({"name": "softmax", "num_kv_heads": 4}, "softmax", "softmax", "softmax")
    model = make(**CROSS_LAYER, mixer=mixers)
    with pytest.raises(ValueError, match="keys of another layer must have 2 heads of size 4"):
        jax.eval_shape(lambda: model(TOKENS))


def test_keys_of_other_tokens_are_refused():
    with_keys, reader = (
        SharedKeysAttention(16, 4, has_keys=has_keys, rngs=nnx.Rngs(0))
        for has_keys in (True, False)
    )
    x = np.ones((1, 4, 16), np.float32)
    _, shapes = jax.eval_shape(lambda: with_keys.with_shared(x))
    keys = jax.tree.map(lambda k: jnp.zeros(k.shape), shapes)
    empty = with_keys.init_state(1, 4)
    for wrong, message in (
        (lambda: reader.with_shared(x, jax.tree.map(lambda k: k[:, :2], keys)), r"got \(1, 2\)"),
        (lambda: reader.with_shared(x, "ab"), "shared must be the keys and values .*, got str"),
        (lambda: reader.with_shared(x, (*keys, keys[0])), "shared must be the keys and values"),
        (
            lambda: with_keys.with_shared(x, keys),
            "shared must be None in a layer with has_keys=True",
        ),
        (
            lambda: reader.extend_with_shared(x, reader.init_state(1, 4), empty),
            r"after the same tokens, \[4\] a row, got \[0\]; extend that layer first",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_what_takes_layers_apart_refuses():
    model = make(**CROSS_LAYER)
    reader = model.blocks[1].mixer
    assert isinstance(reader, SharedKeysAttention)
    encoder = dataclasses.replace(CONFIG, is_causal=False)
    refused = {
        "must be given to a layer that reads": lambda: reader(jnp.zeros((1, 3, 16))),
        "cannot be divided in stages": lambda: PipelinedLM(model, 2),
        "a new mixer of one layer would change": lambda: convert(model, "sigmoid"),
        "cannot be pruned for each layer": lambda: prune_heads(model, [[0]] * 4),
        "plans do not count": lambda: planning.plan(model.config, "softmax", 64, {}, "h100"),
        "decoder must have keys_from=None": lambda: EncoderDecoderConfig(encoder, model.config),
    }
    for message, run in refused.items():
        with pytest.raises(ValueError, match=message):
            run()
