"""Recurrences give the results of flash-linear-attention's naive forms (`tests/golden`)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import (
    GatedSlotState,
    delta_product_attention,
    delta_rule_attention,
    gated_delta_rule_2_attention,
    gated_linear_attention,
    gated_slot_attention,
    linear_attention,
    retention,
    rwkv6_attention,
    rwkv7_attention,
    state_space_duality,
)
from tests.marks import slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def gated_by_feature(log_decay_feature, **given):
    return gated_linear_attention(log_decay=log_decay_feature, **given)


def state_space(query, key, value, log_decay, **given):
    """State-space duality with the decays of `log_decay`; values are divided by the step sizes."""
    step_size = -log_decay
    return state_space_duality(
        query * query.shape[-1] ** -0.5,
        key,
        value / step_size[..., None],
        step_size=step_size,
        rate=np.full(query.shape[-2], -1, np.float32),
        **given,
    )


def kimi_delta(log_decay_feature, **given):
    return delta_rule_attention(log_decay=log_decay_feature, **given)


def gated_delta_2(log_decay_feature, **given):
    return gated_delta_rule_2_attention(log_decay=log_decay_feature, **given)


def delta_product(beta, later_beta, **given):
    return delta_product_attention(beta=jnp.concatenate([beta[..., None], later_beta], -1), **given)


def rwkv(function, log_decay_feature, **given):
    return function(log_decay=log_decay_feature, **given)


def tied(query, value, log_decay_feature, **given):
    key = 1 - jnp.exp(log_decay_feature)
    return gated_linear_attention(query, key, value, log_decay=log_decay_feature, **given)


def slots(log_decay_slot, initial_keys, initial_values, **given):
    state = GatedSlotState(initial_keys, initial_values)
    out, state = gated_slot_attention(
        log_decay=log_decay_slot, initial_state=state, scale=1, **given
    )
    return out, jnp.concatenate([x.ravel() for x in state])


CASES = [
    ("linear", functools.partial(linear_attention, feature_map="identity", is_causal=True)),
    ("retention", retention),
    ("token_decay", gated_linear_attention),
    ("token_decay", state_space),
    slow("gated_linear", gated_by_feature),
    ("delta", delta_rule_attention),
    slow("gated_delta", delta_rule_attention),
    ("kimi_delta", kimi_delta),
    ("gated_delta_2", gated_delta_2),
    ("delta_product", delta_product),
    slow("rwkv6", functools.partial(rwkv, rwkv6_attention)),
    slow("rwkv7", functools.partial(rwkv, rwkv7_attention)),
    slow("hgrn2", tied),
    ("gated_slot", slots),
]


@functools.cache
def golden():
    found = {}
    for file in ("fla.npz", "fla_gates.npz"):
        with np.load(GOLDEN / file) as arrays:
            found |= dict(arrays)
    return found


@pytest.mark.parametrize("case, function", CASES)
def test_outputs_states_and_gradients_agree(case, function):
    arrays = golden()
    names = [n for n in arrays if f"{case}/d_{n}" in arrays]
    function = functools.partial(function, chunk_size=4, return_state=True)

    @jax.jit
    def run(given, cotangent):
        out, pull_back, state = jax.vjp(lambda a: function(**a), given, has_aux=True)
        return {"output": out, "state": state}, pull_back(cotangent)[0]

    results, gradients = run({n: arrays[n] for n in names}, arrays["cotangent"])
    results |= {f"d_{n}": gradient for n, gradient in gradients.items()}
    for name, array in results.items():
        np.testing.assert_allclose(
            array, arrays[f"{case}/{name}"], rtol=1e-4, atol=1e-4, err_msg=name
        )
