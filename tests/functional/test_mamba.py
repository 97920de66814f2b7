"""The selective scan beyond the laws: its equality with another recurrence, and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import selective_scan, state_space_duality
from effattn.analysis import cost


def arrays(length=20, features=3, values=4):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(2, length, 1, size)).astype(np.float32)
        for size in (features, features, values)
    )
    return query, key, value


def test_with_steps_and_rates_that_all_values_share_it_is_that_of_mamba_2():
    query, key, value = arrays()
    step = np.random.default_rng(1).uniform(0.1, 1, size=(2, 20, 1)).astype(np.float32)
    one, skip = np.ones(1, np.float32), np.full(1, 0.7, np.float32)
    expected = jax.jit(state_space_duality)(query, key, value, step_size=step, rate=-one, skip=skip)
    out = jax.jit(selective_scan)(
        query,
        key,
        value,
        step_size=np.broadcast_to(step[..., None], value.shape),
        rate=-np.ones((1, 4, 3), np.float32),
        skip=np.full((1, 4), 0.7, np.float32),
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_there_may_be_no_examples():
    query, key, value = (x[:0] for x in arrays())
    out, state = selective_scan(
        query, key, value, step_size=value, rate=-np.ones((1, 4, 3), np.float32), return_state=True
    )
    assert out.shape == (0, 20, 1, 4) and state.shape == (0, 1, 3, 4)


def test_states_within_chunks_are_not_kept():
    """With 16 features and 64 values, a state is 16 times as large as the token it comes from."""
    length, features, values = 8192, 16, 64
    shapes = [(1, length, 1, size) for size in (features, features, values)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss(query, key, value, rate):
        out = selective_scan(query, key, value, step_size=jax.nn.softplus(value), rate=rate)
        return out.sum()

    rate = jax.ShapeDtypeStruct((1, values, features), jnp.float32)
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*given, rate)
    states = 4 * length * features * values
    assert cost.temporary_bytes(program) < states / 2


def test_wrong_arguments_are_named():
    query, key, value = arrays()
    given = {"step_size": jnp.ones_like(value), "rate": -jnp.ones((1, 4, 3))}
    with pytest.raises(ValueError, match="rate must be 0 or less, the logarithm of a decay"):
        selective_scan(query, key, value, **{**given, "rate": jnp.ones((1, 4, 3))})
    with pytest.raises(
        ValueError, match=r"step_size must be floating point of shape \(2, 20, 1, 4\)"
    ):
        selective_scan(query, key, value, **{**given, "step_size": jnp.ones((2, 20, 1))})
    with pytest.raises(
        ValueError, match="as many query heads as key heads, .* got 2 query heads and 1"
    ):
        twice = jnp.concatenate([query, query], 2)
        selective_scan(twice, key, value, **given, skip=jnp.ones((1, 4)))
    with pytest.raises(NotImplementedError, match="selective_scan has no 'triton' implementation"):
        selective_scan(query, key, value, **given, implementation="triton")
