"""Reversible models, and the language model of Reformer, by options of `TransformerConfig`."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.analysis import cost, planning
from effattn.decode import generate
from effattn.nn import (
    Block,
    EncoderDecoder,
    EncoderDecoderConfig,
    Experts,
    PipelinedLM,
    Transformer,
    TransformerConfig,
    TransformerLM,
)
from tests.nn.build import filled, floats
from tests.nn.calls import call, extend

CONFIG = TransformerConfig(
    vocab_size=13,
    num_layers=2,
    features=16,
    num_heads=2,
    mixer={"name": "lsh", "num_rounds": 2, "num_buckets": 4, "chunk_length": 4},
    feed_forward="relu",
    norm="layer",
    tie_embeddings=False,
    reversible=True,
    feed_forward_chunk_size=4,
)
PLAIN = dataclasses.replace(CONFIG, mixer="softmax", feed_forward_chunk_size=None)
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "reformer.npz"


def made(config=CONFIG, **changes):
    """A model with random parameters in place of its initial parameters."""
    config = dataclasses.replace(config, **changes)
    return filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)), spread=0.1)


def close(ours, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


def layer_by_layer(model, tokens, key=None):
    """The logits by the formula of the paper, with dropout if there is a key."""
    embed_key, *keys = (jax.random.fold_in(key, n) if key is not None else None for n in (2, 0, 1))
    x = model.embed(tokens)
    if key is not None:
        kept = jax.random.bernoulli(embed_key, 1 - model.config.dropout_rate, x.shape)
        x = jnp.where(kept, x / (1 - model.config.dropout_rate), 0)
    x1 = x2 = x
    for block, key in zip(model.blocks, keys, strict=True):
        if key is None:
            x1 = x1 + block.mixer(block.mixer_norm(x2))
            x2 = x2 + block.feed_forward(block.feed_forward_norm(x1))
        else:
            x1, x2 = block((x1, x2), rngs=key)
    return model.head(model.norm(jnp.concatenate([x1, x2], -1)))


def loss(logits):
    return jnp.mean(-jax.nn.log_softmax(logits)[:, :-1, 0])


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_outputs_and_gradients_are_those_of_the_layers_one_by_one(rate):
    """With dropout, the backward pass drops what the forward pass dropped."""
    mixer = PLAIN.mixer if rate else CONFIG.mixer
    model, key = made(mixer=mixer, dropout_rate=rate), jax.random.key(3) if rate else None

    @jax.jit
    def both(model):
        ours = jax.value_and_grad(lambda model: loss(model(TOKENS, rngs=key)))(model)
        expected = jax.value_and_grad(lambda model: loss(layer_by_layer(model, TOKENS, key)))
        return ours, expected(model)

    close(*both(model))


@pytest.mark.parametrize("name", ["masked", "causal"])
def test_logits_and_gradients_are_those_of_transformers(name):
    with np.load(GOLDEN) as file:
        arrays = {key: file[key] for key in file.files if key.startswith(name)}
    arrays = {key.removeprefix(f"{name}/"): x for key, x in arrays.items()}
    length = arrays["tokens"].shape[1]
    local = {"name": "block_sparse", "block_size": 4, "block_mask": lambda m, n: m - n <= 1}
    hashed = {"name": "lsh", "num_rounds": 1}
    mixer = {
        "masked": {**hashed, "num_buckets": (8,), "chunk_length": 6},
        # transformers does not hash the tokens of a single chunk.
        "causal": (local, {**hashed, "num_buckets": 1, "chunk_length": length}),
    }
    model = TransformerLM(
        dataclasses.replace(
            CONFIG,
            mixer=mixer[name],
            is_causal=name == "causal",
            hidden_features=32,
            norm_epsilon=1e-12,
            positions="learned",
            max_length=length,
        ),
        rngs=nnx.Rngs(0),
    )
    # The feed-forward layers of Reformer have biases, and its attention layers have none.
    with_bias = TransformerLM(
        dataclasses.replace(model.config, mixer="softmax", use_bias=True), rngs=nnx.Rngs(0)
    )
    for block, other in zip(model.blocks, with_bias.blocks, strict=True):
        block.feed_forward = other.feed_forward
    fill(model, {n.removeprefix("parameter/"): x for n, x in arrays.items()})
    if name == "masked":
        for block in model.blocks:
            block.mixer.rotations[...] = jnp.moveaxis(arrays["rotations"], 2, 1)

    @jax.jit
    def run(model):
        logits, pull_back = jax.vjp(lambda model: model(arrays["tokens"]), model)
        (gradient,) = pull_back(arrays["cotangent"])
        of_hidden = gradient.blocks[0].feed_forward.up.kernel[...]
        return logits, gradient.embed.embedding[...], of_hidden.T

    logits, of_embeddings, of_hidden = run(model)
    close(logits, arrays["logits"])
    close(of_embeddings, arrays["gradient_of_embeddings"], 1e-4)
    close(of_hidden, arrays["gradient_of_hidden"], 1e-4)


def fill(model, arrays):
    """Copies the parameters of a Reformer of transformers into the model."""

    def put(parameter, name):
        array = arrays[name]
        array = array.T if name.endswith("weight") and "embeddings" not in name else array
        parameter[...] = jnp.asarray(array).reshape(parameter[...].shape)

    def put_layer(layer, name):
        put(layer.kernel if hasattr(layer, "kernel") else layer.scale, f"{name}.weight")
        if getattr(layer, "bias", None) is not None:
            put(layer.bias, f"{name}.bias")

    put(model.embed.embedding, "reformer.embeddings.word_embeddings.weight")
    learned = "reformer.embeddings.position_embeddings.embedding.weight"
    put(model.positions.embedding, learned)
    for number, block in enumerate(model.blocks):
        layer = f"reformer.encoder.layers.{number}"
        attention, feed_forward = f"{layer}.attention", f"{layer}.feed_forward"
        put_layer(block.mixer_norm, f"{attention}.layer_norm")
        for name in ("query", "key", "value", "query_key"):
            if hasattr(block.mixer, name):
                put_layer(getattr(block.mixer, name), f"{attention}.self_attention.{name}")
        put_layer(block.mixer.out, f"{attention}.output.dense")
        put_layer(block.feed_forward_norm, f"{feed_forward}.layer_norm")
        put_layer(block.feed_forward.up, f"{feed_forward}.dense.dense")
        put_layer(block.feed_forward.down, f"{feed_forward}.output.dense")
    put_layer(model.norm, "reformer.encoder.layer_norm")
    put_layer(model.head, "lm_head.decoder")


def test_it_decodes_as_it_trains():
    """In pieces, with unequal prompts; the greedy tokens are those of whole calls."""
    model = made()
    whole, state = call(model, TOKENS), model.init_state(2, 9)
    prompt, lengths = np.where([[True] * 4, [True] * 2 + [False] * 2], TOKENS[:, :4], -1), [4, 2]
    first, state = extend(model, prompt, state, np.array(lengths))
    rest = np.stack([TOKENS[0, 4:9], TOKENS[1, 2:7]])
    second, state = extend(model, rest, state)
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
        close(second[row], whole[row, length : length + 5])
    np.testing.assert_array_equal(state.length, [9, 7])
    found = generate(model, TOKENS[:, :6], max_new_tokens=3, temperature=0.0)
    continued = call(model, np.concatenate([TOKENS[:, :6], found], 1))
    np.testing.assert_array_equal(found, np.argmax(continued[:, 5:8], -1))


def test_padding_and_other_documents_change_nothing():
    model = made()
    whole = call(model, TOKENS)
    padded = np.where(np.arange(9) < 6, TOKENS, 10**6)
    close(call(model, padded, np.array([6, 6]))[:, :6], whole[:, :6])
    ids = np.tile([1, 1, 1, 4, 4, 4, 4, 4, 0], (2, 1))
    packed = call(model, np.where(ids == 0, 10**6, TOKENS), None, ids)
    close(packed[:, :3], whole[:, :3])
    close(packed[:, 3:8], call(model, np.roll(TOKENS, -3, axis=1))[:, :5])


def test_gradients_do_not_read_the_padding():
    model, lengths = made(num_layers=1), np.array([6, 4])

    @jax.jit
    @jax.grad
    def gradient(model, tokens):
        logits = model(tokens, lengths=lengths)
        return jnp.sum(jnp.where(np.arange(9)[:, None] < lengths[:, None, None], logits, 0) ** 2)

    padded = np.where(np.arange(9) < lengths[:, None], TOKENS, 10**6)
    jax.tree.map(np.testing.assert_array_equal, *(gradient(model, t) for t in (TOKENS, padded)))


def test_losses_of_experts_reach_the_routers():
    model = made(PLAIN, experts=Experts(3, 1), num_layers=1)

    @jax.jit
    def both(model):
        def of_model(model):
            _, routing = model.with_routing(TOKENS)
            return sum(each.load_balancing_loss + each.router_z_loss for each in routing)

        def one_by_one(model):
            (block,), x = model.blocks, model.embed(TOKENS)
            x1 = x + block.mixer(block.mixer_norm(x))
            _, stats = block.feed_forward.with_routing(block.feed_forward_norm(x1))
            return stats.load_balancing_loss + stats.router_z_loss

        return [jax.value_and_grad(f)(model) for f in (of_model, one_by_one)]

    ours, expected = both(model)
    close(ours, expected)
    assert np.any(ours[1].blocks[0].feed_forward.router.kernel[...])


def test_both_sides_of_an_encoder_decoder_are_reversible():
    """Gradients reach the encoder through all layers of the decoder, and decoding agrees."""
    encoder = dataclasses.replace(PLAIN, is_causal=False, num_layers=1)
    config = EncoderDecoderConfig(encoder, dataclasses.replace(PLAIN, num_layers=1))
    model = filled(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0)), spread=0.1)

    def one_by_one(model, source, target):
        (layer,), (block,) = model.encoder.blocks, model.decoder.blocks
        x = model.encoder.embed(source)
        x1 = x + layer.mixer(layer.mixer_norm(x))
        x2 = x + layer.feed_forward(layer.feed_forward_norm(x1))
        encoded = model.encoder.norm(jnp.concatenate([x1, x2], -1))
        y = model.decoder.embed(target)
        y1 = y + block.mixer(block.mixer_norm(y))
        y2 = y + block.cross(block.cross_norm(y1), encoded)
        y1 = y1 + block.feed_forward(block.feed_forward_norm(y2))
        return model.decoder.head(model.decoder.norm(jnp.concatenate([y2, y1], -1)))

    @jax.jit
    def run(model):
        functions = (lambda *given: given[0](*given[1:])), one_by_one
        both = [
            jax.value_and_grad(lambda model, f=f: loss(f(model, TOKENS, TOKENS[:, ::-1])))(model)
            for f in functions
        ]
        state = model.init_state(model.encode(TOKENS), 9)
        first, state = model.extend(TOKENS[:, :4], state)
        second, _ = model.extend(TOKENS[:, 4:], state)
        return both, jnp.concatenate([first, second], 1), model(TOKENS, TOKENS)

    (ours, expected), decoded, whole = run(model)
    close(ours, expected)
    close(decoded, whole)


def test_streams_of_a_bfloat16_model_are_float32(monkeypatch):
    """Rounded to bfloat16, the inverse would not give back what the layers read."""
    seen, norm = [], nnx.LayerNorm.__call__

    def spy(self, x, **options):
        seen.append(x.dtype)
        return norm(self, x, **options)

    monkeypatch.setattr(nnx.LayerNorm, "__call__", spy)
    model = made(PLAIN, dtype="bfloat16")
    logits = jax.eval_shape(model, TOKENS)
    decoded, _ = jax.eval_shape(model.extend, TOKENS, model.init_state(2, 9))
    assert set(seen) == {jnp.dtype("float32")} and logits.dtype == decoded.dtype == jnp.float32


def temporary_bytes(features=32, length=512, **changes):
    sizes = {"features": features, "vocab_size": 8, **changes}
    model = nnx.eval_shape(
        lambda: TransformerLM(dataclasses.replace(PLAIN, **sizes), rngs=nnx.Rngs(0))
    )
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    gradient = jax.grad(lambda model, tokens: loss(model(tokens)))
    return cost.temporary_bytes(jax.jit(gradient).trace(model, tokens))


@pytest.mark.slow
def test_activations_take_the_memory_of_one_layer():
    """Temporary memory of forward and backward; in other models it grows with the depth."""
    ours = [temporary_bytes(num_layers=depth) for depth in (2, 4, 8)]
    assert max(ours) <= 1.1 * min(ours), ours
    others = [temporary_bytes(num_layers=depth, reversible=False) for depth in (2, 4)]
    assert others[1] > 1.6 * others[0] and others[0] > ours[0], (others, ours)


def test_hidden_features_take_the_memory_of_a_chunk():
    """Temporary memory of forward and backward, most of it hidden features."""
    whole, some, few = (
        temporary_bytes(
            num_layers=1, length=2048, hidden_features=1024, feed_forward_chunk_size=size
        )
        for size in (None, 512, 128)
    )
    assert some < 0.45 * whole and few < 0.5 * some, (whole, some, few)


@pytest.mark.devices
def test_it_trains_and_decodes_on_explicit_axes_of_a_mesh():
    mesh = jax.make_mesh((2,), ("rows",), (AxisType.Explicit,), devices=jax.devices()[:2])
    model = made(PLAIN, feed_forward_chunk_size=4)

    def run(model, tokens):
        return jax.jit(jax.grad(lambda m: loss(m(tokens))))(model), call(model, tokens)

    alone = run(model, TOKENS)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), model
        )
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("rows")))
        together = run(placed, tokens)
        decoded, _ = extend(placed, tokens, placed.init_state(2, 9))
    close(together, alone)
    close(decoded, alone[1])


@pytest.mark.devices
def test_it_trains_on_automatic_axes_of_a_mesh():
    model = made(PLAIN, feed_forward_chunk_size=4)
    tokens = np.tile(TOKENS[:, :8], (2, 1))

    def run(model):
        return jax.jit(jax.value_and_grad(lambda m: loss(m(tokens))))(model)

    alone = run(model)
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        close(run(model), alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": True}, "reversible=True takes no parallel"),
        ({"post_norm": True}, "takes no post_norm, as a norm of the sum of a stream has no"),
        ({"remat": True}, "takes no remat, as it recomputes each layer already"),
        ({"keys_from": (0, 0)}, r"takes no keys_from, .* got keys_from=\(0, 0\)"),
        ({"value_residual": True, "mixer": "rwkv7"}, "takes no value_residual"),
        ({"reversible": 1}, "reversible must be True or False, got 1"),
        ({"feed_forward_chunk_size": 0}, "feed_forward_chunk_size must be an int, 1 or more"),
        (
            {"feed_forward_chunk_size": 4, "experts": Experts(2)},
            "feed_forward_chunk_size is for feed-forward layers that map each token alone",
        ),
        (
            {"feed_forward_chunk_size": 4, "feed_forward": "rwkv4"},
            "feed_forward_chunk_size is for .* got 'rwkv4'",
        ),
    ],
)
def test_options_that_do_not_suit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **changes)


def test_calls_that_do_not_suit_are_refused():
    tied = dataclasses.replace(PLAIN, tie_embeddings=True)
    assert Transformer(tied, rngs=nnx.Rngs(0))(TOKENS).shape == (2, 9, 32)
    message = "projection 32 features .*, but the token embeddings have 16, .*tie_embeddings=False"
    with pytest.raises(ValueError, match=message):
        TransformerLM(tied, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("x must be two streams (x1, x2)")):
        Block(PLAIN, 0, rngs=nnx.Rngs(0))(floats(1, 3, 16))
    with pytest.raises(ValueError, match="model must have reversible=False: plans do not count"):
        planning.plan(PLAIN, None, 64, {}, "h100")
    with pytest.raises(ValueError, match="reversible=True cannot be divided in stages"):
        PipelinedLM(made(PLAIN), 2)
