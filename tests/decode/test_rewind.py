"""States that forget their last tokens give what they would give without having read them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import effattn
from effattn.decode import RewindableState, rewind
from effattn.nn import (
    EncoderDecoder,
    EncoderDecoderConfig,
    HybridHeads,
    LongformerSelfAttention,
    MixtureOfMechanisms,
    SelfAttention,
    TransformerConfig,
    TransformerLM,
)
from tests.laws.sharding import mesh
from tests.marks import slow, slow_but_for

ROWS, FEATURES, LENGTH, MOST = 3, 16, 24, 5
X = np.random.default_rng(0).normal(size=(ROWS, LENGTH, FEATURES)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, LENGTH))
SIZES = {"vocab_size": 11, "features": FEATURES, "num_heads": 2}
DECODING = effattn.registry.names("decode")
QUICK = "aft_full", "streaming"


def forgetful(model, x, state):
    """Outputs of tokens, of which some are forgotten after they were read."""
    first, state = model.extend(x[:, :9], state, lengths=np.array([9, 4, 0]))
    _, state = model.extend(x[:, 9:13], state)
    state = model.rewind(state, np.array([2, 4, 0]))
    second, state = model.extend(x[:, 13:16], state, lengths=np.array([3, 1, 2]))
    _, state = model.extend(x[:, 16:17], state)
    third, state = model.extend(x[:, 17:18], model.rewind(state, 1))
    return (first[0], first[1, :4], second[0], second[1, :1], second[2, :2], third), state.length


def without_them(model, x, state):
    """Outputs of the tokens that `forgetful` does not forget."""
    first, state = model.extend(x[:, :9], state, lengths=np.array([9, 4, 0]))
    _, state = model.extend(x[:, 9:13], state, lengths=np.array([2, 0, 4]))
    second, state = model.extend(x[:, 13:16], state, lengths=np.array([3, 1, 2]))
    third, state = model.extend(x[:, 17:18], state)
    return (first[0], first[1, :4], second[0], second[1, :1], second[2, :2], third), state.length


def assert_forgets(model, x, keeps=None):
    """Checks outputs and lengths, and whether the state keeps the last tokens."""
    state = model.init_state(ROWS, LENGTH, max_rewind=MOST)
    assert keeps is None or keeps == (state.recent is not None)
    found = jax.jit(forgetful)(model, x, state)
    expected = jax.jit(without_them)(model, x, model.init_state(ROWS, LENGTH))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", slow_but_for(QUICK, DECODING))
def test_mixers_forget(name):
    entry = effattn.registry.get(name)
    options = entry.options_of_model({"max_length": LENGTH})
    assert_forgets(entry.build(FEATURES, 2, rngs=nnx.Rngs(0), **options), X)


@pytest.mark.parametrize(
    "mixer",
    [
        ["softmax", {"name": "softmax", "num_kv_heads": 1}],
        slow(["softmax", "gated_linear"]),
        slow("rwkv7"),
    ],
    ids=str,
)
def test_language_models_forget(mixer):
    config = TransformerConfig(**SIZES, num_layers=2, mixer=mixer)
    assert_forgets(TransformerLM(config, rngs=nnx.Rngs(0)), TOKENS)


@pytest.mark.slow
def test_layers_that_share_keys_and_reversible_layers_forget():
    for changes in ({"keys_from": (0, 0)}, {"reversible": True, "tie_embeddings": False}):
        config = TransformerConfig(**SIZES, num_layers=2, **changes)
        assert_forgets(TransformerLM(config, rngs=nnx.Rngs(0)), TOKENS)


@pytest.mark.slow
def test_encoders_and_decoders_forget():
    encoder = TransformerConfig(**SIZES, num_layers=1, is_causal=False)
    for mixer in ("softmax", "linear"):
        decoder = TransformerConfig(**SIZES, num_layers=1, mixer=mixer)
        config = EncoderDecoderConfig(encoder=encoder, decoder=decoder)
        model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        assert_forgets(model.given(TOKENS[:, :7]), TOKENS)


@pytest.mark.slow
def test_mixers_of_several_mixers_forget():
    for second, keeps in (("softmax", False), ("linear", True)):
        groups = [{"name": "softmax", "num_heads": 1}, {"name": second, "num_heads": 1}]
        assert_forgets(HybridHeads(FEATURES, 2, groups, rngs=nnx.Rngs(0)), X, keeps)
    for gated, keeps in (({}, False), ({"gate": "top1", "capacity": 0.5}, True)):
        given = {"mechanisms": ["softmax", "softmax"], **gated, "rngs": nnx.Rngs(0)}
        assert_forgets(MixtureOfMechanisms(FEATURES, 2, **given), X, keeps)


def model_of(name, **options):
    return SelfAttention(FEATURES, 2, name, rngs=nnx.Rngs(0), **options)


def test_a_cache_of_all_tokens_forgets_by_its_length():
    """Such a state keeps no tokens beside its keys and values, and reads none again."""
    state = model_of("softmax").init_state(ROWS, LENGTH, max_rewind=MOST)
    assert state.recent is None
    state = model_of("linear").init_state(ROWS, LENGTH, max_rewind=MOST)
    assert state.recent.shape == (ROWS, MOST, FEATURES)


def test_without_max_rewind_the_state_is_the_plain_one():
    mixer = model_of("linear")
    for given in ({}, {"max_rewind": 0}):
        assert not isinstance(mixer.init_state(2, LENGTH, **given), RewindableState)


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_tokens_can_be_forgotten_once(name):
    """After n forgotten tokens, only `max_rewind - n` more can be forgotten."""
    mixer = model_of(name)
    _, state = mixer.extend(X[:, :-1], mixer.init_state(ROWS, LENGTH, max_rewind=3))
    state = mixer.rewind(state, np.array([0, 1, 2]))
    np.testing.assert_array_equal(state.length, [LENGTH - 1, LENGTH - 2, LENGTH - 3])
    np.testing.assert_array_equal(state.count, [3, 2, 1])
    with pytest.raises(
        ValueError, match=r"n must be between 0 and .* \[3, 2, 1\] with max_rewind=3, got 2"
    ):
        mixer.rewind(state, 2)
    _, state = mixer.extend(X[:, :1], state)
    np.testing.assert_array_equal(state.count, [3, 3, 2])


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_traced_counts_are_clipped(name):
    mixer = model_of(name)
    _, state = mixer.extend(X[:, :2], mixer.init_state(ROWS, LENGTH, max_rewind=MOST))
    forgotten = jax.jit(rewind)(state, jnp.array([-1, 1, 7]))
    np.testing.assert_array_equal(forgotten.length, [2, 1, 0])


@pytest.mark.parametrize("name", [slow("softmax"), "linear"])
def test_gradients_are_those_without_the_forgotten_tokens(name):
    mixer = model_of(name)

    def loss(x, run, max_rewind):
        outs, _ = run(mixer, x, mixer.init_state(ROWS, LENGTH, max_rewind=max_rewind))
        return sum((out**2).sum() for out in outs)

    found = jax.jit(jax.grad(lambda x: loss(x, forgetful, MOST)))(X)
    expected = jax.jit(jax.grad(lambda x: loss(x, without_them, 0)))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_forgotten_nan_reaches_nothing(name):
    mixer, bad = model_of(name), np.full_like(X[:, :4], np.nan)
    _, state = mixer.extend(bad, mixer.init_state(ROWS, LENGTH, max_rewind=4))
    y, _ = mixer.extend(X[:, :1], mixer.rewind(state, 4))
    expected, _ = mixer.extend(X[:, :1], mixer.init_state(ROWS, LENGTH))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_values_of_the_first_layer_are_not_kept():
    mixer = effattn.registry.get("rwkv7").build(FEATURES, 2, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="takes no global_mask or shared values"):
        mixer.extend_with_shared(X, mixer.init_state(ROWS, LENGTH, max_rewind=MOST))


def test_tokens_are_not_rounded():
    mixer = model_of("linear")
    state = mixer.init_state(ROWS, LENGTH, max_rewind=MOST)
    with jax.enable_x64(True), pytest.raises(ValueError, match="x must have a dtype that float32"):
        mixer.extend(X.astype(np.float64), state)


@pytest.mark.devices
@pytest.mark.parametrize("name", ["softmax", "linear", "aft_full"])
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
def test_rows_stay_where_explicit_axes_have_them(name, is_set):
    devices = mesh(jax.sharding.AxisType.Explicit)
    x = np.zeros((4, 3, FEATURES), np.float32)
    x = jax.device_put(x, NamedSharding(devices, PartitionSpec("batch")))

    def run(mixer, x):
        y, state = mixer.extend(x, mixer.init_state(4, LENGTH, max_rewind=2))
        return y, mixer.extend(x, mixer.rewind(state, 1))

    entry = effattn.registry.get(name)
    mixer = entry.build(FEATURES, 2, rngs=nnx.Rngs(0), **entry.options_of_model({"max_length": 24}))
    with jax.set_mesh(devices) if is_set else contextlib.nullcontext():
        placed = jax.eval_shape(run, mixer, x)
    assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(placed)} == {"batch"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, s: m.rewind(s, 1),
            ValueError,
            r"can forget, \[0, 0, 0\] with max_rewind=5, got 1",
        ),
        (lambda m, s: m.rewind(s, -1), ValueError, "n must be between 0 and the tokens"),
        (lambda m, s: m.rewind(s, 0.5), ValueError, r"integers of shape \(3,\), got float32"),
        (lambda m, s: m.rewind(s, [0, 0]), ValueError, r"integers of shape \(3,\), got int"),
        (
            lambda m, s: m.rewind(m.init_state(ROWS, LENGTH), 0),
            ValueError,
            "can forget tokens, got RecurrentState; make it by init_state with max_rewind=R",
        ),
        (lambda m, s: m.extend(X[:2], s), ValueError, "call init_state with batch=2"),
        (lambda m, s: m.init_state(ROWS, LENGTH, max_rewind=-1), ValueError, "max_rewind must be"),
        (lambda m, s: model_of("retention").extend(X, s), ValueError, "of another layer"),
    ],
)
def test_bad_input_is_named(call, error, message):
    mixer = model_of("linear")
    with pytest.raises(error, match=message):
        call(mixer, mixer.init_state(ROWS, LENGTH, max_rewind=MOST))


def test_masks_of_global_tokens_are_not_kept():
    options = {"local_window_size": (2, 0), "max_global": 2}
    mixer = LongformerSelfAttention(FEATURES, 2, rngs=nnx.Rngs(0), **options)
    state = mixer.init_state(ROWS, LENGTH, max_rewind=MOST)
    with pytest.raises(NotImplementedError, match="a state with max_rewind takes no global_mask"):
        mixer.extend(X, state, global_mask=np.zeros(X.shape[:2], bool))
