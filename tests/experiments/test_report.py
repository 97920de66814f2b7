import json
import math
import re

import pytest

from experiments.harness import figure, report
from experiments.harness.comparison import Comparison
from experiments.harness.errors import UserError
from experiments.tasks.text import MaskedTokens, NextToken
from tests.experiments.counting import Counting

# Reports read nothing of a text but what its class says.
TEXT, MASKED = (kind.__new__(kind) for kind in (NextToken, MaskedTokens))


class Accurate(Counting):
    headline, more_is_better = "accuracy", True
    columns = {"accuracy": "accuracy", "whole examples": "exact"}


def result(mechanism, seed, bits, **changes):
    return {
        "mechanism": mechanism,
        "seed": seed,
        "learning_rate": 0.02,
        "folder": f"{mechanism}-{seed}",
        "step": 2,
        "tokens": 2000,
        "loss": bits * math.log(2),
        "bits_per_byte": bits,
        "perplexity": 2**bits,
        "word_perplexity": None,
        "tokens_per_second": 1000.0,
        "parameters": 1234,
        "temporary_bytes": 2_500_000,
        "state_bytes": 4096,
        "held_out": {"validation": {"bits_per_byte": bits}},
        "prompt": "To be",
        "sample": "or\x1b[31m not\nto be",
        "curve": [
            {"step": s, "tokens": 1e6 * s, "seconds": s * 1.5, "bits_per_byte": bits + 1 / s}
            for s in (1, 2)
        ],
        **changes,
    }


def share(mechanism, seed, accuracy, longer, **changes):
    """Returns the result of a task whose measures are shares, with two held-out sets."""
    run = result(mechanism, seed, 1.0, **changes)
    del run["prompt"], run["sample"]
    sets = {"validation": {"accuracy": accuracy}, "length 64": {"accuracy": longer}}
    curve = [{"tokens": 1e6 * s, "seconds": s, "accuracy": accuracy * s / 2} for s in (1, 2)]
    return {
        **run,
        "accuracy": accuracy,
        "exact": accuracy / 4,
        "held_out": sets,
        "curve": curve,
    }


RUNS = [result("softmax", s, b) for s, b in enumerate((2.0, 2.2))]
RUNS += [result("linear", s, b, tokens_per_second=3000.0) for s, b in enumerate((2.4, 2.5))]
SHARES = [share("softmax", s, a, a / 2) for s, a in enumerate((0.5, 0.6))]
SHARES += [share("linear", s, 1.0, 0.125 * s, state_bytes=None) for s in range(2)]
COMMAND = "python -m experiments.lm --steps 3"
SETTINGS = {"steps": 3, "seeds": [0, 1], "equal_parameters": True}


def summary_of(runs, task=TEXT):
    rows = report.summarise(Comparison(runs, []), task.columns, task.headline)
    found = {"mechanisms": rows, "columns": task.columns, "headline": task.headline}
    return {**found, "runs": runs}


def rows_of(runs):
    return summary_of(runs)["mechanisms"]


def table_of(runs, task=TEXT):
    return report.table(summary_of(runs, task))


def write(folder, runs, settings=SETTINGS, task=TEXT, sweep=()):
    report.write_report(folder, Comparison(runs, list(sweep)), settings, task, COMMAND)
    report.finish(folder)


def test_rows_are_means_with_the_spread_over_seeds():
    softmax, linear = rows_of(RUNS)
    assert softmax["mechanism"] == "softmax"
    assert softmax["bits_per_byte"] == pytest.approx(2.1)
    assert softmax["bits_per_byte_std"] == pytest.approx(math.sqrt(0.02))
    assert softmax["perplexity"] == pytest.approx((2**2.0 + 2**2.2) / 2)
    assert softmax["held_out"] == {
        "validation": (pytest.approx(2.1), pytest.approx(math.sqrt(0.02)))
    }
    assert linear["tokens_per_second"] == 3000
    assert rows_of(RUNS[:1])[0]["bits_per_byte_std"] is None


def test_the_table_shows_what_was_measured():
    header, rule, softmax, linear = table_of(RUNS).splitlines()
    assert "word perplexity" not in header
    for cell in ("2.100 ± 0.141", "1,234", "1,000", "2.5 MB", "4.1 kB", "0.02"):
        assert f" {cell} " in softmax
    assert len({len(line) for line in (header, rule, softmax, linear)}) == 1


