"""The Transformer language model with each mixer."""

import copy
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn import registry
from effattn.decode import ContiguousState, RecurrentState, RingState, generate
from effattn.nn import (
    Alibi,
    Block,
    EncoderDecoderConfig,
    RotaryEmbedding,
    Transformer,
    TransformerConfig,
    TransformerLM,
)
from effattn.testing.laws import rows_first
from tests.marks import slow, slow_but_for
from tests.nn.build import filled, floats
from tests.nn.calls import call, extend

CONFIG = TransformerConfig(
    vocab_size=13, num_layers=2, features=16, num_heads=4, num_kv_heads=2, qk_norm=True
)
WINDOW = {"name": "sliding_window", "local_window_size": (2, 0)}
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
# The smallest model: one layer and few parts.
PLAIN = {"num_layers": 1, "qk_norm": False, "positions": "none"}
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)


def make(seed=0, **changes):
    return TransformerLM(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(seed))


def made(**changes):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(**changes), spread=0.1)


QUICK = "softmax, rotary", "mixed, learned, untied"


@pytest.fixture(params=slow_but_for(QUICK, VARIANTS))
def model(request):
    return made(**VARIANTS[request.param])


def loss(model, tokens, rngs=None):
    logits = model(tokens, rngs=rngs)
    return jnp.mean(-jax.nn.log_softmax(logits)[:, :-1, 0])


def close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


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


def test_options_of_a_mixer_win_over_those_of_the_model():
    model = made(mixer=("softmax", {"name": "softmax", "rotary": None, "head_dim": 8}))
    first, second = (block.mixer for block in model.blocks)
    assert first.rotary is not None and second.rotary is None
    assert (first.head_dim, second.head_dim) == (4, 8)


