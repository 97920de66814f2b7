"""Fixtures of the tests of CPU kernels."""

import jax
import pytest

from effattn.llvm import runtime
from tests.marks import slow


@pytest.fixture(params=[slow(4), 8, slow(16)])
def lanes(request, monkeypatch):
    """Kernels with vectors of so many numbers, if this processor has them."""
    if request.param > runtime.lanes():
        pytest.skip(f"this processor has vectors of {runtime.lanes()} numbers")
    monkeypatch.setattr(runtime, "lanes", lambda: request.param)
    jax.clear_caches()
    return request.param
