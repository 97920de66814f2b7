"""The laws as a library: they hold for a mechanism of another package, and find what is wrong."""

import dataclasses
import importlib
import pathlib
import re
import sys

import jax.numpy as jnp
import pytest

from effattn import registry, testing
from effattn.testing import Case

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/own_mechanism.md"


def example():
    """The code of a new mechanism in the guide, with its laws."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
        if "testing.parametrize" in block
    ]
    return code


@pytest.fixture
def fading(tmp_path, monkeypatch):
    """The example as a module in the current directory, registered for one test."""
    monkeypatch.setattr(registry, "_MECHANISMS", dict(registry._MECHANISMS))
    (tmp_path / "fading.py").write_text(example())
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("fading")
    del sys.modules["fading"]


def test_the_example_is_short(fading):
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) < 60


def test_all_laws_hold_for_the_example(fading):
    testing.check("fading", fading.case)


def test_parametrize_gives_one_test_a_law(fading):
    (mark,) = fading.test_fading.pytestmark
    labels = [parameter.id for parameter in mark.args[1]]
    assert "agrees_with_the_naive_form-fading" in labels
    assert "nothing_reaches_back-fading" in labels
    assert len(labels) == len(set(labels)) > 8


def broken(fading, monkeypatch, change):
    """The example with another function of the fast form."""
    entry = registry.get("fading")
    fast = entry.function

    def function(*args, **kwargs):
        return change(fast, *args, **kwargs)

    function.__signature__ = fast.__signature__
    other = dataclasses.replace(entry, function=function)
    monkeypatch.setitem(registry._MECHANISMS, "fading", other)


def with_next_value(fast, query, key, value, **kwargs):
    return fast(query, key, value + 1e-3 * jnp.roll(value, -1, -3), **kwargs)


def without_lengths(fast, query, key, value, **kwargs):
    ignored = {"query_seq_lengths": None, "key_value_seq_lengths": None}
    return fast(query, key, value, **{**kwargs, **ignored})


def without_packing(fast, query, key, value, **kwargs):
    return fast(query, key, value, **{**kwargs, "segment_ids": None})


def without_initial_state(fast, query, key, value, **kwargs):
    return fast(query, key, value, **{**kwargs, "initial_state": None})


@pytest.mark.parametrize(
    "change", [with_next_value, without_lengths, without_packing, without_initial_state]
)
def test_a_broken_mechanism_breaks_a_law(fading, monkeypatch, change):
    broken(fading, monkeypatch, change)
    with pytest.raises(AssertionError) as raised:
        testing.check("fading", fading.case)
    assert any(note.startswith("law ") for note in raised.value.__notes__)


def test_a_mechanism_without_a_naive_form_is_refused(fading, monkeypatch):
    entry = dataclasses.replace(registry.get("fading"), function=lambda query, key, value: value)
    object.__setattr__(entry, "naive", None)
    monkeypatch.setitem(registry._MECHANISMS, "fading", entry)
    with pytest.raises(ValueError, match="'fading' has no naive form to compare with"):
        testing.check("fading")
    with pytest.raises(ValueError, match="unknown mechanism 'nothing'"):
        testing.check("nothing", Case())