def test_bfloat16_computes_with_float32_parameters_gradients_and_logits(monkeypatch):
    seen, block = [], Block.with_shared

    def spy(self, x, *args, **options):
        seen.append(x.dtype)
        return block(self, x, *args, **options)

    monkeypatch.setattr(Block, "with_shared", spy)
    options = {"num_layers": 1, "tie_embeddings": False}
    model = made(dtype="bfloat16", **options)
    value, gradient = jax.eval_shape(jax.value_and_grad(loss), model, TOKENS)
    assert value.dtype == jnp.float32
    for leaf in jax.tree.leaves((model, gradient)):
        assert leaf.dtype == jnp.float32
    assert set(seen) == {jnp.dtype("bfloat16")}
    state = jax.eval_shape(lambda: model.init_state(2, 4))
    assert state.layers[0].key.dtype == jnp.bfloat16
    logits, exact = call(model, TOKENS), np.asarray(call(made(**options), TOKENS))
    assert logits.dtype == jnp.float32
    error = np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2))
    assert error < 0.02


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_gradients_of_embeddings_are_added_up_unrounded(positions):
    # All gradients are equal, so a sum in bfloat16 stops growing at the 256th.
    rows, time = 64, 32
    options = {**PLAIN, "positions": positions, "max_length": time, "tie_embeddings": False}
    model = made(dtype="bfloat16", **options)
    tokens = np.zeros((rows, time), np.int32)

    @jax.jit
    def gradients(model, tokens):
        features = jax.grad(lambda model: Transformer.__call__(model, tokens).sum())(model)
        tables = features.embed, features.positions
        return [table.embedding[...] for table in tables if table is not None]

    one, all_rows = gradients(model, tokens[:1]), gradients(model, tokens)
    for alone, together in zip(one, all_rows, strict=True):
        np.testing.assert_allclose(together, rows * alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_remat_changes_no_gradient():
    options = {**PLAIN, "dropout_rate": 0.2}
    gradient = jax.jit(jax.value_and_grad(loss))
    plain = gradient(made(**options), TOKENS, jax.random.key(0))
    again = gradient(made(remat=True, **options), TOKENS, jax.random.key(0))
    close(jax.tree.leaves(again), jax.tree.leaves(plain))


@pytest.mark.parametrize(
    ("policy", "function"),
    [
        (None, None),
        ("dots_saveable", jax.checkpoint_policies.dots_saveable),
        (jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.nothing_saveable),
    ],
    ids=["no policy", "by name", "function"],
)
def test_remat_recomputes_each_layer_by_its_policy(policy, function):
    model = made(remat=True, remat_policy=policy)
    equations = jax.make_jaxpr(lambda model: model(TOKENS))(model).eqns
    policies = [e.params["policy"] for e in equations if e.primitive.name == "remat2"]
    assert policies == [function, function]


def test_dropout_needs_rngs_and_is_off_without():
    model, plain = made(**PLAIN, dropout_rate=0.5), made(**PLAIN)
    np.testing.assert_array_equal(call(model, TOKENS), call(plain, TOKENS))
    run = jax.jit(lambda model, rngs: model(TOKENS, rngs=rngs))
    one, other = run(model, jax.random.key(0)), run(model, jax.random.key(1))
    assert not np.allclose(one, other)
    np.testing.assert_array_equal(one, run(model, jax.random.key(0)))
    np.testing.assert_array_equal(run(plain, jax.random.key(0)), call(plain, TOKENS))


def test_all_that_drops_has_a_key_of_its_own(monkeypatch):
    """Embeddings, the output of each sublayer, and the weights of mixers have dropout."""
    model = made(**{**PLAIN, "num_layers": 2}, mixer={"name": "softmax", "dropout_rate": 0.5})

    @jax.jit
    def run(model, key):
        keys = []

        def recorded(x, rate, key):
            keys.append(jax.random.key_data(key))
            return x

        with monkeypatch.context() as patch:
            patch.setattr("effattn.nn.transformer.dropout", recorded)
            patch.setattr("effattn.nn.block.dropout", recorded)
            return model(TOKENS, rngs=key), jnp.stack(keys)

    logits, keys = run(model, jax.random.key(0))
    assert len(np.unique(keys, axis=0)) == len(keys) == 1 + 2 * 2
    assert not np.allclose(logits, call(model, TOKENS))


def test_dropout_keeps_the_mean_of_what_a_layer_adds():
    block, x = made(num_layers=1, dropout_rate=0.5).blocks[0], floats(1, 3, 16)
    # Without the feed-forward layer, the output is linear in the dropped elements.
    block.feed_forward.down.kernel[...] *= 0

    @jax.jit
    def run(block, keys):
        return block(x) - x, jax.vmap(lambda key: block(x, rngs=key) - x)(keys)

    expected, added = map(np.asarray, run(block, jax.random.split(jax.random.key(1), 4096)))
    spread = np.std(added, axis=0) / added.shape[0] ** 0.5
    assert (np.abs(np.mean(added, axis=0) - expected) < 5 * spread + 1e-6).all()
    assert 0.45 < np.mean(added == 0) < 0.55


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


def parameters(**changes):
    shapes = nnx.eval_shape(lambda: make(**changes))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))


def test_options_change_the_parameters_that_they_should():
    # Parameters per layer: q and o 16 * 16, k and v 16 * 8, two norms of heads of 4, SwiGLU of 48
    # (8/3 * 16 rounded up to a multiple of 8), two norms of 16.
    layer = 2 * 256 + 2 * 128 + 2 * 4 + 3 * 16 * 48 + 2 * 16
    expected = 13 * 16 + 2 * layer + 16
    assert parameters() == expected
    assert parameters(tie_embeddings=False) == expected + 13 * 16
    assert parameters(positions="learned", max_length=7) == expected + 7 * 16
    assert parameters(parallel=True) == expected - 2 * 16
    assert parameters(qk_norm=False) == expected - 2 * 8
    assert parameters(feed_forward="geglu") == expected
    assert parameters(feed_forward="gelu") == expected + 2 * (2 * 16 * 64 - 3 * 16 * 48)
    assert parameters(norm="layer") == expected + 5 * 16
    assert parameters(hidden_features=8) == expected - 2 * 3 * 16 * 40
    assert parameters(head_dim=8) == expected + 2 * (2 * 256 + 2 * 128 + 2 * 4)


