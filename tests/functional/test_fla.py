"""Recurrences give what the naive forms of flash-linear-attention gave (`tests/golden`)."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from effattn import delta_rule_attention, linear_attention
from tests.laws.battery import QUICK

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla.npz"

CASES = {
    "linear": functools.partial(linear_attention, feature_map="identity", is_causal=True),
    "delta": delta_rule_attention,
    "gated_delta": delta_rule_attention,
}


@functools.cache
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("case", CASES)
def test_outputs_states_and_gradients_agree(case):
    arrays = golden()
    names = [n for n in arrays if f"{case}/d_{n}" in arrays]
    function = functools.partial(CASES[case], chunk_size=4, return_state=True)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(given, cotangent):
        out, pull_back, state = jax.vjp(lambda a: function(**a), given, has_aux=True)
        return {"output": out, "state": state}, pull_back(cotangent)[0]

    results, gradients = run({n: arrays[n] for n in names}, arrays["cotangent"])
    results |= {f"d_{n}": gradient for n, gradient in gradients.items()}
    for name, array in results.items():
        np.testing.assert_allclose(
            array, arrays[f"{case}/{name}"], rtol=1e-4, atol=1e-4, err_msg=name
        )