def test_shares_are_percentages():
    header, _, softmax, linear = table_of(SHARES, Accurate()).splitlines()
    assert header.startswith("| mechanism |      accuracy | whole examples |")
    assert softmax.startswith("| softmax   |  55.0 ± 7.1 % |   13.8 ± 1.8 % |")
    assert linear.startswith("| linear    | 100.0 ± 0.0 % |   25.0 ± 0.0 % |")
    (row,) = table_of(SHARES[:1], Accurate()).splitlines()[2:]
    assert row.startswith("| softmax   |   50.0 % |         12.5 % |")


def test_models_with_experts_show_their_load():
    loads = [[[0.2, 0.8], [0.5, 0.5]], [[0.4, 0.6], [0.5, 0.5]]]
    runs = [
        share("softmax", s, 0.5, 0.5, expert_load=load, expert_dropped=[0.1, 0.2 * s])
        for s, load in enumerate(loads)
    ]
    (row,) = summary_of(runs, Accurate())["mechanisms"]
    assert row["expert_load"] == [[pytest.approx(0.3), pytest.approx(0.7)], [0.5, 0.5]]
    header, _, softmax, linear = table_of([*runs, *SHARES[2:]], Accurate()).splitlines()
    assert header.endswith("|    expert load | dropped |")
    assert softmax.endswith("| 30.0 to 70.0 % |  10.0 % |")
    assert linear.endswith("|              - |       - |")


def test_the_headline_of_every_held_out_set_has_a_table_of_its_own():
    header, _, softmax, linear = report.sets_table(summary_of(SHARES, Accurate())).splitlines()
    assert header == "| mechanism |    validation |    length 64 |"
    assert softmax == "| softmax   |  55.0 ± 7.1 % | 27.5 ± 3.5 % |"
    assert linear == "| linear    | 100.0 ± 0.0 % |  6.2 ± 8.8 % |"
    assert report.sets_table(summary_of(RUNS)) is None


def test_costs_are_also_relative_to_softmax_attention():
    runs = [*RUNS[:1], result("linear", 0, 2.4, tokens_per_second=3000.0, temporary_bytes=625_000)]
    _, _, softmax, linear = report.relative_table(summary_of(runs)).splitlines()
    assert softmax == "| softmax   |           1.00 |             1.00 |"
    assert linear == "| linear    |           3.00 |             0.25 |"
    assert report.relative_table(summary_of(RUNS[:2])) is None
    assert report.relative_table(summary_of(RUNS[2:])) is None


def test_word_perplexity_is_shown_where_words_are_defined():
    text = table_of([result("softmax", 0, 2.0, word_perplexity=321.04)])
    assert "word perplexity" in text and " 321.0 " in text


def test_perplexities_beyond_a_float_are_called_infinite(tmp_path):
    runs = [result("softmax", s, 9e2, perplexity=p) for s, p in enumerate((2.0, None))]
    runs += [result("linear", s, 9e2, perplexity=1.7e308) for s in range(2)]
    softmax, linear = rows_of(runs)
    assert softmax["perplexity"] is None and softmax["perplexity_std"] is None
    assert linear["perplexity"] == 1.7e308 and linear["perplexity_std"] == 0
    lines = table_of(runs).splitlines()
    assert "infinite |" in lines[2] and "1.700e+308 ± 0.000 |" in lines[3]
    write(tmp_path, runs)
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


def test_results_without_a_comparison_have_the_version_too(tmp_path):
    report.write(tmp_path, {"records": []}, "text")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"schema": report.SCHEMA, "records": []}