def test_logits_are_of_the_head_where_embeddings_are_not_tied():
    model = made(**PLAIN, tie_embeddings=False)
    # NumPy arrays are changed in place, so the call must end before the change.
    logits = np.asarray(call(model, TOKENS))
    model.head.kernel[...] *= 2
    close(call(model, TOKENS), 2 * logits)


def test_parallel_layers_read_the_same_input():
    @jax.jit
    def run(block, x):
        h = block.mixer_norm(x)
        return block(x), x + block.mixer(h) + block.feed_forward(h)

    close(*run(made(parallel=True).blocks[0], floats(1, 4, 16)))


def test_residual_projections_start_smaller():
    @jax.jit
    def spreads():
        block = Block(dataclasses.replace(CONFIG, features=256, num_layers=8), 0, rngs=nnx.Rngs(0))
        layers = block.mixer.out, block.feed_forward.down, block.mixer.query
        return [jnp.std(layer.kernel[...]) for layer in layers]

    expected = (16 * 256) ** -0.5, (16 * 688) ** -0.5, 256**-0.5
    np.testing.assert_allclose(spreads(), expected, rtol=0.05)


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


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_rngs_alone_switch_dropout(mode):
    model = made(num_layers=1, dropout_rate=0.5)
    run = jax.jit(lambda model: (model(TOKENS), model(TOKENS, rngs=jax.random.key(0))))
    without, dropped = run(model)
    assert not np.allclose(dropped, without)
    getattr(model, mode)()
    jax.tree.map(np.testing.assert_array_equal, run(model), (without, dropped))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an int, 1 or more, got 0"),
        ({"hidden_features": 0}, "hidden_features must be an int, 1 or more or None, got 0"),
        ({"positions": "fourier"}, "positions must be one of rotary"),
        ({"positions": "sinusoidal", "features": 15}, "needs an even number of features, got 15"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite number above 0"),
        (
            {"feed_forward": "glu"},
            "feed_forward must be one of swiglu, geglu, gelu, relu, rwkv4, rwkv6, rwkv7, got 'glu'",
        ),
        ({"norm": "batch"}, "norm must be one of rms, layer, got 'batch'"),
        ({"norm": ["rms"]}, r"norm must be one of rms, layer, got \['rms'\]"),
        ({"positions": "learned"}, "positions='learned' needs max_length"),
        ({"mixer": "sofmax"}, "unknown mechanism 'sofmax'"),
        ({"mixer": {"local_window_size": 3}}, 'mixer must be .* as "name" and options, got {'),
        ({"mixer": ("softmax",)}, "num_layers=2 mixers, one for each layer, got 1"),
        ({"mixer": 3}, "mixer must be a registered name, .* got 3"),
        ({"mixer": None}, "mixer must be a registered name, .* got None"),
        ({"mixer": ("softmax", None)}, "mixer must be a registered name, .* got None"),
        ({"mixer": {"heads": []}}, "mixer .* one or more groups in .heads., got"),
        ({"mixer": {"heads": {"name": "softmax"}}}, "mixer .* one or more groups in .heads., got"),
        ({"max_length": 1.5}, "max_length must be an int, 1 or more or None, got 1.5"),
        ({"dropout_rate": 1.5}, r"dropout_rate must be a number in \[0, 1\), got 1.5"),
        ({"dropout_rate": None}, r"dropout_rate must be a number in \[0, 1\), got None"),
        ({"remat": True, "remat_policy": "save_only_these_names"}, "remat_policy must be one of"),
        ({"remat_policy": "dots_saveable"}, "needs remat=True"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def with_arrays(sink=2, block=True):
    """A configuration with arrays among its options, which are new in each call."""
    softmax = {"name": "softmax", "sink": nnx.Param(jnp.zeros(sink))}
    blocks = {"name": "block_sparse", "block_size": 3, "block_mask": np.full((3, 3), block)}
    return dataclasses.replace(CONFIG, mixer=[softmax, blocks])


def test_configurations_are_equal_by_the_values_of_arrays():
    one, same = with_arrays(), with_arrays()
    # A learned value is not part of the configuration.
    same.mixer[0]["sink"][...] += 1
    assert one == same and hash(one) == hash(same)
    assert one != with_arrays(sink=4) and one != with_arrays(block=False)
    both = [EncoderDecoderConfig(dataclasses.replace(c, is_causal=False), c) for c in (one, same)]
    assert both[0] == both[1]
    model = filled(lambda: TransformerLM(one, rngs=nnx.Rngs(0)))
    twins = jax.tree.map(lambda x, y: x is y, model, copy.deepcopy(model))
    assert not any(jax.tree.leaves(twins))


@pytest.mark.parametrize("option", ["rotary_theta", "rotary_scaling"])
def test_options_of_rotary_positions_need_these(option):
    with pytest.raises(ValueError, match=f"{option} needs positions='rotary', .* 'alibi', got"):
        make(positions="alibi", **{option: 2.0})


def test_positions_reach_the_mixers():
    model = made(**{**PLAIN, "positions": None}, rotary_theta=500.0, rotary_scaling=2.0)
    assert model.blocks[0].mixer.rotary == RotaryEmbedding(500.0, 2.0)
    model = made(**{**PLAIN, "positions": "alibi"})
    assert dict(model.blocks[0].mixer.options)["score_mod"] == Alibi(CONFIG.num_heads)


def test_a_mixer_that_cannot_do_what_the_model_asks_is_named():
    with pytest.raises(ValueError, match="'score_mod', which 'linear' lacks.*softmax"):
        make(mixer="linear", positions="alibi")
    with pytest.raises(ValueError, match="no option local_window_size"):
        make(mixer={"name": "linear", "local_window_size": 3})


def test_what_looks_one_way_alone_is_refused_in_models_that_look_the_other():
    with pytest.raises(ValueError, match="'sparse_transformer' lacks 'bidirectional'"):
        make(is_causal=False, mixer="sparse_transformer")


DECODING = registry.names("decode")
FIRST_OF_FAMILY = {registry.get(name).family: name for name in reversed(DECODING)}.values()


@pytest.mark.parametrize("name", slow_but_for(FIRST_OF_FAMILY, DECODING))
def test_every_mechanism_that_decodes_builds_a_model(name):
    options = {"local_window_size": (2, 0)} if name == "sliding_window" else {}
    # Only mechanisms with keys have key heads.
    given = {} if registry.get(name).takes_heads else {"num_kv_heads": None}
    given |= {"mixer": {"name": name, **options}, "num_layers": 1, "max_length": 16}
    assert jax.eval_shape(lambda: make(**given)(TOKENS)).shape == (2, 9, 13)


def test_models_of_any_mixer_tell_the_order():
    """The mixer or rotary positions tell the order; where neither can, learned positions do."""
    entries = map(registry.get, registry.names())
    cannot = {entry.name for entry in entries if not (entry.knows_order or entry.takes_rotary())}
    by_token = {f"synthesizer{kind}" for kind in ("", "_factorized", "_mixture")}
    two_sided = {"fnet", "inducing_points"}
    assert cannot == {"aft_simple", *two_sided, *by_token}
    for name in cannot:
        alone = {"mixer": name, "num_layers": 1, "num_kv_heads": None}
        alone["is_causal"] = name not in two_sided
        assert made(**alone, max_length=9).positions is not None
        assert made(**alone, max_length=9, positions="none").positions is None
        for given in ({"max_length": 9, "positions": "rotary"}, {"max_length": None}):
            with pytest.raises(ValueError, match=f"mixer='{name}' takes no .* give positions"):
                make(**alone, **given)
    mixed = made(mixer=("aft_simple", "softmax"), num_layers=2, num_kv_heads=None)
    assert mixed.positions is None
