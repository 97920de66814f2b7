"""The mixture of mechanisms: its gate, its penalty, and its routing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import effattn
from effattn.analysis import cost
from effattn.nn import (
    ConvolutionAttention,
    MixtureOfMechanisms,
    RotaryEmbedding,
    TransformerConfig,
    TransformerLM,
)
from tests.nn.build import filled

X = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
LOCAL = {"name": "sliding_window", "local_window_size": (1, 0)}
COSTS = "costs must be 2 finite numbers, 0 or more, one for each mechanism"


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
        ({"capacity": 0.5}, "capacity=0.5 needs gate=\"top1\", got gate='soft'"),
        ({"capacity": 0, "gate": "top1"}, "capacity must be a number between 0 and 1, or None"),
        ({"capacity": 1, "gate": "top1"}, "capacity must be a number between 0 .*, got 1"),
        ({"capacity": "half", "gate": "top1"}, "capacity must be a number .*, got 'half'"),
        (
            {"capacity": 0.5, "gate": "top1", "mechanisms": ("softmax", LOCAL)},
            "capacity=0.5 needs exact attention .* every mechanism but the first, .* 'sliding_win",
        ),
        (
            {
                "capacity": 0.5,
                "gate": "top1",
                "mechanisms": (LOCAL, {"name": "softmax", "bias": np.zeros((7, 7))}),
            },
            "capacity=0.5 needs exact attention .* without bias",
        ),
        (
            {
                "capacity": 0.5,
                "gate": "top1",
                "mechanisms": (LOCAL, {"name": "softmax", "mask": np.ones((7, 7), bool)}),
            },
            "capacity=0.5 needs exact attention .* without bias and mask",
        ),
        ({"mechanisms": ("softmax", "sofmax")}, "unknown mechanism 'sofmax'"),
        ({"mechanisms": (1, 2)}, "each item of mechanisms must be a registered name, .* got 1"),
        ({"mechanisms": None}, "two or more registered names, .* got None"),
        ({"mechanisms": "softmax"}, "two or more registered names, .* got 'softmax'"),
        ({"costs": (1, None)}, f"{COSTS}, got None"),
        ({"costs": 1}, COSTS),
        ({"costs": (1,)}, COSTS),
        ({"costs": (1, -1)}, COSTS),
        ({"costs": (0, float("nan"))}, COSTS),
        ({"costs": (0, float("inf"))}, COSTS),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


LONG = np.random.default_rng(1).normal(size=(2, 40, 8)).astype(np.float32)
SHARP = {"name": "softmax", "scale": 2.0}


def limited(capacity=0.3, **options):
    """A mixture in which most tokens wish for one of two dear mechanisms."""
    options = {"mechanisms": (LOCAL, "softmax", SHARP), "gate": "top1", **options}
    mixer = make(capacity=capacity, rotary=RotaryEmbedding(), **options)
    mixer.choose.bias[...] = jnp.array([-1.0, 0, 0])
    return mixer


@jax.jit
def mix(mixer, x, lengths=None, segment_ids=None):
    return mixer(x, lengths=lengths, segment_ids=segment_ids)


@pytest.mark.parametrize("capacity", [0.05, 0.3, 1 / 3])
def test_tokens_take_places_in_the_order_of_time(capacity):
    mixer = limited(capacity)
    expected = jax.jit(effattn.naive.mixture_of_mechanisms)(mixer, LONG)
    np.testing.assert_allclose(mix(mixer, LONG), expected, rtol=1e-4, atol=1e-5)


def test_room_for_all_but_the_first_token_changes_nothing():
    @jax.jit
    def run(mixer):
        def loss(mixer, x):
            return (mixer(x)[:, 1:] ** 2).sum()

        value, gradient = jax.value_and_grad(loss, (0, 1))(mixer, x)
        return value, mixer(x), jax.tree.leaves(nnx.state(gradient[0], nnx.Param)), gradient[1]

    all_, most = limited(None), limited(0.99)
    # The first token wishes for the first mechanism.
    x = LONG.copy()
    x[:, 0] = 9 * np.asarray(all_.choose.kernel[...] @ jnp.array([1.0, -0.5, -0.5]))
    for one, other in zip(*map(jax.tree.leaves, map(run, (most, all_))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_and_padded_rows_take_the_places_that_they_take_alone(is_causal):
    mixer = limited(is_causal=is_causal)
    ids = np.tile(np.repeat([3, 1, 2, 0], (13, 7, 16, 4)), (2, 1))
    x = np.where(ids[..., None] > 0, LONG, np.nan)
    packed = mix(mixer, x, segment_ids=ids)
    for start, end in ((0, 13), (13, 20), (20, 36)):
        alone = mix(mixer, LONG[:, start:end])
        np.testing.assert_allclose(packed[:, start:end], alone, rtol=1e-4, atol=1e-5)
    lengths = np.array([13, 29])
    x = np.where(np.arange(40)[:, None] < lengths[:, None, None], LONG, np.nan)
    padded = mix(mixer, x, lengths)
    for row, length in enumerate(lengths):
        alone = mix(mixer, LONG[row : row + 1, :length])
        np.testing.assert_allclose(padded[row : row + 1, :length], alone, rtol=1e-4, atol=1e-5)
    loss = jax.jit(jax.grad(lambda m: (m(x, lengths=lengths)[:, :13] ** 2).sum()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loss(mixer)))


def test_later_tokens_take_no_place_of_earlier_ones():
    mixer, changed = limited(), LONG.copy()
    changed[:, 25:] = -LONG[:, 25:]
    np.testing.assert_allclose(mix(mixer, changed)[:, :25], mix(mixer, LONG)[:, :25], atol=1e-6)


def test_any_split_takes_the_same_places():
    mixer = limited()
    extend = jax.jit(lambda m, x, state, lengths: m.extend(x, state, lengths=lengths))
    whole, state, lengths = mix(mixer, LONG), mixer.init_state(2, 40), np.array([11, 4])
    rows = np.arange(2)[:, None]
    first, state = extend(mixer, LONG[:, :11], state, lengths)
    parts = [extend(mixer, LONG[rows, lengths[:, None] + np.arange(11)], state, np.array([11] * 2))]
    for t in range(11, 14):
        x = LONG[rows, lengths[:, None] + t]
        parts.append(extend(mixer, x, parts[-1][1], np.ones(2, int)))
    rest = np.concatenate([y for y, _ in parts], 1)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(first[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
        expected = whole[row, length : length + 14]
        np.testing.assert_allclose(rest[row], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="made for capacity=None; it is the state of another lay"):
        limited(None).extend(LONG, state)


def test_operations_fall_with_the_capacity():
    """Logits and projections of queries are proportional to the capacity."""

    def operations(capacity, length=512):
        x = np.zeros((1, length, 8), np.float32)
        mixer = make(gate="top1", capacity=capacity)
        return cost.operations(jax.make_jaxpr(lambda m, x: m(x))(mixer, x))

    most, half, quarter = map(operations, (0.75, 0.5, 0.25))
    assert quarter < operations(None)
    np.testing.assert_allclose(half - quarter, most - half, rtol=0.02)
    assert half < 0.8 * most


def test_the_penalty_counts_the_mechanisms_that_tokens_take():
    mixer = limited(0.25)
    penalty = jax.jit(lambda m, x: m.penalty(x))(mixer, LONG)
    wish = np.asarray(jax.jit(lambda m, x: m.gates(x))(mixer, LONG)).argmax(-1)
    paid = []
    for row in wish:
        taken = [0, 0, 0]
        for t, m in enumerate(row, 1):
            m = m if m and taken[m] < t // 4 else 0
            taken[m] += 1
            paid.append(m)
    np.testing.assert_allclose(penalty, np.mean(paid), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda m: m.penalty(LONG)))(mixer)
    assert np.abs(gradient.choose.kernel[...]).max() > 0


def test_a_model_takes_it_as_a_mixer():
    mixer = {"name": "mixture_of_mechanisms", "mechanisms": (LOCAL, "lstm"), "gate": "top1"}
    config = TransformerConfig(
        vocab_size=5, num_layers=1, features=8, num_heads=2, mixer=mixer, num_kv_heads=1
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    local = model.blocks[0].mixer.mixers[0]
    assert local.rotary is not None and local.num_kv_heads == 1  # the LSTM has no heads
    assert np.isfinite(jax.jit(lambda model: model(np.arange(4)[None]))(model)).all()


def test_a_model_adds_the_costs_of_its_layers():
    mixer = {"name": "mixture_of_mechanisms", "mechanisms": (LOCAL, "softmax"), "costs": (1, 1)}
    config = TransformerConfig(
        vocab_size=5, num_layers=3, features=8, num_heads=2, mixer=(mixer, mixer, "softmax")
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens, lengths = np.arange(8).reshape(2, 4) % 5, np.array([4, 1])

    @jax.jit
    def run(model):
        return model(tokens, lengths=lengths), *model.with_costs(tokens, lengths=lengths)

    expected, logits, costs = run(model)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(costs, 2.0 * (np.arange(4) < lengths[:, None]), rtol=1e-6)


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
