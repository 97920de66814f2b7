"""Random feature attention: its kernel, and its gate as a step-by-step recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import performer_features, random_feature_attention

BATCH, LENGTH, SIZE = 2, 12, 8


def draw(heads=4, key_heads=2, length=LENGTH):
    rng = np.random.default_rng(0)
    shapes = [(heads, SIZE), (key_heads, SIZE), (key_heads, 5)]
    arrays = [rng.normal(size=(BATCH, length, *shape)) for shape in shapes]
    return {
        **dict(zip(("query", "key", "value"), arrays, strict=True)),
        "projection": rng.normal(size=(key_heads, 6, SIZE)) / 3,
        "gate": rng.uniform(0.05, 0.95, size=(BATCH, length, key_heads)),
    }


def step_by_step(query, key, value, projection, gate, state=None, starts=()):
    """The paper's recurrence, one token after another; returns `(out, state)`."""
    groups = query.shape[-2] // key.shape[-2]

    def features(x, w):
        angles = jnp.einsum("bnh,nmh->bnm", x / jnp.linalg.norm(x, axis=-1, keepdims=True), w)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) / w.shape[1] ** 0.5

    def step(state, token):
        query, key, value, gate, starts = token
        phi = features(key, projection)
        ones = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)
        g = gate[..., None, None]
        state = g * jnp.where(starts, 0, state)
        state = state + (1 - g) * phi[..., :, None] * ones[..., None, :]
        phi = features(query, jnp.repeat(projection, groups, 0))
        read = jnp.einsum("bnf,bnfd->bnd", phi, jnp.repeat(state, groups, 1))
        return state, read[..., :-1] / read[..., -1:]

    if state is None:
        state = jnp.zeros((BATCH, key.shape[-2], 2 * projection.shape[1], value.shape[-1] + 1))
    tokens = (jnp.moveaxis(x, 1, 0) for x in (query, key, value, gate))
    state, out = jax.lax.scan(step, state, (*tokens, np.isin(np.arange(key.shape[1]), starts)))
    return jnp.moveaxis(out, 0, 1), state


def with_gradients(function, arrays):
    """Results, and the gradients of all arrays for random cotangents."""

    def run(arrays):
        results, pull_back = jax.vjp(lambda a: function(**a), arrays)
        rng = np.random.default_rng(1)
        cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), results)
        return results, pull_back(cotangents)[0]

    return jax.jit(run)(arrays)


def assert_close(got, expected, rtol=1e-10):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    jax.tree.map(close, got, expected)


GATED = functools.partial(random_feature_attention, is_causal=True, return_state=True, chunk_size=4)


def test_a_gate_is_a_step_by_step_recurrence():
    """The test covers states in and out, and every gradient."""
    with jax.enable_x64(True):
        arrays = draw()
        shape = (BATCH, 2, 12, 6)
        initial = np.random.default_rng(3).uniform(0.1, 1, size=shape)
        ours = with_gradients(GATED, {**arrays, "initial_state": initial})
        expected = with_gradients(step_by_step, {**arrays, "state": initial})
        expected[1]["initial_state"] = expected[1].pop("state")
        assert_close(ours, expected)


def test_packing_and_padding_with_a_gate():
    """A document starts from an empty state, and NaN in padding reaches nothing."""
    with jax.enable_x64(True):
        arrays = draw()
        inside = {k: x if k == "projection" else x[:, :9] for k, x in arrays.items()}
        ids = np.repeat([[4, 2, 0]], [5, 4, 3], 1).repeat(BATCH, 0)
        filled = {
            k: x if k == "projection" else np.concatenate([x[:, :9], np.nan * x[:, 9:]], 1)
            for k, x in arrays.items()
        }
        ours = functools.partial(GATED, segment_ids=ids)
        (out, state), gradients = jax.tree.map(np.asarray, with_gradients(ours, filled))
        expected = jax.jit(functools.partial(step_by_step, starts=(5,)))(**inside)
        assert_close((out[:, :9], state), expected)
        np.testing.assert_array_equal(out[:, 9:], 0)
        for name, gradient in gradients.items():
            assert np.isfinite(gradient).all(), name
            if name != "projection":
                np.testing.assert_array_equal(gradient[:, 9:], 0)


