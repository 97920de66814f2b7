"""The laws of effattn as a library, for mechanisms of other packages.

    registry.register(registry.Mechanism(name="mine", function=my_attention, ...))

    @effattn.testing.parametrize("mine")
    def test_my_attention(law):
        law()

The decorator runs the test once for each law that applies to the mechanism: the mechanism equals
its naive form with all gradients, leaks nothing from the future, ignores padding, packs documents,
decodes as it trains, and stays finite.
`check("mine")` does the same in one call. A `Case` gives the mechanism's own arguments and options.

The laws on growth, sharding, transformations and 16 bits are tests of this repository alone.

Needs `hypothesis`, and for `parametrize` also `pytest`: `pip install effattn[test]`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from effattn import registry
from effattn.testing.case import Case
from effattn.testing.functions import Sizes
from effattn.testing.laws import LAWS
from effattn.testing.subjects import subjects_of

__all__ = ["Case", "Sizes", "check", "parametrize"]

# Laws about values, which every variant goes through; the first variant goes through all laws.
_ABOUT_VALUES = ("agrees_with_the_naive_form", "agrees_with_the_naive_form_with_every_option")


def _cases(name: str, case: Case) -> Iterator[tuple[str, Callable[[], None]]]:
    """The laws that apply to a mechanism, each as a function without arguments, by label."""
    if registry.get(name).naive is None and case.mix is None:
        raise ValueError(
            f"the mechanism {name!r} has no naive form to compare with: decorate its function with "
            "effattn.naive.with_naive, or register it with naive=..."
        )
    first, *_ = case.variants
    for subject in subjects_of(name, case):
        for label, (law, applies) in LAWS.items():
            is_first = subject.subject.variant == first
            if applies(subject) and (is_first or label in _ABOUT_VALUES):
                yield f"{label}-{subject.subject}", functools.partial(law, subject)


def check(name: str, case: Case | None = None) -> None:
    """Puts a registered mechanism through all laws that apply to it.

    Args:
      name: name of the mechanism.
      case: inputs and options of the tests; default `Case()`.

    Raises:
      AssertionError: a law is broken; the note of the error names the law.
      ValueError: an unknown name, or a mechanism without a naive form.
    """
    for label, law in _cases(name, Case() if case is None else case):
        try:
            law()
        except AssertionError as error:
            error.add_note(f"law {label}")
            raise


def parametrize(name: str, case: Case | None = None) -> Any:
    """Pytest decorator: runs a test once for each law that applies to a registered mechanism.

    The test takes one argument, `law`, and calls it. Arguments are those of `check`.
    """
    import pytest

    cases = [pytest.param(law, id=label) for label, law in _cases(name, case or Case())]
    return pytest.mark.parametrize("law", cases)
