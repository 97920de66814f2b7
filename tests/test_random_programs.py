"""`python -m tests.random_programs`: it finds a wrong number, and a few of its programs pass."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from effattn import registry
from effattn.testing import functions
from tests.random_programs import calls
from tests.random_programs.cases import CASES, Cases


@pytest.mark.parametrize("place", range(10))
def test_a_few_programs_give_what_the_naive_forms_give(place):
    cases = Cases(seed=4)
    case = place * CASES
    assert not cases.run(case), f"{cases.program(case)}"


def test_a_case_follows_from_its_number_alone():
    one, two = Cases(seed=1), Cases(seed=1)
    assert str(one.program(8)) == str(two.program(8))
    assert str(one.program(0)) != str(two.program(8))
    assert str(two.program(0)) == str(one.program(0))


def is_plain(program):
    alike = program.dtype == program.value_dtype == jnp.float32
    return alike and program.transformation == "jit" and not program.constant


def test_a_wrong_number_is_found(monkeypatch):
    """The wrong number is in one head of the naive form, not in the mechanism."""
    only = re.compile("^sliding_window$")
    drawn = (calls.draw(np.random.default_rng(seed), only) for seed in range(1000))
    runner = next(runner for runner in drawn if runner is not None and is_plain(runner.program))
    assert not list(runner.failures(np.random.default_rng(0)))
    entry = registry.get("sliding_window")

    @functools.wraps(entry.naive)
    def wrong(**given):
        results = entry.naive(**given)
        out = results[0] if isinstance(results, tuple) else results
        factor = np.where(np.arange(out.shape[-2]) == 0, 1.001, 1)
        out = out * factor[:, None].astype(out.dtype)
        return (out, *results[1:]) if isinstance(results, tuple) else out

    altered = dataclasses.replace(entry, naive=wrong)
    monkeypatch.setitem(registry._MECHANISMS, "sliding_window", altered)
    functions._naive_program.cache_clear()
    found = list(runner.failures(np.random.default_rng(0)))
    functions._naive_program.cache_clear()
    assert any("'out'" in line for line in found) and any("'value'" in line for line in found)