def test_a_gated_past_does_not_change_with_the_future():
    arrays = {k: x.astype(np.float32) for k, x in draw().items()}
    run = jax.jit(lambda a: GATED(**a)[0])
    future = np.arange(LENGTH)[:, None] >= 7
    changed = {
        k: x
        if k == "projection"
        else np.where(future if k == "gate" else future[..., None], x / 2, x)
        for k, x in arrays.items()
    }
    before, after = np.asarray(run(arrays)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any()


@pytest.mark.parametrize("gate", [0.0, 1e-30, 1.0 - 1e-7])
def test_extreme_gates_are_finite(gate):
    """At gate 0 a token sees only itself."""
    arrays = {k: x.astype(np.float32) for k, x in draw().items()}
    arrays["gate"] = np.full_like(arrays["gate"], gate)
    (out, _), gradients = with_gradients(GATED, arrays)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, gradients)))
    if gate == 0:
        np.testing.assert_allclose(out, np.repeat(arrays["value"], 2, -2), rtol=1e-4, atol=1e-5)


def test_the_kernel_is_that_of_a_gaussian():
    """Averages over 200 draws of vectors that have their own scale in each direction."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 32, 1, SIZE))
    sigma = rng.uniform(0.5, 1.5, size=SIZE)

    @jax.jit
    @jax.vmap
    def weights(rng):
        """phi(q) . phi(k) as a mean of cosines."""
        w = sigma * performer_features(rng, 24, SIZE, orthogonal=False)
        angles = [
            jnp.einsum(
                "sh,mh->sm", x[0, :, 0] / jnp.linalg.norm(x[0, :, 0], axis=-1)[:, None], w[0]
            )
            for x in (query, key)
        ]
        return jnp.cos(angles[0] - angles[1]).mean(-1)

    drawn = np.asarray(weights(jax.random.split(jax.random.key(0), 200)), np.float64)
    query, key = (x[0, :, 0] / np.linalg.norm(x[0, :, 0], axis=-1)[:, None] for x in (query, key))
    kernel = np.exp(-np.sum((sigma * (query - key)) ** 2, -1) / 2)
    z = (drawn.mean(0) - kernel) / (drawn.std(0, ddof=1) / 200**0.5)
    assert np.abs(z).max() < 5


def test_many_vectors_approach_attention_of_normalised_queries_and_keys():
    """The logits of exact attention are sigma^2 q . k."""
    query, key, value = (draw()[name].astype(np.float32) for name in ("query", "key", "value"))

    @functools.partial(jax.jit, static_argnums=0)
    def both(is_causal, rng):
        w = 0.8 * performer_features(rng, 8192, SIZE)
        ours = random_feature_attention(query, 100 * key, value, projection=w, is_causal=is_causal)
        normalised = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
        exact = effattn.dot_product_attention(*normalised, value, scale=0.64, is_causal=is_causal)
        return ours, exact

    for is_causal in (False, True):
        ours, exact = both(is_causal, jax.random.key(0))
        np.testing.assert_allclose(ours, exact, atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"projection": np.ones((4, 6, SIZE))},
            r"projection must be .*\(1, m, 8\), or \(2, m, 8\)",
        ),
        (
            {"gate": np.ones((BATCH, LENGTH, 4))},
            r"gate must be floating point of shape \(2, 12, 2\)",
        ),
        ({"gate": np.full((BATCH, LENGTH, 2), 1.5)}, r"gate must be in \[0, 1\], got 1.5 to 1.5"),
        ({"is_causal": False}, "gate needs is_causal=True"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        random_feature_attention(**{**draw(), "is_causal": True, **options})
