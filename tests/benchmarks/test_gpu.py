import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import machine
from benchmarks.contenders import Contender, in_jax
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import measure, partitioned, report
from benchmarks.gpu.cases import DTYPE, FULL, TINY, cases
from benchmarks.gpu.contenders import IMPLEMENTATIONS, OURS, PEERS, contenders
from benchmarks.workloads import only_rows
from tests.marks import slow

TINY_CASES = {case.comparison: case for case in cases(TINY)}
RATES = (machine.Rate("product", "", 1e9), machine.Rate("copy", "", 1e9))


@pytest.fixture
def draws():
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (TINY.tokens * TINY.hidden,), DTYPE) for key in keys]


@pytest.fixture
def only_jax(monkeypatch):
    """Hides all other libraries."""
    monkeypatch.setattr(machine, "installed", lambda package: package == "jax")


def compare(case, taking_part, draws, seconds=100.0, rounds=1, shown=None):
    device = jax.devices("cpu")[0]
    shown = [] if shown is None else shown
    budget = measure.Budget(seconds)
    return measure.compare(case, taking_part, draws, RATES, budget, rounds, device, shown.append)


def test_flops_and_bytes_of_exact_attention_are_those_of_flash_attention():
    exact = {c.variant: c for c in cases(FULL) if c.comparison in ("causal", "bidirectional")}
    case = exact["8192, 128"]  # the last of that name is bidirectional
    assert (case.batch, case.heads, case.kv_heads) == (2, 16, 16)
    assert case.flops("forward") == 4 * 8192**2 * 128 * 16 * 2
    assert case.flops("forward + backward") == 3.5 * case.flops("forward")
    array = 16384 * 2048 * 2  # bytes
    shapes = jax.eval_shape(case.operands, 4 * [jax.ShapeDtypeStruct((16384 * 2048,), DTYPE)])
    assert case.traffic(shapes, "forward") == 4 * array
    # The backward pass reads q, k, v, out and the output gradient, and writes three gradients.
    assert case.traffic(shapes, "forward + backward") == 12 * array


def test_flops_and_bytes_of_a_recurrence():
    case = next(c for c in cases(FULL) if c.comparison == "scalar gate")
    assert case.flops("forward") == 16384 * 16 * (2 * 128 * 128 + 2 * 128 * 128)
    array, gate = 16384 * 2048 * 2, 16384 * 16 * 4
    shapes = jax.eval_shape(case.operands, 4 * [jax.ShapeDtypeStruct((16384 * 2048,), DTYPE)])
    assert case.traffic(shapes, "forward") == 4 * array + gate
    assert case.traffic(shapes, "forward + backward") == 11 * array + 3 * gate


def test_flops_and_bytes_of_decoding():
    case = next(c for c in cases(FULL) if c.variant == "64 of 8192")
    assert case.flops("forward") == 64 * 16 * 8192 * 4 * 128
    shapes = jax.eval_shape(case.operands, None)
    pages, row = 2 * 64 * 8192 * 4 * 128 * 2, 64 * 16 * 128 * 2
    assert case.traffic(shapes, "forward") == pages + 2 * row


def test_shared_key_heads_are_read_once(draws):
    case = TINY_CASES["grouped"]
    query, key, value, _ = case.operands(draws)
    assert query.shape[2] == TINY.group * key.shape[2]
    assert case.traffic(case.operands(draws), "forward") == 2 * 2 * (query.size + key.size)


@pytest.mark.parametrize("name", [name for name, c in TINY_CASES.items() if c.allowed])
def test_pairs_are_those_that_may_attend(name):
    case = TINY_CASES[name]
    queries = np.arange(case.length)[:, None] if name != "decode" else np.zeros((1, 1), int)
    allowed = case.allowed(queries, np.arange(case.length), *case.tables)
    assert case.pairs == np.broadcast_to(allowed, (len(queries), case.length)).sum()
    assert allowed[case.rows].any(-1).all() if name != "decode" else True


def test_blocks_are_as_dense_as_they_are_said_to_be():
    for case in cases(FULL):
        if case.comparison == "block sparse":
            percent = float(case.variant.split()[1])
            assert 100 * case.pairs / case.length**2 == pytest.approx(percent, abs=0.8)


