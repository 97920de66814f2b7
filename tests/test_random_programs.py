"""`python -m tests.random_programs`: that it finds what is wrong, and a few of its programs."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.random_programs import calls
from tests.random_programs.cases import CASES, Cases


@pytest.mark.parametrize("place", range(10))
def test_a_few_programs_give_what_the_plain_forms_give(place):
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


def test_a_wrong_number_is_found():
    """In one head of the plain form, in place of the mechanism."""
    only = re.compile("^sliding_window$")
    drawn = (calls.draw(np.random.default_rng(seed), only) for seed in range(1000))
    runner = next(runner for runner in drawn if runner is not None and is_plain(runner.program))
    program = runner.program
    reference = program.subject.reference

    def attend(arrays, *args, **options):
        results = reference.attend(arrays, *args, **options)
        factor = np.where(np.arange(arrays["query"].shape[-2]) == 0, 1.001, 1)
        return {**results, "out": results["out"] * factor[:, None].astype(results["out"].dtype)}

    wrong = dataclasses.replace(reference, attend=attend)
    subject = dataclasses.replace(program.subject, reference=wrong)
    altered = calls.Runner(dataclasses.replace(program, subject=subject))
    assert not list(runner.failures(np.random.default_rng(0)))
    found = list(altered.failures(np.random.default_rng(0)))
    assert any("'out'" in line for line in found) and any("'value'" in line for line in found)
