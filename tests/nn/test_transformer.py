"""The Transformer language model with each mixer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.decode import ContiguousState, RecurrentState, RingState, generate
from effattn.testing.laws import rows_first
from tests.marks import slow, slow_but_for
from tests.nn.calls import call, extend
from tests.nn.small_models import PLAIN, TOKENS, WINDOW, close, loss, made

VARIANTS = {
    "softmax, rotary": {"num_layers": 1},
    "window, alibi, parallel": {
        "mixer": WINDOW,
        "positions": "alibi",
        "parallel": True,
        "num_layers": 1,
    },
    "mixed, learned, untied": {
        "mixer": ("linear", WINDOW),
        "positions": "learned",
        "max_length": 10,
        "tie_embeddings": False,
    },
}
QUICK = "softmax, rotary", "mixed, learned, untied"


@pytest.fixture(params=slow_but_for(QUICK, VARIANTS))
def model(request):
    return made(**VARIANTS[request.param])


def changed(token):
    """`TOKENS` with another token at one place."""
    tokens = TOKENS.copy()
    tokens[:, token] = (tokens[:, token] + 1) % 13
    return tokens


def padded(*pieces):
    """Pieces of the rows as tokens `(2, 5)`, with -1 after each piece; and the pieces' lengths."""
    tokens = np.full((2, 5), -1, np.int32)
    for row, piece in zip(tokens, pieces, strict=True):
        row[: len(piece)] = piece
    return tokens, np.array([len(piece) for piece in pieces])


def test_any_split_equals_the_whole(model):
    """Two of the four pieces are whole, and two end in padding."""
    state = model.init_state(2, 9)
    outs = []
    for piece in (slice(0, 3), slice(3, 6)):
        logits, state = extend(model, TOKENS[:, piece], state)
        outs.append(logits)
    for piece in (slice(6, 7), slice(7, 9)):
        tokens, lengths = padded(*TOKENS[:, piece])
        logits, state = extend(model, tokens, state, lengths)
        outs.append(logits[:, : lengths[0]])
    close(np.concatenate(outs, 1), call(model, TOKENS))
    np.testing.assert_array_equal(state.length, [9, 9])


def test_unequal_prompts_continue_as_each_would_alone(model):
    prompt, lengths = padded(TOKENS[0, :5], TOKENS[1, :2])
    first, state = extend(model, prompt, model.init_state(2, 9), lengths)
    second, _ = extend(model, np.stack([TOKENS[0, 5:8], TOKENS[1, 2:5]]), state)
    whole = call(model, TOKENS)
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
        close(second[row], whole[row, length : length + 3])


def test_packed_documents_give_what_they_give_alone(model):
    """Alone, each document begins a row, and the tokens after it have no effect on it."""
    ids = np.tile([1, 1, 1, 4, 4, 4, 4, 4, 0], (2, 1))
    tokens = np.where(ids == 0, 10**6, TOKENS)
    out = call(model, tokens, None, ids)
    first, second = call(model, TOKENS), call(model, np.roll(TOKENS, -3, axis=1))
    close(out[:, :3], first[:, :3])
    close(out[:, 3:8], second[:, :5])


def test_padding_changes_nothing_before_it(model):
    """Tokens in the place of padding have no effect either."""
    out = call(model, np.where(np.arange(9) < 6, TOKENS, 10**6), np.array([6, 6]))
    close(out[:, :6], call(model, TOKENS)[:, :6])
    assert np.isfinite(out).all()


def test_a_token_changes_no_logits_before_it(model):
    before, after = np.asarray(call(model, TOKENS)), np.asarray(call(model, changed(6)))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.any(before[:, 6:] != after[:, 6:], axis=-1).all()


LINFORMER_HEADS = {"name": "linformer", "num_heads": 2, "num_projected": 3}
NYSTROM_HEADS = {"name": "nystrom", "num_heads": 2, "num_landmarks": 3}
BOTH_WAYS = {
    "softmax, alibi": {"positions": "alibi", "num_layers": 1},
    "window of no given size": {"mixer": "sliding_window", "num_layers": 1},
    "Linformer for as many tokens, learned": {
        "mixer": (
            "softmax",
            {"heads": [LINFORMER_HEADS, NYSTROM_HEADS]},
        ),
        "positions": "learned",
        "max_length": 9,
    },
}


