"""The benchmark that compiles kernels for TPUs: schedules, and what it says without a compiler."""

import importlib.util

import pytest

from benchmarks.tpu import compiled, schedules

UNITS = "MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"


def write(folder, kernel, bundles, uses, source):
    """Files as the compiler writes them; a bundle is its label and its instructions."""
    lines = [f"{n:#x} {label}: > {{ {code} }}" for n, (label, code) in enumerate(bundles)]
    (folder / f"17-{kernel}-72-final_bundles.txt").write_text("= header\n" + "\n".join(lines))
    table = "\n".join(" ".join(map(str, use)) for use in uses)
    slots = "4 4 3 4 2 1 3 3 1 1 2"
    use = f"== CAPACITY:\n{UNITS}\n {slots}\n== UTILIZATION:\n{table}\n"
    (folder / f"17-{kernel}-70-final_hlo-static-per-bundle-utilization.txt").write_text(use)
    (folder / f"17-{kernel}-02-original.txt").write_text(source)


def test_a_schedule_has_the_counts_of_the_shortest_piece_with_the_products(tmp_path):
    none, product = [0] * 11, [4, 0, 0, 2, 0, 1, 0, 1, 0, 1, 0]
    bundles = [
        ("  ", "start"),
        ("LB", "masked"),
        ("  ", "masked"),
        ("  ", "%5 = sbr.rel target"),
        ("  ", "whole"),
        ("  ", "whole"),
        ("LE", "end"),
    ]
    uses = [none, product, product, none, product, product, none]
    source = (
        "#allocation1 [shape = 'f32[8,128]', space=vmem, size = 0x1000, scoped]\n"
        "  #allocation1 [shape = 'f32[8,128]', space=vmem, size = 0x1000, scoped]\n"
        "#allocation2 [shape = 's32[1]', space=smem, size = 0x4, scoped]\n"
        "#allocation3 [shape = 'f32[8,128]', space=vmem, size = 0x2000, scoped]\n"
    )
    write(tmp_path, "block_attention_forward.1", bundles, uses, source)
    write(tmp_path, "fusion.3", bundles, uses, source)
    (found,) = schedules.read(tmp_path)
    assert (found.kernel, found.bundles, found.body) == ("block_attention_forward.1", 7, 2)
    assert found.use["MATMUL"] == 100
    assert found.use["VALU"] == 50
    assert found.spills == 4
    assert found.vector_memory == 0x3000


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    write(tmp_path, "block_attention_key.1", [("  ", "start")] * 3, [[0] * 11] * 2, "")
    with pytest.raises(ValueError, match="has 3 bundles, and 2 lines of their use"):
        schedules.read(tmp_path)


def test_without_the_compiler_it_says_how_to_install_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compiled.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "the compiler for TPUs is not installed: pip install libtpu\n"


def test_a_kernel_is_compiled(tmp_path):
    pytest.importorskip("libtpu", reason="needs the libtpu package, which compiles the kernels")
    options = ["--chips", "v5e", "--only", "causal, 128", "--output", str(tmp_path)]
    assert compiled.main(options) == 0
    table = (tmp_path / "compiled.md").read_text()
    for kernel in ("forward", "query", "key"):
        assert f"| v5e | causal, 128 | block_attention_{kernel}" in table
