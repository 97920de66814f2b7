"""Mixers with a recurrence: whole, in pieces, packed, padded, in 16 bits, and in models."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import (
    RWKV6,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    HybridHeads,
    KimiDeltaAttention,
    Mamba,
    Mamba2,
    RetNet,
    RotaryEmbedding,
    TransformerConfig,
    TransformerLM,
    generate,
)
from effattn.nn.initializers import orthogonal_init
from tests.marks import slow, slow_but_for
from tests.nn.build import filled
from tests.nn.calls import call, extend, sigmoid

FEATURES, HEADS, LENGTH = 16, 4, 11
NAMES = {
    RetNet: "retention",
    GatedLinearAttention: "gated_linear",
    Mamba: "mamba",
    Mamba2: "mamba2",
    RWKV6: "rwkv6",
    RWKV7: "rwkv7",
    DeltaNet: "delta_net",
    GatedDeltaNet: "gated_delta_net",
    GatedDeltaNet2: "gated_delta_net_2",
    GatedDeltaProduct: "delta_product",
    KimiDeltaAttention: "kimi_delta",
}

X = np.random.default_rng(0).normal(size=(2, LENGTH, FEATURES)).astype(np.float32)
ONE_DOCUMENT = np.ones((2, LENGTH), int)


def make(layer, **options):
    options = {"num_kv_heads": 2, "chunk_size": 4, **options}
    if layer in (Mamba, Mamba2):
        options.setdefault("state_size", 6)
    return layer(FEATURES, HEADS, rngs=nnx.Rngs(0), **options)


@pytest.fixture(params=NAMES, ids=lambda layer: layer.__name__)
def layer(request):
    return request.param


@pytest.fixture
def mixer(layer):
    return made(layer)


@functools.cache
def made(layer):
    return filled(lambda: make(layer))


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def of(variable):
    return np.asarray(variable[...], np.float64)


def normalised(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attended(mixer, q, k, v, decay):
    """Gated linear attention of one row, token by token: `decay (T, K, H)`."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for head in range(q.shape[1]):
        of_head = head // (q.shape[1] // k.shape[1])
        state = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(len(q)):
            state = decay[t, of_head][:, None] * state + np.outer(k[t, of_head], v[t, of_head])
            out[t, head] = state.T @ q[t, head] / k.shape[-1] ** 0.5
    return out


def turned(x):
    """Rotary positions; features m and m + H/2 are a complex number."""
    real, imaginary = np.split(x, 2, -1)
    frequency = 10000.0 ** (-np.arange(real.shape[-1]) / real.shape[-1])
    turns = np.exp(1j * np.arange(len(x))[:, None, None] * frequency)
    number = (real + 1j * imaginary) * turns
    return np.concatenate([number.real, number.imag], -1)


def by_hand(mixer, x):
    """The formulas of the docstrings in float64, for one row `(T, D)`."""

    def project(layer):
        return np.einsum("td,dnh->tnh", x, of(layer.kernel))

    q, k, v, gate = (project(p) for p in (mixer.query, mixer.key, mixer.value, mixer.gate))
    if isinstance(mixer, RetNet):
        q, k = turned(q), turned(k)
        gamma = 1 - 2.0 ** (-5 - np.arange(k.shape[1]))
        out = normalised(attended(mixer, q, k, v, np.broadcast_to(gamma[:, None], k.shape)))
    else:
        low = x @ of(mixer.decay_in.kernel)
        logits = np.einsum("tr,rkh->tkh", low, of(mixer.decay_out.kernel))
        decay = sigmoid(logits + of(mixer.decay_out.bias)) ** (1 / 16)
        gate = gate + of(mixer.gate.bias)
        out = normalised(attended(mixer, q, k, v, decay)) * of(mixer.norm.scale)
    return np.einsum("tnh,nhd->td", gate * sigmoid(gate) * out, of(mixer.out.kernel))


@pytest.mark.parametrize("layer", [RetNet, slow(GatedLinearAttention)])
def test_it_is_the_layer_of_its_paper(layer):
    """For Mamba-2, `test_mamba2` compares with another implementation."""
    mixer = made(layer)
    y = call(mixer, X, np.full(2, LENGTH), ONE_DOCUMENT)
    for row in range(2):
        close(y[row], by_hand(mixer, X[row]))


