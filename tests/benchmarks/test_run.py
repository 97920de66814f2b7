import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decode, layers, machine, measure, report, run
from benchmarks.contenders import COMPARISONS, Contender, in_jax
from benchmarks.workloads import PASSES, draw

RATES = (machine.Rate("product", "", 1e9), machine.Rate("exponential", "", 1e9))


@pytest.fixture
def only_jax(monkeypatch):
    """Hides all other libraries, and shortens the measurement of rates."""
    monkeypatch.setattr(machine, "installed", lambda package: package == "jax")
    monkeypatch.setattr(machine, "SQUARE", 64)
    monkeypatch.setattr(machine, "EXPONENTIALS", 64)
    monkeypatch.setattr(run, "RATE_SECONDS", 0.001)


def row(comparison="causal", which="forward", length=8192, contender="jax.nn", **fields):
    return measure.Row(comparison, which, length, contender, 1, 1, 1.0, **fields)


def test_a_run_writes_table_json_and_figure(only_jax, tmp_path, capsys):
    argv = ["--lengths", "40", "--rounds", "2", "--output", str(tmp_path / "out")]
    assert run.main([*argv, "--only", "causal"]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {(r["which"], r["contender"]): r for r in record["rows"]}
    assert rows.keys() == {(which, c.name) for c in COMPARISONS["causal"] for which in PASSES}
    for (_, contender), measured in rows.items():
        if contender in ("Tokamax xla_chunked", "PyTorch SDPA"):
            assert measured["skipped"].endswith("is not installed")
            assert measured["seconds"] is None
        else:
            assert measured["skipped"] is None
            assert measured["error"] < 1e-5
            assert len(measured["rounds"]) == 2
            assert measured["temporary_bytes"] > 0
            assert 0 < measured["floor"]
    assert record["machine"]["versions"]["jax"] == jax.__version__
    table = (tmp_path / "out" / "table.md").read_text()
    assert "torch is not installed" in table
    assert table in capsys.readouterr().out
    assert (tmp_path / "out" / "time.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_computes_something_else_is_not_timed():
    def off_by_a_thousandth(query, key, value):
        return 1.001 * jax.nn.dot_product_attention(query, key, value)

    def without_a_gradient_of_keys(query, key, value):
        return jax.nn.dot_product_attention(query, jax.lax.stop_gradient(key), value)

    contenders = (
        Contender("right", "bidirectional", in_jax(jax.nn.dot_product_attention)),
        Contender("wrong", "bidirectional", in_jax(off_by_a_thousandth)),
        Contender("no gradient", "bidirectional", in_jax(without_a_gradient_of_keys)),
        Contender("NaN", "bidirectional", in_jax(lambda q, k, v: q * jnp.nan)),
    )
    rows = measure.compare("bidirectional", contenders, draw(20), PASSES[1], 1, RATES, {})
    assert rows[0].skipped is None
    assert rows[0].ratio == 1
    for one in rows[1:]:
        assert one.skipped.startswith("disagrees")
        assert one.seconds is None
        assert one.rounds == []


def test_one_that_raises_says_why_and_the_others_are_timed():
    def refuses(query, key, value):
        raise NotImplementedError("no such thing here. And more.")

    contenders = (
        Contender("right", "bidirectional", in_jax(jax.nn.dot_product_attention)),
        Contender("refuses", "bidirectional", in_jax(refuses)),
    )
    right, refused = measure.compare("bidirectional", contenders, draw(20), PASSES[0], 1, RATES, {})
    assert right.seconds is not None
    assert refused.skipped == "NotImplementedError: no such thing here"


def test_one_that_needs_too_much_memory_is_not_run(monkeypatch):
    monkeypatch.setattr(measure, "MOST_BYTES", 0)
    contenders = (Contender("large", "causal", in_jax(jax.nn.dot_product_attention)),)
    (large,) = measure.compare("causal", contenders, draw(20), PASSES[0], 1, RATES, {})
    assert large.skipped.endswith("GB of temporaries")
    assert large.error is None


class Clock:
    """Replacement of `time`, which advances only when a program runs."""

    def __init__(self):
        self.now = 0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        pass

    def contender(self, name, seconds):
        """Returns a contender whose calls take a given time."""

        def compile_program(arrays, backward):
            program = in_jax(jax.nn.dot_product_attention)(arrays, backward)

            def run_program(operands):
                self.now += seconds
                return program.run(operands)

            return program._replace(run=run_program)

        return Contender(name, "bidirectional", compile_program)


def test_after_enough_seconds_contenders_leave_and_slow_peers_do_not_come_back(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    contenders = (clock.contender("effattn", 0.75), clock.contender("slow", 9))
    slow = {}
    rows = measure.compare("bidirectional", contenders, draw(20), PASSES[0], 5, RATES, slow)
    assert rows[0].rounds == [0.75, 0.75, 0.75, 0.75, None]
    assert rows[1].rounds == [9, 9, 9, None, None]
    assert rows[1].ratio == 12
    assert slow == {"slow": "slow: a call took 9.0 s at length 20"}
    first, left_out = measure.compare(
        "bidirectional", contenders, draw(40), PASSES[0], 1, RATES, slow
    )
    assert first.rounds == [0.75]
    assert left_out.skipped == slow["slow"]


def test_each_round_starts_with_another():
    calls = []
    program = measure.Program(
        None, calls.append, lambda _: None, None, temporary_bytes=None, peak_bytes=None
    )
    measure._time([(row(contender=name), program, name) for name in "abc"], 4)
    assert "".join(calls) == "abcbcacababc"


def test_ratios_are_of_times_in_the_same_round():
    first, second, third = (row(contender=name) for name in "abc")
    first.rounds, second.rounds, third.rounds = [1, 4, 2], [2, 2, 1], [None, 1, 1]
    for one in (first, second, third):
        measure._summarise(one, first)
    assert second.seconds == 2
    assert second.ratio == 0.5
    assert second.ratio_range == (0.5, 2)
    assert third.ratio == 0.375


def test_targets_are_met_missed_or_not_measured():
    timed = {"seconds": 1.0, "ratio_range": (0.5, 9.0)}
    rows = [
        row(ratio=4.5, **timed),
        row(contender="PyTorch SDPA", ratio=1.1, **timed),
        row(which=PASSES[1], contender="effattn", temporary_bytes=65_000_000, ratio=1.0, **timed),
        row("window", skipped="jax is slow"),
        row("window", length=16384, contender="PyTorch FlexAttention", ratio=0.9, **timed),
    ]
    verdicts = [line[-1] for line in report._verdicts(rows)]
    assert verdicts == [
        "met",
        "met, aim of 1.2 missed",
        "MISSED",
        "MISSED",
        "not measured: jax is slow",
    ]


@pytest.mark.parametrize("argv", [["--lengths", "15"], ["--rounds", "x"], ["--only", "sideways"]])
def test_a_bad_option_is_named(argv, capsys):
    with pytest.raises(SystemExit):
        run.main(argv)
    assert argv[0] in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for program in (run, layers, decode):
        assert program.parse(["--output=~/a"]).output == tmp_path / "a"
    file = tmp_path / "file"
    file.write_text("kept")
    assert run.main(["--output", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert file.read_text() == "kept"
