"""Marks slow cases of a test, by naming the slow cases or the quick cases."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrized test, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but_for(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrized test, where all cases but the quick ones are marked slow."""
    return [case if case in quick else slow(case) for case in cases]