def test_the_state_has_one_size(mixer):
    state = jax.jit(lambda: mixer.init_state(3, 10**9, jnp.bfloat16))()
    _, after = jax.eval_shape(mixer.step, jnp.ones((3, 1, FEATURES), jnp.bfloat16), state)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, after, state)
    assert all(jax.tree.leaves(same))
    dtypes = [x.dtype for x in jax.tree.leaves(state) if x.dtype != jnp.int32]
    assert dtypes.count(jnp.float32) == 1  # the sums
    assert dtypes.count(jnp.bfloat16) == len(dtypes) - 1  # the last tokens, if it reads them again
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("layer", slow_but_for([RetNet, Mamba2, GatedDeltaNet], NAMES))
def test_packed_documents_give_what_they_give_alone_and_padded(mixer):
    """Each document alone is padded to the shape of the packed row, so the program is the same."""
    ids = np.repeat([3, 1, 0, 2], [4, 4, 1, 2])
    x = np.where(ids[:, None] == 0, np.nan, X)
    y = np.asarray(call(mixer, x, np.full(2, LENGTH), np.tile(ids, (2, 1))))
    for id in (1, 2, 3):
        length = (ids == id).sum()
        alone = np.full_like(X, np.nan)
        alone[:, :length] = X[:, ids == id]
        expected = np.asarray(call(mixer, alone, np.full(2, length), ONE_DOCUMENT))
        close(y[:, ids == id], expected[:, :length])


@pytest.mark.parametrize("layer", slow_but_for([Mamba], NAMES))
def test_padding_reaches_no_output_and_no_gradient(mixer):
    lengths = np.array([7, LENGTH])
    valid = np.arange(LENGTH) < lengths[:, None]

    @jax.jit
    def loss_and_gradient(mixer, x):
        def loss(mixer, x):
            return jnp.sum(jnp.where(valid[..., None], mixer(x, lengths=lengths), 0) ** 2)

        return jax.value_and_grad(loss, (0, 1))(mixer, x)

    with_nan = loss_and_gradient(mixer, np.where(valid[..., None], X, np.nan))
    with_zeros = loss_and_gradient(mixer, np.where(valid[..., None], X, 0))
    jax.tree.map(np.testing.assert_array_equal, with_nan, with_zeros)
    value, (of_mixer, of_x) = jax.tree.map(np.asarray, with_nan)
    assert np.isfinite(value) and not np.any(of_x[~valid])
    for path, gradient in jax.tree.leaves_with_path(of_mixer):
        assert np.isfinite(gradient).all() and np.any(gradient), jax.tree_util.keystr(path)


@pytest.mark.parametrize("layer", slow_but_for([RetNet], NAMES))
def test_bfloat16(layer, mixer):
    narrow = filled(lambda: make(layer, dtype=jnp.bfloat16))
    expected = call(mixer, X, np.full(2, LENGTH), ONE_DOCUMENT)
    y = call(narrow, X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    error = np.asarray(y, np.float32) - expected
    assert np.sqrt((error**2).mean() / np.square(expected).mean()) < 0.02


def model_with(layer):
    config = TransformerConfig(
        vocab_size=7, num_layers=1, features=FEATURES, num_heads=HEADS, mixer=NAMES[layer]
    )
    return TransformerLM(config, rngs=nnx.Rngs(0))


def test_a_model_has_it_by_name(layer):
    mixer = nnx.eval_shape(lambda: model_with(layer)).blocks[0].mixer
    assert type(mixer) is layer
    # A mechanism whose decays depend on the tokens needs no positions.
    assert (getattr(mixer, "rotary", None) is None) == registry.get(NAMES[layer]).knows_order


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Mamba2, RWKV7, GatedDeltaNet])
def test_a_model_generates(layer):
    model = filled(lambda: model_with(layer))
    tokens = np.random.default_rng(0).integers(0, 7, size=(2, LENGTH))
    forward = jax.jit(lambda model, tokens: model(tokens))
    drawn = generate(model, tokens[:, :-1], max_new_tokens=2, temperature=0)
    tokens[:, -1] = drawn[:, 0]
    logits = forward(model, tokens)
    np.testing.assert_array_equal(drawn, np.argmax(logits[:, -2:], -1))


def test_a_model_trains():
    """The loss falls after one step of gradient descent."""
    config = TransformerConfig(
        vocab_size=7, num_layers=1, features=FEATURES, num_heads=HEADS, mixer="mamba"
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 7, size=(2, LENGTH))

    def loss_of(model):
        log_probability = jax.nn.log_softmax(model(tokens[:, :-1]))
        return -jnp.take_along_axis(log_probability, tokens[:, 1:, None], -1).mean()

    @jax.jit
    def step(model):
        loss, gradient = jax.value_and_grad(loss_of)(model)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, model, gradient)

    loss, after = step(model)
    assert np.isfinite(loss) and step(after)[0] < loss