def test_the_report_is_written_and_read_back(tmp_path):
    sweep = [result("softmax", 0, 2.7, learning_rate=0.5)]
    assert not report.finished(tmp_path, SETTINGS)
    assert report.earlier_runs(tmp_path) == []
    write(tmp_path, RUNS, sweep=sweep)
    assert report.finished(tmp_path, SETTINGS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema"] == report.SCHEMA
    assert summary["config"] == SETTINGS
    assert summary["runs"] == RUNS
    assert summary["environment"]["device"]
    # In a clone that git may read, the version has its commit.
    assert re.fullmatch(r"([0-9a-f]{12}\+?)?", summary["environment"].get("commit", ""))
    assert report.earlier_runs(tmp_path) == sweep + RUNS
    markdown = (tmp_path / "summary.md").read_text()
    table, read = report.table(summary), report.read_report(tmp_path)
    assert table in markdown and table in read
    assert "# Language models compared\n" in markdown and TEXT.reference in markdown
    assert "| softmax   |           0.5 |     2.700 |" in markdown
    assert "best rate was chosen on the validation set, with the first seed" in markdown
    assert f"`{COMMAND}`\n\nsteps 3, seeds 0 1" in markdown
    assert markdown.count("    to be\n") == 4
    assert "Continuing this held-out text:\n    To be\n" in read and "linear writes:" in read
    assert read.count("to be") == 2


@pytest.mark.parametrize(
    ("side", "task", "is_causal"),
    [
        (None, TEXT, True),
        (None, MASKED, False),
        ("encoder", TEXT, False),
        ("decoder", TEXT, True),
        ("cross_attention", TEXT, False),
    ],
)
def test_the_direction_of_the_compared_mechanisms_is_recorded(tmp_path, side, task, is_causal):
    write(tmp_path, RUNS, SETTINGS if side is None else {**SETTINGS, "side": side}, task)
    assert json.loads((tmp_path / "summary.json").read_text())["is_causal"] == is_causal


def test_a_report_of_several_sets_has_both_tables(tmp_path):
    write(tmp_path, SHARES, task=Accurate())
    summary = json.loads((tmp_path / "summary.json").read_text())
    markdown, read = (tmp_path / "summary.md").read_text(), report.read_report(tmp_path)
    for text in (markdown, read):
        assert report.table(summary) in text and report.sets_table(summary) in text
    assert "# Accurate: mechanisms compared\n" in markdown
    assert "## Held-out sets: accuracy\n" in markdown
    assert "Samples" not in markdown and "writes" not in read


@pytest.mark.parametrize(
    "changes",
    [{"mechanisms": ["linear"]}, {"seeds": [0, 1, 2]}, {"seeds": [0]}, {"learning_rate": [0.1]}],
)
def test_a_report_is_finished_for_the_same_runs_alone(tmp_path, changes):
    chosen = {"mechanisms": ["softmax", "linear"], "learning_rate": [0.02], **SETTINGS}
    write(tmp_path, RUNS, chosen)
    assert report.finished(tmp_path, {**chosen, "mechanisms": ("softmax", "linear")})
    assert not report.finished(tmp_path, {**chosen, **changes})


def test_runs_of_other_versions_are_named(tmp_path):
    write(tmp_path, [{**RUNS[0], "environment": {"effattn": "0.0.9", "jax": "0.1"}}, *RUNS[1:]])
    text = (tmp_path / "summary.md").read_text()
    assert "Made earlier, with effattn 0.0.9, jax 0.1: softmax with seed 0.\n" in text


def test_speeds_of_different_machines_are_not_compared(tmp_path):
    *others, last = RUNS
    write(tmp_path, [*others, {**last, "environment": {"system": "another"}}])
    text = (tmp_path / "summary.md").read_text()
    *_, softmax, linear = report.relative_table(summary_of(RUNS)).splitlines()
    speed = linear.split("|")[2]
    assert softmax in text and linear.replace(speed, "-".rjust(len(speed) - 1) + " ") in text
    assert "another environment than softmax" in text


def test_runs_of_an_earlier_report_may_have_shared_the_machine(tmp_path):
    for now, shown in ((2, 2), (1, 2), (3, 3), (1, 3)):
        compared = Comparison(RUNS, [], at_once=now)
        report.write_report(tmp_path, compared, dict(SETTINGS), TEXT, COMMAND)
        assert json.loads((tmp_path / "summary.json").read_text())["at_once"] == shown


def test_a_report_says_what_it_left_out_and_is_finished_without_it(tmp_path):
    chosen = {"mechanisms": ["softmax", "linear"], **SETTINGS}
    left_out = {"performer": "the loss became NaN", "linformer": "it has too many parameters"}
    compared = Comparison(RUNS, [], left_out=left_out)
    report.write_report(tmp_path, compared, chosen, TEXT, COMMAND)
    report.finish(tmp_path)
    assert "- performer: the loss became NaN\n" in (tmp_path / "summary.md").read_text()
    asked = {**chosen, "mechanisms": ["softmax", "performer", "linear"]}
    assert report.finished(tmp_path, asked, {"performer", "linear"})
    assert not report.finished(tmp_path, asked)
    assert not report.finished(tmp_path, {**asked, "seeds": [0]}, {"performer"})
    asked["mechanisms"].append("mamba")
    assert not report.finished(tmp_path, asked, {"performer", "mamba"})


def test_a_report_that_a_kill_left_half_written_is_not_finished(tmp_path):
    write(tmp_path, RUNS)
    others = {**SETTINGS, "seeds": [0]}
    report.write_report(tmp_path, Comparison(RUNS[::2], []), others, TEXT, COMMAND)
    assert not report.finished(tmp_path, others) and not report.finished(tmp_path, SETTINGS)


def test_results_of_another_version_are_refused(tmp_path):
    write(tmp_path, RUNS)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1}))
    reads = (report.read_report, report.earlier_runs, lambda f: report.finished(f, SETTINGS))
    for read in reads:
        with pytest.raises(UserError, match="has version 1 .* reads version 2; choose another --"):
            read(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"runs'])
def test_damaged_results_are_one_sentence_that_says_what_to_delete(tmp_path, content):
    path = tmp_path / "summary.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"summary\.json is damaged; delete .*summary\.md"):
        report.read_report(tmp_path)


@pytest.mark.parametrize("runs", [[{}], [None], {}, [{"mechanism": "softmax"}]])
@pytest.mark.parametrize("key", ["runs", "sweep"])
def test_results_without_their_keys_are_damaged(tmp_path, key, runs):
    write(tmp_path, RUNS)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: runs}))
    for read in (report.read_report, report.earlier_runs):
        with pytest.raises(UserError, match=r"summary\.json is damaged; delete .*summary\.md"):
            read(tmp_path)