@pytest.mark.parametrize(
    "variant",
    [
        "softmax, alibi",
        "window of no given size",
        slow("Linformer for as many tokens, learned"),
    ],
)
def test_a_bidirectional_model_sees_both_sides_and_does_not_decode(variant):
    model = made(is_causal=False, **BOTH_WAYS[variant])
    before, after = (np.asarray(call(model, t, np.array([9, 9]))) for t in (TOKENS, changed(6)))
    assert np.any(before != after, axis=-1).all()
    out = call(model, np.where(np.arange(9) < 6, TOKENS, 10**6), np.array([6, 6]))
    close(out[:, :6], call(model, TOKENS[:, :6]))
    with pytest.raises(ValueError, match="cannot decode; configure it with is_causal=True"):
        model.init_state(2, 9)


def test_mixers_with_parameters_by_position_have_the_length_of_the_model():
    linformer = {"name": "linformer", "num_projected": 3}
    mixers = (linformer, {**linformer, "max_length": 11})
    model = made(is_causal=False, max_length=20, mixer=mixers)
    assert [block.mixer.max_length for block in model.blocks] == [20, 11]
    default = made(is_causal=False, num_layers=1, mixer=linformer)
    assert default.blocks[0].mixer.max_length == 512


def test_each_layer_has_its_own_mixer_and_state():
    model = made(num_layers=3, mixer=("softmax", WINDOW, "linear"))
    state = model.init_state(2, 9)
    kinds = [type(layer) for layer in state.layers]
    assert kinds == [ContiguousState, RingState, RecurrentState]
    assert state.layers[1].key.shape[1] == 2


def test_every_array_of_a_state_has_the_rows_first():
    heads = {"heads": ({"name": "softmax", "num_heads": 2}, {"name": "linear", "num_heads": 2})}
    longformer = {"name": "longformer", "max_global": 2}
    model = made(num_layers=4, mixer=("softmax", heads, longformer, "mixture_of_mechanisms"))
    rows_first(lambda rows: model.init_state(rows, 9))


def on_explicit_axes():
    """A model of three mixers, a mesh, and model and tokens sharded by heads and by rows."""
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axes, devices=jax.devices()[:4])
    model = made(num_layers=3, mixer=("softmax", WINDOW, "linear"), positions="none")
    by_head, from_heads = PartitionSpec(None, "heads"), PartitionSpec("heads")
    specs = {".query": by_head, ".out": from_heads, ".up": by_head, ".down": from_heads}

    def place(path, leaf):
        spec = specs.get(str(path[-3]), PartitionSpec())
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    tokens = np.concatenate([TOKENS, TOKENS[::-1]])
    placed = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("rows")))
    return model, mesh, jax.tree.map_with_path(place, model), placed


@pytest.mark.devices
def test_explicit_axes_of_a_mesh_suit_training_and_decoding():
    _, mesh, model, tokens = on_explicit_axes()
    with jax.set_mesh(mesh):
        jax.eval_shape(jax.grad(loss), model, tokens)
        jax.eval_shape(lambda model, ids: model(ids, segment_ids=ids), model, tokens)
        logits, state = jax.eval_shape(model.extend, tokens, model.init_state(4, 11))
        more, _ = jax.eval_shape(model.extend, tokens, state)
    assert logits.sharding.spec == more.sharding.spec == PartitionSpec("rows", None, None)


@pytest.mark.slow
@pytest.mark.devices
def test_rows_and_heads_on_explicit_axes_are_as_on_one_device():
    model, mesh, placed, tokens = on_explicit_axes()

    def run(model, tokens):
        value, gradient = jax.jit(jax.value_and_grad(loss))(model, tokens)
        return value, gradient, generate(model, tokens, max_new_tokens=2, temperature=0)

    alone = run(model, np.asarray(tokens))
    with jax.set_mesh(mesh):
        together = run(placed, tokens)
    jax.tree.map(close, together, alone)


@pytest.mark.slow
def test_nnx_and_plain_jax_transformations_agree():
    model = made(**PLAIN)
    value, gradient = nnx.jit(nnx.value_and_grad(loss))(model, TOKENS)
    plain, plain_gradient = jax.jit(jax.value_and_grad(loss))(model, TOKENS)
    close(*map(jax.tree.leaves, ((value, gradient), (plain, plain_gradient))))


