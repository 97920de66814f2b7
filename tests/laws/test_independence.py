"""Naive forms share no code with the fast forms that they check."""

import os
import sys

import jax
import numpy as np
import pytest

import effattn
from effattn.testing import functions, mixers
from tests.laws import battery
from tests.marks import slow_but_for

LIBRARY = os.path.dirname(effattn.__file__) + os.sep
# Exceptions: the lift of naive forms over batch and heads, and the random bits of dropout, which
# define dropout.
SHARED = ("naive/", "arrays/dropout.py")


def library_code(run):
    """The functions of the library that run, each with its file."""
    jax.clear_caches()  # code that was traced before would not run again
    called = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            path = code.co_filename.removeprefix(LIBRARY)
            if not path.startswith(SHARED):
                called.add((path, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called


@pytest.mark.parametrize(
    "subject", slow_but_for(battery.FIRST_OF_FAMILY, battery.SUBJECTS), ids=str
)
def test_a_naive_form_shares_no_code_with_the_fast_form(subject):
    sizes, extent = functions.SQUARE, functions.everything(subject)
    arrays = functions.draw_arrays(subject, sizes, everything=True)
    known = functions.neutral(subject, sizes, extent)

    def code(naive):
        # Functions that the tests themselves call, such as `score_mod`, are in `effattn.testing`.
        run = functions.call
        found = library_code(
            lambda: jax.eval_shape(lambda a: run(subject, extent, a, known, naive=naive), arrays)
        )
        return {(path, name) for path, name in found if not path.startswith(("testing/", "reg"))}

    assert not code(naive=True) & code(naive=False)


@pytest.mark.parametrize(
    "mixer", slow_but_for(battery.FIRST_MIXER_OF_FAMILY, battery.FIRST_MIXERS), ids=str
)
def test_a_naive_form_of_a_mixer_shares_no_code_with_the_mixer(mixer):
    module = jax.eval_shape(lambda: mixers.build(mixer))
    x = np.zeros((mixers.LENGTH, mixers.FEATURES), np.float32)
    naive = library_code(lambda: jax.eval_shape(mixer.mix, module, x))
    fast = library_code(lambda: jax.eval_shape(lambda m, x: m(x[None]), module, x))
    assert not {(path, name) for path, name in naive & fast if not path.startswith("reg")}
