"""What holds for all recurrences through their shared arguments."""

import functools

import jax
import jax.numpy as jnp
import pytest

import effattn
from tests.marks import slow_but_for

MILLION = 2**20


def shapes(length, *, gate=None, beta=False):
    """Of one example and one head of 64."""
    token = jax.ShapeDtypeStruct((length, 1, 64), jnp.float32)
    given = {"query": token, "key": token, "value": token}
    if gate is not None:
        given["log_decay"] = jax.ShapeDtypeStruct((length, 1, 64)[:gate], jnp.float32)
    if beta:
        given["beta"] = jax.ShapeDtypeStruct((length, 1), jnp.float32)
    return given


RECURRENCES = {
    "linear": (functools.partial(effattn.linear_attention, is_causal=True), {}),
    "retention": (effattn.retention, {}),
    "a decay of the token": (effattn.gated_linear_attention, {"gate": 2}),
    "decays of features": (effattn.gated_linear_attention, {"gate": 3}),
    "delta rule": (effattn.delta_rule_attention, {"beta": True}),
    "gated delta rule": (effattn.delta_rule_attention, {"gate": 2, "beta": True}),
}
QUICK = ("linear", "decays of features", "gated delta rule")


@pytest.mark.parametrize("name", slow_but_for(QUICK, RECURRENCES))
def test_a_million_tokens_fit(name):
    """Forward, in less than 3 GB with arguments and output; counted, not run."""
    function, options = RECURRENCES[name]
    given = shapes(MILLION, **options)
    memory = jax.jit(lambda given: function(**given)).lower(given).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert total < 3e9
    assert memory.temp_size_in_bytes < 16e6
