"""The mesa layer: its limits, an independent form and wrong arguments."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import MesaState, gated_linear_attention, mesa_attention

B, T, N, K, H = 2, 9, 4, 2, 4
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla_memory.npz"
run = jax.jit(functools.partial(mesa_attention, num_steps=8, return_state=True, chunk_size=4))


def draw():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    beta, decay = rng.uniform(0, 1, (2, B, T, K)).astype(np.float32)
    regulariser = np.ones((K, H), np.float32)
    return {
        **{"query": query, "key": key, "value": value, "beta": beta},
        **{"log_decay": -decay, "regulariser": regulariser},
    }


def test_a_large_regulariser_gives_linear_attention():
    given = draw()
    given["regulariser"] *= 1e5
    out, state = run(**given)
    key = given["beta"][..., None] * given["key"]
    expected, whole = gated_linear_attention(
        *(given["query"], key, given["value"]),
        **{"log_decay": given["log_decay"], "scale": 1e-5, "return_state": True},
    )
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-8)
    np.testing.assert_allclose(state.values, whole, rtol=1e-5, atol=1e-6)


def test_the_map_of_the_keys_is_found():
    """Values that a linear map gives the keys, without decays: the map gives the output too."""
    given = draw()
    matrix = np.random.default_rng(1).normal(size=(H, H)).astype(np.float32)
    given["log_decay"] *= 0
    given["value"] = given["key"] @ matrix
    given["regulariser"] = np.full((K, H), 1e-4, np.float32)
    out, _ = run(**given)
    np.testing.assert_allclose(out[:, -1], given["query"][:, -1] @ matrix, rtol=1e-2, atol=1e-2)


def test_outputs_states_and_gradients_agree_with_flash_linear_attention():
    names = "query", "key", "square_value", "beta", "log_decay", "regulariser"
    states = "key_memory", "value_memory"
    with np.load(GOLDEN) as arrays:
        given = {name: arrays[name] for name in (*names, *states)}
        right = {name: arrays[f"mesa/d_{name}"] for name in given}
        output, state = arrays["mesa/output"], arrays["mesa/state"]
        cotangent = arrays["cotangent_square"]

    @jax.jit
    def outputs_and_gradients(given):
        def call(given):
            own = {name: given[name] for name in names}
            memory = MesaState(*(given[name] for name in states))
            return run(value=own.pop("square_value"), **own, initial_state=memory)

        out, pull_back, state = jax.vjp(call, given, has_aux=True)
        return out, state, pull_back(cotangent)[0]

    out, after, gradients = outputs_and_gradients(given)
    np.testing.assert_allclose(out, output, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.stack(after), state, rtol=1e-4, atol=1e-4)
    # The formula of flash-linear-attention has the transposed matrix, which is the same.
    right["key_memory"] = right["key_memory"].swapaxes(-1, -2)
    for name, found in gradients.items():
        np.testing.assert_allclose(found, right[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"regulariser": jnp.zeros((K, H))}, "regulariser must be above 0, .* got 0"),
        ({"regulariser": jnp.ones((N, H))}, r"regulariser must be .* \(2, 4\)"),
        ({"num_steps": 0}, "num_steps must be an int, 1 or more steps"),
        ({"beta": -jnp.ones((B, T, K))}, "beta must be 0 or more, got -1"),
        ({"log_decay": jnp.ones((B, T, K))}, "log_decay must be 0 or less"),
        ({"initial_state": jnp.zeros((B, K, H, H))}, "must be the MesaState"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        mesa_attention(**{**draw(), **change})