def test_a_call_writes_nothing_to_the_model():
    model = made(dropout_rate=0.1)
    before = jax.tree.map(np.asarray, jax.tree.leaves(model))
    jax.eval_shape(lambda: model(TOKENS, rngs=jax.random.key(0)))
    for a, b in zip(before, jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(made(seed=1, dropout_rate=0.1)) == jax.tree.structure(model)


def test_learned_positions_end():
    model = made(positions="learned", max_length=4)
    with pytest.raises(
        ValueError, match="at most 4 columns, the number of learned positions .* got 9"
    ):
        model(TOKENS)
    ids = np.array([[1, 1, 1, 1, 2, 2, 0, 0, 0], [3, 4, 4, 4, 4, 4, 5, 5, 5]])
    with pytest.raises(ValueError, match="at most 4 tokens, .* got a document of 5 tokens"):
        model(TOKENS, segment_ids=ids)
    assert np.isfinite(call(model, TOKENS, lengths=np.array([9, 5]), segment_ids=ids)[1, :5]).all()
    with pytest.raises(ValueError, match="max_length must be at most 4, .* got 5"):
        model.init_state(2, 5)
    with pytest.raises(ValueError, match="max_length must be an int, 0 or more tokens, got None"):
        model.init_state(2, None)
    linear = made(positions="learned", max_length=4, mixer="linear")
    with pytest.raises(ValueError, match="holds at most 4 tokens a row, got 5"):
        linear.extend(TOKENS[:, :5], linear.init_state(2, 4))


def test_tokens_outside_the_vocabulary_are_refused_where_they_are_known():
    model, wrong = made(num_layers=1), TOKENS.copy()
    for token in (13, -1, 2**31 - 1):
        wrong[1, 3] = token
        message = f"tokens must hold tokens of the vocabulary, from 0 to 12, got {token}"
        for call_it in (
            lambda: model(wrong),
            lambda: model(wrong, lengths=np.array([9, 4])),
            lambda: model.extend(wrong, model.init_state(2, 9)),
            lambda: model.step(wrong[:, 3:4], model.init_state(2, 9)),
            lambda: model.update_centroids(wrong),
        ):
            with pytest.raises(ValueError, match=message):
                call_it()
        # Padding may hold anything.
        assert np.isfinite(model(wrong, lengths=np.array([9, 3]))[1, :3]).all()
        model.extend(wrong, model.init_state(2, 9), lengths=np.array([9, 3]))
    with pytest.raises(ValueError, match="tokens must fit in int32"):
        model(np.full((1, 2), 2**32 + 1))
    with pytest.raises(ValueError, match="tokens must fit in int32"):
        model.step(np.full((1, 1), 2**32 + 1), model.init_state(1, 2))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_traced_tokens_outside_the_vocabulary_give_nan(dtype):
    """Only the row of the wrong token is NaN; token -1 is not read as the last token."""
    model, tokens = made(num_layers=1), np.array([[1, 2, 3], [1, 0, 3]], dtype)
    for token in (13, np.iinfo(dtype).max, -1):
        if token < 0 and np.iinfo(dtype).min == 0:
            continue
        tokens[1, 1] = token
        is_nan = np.isnan(call(model, tokens))
        assert not is_nan[0].any() and is_nan[1, 1:].all()


def test_step_is_extend_by_one():
    model = made(num_layers=1)
    state = model.init_state(2, 4)
    step = jax.jit(lambda model, tokens, state: model.step(tokens, state))
    np.testing.assert_array_equal(
        step(model, TOKENS[:, :1], state)[0], extend(model, TOKENS[:, :1], state)[0]
    )
    from_list = step(model, TOKENS[:, :1].tolist(), state)[0]
    np.testing.assert_array_equal(from_list, step(model, TOKENS[:, :1], state)[0])
    with pytest.raises(ValueError, match="one token"):
        model.step(TOKENS, state)


def test_bad_inputs_are_named():
    model = made(num_layers=1)
    with pytest.raises(ValueError, match=r"tokens must be integers of shape \(B, T\)"):
        model(TOKENS.astype(np.float32))
    with pytest.raises(ValueError, match="tokens must be integers"):
        model(TOKENS[0])
    with pytest.raises(ValueError, match="segment_ids must have the shape"):
        model(TOKENS, segment_ids=np.ones((2, 3), np.int32))
    with pytest.raises(ValueError, match="segment_ids must fit in int32"):
        model(TOKENS, segment_ids=np.full(TOKENS.shape, 2**32))
    with pytest.raises(ValueError, match="lengths must be integers of shape"):
        model(TOKENS, lengths=np.array([1]))
    with pytest.raises(ValueError, match="must be at least one token"):
        model.extend(TOKENS[:, :0], model.init_state(2, 9))
    with pytest.raises(ValueError, match="state has 3 layers, and this model needs 1"):
        model.extend(TOKENS, made(num_layers=3).init_state(2, 9))
    with pytest.raises(ValueError, match="TransformerState"):
        model.extend(TOKENS, model.init_state(2, 9).layers[0])
    with pytest.raises(ValueError, match="dtype of a decode state must be .* got 'int8'"):
        model.init_state(2, 9, jnp.int8)
