"""Performer attention: its features, its running maximum, and its expected value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import performer_attention, performer_features
from effattn.analysis import cost
from effattn.functional.performer import PerformerState, exponents
from effattn.xla.linear_recurrence import BLOCK
from tests.marks import slow

DRAWS = 200


def draw(length=13, size=8, std=1.0, heads=4, key_heads=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (2, length, heads, size), (2, length, key_heads, size), (2, length, key_heads, 5)
    return tuple((std * rng.normal(size=shape)).astype(np.float32) for shape in shapes)


@functools.cache
def estimates(orthogonal=True, hyperbolic=False, num_features=256):
    """Estimates of exp(q . k) by feature in 200 draws, `(200, 64, m)`; and exp(q . k), `(64,)`."""
    query, key = 0.25 * np.random.default_rng(0).normal(size=(2, 64, 8))
    options = {"orthogonal": orthogonal, "hyperbolic": hyperbolic}

    @jax.jit
    @jax.vmap
    def estimate(rng):
        w = performer_features(rng, num_features, 8, **options)
        of_query, of_key = (exponents(x[:, None], w)[:, 0] for x in (query, key))
        return jnp.exp(of_query + of_key)

    drawn = estimate(jax.random.split(jax.random.key(1), DRAWS))
    return np.asarray(drawn, np.float64), np.exp((query * key).sum(-1))


@pytest.mark.parametrize(
    "options", [{}, {"orthogonal": False}, {"hyperbolic": True}], ids=["orthogonal", "iid", "pairs"]
)
def test_the_softmax_kernel_is_unbiased(options):
    drawn, kernel = estimates(**options)
    drawn = drawn.mean(-1)
    z = (drawn.mean(0) - kernel) / (drawn.std(0, ddof=1) / DRAWS**0.5)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_error_falls_as_the_root_of_the_number_of_features(orthogonal):
    """The first m vectors of a draw are themselves a draw of m vectors."""
    drawn, kernel = estimates(orthogonal=orthogonal)
    counts = [16, 32, 64, 128, 256]
    errors = [np.sqrt(np.mean((drawn[..., :m].mean(-1) - kernel) ** 2)) for m in counts]
    assert -0.6 <= np.polyfit(np.log(counts), np.log(errors), 1)[0] <= -0.4


def test_orthogonal_vectors_and_pairs_have_less_variance():
    independent = estimates(orthogonal=False)[0].mean(-1).var(0).mean()
    assert estimates()[0].mean(-1).var(0).mean() < 0.9 * independent
    pairs, _ = estimates(orthogonal=False, hyperbolic=True)
    assert pairs.mean(-1).var(0).mean() < 0.9 * independent


def test_vectors_are_orthogonal_in_blocks_and_as_long_as_independent_ones():
    draw_features = jax.jit(performer_features, static_argnums=(1, 2), static_argnames="num_heads")
    w = np.asarray(draw_features(jax.random.key(0), 20, 8, num_heads=200))
    assert w.shape == (200, 20, 8)
    for block in (w[:, :8], w[:, 8:16], w[:, 16:]):
        products = np.einsum("nfh,ngh->nfg", block, block)
        products -= products * np.eye(block.shape[1])
        np.testing.assert_allclose(products, 0, atol=1e-4)
    lengths = np.sum(w**2, -1)
    np.testing.assert_allclose(lengths.mean(), 8, rtol=0.05)  # chi-squared, 8 degrees of freedom
    np.testing.assert_allclose(lengths.var(), 16, rtol=0.15)
    draw_pairs = jax.jit(
        functools.partial(performer_features, hyperbolic=True), static_argnums=(1, 2)
    )
    pairs = np.asarray(draw_pairs(jax.random.key(0), 20, 8))
    np.testing.assert_array_equal(pairs[:, 10:], -pairs[:, :10])


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_many_features_approach_exact_attention(is_causal):
    query, key, value = draw(std=0.25)

    @jax.jit
    def both(query, key, value, rng):
        w = performer_features(rng, 8192, 8)
        ours = performer_attention(query, key, value, projection=w, is_causal=is_causal)
        return ours, effattn.dot_product_attention(query, key, value, is_causal=is_causal)

    ours, exact = both(query, key, value, jax.random.key(0))
    np.testing.assert_allclose(ours, exact, atol=0.01)


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_the_relu_kernel_is_linear_attention_of_its_features(is_causal):
    """The state has no maximum here; padding and packing are included."""
    query, key, value = draw(key_heads=1)
    w = np.random.default_rng(2).normal(size=(1, 6, 8)).astype(np.float32)
    lengths = {"key_value_seq_lengths": np.array([9, 0])}
    performer = functools.partial(
        performer_attention, projection=w, kernel="relu", is_causal=is_causal
    )

    def relu(x):
        return jax.nn.relu(x @ w[0].T)

    ids = np.repeat([[3] * 6 + [5] * 7], 2, 0)
    for more in ({"return_state": True}, {"segment_ids": ids}):
        run = functools.partial(performer, scale=1.0, **more)
        ours = jax.jit(run)(query, key, value, **lengths)
        run = functools.partial(effattn.linear_attention, feature_map=relu, is_causal=is_causal)
        linear = jax.jit(functools.partial(run, **more))(query, key, value, **lengths)
        if "return_state" in more:
            assert ours[1].maximum is None
            ours = ours[0], ours[1].sums
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, linear
        )
    run = jax.jit(functools.partial(performer, return_state=True))
    _, state = run(query, key, value)
    again, _ = run(query, key, value, initial_state=state)
    assert np.isfinite(again).all()


@pytest.mark.parametrize("far", [300.0, -300.0])
def test_features_that_no_float_holds_change_nothing(far):
    """exp(-|x|^2 / 2) is outside the float range for each key, and changes by e^600 a token."""
    with jax.enable_x64(True):
        query, key, value = (np.asarray(x, np.float64) for x in draw(length=9))
        w = np.random.default_rng(2).normal(size=(1, 6, 8))
        steps = np.arange(9)[:, None, None] if far > 0 else np.arange(9)[::-1, None, None]
        moved = key + np.where(np.arange(8) == 0, 20.0 + steps, 0)
        options = {"projection": w, "scale": 1.0, "is_causal": True, "return_state": True}
        ours, state = jax.jit(functools.partial(performer_attention, **options))(
            query, moved, value
        )

        # The expected value from logarithms of features, none of which is exponentiated alone.
        of_query, of_key = (np.asarray(jax.jit(exponents)(x, w)) for x in (query, moved))
        of_key = np.repeat(of_key, 2, -2)
        logits = of_query[:, :, None] + of_key[:, None]  # (B, T, S, N, m)
        logits = np.where(np.tri(9, dtype=bool)[:, :, None, None], logits, -np.inf)
        weights = np.exp(logits - logits.max((2, 4), keepdims=True)).sum(-1)
        weights /= weights.sum(2, keepdims=True)
        expected = np.einsum("btsn,bsnd->btnd", weights, np.repeat(value, 2, -2))
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)
        assert np.abs(np.asarray(state.maximum)).min() > 100


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_state_continues_where_it_was_taken(is_causal):
    """The maximum before the cut is larger or smaller than the maximum after the cut."""
    with jax.enable_x64(True):
        query, key, value = (np.asarray(x, np.float64) for x in draw())
        w = np.random.default_rng(2).normal(size=(2, 6, 8))
        run = jax.jit(
            functools.partial(
                performer_attention, projection=w, is_causal=is_causal, return_state=True
            )
        )
        for factor in (0.2, 5.0):
            keys = np.concatenate([key[:, :6], factor * key[:, 6:]], 1)
            out, state = jax.tree.map(np.asarray, run(query, keys, value))
            first = query[:, :6] if is_causal else query
            rest = query[:, 6:] if is_causal else query
            _, middle = run(first, keys[:, :6], value[:, :6])
            later, after = run(rest, keys[:, 6:], value[:, 6:], initial_state=middle)
            expected = out[:, 6:] if is_causal else out, state
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
                (later, after),
                expected,
            )


@pytest.mark.slow
def test_gradients_pass_through_a_state_as_through_the_whole():
    """The maximum only sets the unit of the state, so no gradient has to pass through it."""
    with jax.enable_x64(True):
        query, key, value = (np.asarray(x, np.float64) for x in draw())
        w = np.random.default_rng(2).normal(size=(2, 6, 8))
        run = functools.partial(
            performer_attention, projection=w, is_causal=True, return_state=True
        )

        def whole(key):
            return (run(query, key, value)[0][:, 6:] ** 2).sum()

        def in_parts(key):
            _, state = run(query[:, :6], key[:, :6], value[:, :6])
            later, _ = run(query[:, 6:], key[:, 6:], value[:, 6:], initial_state=state)
            return (later**2).sum()

        np.testing.assert_allclose(
            jax.jit(jax.grad(in_parts))(key), jax.jit(jax.grad(whole))(key), rtol=1e-9, atol=1e-11
        )


def test_the_features_of_all_tokens_are_never_held():
    """Forward and backward hold far less than one array with the features of every token."""
    length, features = 16 * BLOCK, 256
    w = np.ones((1, features, 8), np.float32)
    args = (jax.ShapeDtypeStruct((length, 1, 8), jnp.float32),) * 3

    def loss(*args):
        return (performer_attention(*args, projection=w, is_causal=True) ** 2).sum()

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * length * features / 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_program_for_packed_documents_is_no_larger_for_longer_sequences(is_causal):
    def equations(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        attend = functools.partial(
            performer_attention, projection=jnp.ones((1, 8, 4)), is_causal=is_causal
        )
        run = jax.jit(lambda x, ids: attend(x, x, x, segment_ids=ids))
        return cost.equations(run.trace(x, ids).jaxpr)

    assert equations(16384) == equations(65536)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_to_attend_to(is_causal):
    query, key, value = draw(length=0)
    query = query if is_causal else draw(length=3)[0]
    w = np.ones((1, 6, 8), np.float32)
    run = functools.partial(performer_attention, projection=w)
    with_state = jax.jit(functools.partial(run, is_causal=is_causal, return_state=True))
    out, state = with_state(query, key, value)
    for x in (out, *state):
        np.testing.assert_array_equal(x, 0)
    assert out.shape == query.shape[:-1] + (5,)
    ids = np.ones(query.shape[:2], int), np.ones((2, 0), int)
    np.testing.assert_array_equal(jax.jit(run)(query, key, value, segment_ids=ids), 0)


def test_a_state_of_nothing_stays_so_where_there_are_no_keys():
    run = functools.partial(performer_attention, projection=jnp.ones((1, 6, 8)), return_state=True)
    empty = PerformerState(jnp.zeros((2, 2, 6, 6)), jnp.zeros((2, 2)))
    lengths = jnp.zeros(2, int)
    out, state = jax.jit(run)(*draw(length=3), key_value_seq_lengths=lengths, initial_state=empty)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(state.sums, 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_before_the_first_token_makes_no_nan_on_the_way(is_causal):
    """Before the first token there is no largest exponent yet. The state and one row are empty."""
    query, key, value = draw(length=3)
    empty = PerformerState(jnp.zeros((2, 2, 6, 6)), jnp.zeros((2, 2)))
    run = functools.partial(
        performer_attention,
        projection=jnp.ones((1, 6, 8)),
        is_causal=is_causal,
        key_value_seq_lengths=jnp.array([2, 0]),
        initial_state=empty,
    )
    with jax.debug_nans(True):
        out = run(query, key, value)
    assert np.all(out[0] != 0)
    np.testing.assert_array_equal(out[1], 0)


def state_like(maximum):
    return PerformerState(jnp.zeros((2, 2, 6, 6)), maximum)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "cosine"}, "kernel must be one of softmax, relu, got 'cosine'"),
        ({"projection": jnp.ones((6, 8))}, r"projection must be .*\(1, m, 8\), or \(2, m, 8\)"),
        ({"projection": jnp.ones((4, 6, 8))}, "with m vectors for each key head, got float32"),
        ({"projection": jnp.ones((1, 6, 8), int)}, "projection must be floating point"),
        ({"scale": -1.0}, "scale must be above 0, got -1.0"),
        ({"initial_state": jnp.zeros((2, 2, 6, 6))}, "PerformerState .* got ArrayImpl"),
        ({"initial_state": state_like(None)}, "got one without a maximum for kernel='softmax'"),
        (
            {"initial_state": state_like(jnp.zeros((2, 2))), "kernel": "relu"},
            "got one with a maximum for kernel='relu'",
        ),
        ({"initial_state": state_like(jnp.zeros(2))}, r"initial_state.maximum must .*\(2, 2\)"),
    ],
)
def test_bad_options_are_named(options, message):
    options = {"projection": jnp.ones((1, 6, 8)), **options}
    with pytest.raises(ValueError, match=message):
        performer_attention(*draw(), **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 8), {}, "num_features must be an int, 1 or more"),
        ((8, 8), {"num_heads": 0}, "num_heads must be"),
        ((7, 8), {"hyperbolic": True}, "hyperbolic=True needs an even num_features"),
    ],
)
def test_bad_counts_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        performer_features(jax.random.key(0), *arguments, **options)


def test_a_scale_that_a_trace_closes_over_is_known():
    x, projection = np.ones((1, 3, 1, 4), np.float32), np.ones((1, 8, 4), np.float32)

    def performer(x, scale):
        return effattn.performer_attention(x, x, x, projection=projection, scale=scale)

    scale = jnp.asarray(0.3)
    traced = jax.jit(lambda x: performer(x, scale))(x)
    np.testing.assert_allclose(traced, jax.jit(lambda x: performer(x, 0.3))(x), rtol=1e-6)
    below = -scale
    with pytest.raises(ValueError, match="scale must be above 0"):
        jax.eval_shape(lambda x: performer(x, below), x)
