"""Which cases of a test are slow: said of each, or by those that are not."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case to parametrize a test by, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but_for(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases to parametrize a test by; those that are not among the quick are marked slow."""
    return [case if case in quick else slow(case) for case in cases]
