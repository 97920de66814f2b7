"""Titans' memory: its limit, an independent form and wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import delta_rule_attention, titans_memory
from effattn.nn import TitansMemory

B, T, N, K, H, SIZE = 2, 11, 4, 2, 4, 5
run = jax.jit(functools.partial(titans_memory, mini_batch_size=4, return_state=True))


def draw():
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=(B, T, h, H)) for n, h in (("query", N), ("key", K))}
    learning_rate, momentum, decay = rng.uniform(0, 1, (3, B, T, K))
    arrays |= {
        "value": rng.normal(size=(B, T, K, SIZE)),
        "learning_rate": learning_rate / 4,
        "momentum": momentum,
    }
    return {name: x.astype(np.float32) for name, x in {**arrays, "log_decay": -decay}.items()}


def test_mini_batches_of_one_token_without_momentum_are_the_delta_rule():
    given = draw()
    nothing = 0 * given["learning_rate"]
    out = titans_memory(
        **{**given, "momentum": nothing, "log_decay": nothing, "mini_batch_size": 1}
    )
    heads = (given[name] for name in ("query", "key", "value"))
    expected = delta_rule_attention(*heads, beta=given["learning_rate"], scale=1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_outputs_and_states_agree_with_the_steps_of_the_paper():
    """In NumPy, with the gradient written out."""
    given = draw()
    out, state = run(**given)
    for b, n in np.ndindex(B, N):
        k = n // (N // K)
        now = velocity = np.zeros((H, SIZE))
        for t in range(T):
            if t % 4 == 0:
                start = now
            key, value = given["key"][b, t, k], given["value"][b, t, k]
            surprise = np.outer(key, start.T @ key - value)
            velocity = (
                given["momentum"][b, t, k] * velocity - given["learning_rate"][b, t, k] * surprise
            )
            now = np.exp(given["log_decay"][b, t, k]) * now + velocity
            expected = now.T @ given["query"][b, t, n]
            np.testing.assert_allclose(out[b, t, n], expected, rtol=1e-4, atol=1e-4)
        found = (x[b, k] for x in state)
        for x, expected in zip(found, (now, start, velocity, T), strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"learning_rate": jnp.zeros((B, T, N))}, r"learning_rate must be .* \(2, 11, 2\)"),
        ({"momentum": jnp.zeros((B, T))}, r"momentum must be .* \(2, 11, 2\)"),
        ({"momentum": jnp.full((B, T, K), 1.5)}, "momentum must be between 0 and 1, got 1.5"),
        ({"log_decay": jnp.ones((B, T, K))}, "log_decay must be 0 or less"),
        ({"mini_batch_size": 0}, "mini_batch_size must be an int, 1 or more tokens"),
        ({"initial_state": jnp.zeros((B, K, H, H))}, "must be the TitansState"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        titans_memory(**{**draw(), **change})


@pytest.mark.parametrize("momentum", [0, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_on_equal_keys_the_memory_stays_bounded_up_to_the_rate_that_is_named(momentum):
    length, batch = 4096, 16
    tokens = np.ones((length, 1, 1), np.float32)
    gates = np.ones((length, 1), np.float32)
    learning_rate = 1.99 * (1 - momentum) / batch
    out = titans_memory(
        tokens,
        tokens,
        tokens,
        learning_rate=learning_rate * gates,
        momentum=momentum * gates,
        log_decay=0 * gates,
        mini_batch_size=batch,
    )
    assert abs(out).max() < 4


def test_the_layer_stays_bounded_on_equal_tokens():
    layer = TitansMemory(16, 2, rngs=nnx.Rngs(0))
    for gate, bias in ((layer.momentum, 4.0), (layer.learning_rate, 4.0), (layer.decay, 20.0)):
        gate.bias[...] = jnp.full_like(gate.bias[...], bias)
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (16,)), (1, 4096, 16))
    y, state = jax.jit(lambda layer, x: layer.extend(x, layer.init_state(1, 4096)))(layer, x)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((y, state)))
    assert max(abs(leaf).max() for leaf in jax.tree.leaves(state.state) if leaf.ndim > 2) < 100