def test_results_that_are_gone_are_one_sentence_that_says_what_to_delete(tmp_path):
    (tmp_path / "summary.md").touch()
    with pytest.raises(UserError, match=r"summary\.json is gone; delete .*summary\.md, and"):
        report.finished(tmp_path, SETTINGS)


def test_masked_models_are_spoken_of_as_such(tmp_path):
    write(tmp_path, [{**run, "state_bytes": None} for run in RUNS], task=MASKED)
    text = (tmp_path / "summary.md").read_text() + report.read_report(tmp_path)
    assert "# Masked language models" in text and "softmax fills in:" in text
    assert "pseudo-perplexities" in text and "decode state" not in text.lower()


def test_one_mechanism_that_does_not_decode_has_a_dash():
    runs = [RUNS[0], result("nystrom", 0, 2.0, state_bytes=None)]
    assert "|            - |" in table_of(runs)


def test_no_control_character_of_a_sample_reaches_the_terminal(tmp_path):
    write(tmp_path, RUNS)
    assert "\x1b" not in report.read_report(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "chosen", "said"),
    [
        (1235, True, "give all models the same number of parameters"),
        (1235, False, None),
        (1300, False, "differ in their numbers of parameters"),
        (1300, True, "differ in their numbers of parameters"),
    ],
)
def test_whether_models_are_of_one_size_is_said(tmp_path, parameters, chosen, said):
    runs = [RUNS[0], result("linear", 0, 2.0, parameters=parameters)]
    write(tmp_path, runs, {**SETTINGS, "equal_parameters": chosen})
    text = (tmp_path / "summary.md").read_text()
    assert said is None or said in text
    assert ("differ in" in text) + ("the same number" in text) == (said is not None)


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were drawn, in order."""
    figures = []
    monkeypatch.setattr(figure.plt, "close", figures.append)
    return figures


def band_of(axis):
    heights = axis.collections[0].get_paths()[0].vertices[:, 1]
    return heights.min(), heights.max()


def test_the_figure_shows_both_curves_with_their_bands(tmp_path, drawn):
    figure.write_figures(tmp_path, RUNS, TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["results.png"]
    assert (tmp_path / "results.png").stat().st_size > 10_000
    left, right = drawn[0].axes
    assert left.get_xlabel() == "training tokens (millions)"
    assert left.get_ylabel() == "validation: bits/byte"
    assert right.get_xlabel() == "training time (s)"
    assert [line.get_label() for line in left.lines] == ["softmax", "linear"]
    assert left.lines[0].get_xdata().tolist() == [1, 2]
    assert right.lines[0].get_xdata().tolist() == [1.5, 3.0]
    assert left.lines[0].get_ydata() == pytest.approx([3.1, 2.6])
    assert band_of(left) == (pytest.approx(2.5), pytest.approx(3.2))


def test_the_figure_of_several_sets_shows_each_set(tmp_path, drawn):
    figure.write_figures(tmp_path, SHARES, Accurate())
    left, right = drawn[0].axes
    assert left.get_ylabel() == "validation: accuracy (%)"
    assert left.lines[0].get_ydata() == pytest.approx([27.5, 55])
    assert right.get_xlabel() == "held-out set, at the end"
    assert [t.get_text() for t in right.get_xticklabels()] == ["validation", "length 64"]
    assert right.lines[0].get_ydata() == pytest.approx([55, 27.5])
    assert band_of(right) == (pytest.approx(25), pytest.approx(60))


def test_accuracy_is_shown_against_the_state_of_three_mechanisms_that_decode(tmp_path, drawn):
    runs = [share(m, s, 0.5, 0.1 * s, state_bytes=1000 * (i + 1))
            for i, m in enumerate("abc") for s in range(2)]  # fmt: skip
    figure.write_figures(tmp_path, [*SHARES[2:], *runs], Accurate())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.png", "states.png"]
    (axis,) = drawn[1].axes
    assert (axis.get_xlabel(), axis.get_xscale()) == ("decode state (kB)", "log")
    assert axis.get_ylabel() == "mean of all held-out sets: accuracy (%)"
    assert [line.get_label() for line in axis.lines] == ["a", "b", "c"]
    assert [line.get_xdata()[0] for line in axis.lines] == [1, 2, 3]
    assert [line.get_ydata()[0] for line in axis.lines] == pytest.approx([27.5] * 3)
    assert len({line.get_marker() for line in axis.lines}) == 3


def test_many_mechanisms_are_named_where_nothing_beats_them(tmp_path, drawn):
    # More accuracy takes more state, but for the last mechanism.
    runs = [share(f"m{i}", 0, 0.1 * i, 0.1 * i, state_bytes=1000 * (i + 1)) for i in range(9)]
    figure.write_figures(
        tmp_path, [*runs, share("last", 0, 0.0, 0.0, state_bytes=9999)], Accurate()
    )
    (axis,) = drawn[1].axes
    assert [text.get_text() for text in axis.texts] == [f"m{i}" for i in range(9)]
    assert [line.get_xdata()[0] for line in axis.lines] == [*range(1, 10), 9.999]
    *best, last = [line.get_color() for line in axis.lines]
    assert set(best) == {figure.COLOURS[0]} and last == "silver"


@pytest.mark.parametrize("places", [7, 8])
def test_losses_by_position_are_drawn_for_long_windows(tmp_path, drawn, places):
    by_position = {str(2**place): 8.0 - place for place in range(places)}
    runs = [result(m, s, 2.0) for m in ("softmax", "linear") for s in range(2)]
    for run, more in zip(runs, (0, 1, 0, 0), strict=True):
        values = {place: bits + more for place, bits in by_position.items()}
        run["held_out"] = {"validation": {"bits_per_byte": 2.0, "bits_by_position": values}}
    figure.write_figures(tmp_path, runs, TEXT)
    assert (tmp_path / "positions.png").exists() == (places == 8)
    if places == 8:
        (axis,) = drawn[1].axes
        softmax, linear = axis.lines
        assert softmax.get_xdata().tolist() == [1, 2, 4, 8, 16, 32, 64, 128]
        assert softmax.get_ydata() == pytest.approx(linear.get_ydata() + 0.5)
        assert linear.get_ydata() == pytest.approx(list(by_position.values()))


@pytest.mark.parametrize(
    ("states", "task"), [((1, 2, 2), Accurate()), ((1, 2, None), Accurate()), ((1, 2, 3), TEXT)]
)
def test_few_states_or_losses_are_not_drawn_against_each_other(tmp_path, drawn, states, task):
    runs = [share(m, 0, 0.5, 0.1, state_bytes=s) for m, s in zip("abc", states, strict=True)]
    if task is TEXT:
        runs = [result(m, 0, 2.0, state_bytes=s) for m, s in zip("abc", states, strict=True)]
    figure.write_figures(tmp_path, runs, task)
    assert [path.name for path in tmp_path.iterdir()] == ["results.png"]


LONG = "mixture_of_mechanisms,mechanisms=('sliding_window','softmax'),gate='top1',scale=0."


def test_long_names_fit_into_a_legend():
    drawn, axes = figure.plt.subplots(figsize=(10, 4.2), layout="constrained")
    lines = [axes.plot([0], label=f"{LONG}{i}")[0] for i in range(3)]
    lines += axes.plot([0], label="softmax/" * 40)
    figure.legend_below(drawn, lines, "mechanism")
    drawn.canvas.draw()
    (legend,) = drawn.legends
    extent = legend.get_window_extent()
    assert 0 < extent.x0 < extent.x1 < drawn.bbox.width
    assert [text.get_text() for text in legend.get_texts()][0] == f"{LONG}0"
    figure.plt.close(drawn)


def test_long_names_leave_room_for_a_ranking(tmp_path, drawn):
    runs = [result(f"{LONG}{i}", 0, 2.0 + i / 10) for i in range(8)]
    figure.write_figures(tmp_path, runs, TEXT)
    left, right = (ax.xaxis.label.get_window_extent() for ax in drawn[0].axes)
    assert 0 < left.x0 and left.x1 < right.x0 and right.x1 < drawn[0].bbox.width
    names = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert [name.replace("\n", "") for name in names] == [f"{LONG}{i}" for i in range(8)]


def test_the_figure_of_many_mechanisms_ranks_them(tmp_path, drawn):
    bits = {f"kind{i}": 2.0 + (i * 3 % 8) / 10 for i in range(8)}
    runs = [
        result(name, seed, b + seed / 10, tokens_per_second=1000.0 * b)
        for name, b in bits.items()
        for seed in range(2)
    ]
    figure.write_figures(tmp_path, runs, TEXT)
    assert (tmp_path / "results.png").stat().st_size > 10_000
    loss, speed = drawn[0].axes
    ranked = sorted(bits, key=bits.get)
    assert [label.get_text() for label in loss.get_yticklabels()] == ranked
    assert loss.yaxis_inverted()
    assert loss.get_xlabel() == "validation: bits/byte"
    assert speed.get_xlabel() == "training speed (thousand tokens/s)"
    dots = [line.get_xydata()[0].tolist() for line in loss.lines]
    assert dots == [[pytest.approx(bits[name] + 0.05), row] for row, name in enumerate(ranked)]
    ranges = [c.get_segments()[0][:, 0].tolist() for c in loss.collections]
    assert ranges == [[pytest.approx(bits[n]), pytest.approx(bits[n] + 0.1)] for n in ranked]
    assert [line.get_xdata()[0] for line in speed.lines] == pytest.approx(sorted(bits.values()))


def test_speeds_of_other_machines_are_not_drawn(tmp_path, drawn):
    runs = [result(f"kind{i}", 0, 2.0 + i / 10) for i in range(8)]
    for run, system in ((runs[0], "one"), (runs[3], "another")):
        run["environment"] = {"system": system}
    figure.write_figures(tmp_path, runs, TEXT)
    loss, speed = drawn[0].axes
    assert [line.get_ydata()[0] for line in loss.lines] == list(range(8))
    assert [line.get_ydata()[0] for line in speed.lines] == [1, 2, 4, 5, 6, 7]
    assert speed.get_xlabel().endswith("\nno dot: made in another environment")


def test_a_ranking_by_accuracy_begins_with_the_most_and_shows_the_last_set(tmp_path, drawn):
    accuracies = {f"kind{i}": (i * 3 % 8) / 10 for i in range(8)}
    runs = [share(name, 0, a, a / 4, state_bytes=None) for name, a in accuracies.items()]
    figure.write_figures(tmp_path, runs, Accurate())
    first, last, _ = drawn[0].axes
    ranked = sorted(accuracies, key=accuracies.get, reverse=True)
    assert [label.get_text() for label in first.get_yticklabels()] == ranked
    assert last.get_xlabel() == "length 64: accuracy (%)"
    assert [line.get_xdata()[0] for line in last.lines] == pytest.approx(
        [25 * accuracies[name] for name in ranked]
    )