@pytest.mark.parametrize("layer", [RetNet, GatedLinearAttention])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 3}, "has no option window"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a .* multiple of num_kv_heads \(3\)"),
        ({"num_heads": 0}, "num_heads must be an int, 1 or more heads, got 0"),
        ({"num_heads": 3}, r"in_features \(16\) must be a multiple of num_heads \(3\)"),
        ({"head_dim": 0}, "head_dim must be an int, 1 or more features, got 0"),
        ({"value_dim": 0}, "value_dim must be an int, 1 or more features, got 0"),
    ],
)
def test_wrong_options_are_named(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(FEATURES, **{"num_heads": HEADS, **options}, rngs=nnx.Rngs(0))


def test_wrong_options_of_the_decays_are_named():
    with pytest.raises(ValueError, match="no option log_decay; it computes the decays from the"):
        make(GatedLinearAttention, log_decay=np.zeros(2))
    with pytest.raises(ValueError, match="gate_rank must be an int, 1 or more features, got 0"):
        make(GatedLinearAttention, gate_rank=0)
    with pytest.raises(ValueError, match="temperature must be a finite number above 0, got 0"):
        make(GatedLinearAttention, temperature=0)


def test_it_looks_back_only(mixer, layer):
    with pytest.raises(ValueError, match="is_causal=False was given, but .* lacks 'bidirectional'"):
        jax.eval_shape(lambda: make(layer, is_causal=False))
    with pytest.raises(ValueError, match="step takes one token"):
        mixer.step(X, jax.eval_shape(lambda: mixer.init_state(2, 0)))
    with pytest.raises(ValueError, match="state must be .* init_state returned, got tuple"):
        mixer.extend(X, ())
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 16\)"):
        mixer(X[..., :3])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Mamba2, DeltaNet, GatedDeltaNet])
def test_heads_of_it_stand_beside_others(layer):
    groups = [{"name": name, "num_heads": 2} for name in (NAMES[layer], "softmax")]
    hybrid = filled(
        lambda: HybridHeads(FEATURES, HEADS, groups, rotary=RotaryEmbedding(), rngs=nnx.Rngs(0))
    )
    assert type(hybrid.mixers[0]) is layer
    y, _ = extend(hybrid, X, hybrid.init_state(2, LENGTH))
    close(y, call(hybrid, X))


ACTIVATED = (
    "mamba",
    "mamba2",
    "delta_net",
    "gated_delta_net",
    "lstm",
    "slstm",
    "gru",
    "recurrent_memory",
)


@pytest.mark.parametrize("name", ACTIVATED)
def test_copies_and_pickles_are_the_same_to_jax(name):
    made = jax.eval_shape(lambda: registry.get(name).build(FEATURES, HEADS, rngs=nnx.Rngs(0)))
    structure = jax.tree.structure(made)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert jax.tree.structure(twin) == structure


@pytest.mark.parametrize("name", ["rwkv7", "recurrent_memory", "lstm", "gru"])
def test_orthogonal_parameters_may_have_16_bits(name):
    def run(x):
        mixer = registry.get(name).build(16, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        y, state = mixer.extend(x, mixer.init_state(2, LENGTH))
        return mixer, mixer(x), y, state

    mixer, whole, y, _ = jax.eval_shape(run, X.astype(jnp.bfloat16))
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(nnx.state(mixer, nnx.Param)))
    assert whole.dtype == y.dtype == jnp.bfloat16


def test_orthogonal_parameters_of_16_bits_are_rounded():
    draw = functools.partial(orthogonal_init, jax.random.key(0), (5, 3))
    np.testing.assert_array_equal(draw(jnp.bfloat16), draw(jnp.float32).astype(jnp.bfloat16))
    np.testing.assert_allclose(draw(scale=0.1).T @ draw(scale=0.1), 0.01 * np.eye(3), atol=1e-7)


@pytest.mark.parametrize("name", ["gru", "lstm", "slstm"])
def test_a_cell_whose_parameters_were_cast_decodes_in_their_dtype(name):
    with jax.enable_x64(True):
        made = registry.get(name).build(FEATURES, 1, is_causal=True, rngs=nnx.Rngs(0))
        mixer = jax.tree.map(lambda x: x.astype(jnp.float64), made)
        x = jnp.asarray(X, jnp.float64)
        state = mixer.init_state(2, LENGTH, jnp.float32)
        first, state = mixer.extend(x[:, :4], state)
        second, _ = mixer.extend(x[:, 4:], state)
        assert first.dtype == jnp.float64
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), mixer(x), rtol=1e-12)
