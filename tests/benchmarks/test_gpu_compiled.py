"""Layers compiled for GPUs that are not there."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import compiled
from benchmarks.gpu.layers import Sizes

installed = pytest.mark.skipif(
    bool(compiled.missing()),
    reason="needs XLA's compiler for GPUs (see benchmarks/gpu/compiled.py)",
)


def test_without_the_compiler_it_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiled, "PACKAGES", ("json", "no_such_module", "no_such_package.inner"))
    assert compiled.main(["--output", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "not installed (no no_such_module, no_such_package.inner)" in told
    assert not list(tmp_path.iterdir())


def test_the_table_has_kernels_memory_and_failures():
    row = compiled.Row(
        "softmax", "causal",
        {"forward": {"triton": 1}, "backward": {"triton": 3, "mosaic_gpu": 2}},
        {"forward": 2_000_000, "backward": 3_600_000_000}, {"forward": 0, "backward": 1024},
        {"forward": 0.25, "backward": 4.0},
    )  # fmt: skip
    failed = compiled.Row("lsh", "bidirectional", seconds={"forward": 2.0}, failed="too large")
    text = compiled.table(compiled.CARDS["a100"], Sizes(2, 512, 64, 4), [row, failed])
    assert "2 sequences of 512 tokens, bfloat16" in text and "NVIDIA A100" in text
    assert text.splitlines()[-2:] == [
        "| `softmax` | causal | 1 triton, 3 triton + 2 mosaic_gpu | 2 MB, 3,600 MB | 0, 1,024 "
        "| 0.2 s, 4.0 s |  |",
        "| `lsh` | bidirectional |  |  |  | 2.0 s | too large |",
    ]


@installed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "kernel"),
    [("a10", "triton"), ("a100", "triton"), ("h100", "mosaic_gpu"), ("b200", "triton")],
)
def test_a_layer_is_compiled(card, kernel, tmp_path):
    """In a process of its own, as the compiler's settings are those of the process."""
    command = "--only softmax --rows 1 --length 256 --features 128 --heads 2"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compiled", *command.split(), "--card", card,
         "--output", str(tmp_path)],
        check=True, capture_output=True,
    )  # fmt: skip
    (row,) = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert row["kernels"] == {"forward": {kernel: 1}, "backward": {kernel: 3}}
    assert 0 < row["temporary_bytes"]["forward"] <= row["temporary_bytes"]["backward"]
