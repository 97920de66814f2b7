"""Which cases of a test are slow, said by those that are not."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but_for(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases to parametrize a test by; those that are not among the quick are marked slow."""
    slow = pytest.mark.slow
    return [case if case in quick else pytest.param(case, marks=slow) for case in cases]