def test_all_kinds_come_once_before_the_variants_of_any():
    order = [case.comparison for case in cases(FULL)]
    assert set(order) == OURS.keys() == PEERS.keys() == report.TITLES.keys()
    assert set(order[: len(OURS)]) == OURS.keys()
    variants = [(case.comparison, case.variant) for case in cases(FULL)]
    assert len(set(variants)) == len(variants)
    assert sum(case.comparison in ("causal", "bidirectional") for case in cases(FULL)) == 36


@pytest.mark.parametrize("name", OURS)
def test_our_functions_take_the_operands_and_give_what_has_the_shape_of_the_gradient(name, draws):
    case = TINY_CASES[name]
    *inputs, gradient = jax.eval_shape(case.operands, draws)
    out = jax.eval_shape(lambda *arrays: OURS[name](case, "xla", *arrays), *inputs)
    assert (out.shape, out.dtype) == (gradient.shape, gradient.dtype)


@pytest.mark.parametrize(
    "only",
    [
        ["causal"],
        slow(["documents", "gated delta rule", "decode"]),
    ],
    ids=", ".join,
)
def test_a_run_on_a_cpu_writes_tables_json_and_figure(only_jax, tmp_path, capsys, only):
    argv = ["--quick", "--platform", "cpu", "--rounds", "1", "--only", *only]
    assert program.main([*argv, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["machine"]["device"]["name"] == "cpu"
    assert {"commit", "versions"} <= record["machine"].keys()
    assert {rate["kind"] for rate in record["rates"]} == {"product", "copy"}
    rows = {(r["comparison"], r["which"], r["contender"]): r for r in record["rows"]}
    expected = {
        (name, which, one.name)
        for name in only
        for which in TINY_CASES[name].passes
        for one in contenders(TINY_CASES[name], "cpu")
    }
    assert rows.keys() == expected
    for (_, _, contender), row in rows.items():
        if contender == "effattn xla":
            assert row["skipped"] is None
            assert 0 < row["error"] < measure.TOLERANCE
            assert row["flops_per_second"] == row["flops"] / row["seconds"]
            assert row["bytes_per_second"] == row["traffic"] / row["seconds"]
            assert row["peak_bytes"] > 0
            assert len(row["rounds"]) == 1
        else:
            assert row["seconds"] is None
        if contender == "PyTorch SDPA":
            assert row["skipped"] == "torch is not installed"
        if contender in ("effattn triton", "effattn mosaic_gpu"):
            assert row["skipped"].startswith("NotImplementedError")
            assert not row["failed"]
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert all(f"## {report.TITLES[name]}" in text for name in only)
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def softmax(query, key, value, *, wrong=1.0):
    return wrong * jax.nn.dot_product_attention(query, key, value)


def test_one_that_disagrees_or_raises_is_a_row_that_says_so(draws):
    def refuses(*arrays):
        raise NotImplementedError("takes no such thing. And more.")

    def breaks(*arrays):
        raise RuntimeError("out of memory")

    case = dataclasses.replace(TINY_CASES["bidirectional"], passes=("forward",))
    taking_part = [
        Contender("right", case.comparison, in_jax(softmax)),
        Contender("wrong", case.comparison, in_jax(softmax, wrong=1.05)),
        Contender("refuses", case.comparison, in_jax(refuses)),
        Contender("breaks", case.comparison, in_jax(breaks)),
        Contender("absent", case.comparison, in_jax(softmax), "no_such_package"),
    ]
    shown = []
    rows = compare(case, taking_part, draws, shown=shown)
    assert shown == rows
    right, wrong, refused, broken, absent = rows
    assert right.seconds is not None
    assert right.product_share == pytest.approx(right.flops / right.seconds / 1e9)
    assert right.copy_share == pytest.approx(right.traffic / right.seconds / 1e9)
    assert wrong.skipped.startswith("disagrees")
    assert wrong.failed
    assert (refused.skipped, refused.failed) == (
        "NotImplementedError: takes no such thing",
        False,
    )
    assert (broken.skipped, broken.failed) == ("RuntimeError: out of memory", True)
    assert (absent.skipped, absent.failed) == ("no_such_package is not installed", False)
    assert all(row.seconds is None for row in rows[1:])


def test_nothing_is_compiled_when_the_time_is_over(draws):
    def compile_program(arrays, backward):
        raise AssertionError

    case = TINY_CASES["causal"]
    rows = compare(case, [Contender("late", "causal", compile_program)], draws, seconds=0)
    assert [row.which for row in rows] == list(case.passes)
    assert all(row.skipped == measure.NOT_REACHED and not row.failed for row in rows)


def test_a_program_that_is_compiled_too_late_is_not_timed(draws, monkeypatch):
    now = 0.0
    monkeypatch.setattr(measure.time, "monotonic", lambda: now)

    def compile_program(arrays, backward):
        nonlocal now
        now = 101.0
        return in_jax(softmax)(arrays, backward)

    case = dataclasses.replace(TINY_CASES["bidirectional"], passes=("forward",))
    # The program compiles in the main thread, as PyTorch's programs do.
    monkeypatch.setattr(measure, "IN_THREADS", ())
    taking_part = [Contender(name, case.comparison, compile_program) for name in ("a", "b")]
    rows = compare(case, taking_part, draws, seconds=100.0)
    assert [row.skipped for row in rows] == [measure.NOT_REACHED] * 2


def test_a_compiler_that_outlasts_the_time_is_not_waited_for(draws):
    finish = threading.Event()

    def compile_program(arrays, backward):
        finish.wait(60)
        raise AssertionError

    case = dataclasses.replace(TINY_CASES["bidirectional"], passes=("forward",))
    begin = time.monotonic()
    (row,) = compare(case, [Contender("slow", case.comparison, compile_program)], draws, 0.5)
    finish.set()
    assert row.skipped == measure.NOT_REACHED
    assert time.monotonic() - begin < 30


class Device:
    """Replacement of `time` and of a program, whose calls take a given time."""

    def __init__(self, start, seconds):
        self.now, self.free, self.start, self.seconds = 0.0, 0.0, start, seconds
        self.program = measure.Program(lambda x: x, self.run, self.wait, None, None, None)

    def perf_counter(self):
        return self.now

    monotonic = perf_counter

    def run(self, placed):
        self.now += self.start
        self.free = max(self.now, self.free) + self.seconds

    def wait(self, results):
        self.now = max(self.now, self.free)


def timed(device, monkeypatch, rounds):
    monkeypatch.setattr(measure, "time", device)
    shape = (1, 1, 1, 1, 1, 1, 1)
    row = measure.Row("causal", "", "forward", "one", *shape)
    measure._time([(row, device.program, None)], rounds, measure.Budget(1e9))
    measure._summarise(row, RATES)
    return row


def test_the_time_of_a_call_is_that_of_the_device_where_the_host_is_faster(monkeypatch):
    row = timed(Device(start=1e-5, seconds=1e-3), monkeypatch, rounds=3)
    assert row.calls == 20
    assert row.seconds == pytest.approx(1e-3, rel=0.01)
    assert row.start_seconds == pytest.approx(1e-5)
    assert not row.bound_by_host


def test_a_call_that_takes_the_host_longer_than_the_device_is_marked(monkeypatch):
    row = timed(Device(start=1e-4, seconds=1e-5), monkeypatch, rounds=1)
    assert row.calls == measure.MOST_CALLS
    assert row.bound_by_host
    row = dataclasses.replace(row, error=1e-3)
    assert " 0.100* " in report.markdown(
        {**machine.describe(), "device": {"name": "", "driver": None}}, RATES, [row]
    )


def test_one_that_breaks_in_a_later_round_is_not_timed_and_the_others_are(monkeypatch):
    device = Device(start=0, seconds=1.0)
    calls = iter(range(100))

    def breaks(placed):
        if next(calls) == 4:
            raise RuntimeError("out of memory")
        device.run(placed)

    monkeypatch.setattr(measure, "time", device)
    first, second = (
        measure.Row("causal", "", "forward", name, *[1] * 7) for name in ("breaks", "works")
    )
    taking_part = [
        (first, device.program._replace(run=breaks), None),
        (second, device.program, None),
    ]
    measure._time(taking_part, 3, measure.Budget(1e9))
    for row in (first, second):
        measure._summarise(row, RATES)
    assert (first.skipped, first.seconds) == ("RuntimeError: out of memory", None)
    assert (second.skipped, second.seconds) == (None, 1.0)


def test_figures_have_a_panel_for_each_kind_with_several_cases():
    def row(comparison, variant, length=8192, head_size=128):
        return measure.Row(comparison, variant, "forward", "one", 1, length, 1, 1, head_size, 1, 1)

    rows = [
        row("causal", "8192, 128"),
        row("causal", "512, 128", 512),
        row("causal", "512, 64", 512, 64),
        row("window", "8192, 1024 keys"),
        row("window", "8192, 128 keys"),
        row("bigbird", "8192, blocks of 64"),
    ]
    kinds = {title: list(cases) for title, cases in report._kinds(rows).items()}
    assert kinds == {
        "exact, causal, heads of 128": ["512", "8192"],
        "causal window": ["8192, 128 keys", "8192, 1024 keys"],
        report.ALONE: ["exact, causal, heads of 64", "BigBird"],
    }


def test_slow_programs_have_few_rounds(monkeypatch):
    row = timed(Device(start=0, seconds=1.0), monkeypatch, rounds=9)
    assert (row.calls, len(row.rounds)) == (1, measure.FEWEST_ROUNDS)


def test_without_a_cuda_device_one_sentence_says_so(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert "--platform cpu --quick" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [["--minutes", "0"], ["--minutes", "x"], ["--rounds", "0"], ["--only", "sideways"],
     ["--platform", "cpu"]],
)  # fmt: skip
def test_a_bad_option_is_named(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(argv)
    assert argv[0] in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert program.main(["--output", str(tmp_path / "file")]) == 2
    assert "cannot write the output folder" in capsys.readouterr().err


def test_every_implementation_is_a_row_for_each_kind():
    for case in TINY_CASES.values():
        names = [one.name for one in contenders(case, "cpu")]
        assert [name for name in names if name.startswith("effattn")] == [
            f"effattn {name}" for name in IMPLEMENTATIONS
        ]
        assert len(set(names)) == len(names)


def test_the_gradient_of_unchecked_heads_is_zero():
    gradient = jnp.ones((2, 6, 3, 1))
    kept = only_rows(gradient, np.array([1, 4]), slice(1))
    assert np.argwhere(kept[..., 0]).tolist() == [[0, 1, 0], [0, 4, 0]]


@pytest.mark.slow
def test_partitioned_calls_are_timed_beside_direct_ones(tmp_path, capsys):
    """On a CPU, with tiny arrays."""
    assert partitioned.main(["--quick", "--rounds", "1", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "partitioned.json").read_text())["rows"]
    forms = {row["form"] for row in rows if row["comparison"] == "causal, bfloat16"}
    assert forms == {"direct", "compiler's rule", "explicit axes"}
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)
    assert f"| {rows[0]['comparison']} | forward | direct | " in capsys.readouterr().out


def test_each_form_is_partitioned_in_its_way():
    """The compiler's rule in one, `jax.shard_map` in another; all compute the same."""
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [jax.random.normal(key, (1, 64, 2, 16)) for key in keys]
    function = partitioned.PASSES["forward + backward"](partitioned.MECHANISMS["causal"])
    found, traced = {}, {}
    for form, around in partitioned.partitionings().items():
        program, placed = partitioned.compiled(function, operands, around)
        found[form] = jax.tree.map(np.asarray, program(*placed))
        with around():
            traced[form] = str(jax.make_jaxpr(function)(*placed))
    ruled = [form for form, text in traced.items() if "effattn_partitioned" in text]
    mapped = [form for form, text in traced.items() if "shard_map" in text]
    assert (ruled, mapped) == (["compiler's rule"], ["explicit axes"])
    jax.tree.map(np.testing.assert_array_equal, found["direct"], found["compiler's rule"])
    jax.tree.map(np.testing.assert_array_equal, found["direct"], found["explicit axes"])
