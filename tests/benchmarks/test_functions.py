"""The benchmark of functions beside exact attention."""

import json

import jax
import pytest

from benchmarks import functions
from tests.marks import slow


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(functions, "_CHECKED", 70)
    jax.clear_caches()


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "retention", "indexed", "rg_lru"],
        slow([]),
        slow(["--backward", "--only", *functions.chosen_keys()]),
    ],
)
def test_it_writes_a_row_for_each_mechanism(flags, tmp_path):
    options = ["--length", "80", "--rounds", "1", "--share", "64", "--output", str(tmp_path)]
    assert functions.main([*options, *flags]) == 0
    record = json.loads((tmp_path / "functions.json").read_text())
    names = flags[flags.index("--only") + 1 :] if flags else [*functions.cases()]
    assert [row["mechanism"] for row in record["rows"]] == names
    assert all(row["ratio"] > 0 and row["error"] < 1e-5 for row in record["rows"])
    table = (tmp_path / "functions.md").read_text()
    assert "2 heads of 576 and 512, 1 of keys, top_k 2048" in table


def test_wrong_results_are_not_timed(monkeypatch):
    monkeypatch.setattr(functions, "error_of", lambda case: 0.1)
    with pytest.raises(ValueError, match="moba differs from its reference by 1.0e-01"):
        functions.measure("moba", functions.cases()["moba"], 80, 1, False)
