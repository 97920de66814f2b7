"""MixtureOfExperts: the sum over the chosen experts of each token, its losses, and its padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import (
    Block,
    EncoderDecoder,
    EncoderDecoderConfig,
    Experts,
    MixtureOfExperts,
    TransformerConfig,
    TransformerLM,
)
from effattn.testing.functions import assert_close
from tests.nn.build import filled, floats

BATCH, LENGTH, FEATURES, HIDDEN, EXPERTS = 2, 5, 4, 6, 3
X, COTANGENT = (floats(BATCH, LENGTH, FEATURES, seed=seed) for seed in (1, 2))
LENGTHS = np.array([5, 3])


def make(**options):
    given = {"activation": "silu", "gated": True, **options}
    return MixtureOfExperts(FEATURES, HIDDEN, EXPERTS, **given, rngs=nnx.Rngs(0))


@jax.jit
def mixed(layer, x, lengths=None):
    """Output and statistics of a call."""
    return layer.with_routing(x, lengths=lengths)


@jax.jit
def called(layer, x):
    return layer(x)


def reference(layer, x, lengths, chosen):
    """Output and statistics, token by token and expert by expert.

    `chosen` gives the experts of a token from its probabilities; whoever comes first has a slot.
    """
    config = layer.experts
    counts, mean, z = [0] * EXPERTS, [0.0] * EXPERTS, 0.0
    dropped, out = 0, []
    for row, length in zip(x, lengths, strict=True):
        length = int(length)
        slots = length
        if config.capacity_factor is not None:
            exact = config.capacity_factor * config.experts_per_token * length / EXPERTS
            slots = int(np.ceil(exact))
        taken = [0] * EXPERTS
        for t, token in enumerate(row):
            y = jnp.zeros_like(token)
            if t >= length:
                out.append(y)
                continue
            logits = token @ layer.router.kernel[...]
            p = jnp.exp(logits) / jnp.exp(logits).sum()
            z = z + jnp.log(jnp.exp(logits).sum()) ** 2
            own = sorted(range(EXPERTS), key=lambda i: -float(chosen[len(out)][i]))
            own = own[: config.experts_per_token]
            whole = sum(p[i] for i in own) if len(own) > 1 else 1.0
            for i in range(EXPERTS):
                mean[i] = mean[i] + p[i]
            for i in own:
                counts[i] += 1
                if taken[i] == slots:
                    dropped += 1
                    continue
                taken[i] += 1
                y = y + p[i] / whole * expert(layer, i, token)
            if layer.shared is not None:
                for i in range(config.num_shared_experts):
                    y = y + shared_expert(layer.shared, i, token)
            out.append(y)
    tokens = sum(map(int, lengths))
    load = [c / (tokens * config.experts_per_token) for c in counts]
    balance = EXPERTS * sum(f * p / tokens for f, p in zip(load, mean, strict=True))
    stats = balance, z / tokens, np.array(load), dropped / (tokens * config.experts_per_token)
    return jnp.stack(out).reshape(x.shape), stats


def expert(layer, i, x):
    up = x @ layer.up_kernels[i]
    hidden = layer.activation(up)
    if layer.gate_kernels is not None:
        hidden = layer.activation(x @ layer.gate_kernels[i]) * up
    return hidden @ layer.down_kernels[i]


def shared_expert(shared, i, x):
    part = slice(i * HIDDEN, (i + 1) * HIDDEN)
    gate, up = (x @ layer.kernel[:, part] for layer in (shared.gate, shared.up))
    return shared.activation(gate) * up @ shared.down.kernel[part]


def wide(layer):
    return jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), layer)


def loss_of(call):
    """A loss that depends on output and both auxiliary losses, with these as further results."""

    def loss(layer, x):
        y, (balance, z, load, dropped) = call(layer, x)
        return (y * COTANGENT).sum() + balance + 0.5 * z, (y, (balance, z, load, dropped))

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


OPTIONS = {
    "switch": {"experts_per_token": 1},
    "two and shared experts": {"num_shared_experts": 2},
    "all, without a gate": {"experts_per_token": EXPERTS, "gated": False, "activation": "gelu"},
    "switch with capacity": {"experts_per_token": 1, "capacity_factor": 0.7},
    "two with capacity": {"capacity_factor": 0.75},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_sum_over_the_experts_of_each_token(options):
    """Output, statistics and all gradients, with padding, in float64 and in float32."""
    layer = filled(lambda: make(**options))
    calls = []
    with jax.enable_x64(True):
        of_layer = loss_of(lambda layer, x: layer.with_routing(x, lengths=LENGTHS))
        exact, x = wide(layer), jnp.asarray(X, jnp.float64)
        calls.append(jax.jit(of_layer)(exact, x))
        logits = np.asarray(x @ exact.router.kernel[...]).reshape(-1, EXPERTS)
        expected = loss_of(lambda layer, x: reference(layer, x, LENGTHS, logits))(exact, x)
        assert_close(calls[0], expected, 1e-12)
    dropped = float(expected[0][1][1][-1])
    assert (dropped > 0) == (options.get("capacity_factor", 9) < 1)
    assert_close(jax.jit(of_layer)(layer, X), expected, 1e-5)
    gradient = expected[1][0]
    assert np.abs(gradient.router.kernel[...]).max() > 1e-3


def test_padding_reaches_nothing():
    """NaN in the padding changes no output, no statistics and no gradient."""
    for options in ({}, {"capacity_factor": 0.75, "num_shared_experts": 1}):
        layer = filled(lambda options=options: make(**options))
        ids = np.array([[1, 1, 2, 2, 2], [0, 4, 4, 0, 0]])

        @jax.jit
        def run(layer, x, ids=ids):
            def loss(layer, x):
                y, stats = layer.with_routing(x, segment_ids=ids)
                return (y * COTANGENT).sum() + stats.load_balancing_loss + stats.router_z_loss, (
                    y,
                    stats,
                )

            return jax.value_and_grad(loss, (0, 1), has_aux=True)(layer, x)

        (_, (y, stats)), gradients = run(layer, X)
        broken = np.where((ids == 0)[..., None], np.nan, X)
        for a, b in zip(
            jax.tree.leaves(run(layer, broken)),
            jax.tree.leaves(run(layer, X)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
        assert not np.any(np.asarray(y)[ids == 0]) and not np.any(
            np.asarray(gradients[1])[ids == 0]
        )
        assert np.isfinite(np.asarray(stats.load)).all() and float(stats.load.sum()) == 1


@pytest.mark.parametrize("factor", [None, 0.5])
def test_nan_in_a_token_reaches_that_token_alone(factor):
    """Also where tokens are dropped: the first token has a slot, and later tokens have none."""
    layer = filled(lambda: make(capacity_factor=factor))
    broken = X.copy()
    broken[:, 0] = np.nan
    y, _ = jax.device_get(mixed(layer, broken, LENGTHS))
    assert np.isnan(y[:, 0]).all() and np.isfinite(y[:, 1:]).all()


def test_padding_takes_no_slots():
    """A padded row gives what it gives alone: the capacity follows its valid tokens."""
    layer = filled(lambda: make(capacity_factor=0.5))
    y, _ = mixed(layer, X[:1], np.array([3]))
    assert_close(y[:, :3], called(layer, X[:1, :3]), 1e-6)


def test_a_layer_without_valid_tokens_is_finite():
    for factor in (None, 1.0):
        layer = make(capacity_factor=factor)
        y, stats = mixed(layer, X, np.zeros(BATCH, int))
        assert not np.any(y)
        for each in stats:
            np.testing.assert_array_equal(each, np.zeros_like(each))


def test_equal_probabilities_have_the_loss_one():
    """With logits 0, p is 1 / E and the balancing loss is 1, whatever the load; z is log(E)^2."""
    layer = make()
    layer.router.kernel[...] = jnp.zeros((FEATURES, EXPERTS))
    _, stats = mixed(layer, X)
    np.testing.assert_allclose(stats.load_balancing_loss, 1, rtol=1e-6)
    np.testing.assert_allclose(stats.router_z_loss, np.log(EXPERTS) ** 2, rtol=1e-6)
    # Equal probabilities give the first experts.
    np.testing.assert_allclose(stats.load, [0.5, 0.5, 0])


def test_earlier_tokens_take_the_slots():
    """All tokens choose one expert, which has two slots: the first two tokens get them."""
    layer = make(experts_per_token=1, capacity_factor=2 * EXPERTS / LENGTH)
    layer.router.kernel[...] = jnp.zeros((FEATURES, EXPERTS)).at[:, 1].set(1)
    y, stats = jax.device_get(mixed(layer, np.abs(X)))
    assert np.all(np.any(y[:, :2], -1)) and not np.any(y[:, 2:])
    np.testing.assert_allclose(stats.dropped, 3 / 5, rtol=1e-6)
    np.testing.assert_array_equal(stats.load, [0, 1, 0])


@pytest.mark.parametrize("factor", [None, 0.75])
def test_it_is_the_same_bit_for_bit(factor):
    layer = filled(lambda: make(capacity_factor=factor))

    def run(layer, x):
        y, pull_back = jax.vjp(lambda layer, x: layer(x), layer, x)
        return y, pull_back(COTANGENT)

    first, second = (jax.jit(run)(layer, X) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    program = str(jax.make_jaxpr(run)(layer, X))
    assert "gather" in program and "scatter-add" not in program and "scatter_add" not in program


def test_a_token_does_not_depend_on_others_unless_there_is_a_capacity():
    layer, limited = (filled(lambda f=f: make(capacity_factor=f)) for f in (None, 0.5))
    changed = X.copy()
    changed[:, 0] += 1
    np.testing.assert_array_equal(called(layer, X)[:, 1:], called(layer, changed)[:, 1:])
    # Another example has slots of its own.
    changed = X.copy()
    changed[0] += 1
    np.testing.assert_array_equal(called(limited, X)[1], called(limited, changed)[1])
    # Slots go by position, so that a later token changes nothing before it.
    changed = X.copy()
    changed[:, 3:] += 1
    np.testing.assert_array_equal(called(limited, X)[:, :3], called(limited, changed)[:, :3])


@pytest.mark.parametrize("factor", [None, 1.0])
def test_bfloat16_is_as_exact_as_its_numbers(factor):
    layer = filled(lambda: make(capacity_factor=factor))
    narrow = filled(lambda: make(capacity_factor=factor, dtype=jnp.bfloat16))
    x = jnp.asarray(X, jnp.bfloat16)
    y, stats = mixed(narrow, x)
    expected, of_float32 = mixed(layer, x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    # The router computes in float32, so that the choices are equal.
    assert_close(stats, of_float32, 1e-6)
    error = np.asarray(y, np.float32) - np.asarray(expected)
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(np.asarray(expected) ** 2))


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("wide", [False, True])
def test_it_promotes_no_dtype_in_silence(factor, wide):
    def run():
        layer = make(capacity_factor=factor, num_shared_experts=1, dtype="bfloat16")
        return layer.with_routing(X, segment_ids=np.ones((BATCH, LENGTH), np.int32))

    with jax.enable_x64(wide), jax.numpy_dtype_promotion("strict"):
        y, stats = jax.eval_shape(run)
    assert y.dtype == jnp.bfloat16 and {each.dtype for each in stats} == {jnp.dtype("float32")}


def test_derivatives_along_a_tangent_are_those_of_the_gradients():
    layer = make()
    y, along = jax.jvp(layer, (X,), (X,))
    (gradient,) = jax.vjp(layer, X)[1](y)
    np.testing.assert_allclose((along * y).sum(), (gradient * X).sum(), rtol=1e-5)


CONFIG = TransformerConfig(
    vocab_size=5, num_layers=2, features=8, num_heads=2, hidden_features=8, experts=Experts(4)
)
TOKENS = np.random.default_rng(0).integers(0, 5, size=(2, 6))


def lm(**options):
    return filled(lambda: TransformerLM(dataclasses.replace(CONFIG, **options), rngs=nnx.Rngs(0)))


@jax.jit
def extended(model, tokens, state, lengths=None):
    return model.extend(tokens, state, lengths=lengths)


def test_a_model_hands_up_the_statistics_of_its_layers():
    lengths = np.array([6, 3])

    @jax.jit
    def run(model):
        def loss(model):
            logits, routing = model.with_routing(TOKENS, lengths=lengths)
            (stats,) = routing
            return stats.load_balancing_loss, (logits, stats)

        return model(TOKENS, lengths=lengths), *jax.grad(loss, has_aux=True)(model)

    results = []
    for remat in (False, True):
        model = lm(experts=(None, Experts(4, num_shared_experts=1)), remat=remat)
        expected, gradient, (logits, stats) = run(model)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
        counts = stats.load * 2 * lengths.sum()
        np.testing.assert_allclose(counts, np.round(counts), atol=1e-4)
        assert np.abs(gradient.blocks[0].mixer.query.kernel[...]).max() > 0
        results.append((logits, stats, jax.tree.leaves(gradient)))
    assert_close(results[1], results[0], 1e-5)


def test_a_model_without_experts_has_no_statistics():
    assert jax.eval_shape(lambda: lm(experts=None).with_routing(TOKENS)[1]) == ()


def test_a_block_is_its_formula():
    block = filled(lambda: Block(CONFIG, 0, rngs=nnx.Rngs(0)))
    x = floats(2, 6, 8)

    @jax.jit
    def run(block):
        mixed = x + block.mixer(block.mixer_norm(x))
        out, stats = block.feed_forward.with_routing(block.feed_forward_norm(mixed))
        return block.with_routing(x), (mixed + out, (stats,))

    assert_close(*run(block), 1e-6)


def test_an_encoder_decoder_has_the_statistics_of_both_sides():
    encoder = dataclasses.replace(CONFIG, is_causal=False, num_layers=1)
    decoder = dataclasses.replace(CONFIG, experts=(Experts(3), Experts(2)))
    config = EncoderDecoderConfig(encoder=encoder, decoder=decoder)
    model = filled(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0)))
    logits, routing = jax.jit(lambda model: model.with_routing(TOKENS, TOKENS))(model)
    assert [len(stats.load) for stats in routing] == [4, 3, 2]

    @jax.jit
    def decode(model):
        given = model.given(TOKENS)
        return given.extend(TOKENS, given.init_state(2, 6))[0]

    assert_close(decode(model), logits, 1e-5)


def test_decoding_in_any_split_is_a_call():
    model = lm(num_layers=1)
    expected = called(model, TOKENS)
    for sizes in ((1,) * 6, (3, 1, 2)):
        state, parts, at = model.init_state(2, 6), [], 0
        for size in sizes:
            logits, state = extended(model, TOKENS[:, at : at + size], state)
            parts.append(logits)
            at += size
        assert_close(jnp.concatenate(parts, 1), expected, 1e-5)


def test_decoding_drops_no_token():
    """The logits are those of a model without a capacity."""
    limited, model = lm(num_layers=1, experts=Experts(4, capacity_factor=0.3)), lm(num_layers=1)
    logits, _ = extended(limited, TOKENS, limited.init_state(2, 6))
    assert_close(logits, called(model, TOKENS), 1e-5)
    assert float(mixed(limited, TOKENS)[1][0].dropped) > 0


def test_unequal_prompts_are_padded():
    model = lm(num_layers=1)
    lengths = np.array([6, 2])
    logits, state = extended(model, TOKENS, model.init_state(2, 6), lengths)
    assert_close(logits[:, :2], called(model, TOKENS)[:, :2], 1e-5)
    np.testing.assert_array_equal(state.length, lengths)


def test_wrong_arguments_are_one_sentence():
    build = functools.partial(MixtureOfExperts, 8, 8, rngs=nnx.Rngs(0))
    for message, options in {
        "num_experts must be an int, 1 or more experts, got 0": {"num_experts": 0},
        "experts_per_token must be an int, 1 or more experts, got 0": {"experts_per_token": 0},
        "experts_per_token must be at most num_experts=2, got 3": {"experts_per_token": 3},
        "capacity_factor must be a finite number above 0, got 0": {"capacity_factor": 0},
        "capacity_factor must be a finite number above 0, got -1.5": {"capacity_factor": -1.5},
        "num_shared_experts must be an int, 0 or more": {"num_shared_experts": -1},
        "activation must be one of silu, gelu, relu, got 'tanh'": {"activation": "tanh"},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            build(**{"num_experts": 2, **options})
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 8\), got \(3, 8\)"):
        build(2)(np.ones((3, 8), np.float32))
    with pytest.raises(
        ValueError, match=r"segment_ids must be integers of shape \(1, 3\), got .* \(2, 3\)"
    ):
        build(2)(np.ones((1, 3, 8), np.float32), segment_ids=np.ones((2, 3), int))
    with pytest.raises(ValueError, match="experts must be Experts or None for all layers, or a "):
        dataclasses.replace(CONFIG, experts=4)
    with pytest.raises(ValueError, match="or a sequence of 2, one for each layer, got "):
        dataclasses.replace(CONFIG, experts=(Experts(2),))
