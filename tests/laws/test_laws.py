"""Every law, applied to every mechanism for which it holds."""

import pytest

from effattn import registry
from effattn.testing.laws import LAWS
from effattn.testing.subjects import OfFunction, OfMixer
from tests.cases import FUNCTIONS, MIXERS
from tests.laws import battery

# Laws of float32 values, which kernels may compute; the XLA form is tested too.
IN_FLOAT32 = {
    "nothing_reaches_back",
    "an_example_does_not_depend_on_the_others",
    "extreme_values_stay_finite",
    "equal_keys_share_their_weight",
    "a_query_that_is_nan_reaches_its_own_output_alone",
    "one_token_is_enough",
    "twice_the_same",
}


DECODING = {"any_split_equals_the_whole", "rows_of_a_state_can_be_chosen"}
IN_BOTH_DIRECTIONS = {
    "agrees_with_the_naive_form",
    "padding_reaches_nothing",
    "packed_documents_give_what_they_give_alone",
}
EVERY_OPTION = "agrees_with_the_naive_form_with_every_option"
# One mechanism of each family, and one of each decoder, for what they share.
OF_FAMILIES, OF_DECODERS = "one_token_is_enough", "rows_of_a_state_can_be_chosen"
FIRST_OF_DECODERS = {s.entry.decoder: s.name for s in reversed(battery.MECHANISMS)}


def subjects():
    """All variants; the first variant of each mechanism is the same as in `battery.MECHANISMS`."""
    firsts = {(s.name, s.variant): s for s in battery.MECHANISMS}
    yield from (battery.of_function(firsts.get((s.name, s.variant), s)) for s in battery.SUBJECTS)
    yield from map(OfMixer, battery.MIXER_SUBJECTS)


def is_quick(law, subject):
    """Returns whether a case is quick: the first variant, or a variant with another program."""
    name, variant = subject.subject.name, subject.subject.variant
    if isinstance(subject, OfMixer):
        if subject.subject in battery.FIRST_MIXERS:
            return True
        causal = subject.subject._replace(is_causal=True)
        if causal in battery.FIRST_MIXER_OF_FAMILY:
            return law in IN_BOTH_DIRECTIONS
        # State spaces continue past the length of their kernels.
        return variant == "longer" and law in {*IN_BOTH_DIRECTIONS, *DECODING}
    if law == EVERY_OPTION:
        if not subject.has("bidirectional"):
            return variant == next(iter(subject.case.variants))
        # The last variant of one mechanism of each family, and of Nystrom, where this variant has
        # more landmarks than queries.
        last = next(s for s in battery.LAST if s.name == name)
        return name in (*battery.FIRST_NAMES, "nystrom") and variant == last.variant
    if law == OF_FAMILIES and name not in battery.FIRST_NAMES:
        return False
    if law == OF_DECODERS and name not in FIRST_OF_DECODERS.values():
        return False
    # Hierarchical attention finishes segments of several levels only in its last variant.
    several_levels = (name, variant) == ("hierarchical", "levels") and law in DECODING
    return variant == next(iter(subject.case.variants)) or several_levels


def cases():
    for subject in subjects():
        for name, (law, applies) in LAWS.items():
            if applies(subject):
                marks = () if is_quick(name, subject) else pytest.mark.slow
                yield pytest.param(law, subject, id=f"{name}-{subject.subject}", marks=marks)
    for subject in map(OfFunction, battery.BY_XLA):
        for name in sorted(IN_FLOAT32 - {OF_FAMILIES}):
            law, applies = LAWS[name]
            if applies(subject):
                yield pytest.param(law, subject, id=f"{name}-{subject.subject}")


def test_every_mechanism_has_a_case_and_none_is_left_over():
    assert {*FUNCTIONS, *MIXERS} == set(registry.names())
    assert all(registry.get(name).takes_heads == (name in FUNCTIONS) for name in registry.names())


@pytest.mark.parametrize(("law", "subject"), list(cases()))
def test_law(law, subject):
    law(subject)
