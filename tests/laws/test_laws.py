"""Every law, put to every mechanism that it applies to."""

import pytest

from effattn import registry
from effattn.testing.laws import LAWS
from effattn.testing.subjects import OfFunction, OfMixer
from tests.cases import FUNCTIONS, MIXERS
from tests.laws import battery

# Laws of float32 values, which kernels may take: they are also put to XLA's form.
IN_FLOAT32 = {
    "nothing_reaches_back",
    "an_example_does_not_depend_on_the_others",
    "extreme_values_stay_finite",
    "equal_keys_share_their_weight",
    "twice_the_same",
}


def subjects():
    """`(subject, is_first)`."""
    for subject in battery.SUBJECTS:
        first = next((s for s in battery.MECHANISMS if s[:2] == subject[:2]), None)
        yield OfFunction(first or subject), first is not None
    for subject in battery.MIXER_SUBJECTS:
        yield OfMixer(subject), subject in battery.FIRST_MIXERS


def cases():
    found = []
    for subject, is_first in subjects():
        for name, (law, applies) in LAWS.items():
            quick = is_first
            if applies(subject):
                marks = () if quick else pytest.mark.slow
                found.append(pytest.param(law, subject, id=f"{name}-{subject.subject}", marks=marks))
    for subject in map(OfFunction, battery.BY_XLA):
        for name in IN_FLOAT32:
            law, applies = LAWS[name]
            if applies(subject):
                found.append(pytest.param(law, subject, id=f"{name}-{subject.subject}"))
    return found


def test_every_mechanism_has_a_case_and_none_is_left_over():
    assert {*FUNCTIONS, *MIXERS} == set(registry.names())
    assert all(registry.get(name).takes_heads == (name in FUNCTIONS) for name in registry.names())


@pytest.mark.parametrize(("law", "subject"), cases())
def test_law(law, subject):
    law(subject)
