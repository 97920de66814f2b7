"""Global tokens of Longformer in models: a mask in each call, and named positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.nn import (
    EncoderDecoder,
    EncoderDecoderConfig,
    HybridHeads,
    Transformer,
    TransformerConfig,
    TransformerLM,
    generate,
)
from tests.marks import slow
from tests.nn.build import filled, floats
from tests.nn.calls import call, extend

MASKED = {"name": "longformer", "local_window_size": (1, 0), "max_global": 3}
NAMED = {"name": "longformer", "local_window_size": (1, 0), "global_tokens": (1, 5)}
CONFIG = TransformerConfig(
    vocab_size=13, num_layers=2, features=16, num_heads=4, mixer=(MASKED, "softmax")
)
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)
MASK = np.isin(np.arange(9), (1, 5)) | np.zeros((2, 1), bool)
HEADS = {"heads": [{**MASKED, "num_heads": 2}, {"name": "softmax", "num_heads": 2}]}


def made(kind=TransformerLM, **changes):
    """A model with random parameters in place of its initial parameters."""
    config = dataclasses.replace(CONFIG, **changes)
    return filled(lambda: kind(config, rngs=nnx.Rngs(0)), spread=0.2)


def close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


VARIANTS = {
    "layers": {},
    "groups of heads": {"mixer": HEADS, "num_layers": 1},
    "reversible": {"reversible": True, "tie_embeddings": False, "num_layers": 1, "mixer": MASKED},
    "remat": {"remat": True, "num_layers": 1, "mixer": MASKED},
}


@pytest.mark.parametrize(
    "variant", ["layers", "groups of heads", slow("reversible"), slow("remat")]
)
def test_a_mask_in_a_call_chooses_global_tokens_and_decoding_agrees(variant):
    model = made(**VARIANTS[variant])
    whole = call(model, TOKENS, global_mask=MASK)
    assert np.abs(whole - call(model, TOKENS, global_mask=MASK & False)).max() > 1e-3
    state, logits = model.init_state(2, 9), []
    for piece in (slice(0, 4), slice(4, 8)):
        y, state = extend(model, TOKENS[:, piece], state, global_mask=MASK[:, piece])
        logits.append(y)
    close(np.concatenate(logits, 1), whole[:, :8])


def test_named_positions_are_those_of_a_mask():
    """In rows, in packed documents and in decoding, with one set of parameters."""
    masked, named = made(mixer=MASKED), made(mixer={**NAMED, "max_global": 4})
    whole = call(named, TOKENS)
    close(whole, call(masked, TOKENS, global_mask=MASK))
    found = generate(named, TOKENS[:, :4], max_new_tokens=5, temperature=0.0)
    continued = call(named, np.concatenate([TOKENS[:, :4], found], 1))
    np.testing.assert_array_equal(found, np.argmax(continued[:, 3:8], -1))
    # The second document begins at token 6, and has one global token.
    ids = np.tile([1] * 6 + [2] * 3, (2, 1))
    packed = call(named, TOKENS, segment_ids=ids)
    close(packed[:, :6], whole[:, :6])
    close(packed[:, 6:], call(named, np.roll(TOKENS, 3, axis=1))[:, :3])


@pytest.mark.parametrize("kind", [Transformer, slow(TransformerLM)])
def test_masks_suit_padding_and_packed_documents(kind):
    """Marks in the padding have no effect, and global tokens stay in their documents."""
    mixer = {**MASKED, "local_window_size": 1, "max_global": 4}
    model = made(kind, mixer=mixer, is_causal=False)
    alone = call(model, TOKENS[:, :6], global_mask=MASK[:, :6])
    padded = np.where(np.arange(9) < 6, TOKENS, 10**6)
    marked = MASK | (np.arange(9) >= 6)
    close(call(model, padded, lengths=np.array([6, 6]), global_mask=marked)[:, :6], alone)
    ids = np.tile([1] * 6 + [2] * 3, (2, 1))
    mask = MASK | (np.arange(9) == 8)
    packed = call(model, TOKENS, segment_ids=ids, global_mask=mask)
    close(packed[:, :6], alone)
    close(packed[:, 6:], call(model, TOKENS[:, 6:], global_mask=mask[:, 6:]))


def test_both_sides_of_an_encoder_decoder_take_masks():
    sizes = {"num_layers": 1, "mixer": MASKED}
    encoder = dataclasses.replace(
        CONFIG, num_layers=1, mixer={**MASKED, "local_window_size": 1}, is_causal=False
    )
    config = EncoderDecoderConfig(encoder, dataclasses.replace(CONFIG, **sizes))
    model = filled(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0)), spread=0.2)

    @jax.jit
    def run(model, of_source, of_target):
        masks = {"source_global_mask": of_source, "target_global_mask": of_target}
        whole = model(TOKENS, TOKENS[:, ::-1], **masks)
        given = model.given(TOKENS, global_mask=of_source)
        state = given.init_state(2, 9)
        first, state = model.extend(TOKENS[:, :4:-1], state, global_mask=of_target[:, :4])
        second, _ = model.extend(TOKENS[:, 4::-1], state, global_mask=of_target[:, 4:])
        return whole, jnp.concatenate([first, second], 1)

    whole, decoded = run(model, MASK, MASK)
    close(decoded, whole)
    for other in ((MASK & False, MASK), (MASK, MASK & False)):
        assert np.abs(run(model, *other)[0] - whole).max() > 1e-3


def test_masks_that_no_mixer_takes_are_refused():
    for model in (made(mixer="softmax"), made(mixer=NAMED)):
        message = "a mask of global tokens was given, but no mixer of this model takes it"
        with pytest.raises(ValueError, match=message):
            model(TOKENS, global_mask=MASK)
        with pytest.raises(ValueError, match=message):
            model.extend(TOKENS, model.init_state(2, 9), global_mask=MASK)
    with pytest.raises(ValueError, match=r"global_mask must be bool of shape \(2, 9\)"):
        made()(TOKENS, global_mask=MASK[:, :5])
    heads = HybridHeads(16, 2, [{"name": "softmax", "num_heads": 2}], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="global_mask was given, but no group takes it"):
        heads(floats(2, 9, 16), global_mask=MASK)


@pytest.mark.devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mask_is_divided_with_its_tokens(kind):
    model = made(mixer=(MASKED, HEADS))
    tokens, mask = np.tile(TOKENS[:, :8], (2, 1)), np.tile(MASK[:, :8], (2, 1))
    alone = call(model, tokens, global_mask=mask)
    sizes = (2, 2) if kind == AxisType.Auto else (2, 1)
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("data", "sequence"), (kind,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec("data", "sequence"))
        tokens, mask = (jax.device_put(x, place) for x in (tokens, mask))
        close(call(model, tokens, global_mask=mask), alone)
