"""The benchmark of layers on a GPU, with the CPU in the place of the GPU."""

import json
import time

import jax
import numpy as np
import pytest

from benchmarks.gpu import layers
from benchmarks.gpu.layers import Row, Sizes

SIZES = Sizes(rows=1, length=32, features=16, heads=2)


class Pipe:
    """The end of a pipe whose other end says to go on at once."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def recv(self):
        return "time"


def work(*rows, seconds=100.0):
    pipe = Pipe()
    layers.work(pipe, "cpu", list(rows), SIZES, time.time() + seconds)
    return pipe.sent


def test_errors_are_relative_to_their_array():
    tree = {"a": np.ones(100), "b": np.full(100, 1e-3)}
    other = {"a": np.ones(100), "b": np.full(100, 2e-3)}
    assert layers.relative_error(tree, tree) == 0
    # The small array is compared with a hundredth of the large one.
    assert layers.relative_error(other, tree) == pytest.approx(0.1)
    assert layers.relative_error({**tree, "a": np.full(100, np.nan)}, tree) == float("inf")


def test_a_layer_is_checked_compiled_and_timed(monkeypatch):
    monkeypatch.setattr(layers, "CHECKED_LENGTH", 40)
    monkeypatch.setattr(layers, "PROMPT", 30)
    row = Row("linear", "causal")
    *_, ready, last = work(row)
    assert ready == "ready" and last is row and row.failed is None
    assert row.error == 0 and row.decode_error < 1e-5  # on the CPU beside itself
    assert row.half_error == row.half_error_on_cpu < 0.05
    assert row.seconds.keys() == row.temporary_bytes.keys() == {"forward", "backward"}
    assert "| `linear` | causal | " in layers.table(
        {"device": {"name": ""}, "versions": {"jax": ""}}, SIZES, [row]
    )


def test_what_disagrees_or_fails_is_told(monkeypatch):
    monkeypatch.setattr(layers, "CHECKED_LENGTH", 20)
    monkeypatch.setattr(layers, "TOLERANCE", -1.0)
    wrong = Row("fnet", "bidirectional")
    assert work(wrong) == [wrong, "ready"] and wrong.failed == "disagrees with the CPU"
    failing = Row("sliding_window", "neither")
    monkeypatch.setattr(layers, "check", lambda row: 1 / 0)
    work(failing)
    assert failing.failed == "ZeroDivisionError: division by zero"


def test_what_is_too_large_or_too_late_is_told(monkeypatch):
    monkeypatch.setattr(layers, "check", lambda row: None)
    late = Row("fnet", "bidirectional")
    work(late, seconds=-1)
    assert late.skipped == "not reached within --minutes"
    monkeypatch.setattr(layers, "MOST_BYTES", 100)
    large = Row("linear", "causal")
    work(large)
    assert "GB of parameters" in large.skipped and not large.seconds


def test_a_missing_device_is_told(tmp_path, capsys):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    assert layers.main(["--only", "fnet", "--output", str(tmp_path)]) == 2
    assert "JAX finds no device of cuda (" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_its_processes(tmp_path, capsys):
    arguments = "--platform cpu --only fnet additive --length 32 --features 16 --heads 2"
    assert layers.main([*arguments.split(), "--processes", "2", "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "layers.json").read_text())
    assert [row["mechanism"] for row in record["rows"]] == ["fnet", "additive"]
    assert all(row["seconds"]["backward"] > 0 for row in record["rows"])
    assert record["machine"]["device"]["platform"] == "cpu"
    assert (tmp_path / "layers.md").read_text() in capsys.readouterr().out
