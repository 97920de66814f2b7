"""The mixture of mechanisms: its gate, its penalty, and its routing."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from effattn.nn import (
    ConvolutionAttention,
    MixtureOfMechanisms,
    TransformerConfig,
    TransformerLM,
)
from tests.nn.build import filled

X = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
LOCAL = {"name": "sliding_window", "local_window_size": (1, 0)}


def make(**options):
    options = {"mechanisms": (LOCAL, "softmax"), **options}
    return filled(lambda: MixtureOfMechanisms(8, 2, rngs=nnx.Rngs(0), **options))


def test_the_hard_gate_takes_one_answer_and_has_the_gradient_of_the_soft_one():
    soft, hard = make(), make(gate="top1")
    weights = np.random.default_rng(1).normal(size=(2, 7, 2))

    @jax.jit
    def run(soft, hard):
        answers = [mixer(X) for mixer in hard.mixers]
        of_gates = [jax.grad(lambda m: (m.gates(X) * weights).sum())(m) for m in (soft, hard)]
        gradients = [of_gate.choose.kernel[...] for of_gate in of_gates]
        return soft.gates(X), hard.gates(X), answers, hard(X), gradients

    share, choice, answers, y, gradients = jax.tree.map(np.asarray, run(soft, hard))
    np.testing.assert_array_equal(np.sort(choice, -1), np.tile([0.0, 1.0], (2, 7, 1)))
    np.testing.assert_array_equal(choice.argmax(-1), share.argmax(-1))
    taken = np.where(choice[..., :1] == 1, *answers)
    np.testing.assert_allclose(y, taken, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_the_penalty_is_the_mean_cost_of_valid_tokens():
    mixer, lengths = make(costs=(0.5, 3.0)), np.array([4, 1])
    penalty = jax.jit(lambda mixer, x, padding: mixer.penalty(x, **padding))
    gates = np.asarray(jax.jit(lambda mixer: mixer.gates(X))(mixer)) @ [0.5, 3.0]
    valid = np.arange(7) < lengths[:, None]
    x = np.where(valid[..., None], X, np.nan)
    for padding in ({"lengths": lengths}, {"segment_ids": np.where(valid, 3, 0)}):
        np.testing.assert_allclose(penalty(mixer, x, padding), gates[valid].mean(), rtol=1e-6)
    assert penalty(mixer, x, {"lengths": np.zeros(2, int)}) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "hard"}, 'gate must be "soft" or "top1", got \'hard\''),
        ({"mechanisms": ("softmax",)}, "mechanisms must be two or more registered names"),
        (
            {"mechanisms": ({"local_window_size": 3}, "softmax")},
            'each item of mechanisms .* as "name"',
        ),
        ({"mechanisms": ("softmax", "sofmax")}, "unknown mechanism 'sofmax'"),
        ({"mechanisms": (1, 2)}, "each item of mechanisms must be a registered name, .* got 1"),
        ({"mechanisms": None}, "two or more registered names, .* got None"),
        (
            {"costs": (1, None)},
            "costs must be 2 numbers, 0 or more, one for each mechanism, got None",
        ),
        ({"costs": 1}, "costs must be 2 numbers, 0 or more, one for each mechanism"),
        ({"costs": (1,)}, "costs must be 2 numbers, 0 or more, one for each mechanism"),
        ({"costs": (1, -1)}, "costs must be 2 numbers, 0 or more, one for each mechanism"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_model_takes_it_as_a_mixer():
    mixer = {"name": "mixture_of_mechanisms", "mechanisms": (LOCAL, "lstm"), "gate": "top1"}
    config = TransformerConfig(
        vocab_size=5, num_layers=1, features=8, num_heads=2, mixer=mixer, num_kv_heads=1
    )
    with pytest.raises(ValueError, match="'lstm' has no option num_kv_heads"):
        TransformerLM(config, rngs=nnx.Rngs(0))
    config = TransformerConfig(vocab_size=5, num_layers=1, features=8, num_heads=2, mixer=mixer)
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    assert model.blocks[0].mixer.mixers[0].rotary is not None
    assert np.isfinite(jax.jit(lambda model: model(np.arange(4)[None]))(model)).all()


def test_what_attends_beside_a_convolution_is_named():
    with pytest.raises(ValueError, match="attention must be a registered name, .* got None"):
        ConvolutionAttention(8, 2, attention=None, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("layer", [MixtureOfMechanisms, ConvolutionAttention])
@pytest.mark.parametrize(
    "part",
    [
        {"name": "hyena"},
        {"name": "hierarchical", "segment_size": 2, "num_levels": 3, "num_summaries": 1},
    ],
    ids=lambda part: part["name"],
)
def test_mechanisms_decode_in_it_whose_states_grow_in_ways_of_their_own(layer, part):
    parts = {"mechanisms": (part, LOCAL)} if layer is MixtureOfMechanisms else {"attention": part}

    def run():
        mixer = layer(8, 2, max_length=7, rngs=nnx.Rngs(0), **parts)
        state = mixer.init_state(2, 7)
        return state, *mixer.extend(X, state)

    state, y, after = jax.eval_shape(run)
    assert y.shape == X.shape and state == after


def test_the_state_of_another_mixture_is_refused():
    state = make(mechanisms=("linear", LOCAL, "softmax")).init_state(2, 7)
    with pytest.raises(ValueError, match="has 3 parts, and this .* needs 2; .* another layer"):
        make().extend(X, state)
    with pytest.raises(ValueError, match="state must be the RecurrentState"):
        make(mechanisms=("linear", "softmax")).extend(X, make().init_state(2, 7))


@pytest.mark.slow
def test_only_tokens_that_need_long_range_buy_the_dense_mechanism():
    """A token repeats the token before it; after a mark, it repeats the first token of the row."""
    features, length, marks = 16, 24, 4
    mechanisms = ({"name": "sliding_window", "local_window_size": (1, 0)}, "softmax")

    @jax.jit
    def build():
        options = {"mechanisms": mechanisms, "gate": "top1"}
        mixer = MixtureOfMechanisms(features, 2, **options, rngs=nnx.Rngs(1))
        return mixer, nnx.Linear(features, features, rngs=nnx.Rngs(2))

    # Features of a token: one of 8 symbols, whether it is a mark or the first token, and its place.
    places = np.random.default_rng(0).normal(size=(length, features - 10)) / 2

    def draw(seed):
        rng = np.random.default_rng(seed)
        symbols = rng.integers(0, 8, size=(32, length))
        asks = np.zeros((32, length), bool)
        for row in asks:
            row[rng.choice(np.arange(4, length), marks, replace=False)] = True
        x = np.zeros((32, length, features), np.float32)
        x[..., :8] = 2 * np.eye(8)[symbols]
        x[..., 8], x[:, 0, 9], x[..., 10:] = 2 * asks, 4, places
        before = np.concatenate([symbols[:, :1], symbols[:, :-1]], 1)
        return x, np.where(asks, symbols[:, :1], before), asks

    optimiser = optax.adam(1e-2)

    def loss_of(model, x, targets):
        mixer, readout = model
        logits = readout(mixer(x))[..., :8]
        error = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return error[:, 1:].mean() + 0.1 * mixer.penalty(x)

    @jax.jit
    def step(model, state, x, targets):
        gradient = jax.grad(loss_of)(model, x, targets)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(model, updates), state

    model = build()
    state = jax.jit(optimiser.init)(model)
    for seed in range(400):
        x, targets, _ = draw(seed)
        model, state = step(model, state, x, targets)
    x, targets, asks = draw(10_000)
    answer = jax.jit(lambda mixer, readout, x: (readout(mixer(x))[..., :8], mixer.gates(x)))
    logits, gates = map(np.asarray, answer(*model, x))
    right, dense = logits.argmax(-1) == targets, gates[..., 1] > 0.5
    assert right[asks].mean() > 0.9 and right[:, 1:][~asks[:, 1:]].mean() > 0.9
    assert dense[asks].mean() > 0.9 and dense[~asks].mean() < 0.2
