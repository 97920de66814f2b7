"""The benchmark of attention to chosen keys."""

import json

import jax
import pytest

from benchmarks import chosen
from tests.marks import slow


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chosen, "_CHECKED", 70)
    jax.clear_caches()


@pytest.mark.parametrize("flags", [[], slow(["--backward"])])
def test_it_writes_a_row_for_each_mechanism(flags, tmp_path):
    options = ["--length", "80", "--rounds", "1", "--share", "64", "--output", str(tmp_path)]
    assert chosen.main([*options, *flags]) == 0
    record = json.loads((tmp_path / "chosen.json").read_text())
    assert [row["mechanism"] for row in record["rows"]] == ["native_sparse", "moba", "indexed"]
    assert all(row["ratio"] > 0 and row["error"] < 1e-5 for row in record["rows"])
    table = (tmp_path / "chosen.md").read_text()
    assert "2 heads of 576 and 512, 1 of keys, top_k 2048" in table


def test_wrong_results_are_not_timed(monkeypatch):
    monkeypatch.setattr(chosen, "error_of", lambda case: 0.1)
    with pytest.raises(ValueError, match="moba differs from XLA by 1.0e-01"):
        chosen.measure("moba", chosen.cases()["moba"], 80, 1, False)
