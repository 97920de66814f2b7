import json
import math

import pytest

from experiments.harness import figure, report
from experiments.harness.comparison import Comparison
from experiments.tasks.text import MaskedTokens, NextToken


def result(mechanism, seed, bits, **changes):
    return {
        "mechanism": mechanism,
        "seed": seed,
        "learning_rate": 0.02,
        "folder": f"{mechanism}-{seed}",
        "step": 2,
        "tokens": 2000,
        "bits_per_byte": bits,
        "perplexity": 2**bits,
        "word_perplexity": None,
        "tokens_per_second": 1000.0,
        "parameters": 1234,
        "temporary_bytes": 2_500_000,
        "state_bytes": 4096,
        "prompt": "To be",
        "sample": "or\x1b[31m not\nto be",
        **changes,
    }


RUNS = [result("softmax", s, b) for s, b in enumerate((2.0, 2.2))]
RUNS += [result("linear", s, b, tokens_per_second=3000.0) for s, b in enumerate((2.4, 2.5))]
SETTINGS = {"steps": 3, "seeds": [0, 1], "equal_parameters": True}


def test_rows_are_means_with_the_spread_over_seeds():
    softmax, linear = report.summarise(Comparison(RUNS, []))
    assert softmax["mechanism"] == "softmax"
    assert softmax["bits_per_byte"] == pytest.approx(2.1)
    assert softmax["bits_per_byte_std"] == pytest.approx(math.sqrt(0.02))
    assert softmax["perplexity"] == pytest.approx((2**2.0 + 2**2.2) / 2)
    assert linear["tokens_per_second"] == 3000
    assert report.summarise(Comparison(RUNS[:1], []))[0]["bits_per_byte_std"] is None


def test_the_table_shows_what_was_measured():
    header, rule, softmax, linear = report.table(
        report.summarise(Comparison(RUNS, []))
    ).splitlines()
    assert "word perplexity" not in header
    for cell in ("2.100 ± 0.141", "1,234", "1,000", "2.5 MB", "4.1 kB", "0.02"):
        assert f" {cell} " in softmax
    assert len({len(line) for line in (header, rule, softmax, linear)}) == 1


def test_word_perplexity_is_shown_where_words_are_defined():
    runs = [result("softmax", 0, 2.0, word_perplexity=321.04)]
    text = report.table(report.summarise(Comparison(runs, [])))
    assert "word perplexity" in text and " 321.0 " in text


def test_perplexities_beyond_a_float_are_called_infinite(tmp_path):
    runs = [result("softmax", s, 9e2, perplexity=p) for s, p in enumerate((2.0, None))]
    runs += [result("linear", s, 9e2, perplexity=1.7e308) for s in range(2)]
    softmax, linear = report.summarise(Comparison(runs, []))
    assert softmax["perplexity"] is None and softmax["perplexity_std"] is None
    assert linear["perplexity"] == 1.7e308 and linear["perplexity_std"] == 0
    lines = report.table([softmax, linear]).splitlines()
    assert "infinite |" in lines[2] and "1.700e+308 ± 0.000 |" in lines[3]
    report.write_report(tmp_path, Comparison(runs, []), SETTINGS, NextToken.words)
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


def test_the_report_is_written_and_read_back(tmp_path):
    comparison = Comparison(RUNS, [result("softmax", 0, 2.7, learning_rate=0.5)])
    assert not report.finished(tmp_path)
    report.write_report(tmp_path, comparison, SETTINGS, NextToken.words)
    assert report.finished(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"] == SETTINGS
    assert summary["runs"] == RUNS
    assert summary["environment"]["device"]
    markdown = (tmp_path / "summary.md").read_text()
    table = report.table(summary["mechanisms"])
    assert table in markdown and table in report.read_report(tmp_path, NextToken.words)
    assert "| softmax   |           0.5 |     2.700 |" in markdown
    assert "chosen on the same held-out windows as in the table" in markdown
    assert "steps 3, seeds 0 1" in markdown
    assert markdown.count("    to be\n") == 4
    assert report.read_report(tmp_path, NextToken.words).count("to be") == 2


def test_masked_models_are_spoken_of_as_such(tmp_path):
    runs = [{**run, "state_bytes": None} for run in RUNS]
    report.write_report(tmp_path, Comparison(runs, []), SETTINGS, MaskedTokens.words)
    text = (tmp_path / "summary.md").read_text() + report.read_report(tmp_path, MaskedTokens.words)
    assert "# Masked language models" in text and "softmax fills in:" in text
    assert "pseudo-perplexities" in text and "decode state" not in text.lower()


def test_one_mechanism_that_does_not_decode_has_a_dash():
    runs = [RUNS[0], result("nystrom", 0, 2.0, state_bytes=None)]
    assert "|            - |" in report.table(report.summarise(Comparison(runs, [])))


def test_no_control_character_of_a_sample_reaches_the_terminal(tmp_path):
    report.write_report(tmp_path, Comparison(RUNS, []), SETTINGS, NextToken.words)
    assert "\x1b" not in report.read_report(tmp_path, NextToken.words)


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
    settings = {**SETTINGS, "equal_parameters": chosen}
    report.write_report(tmp_path, Comparison(runs, []), settings, NextToken.words)
    text = (tmp_path / "summary.md").read_text()
    assert said is None or said in text
    assert ("differ in" in text) + ("the same number" in text) == (said is not None)


def test_the_figure_shows_both_curves_with_their_bands(tmp_path, monkeypatch):
    for run in RUNS:
        (tmp_path / run["folder"]).mkdir()
        lines = [{"step": 1, "tokens": 500, "seconds": 1.0, "train_loss": 9.0}]
        lines += [
            {"step": s, "tokens": 1e6 * s, "seconds": s * 1.5, "valid_loss": 1.0}
            | {"bits_per_byte": run["bits_per_byte"] + 1 / s}
            for s in (1, 2)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / run["folder"] / "metrics.jsonl").write_text(text)
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    figure.write_figure(tmp_path, RUNS)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    left, right = drawn[0].axes
    assert left.get_xlabel() == "training tokens (millions)"
    assert left.get_ylabel() == "validation loss (bits/byte)"
    assert right.get_xlabel() == "training time (s)"
    assert [line.get_label() for line in left.lines] == ["softmax", "linear"]
    assert left.lines[0].get_xdata().tolist() == [1, 2]
    assert right.lines[0].get_xdata().tolist() == [1.5, 3.0]
    assert left.lines[0].get_ydata() == pytest.approx([3.1, 2.6])
    band = left.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(2.5) and band[:, 1].max() == pytest.approx(3.2)


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


def test_long_names_leave_room_for_a_ranking(tmp_path, monkeypatch):
    runs = [result(f"{LONG}{i}", 0, 2.0 + i / 10) for i in range(8)]
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    figure.write_figure(tmp_path, runs)
    left, right = (ax.xaxis.label.get_window_extent() for ax in drawn[0].axes)
    assert 0 < left.x0 and left.x1 < right.x0 and right.x1 < drawn[0].bbox.width
    names = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert [name.replace("\n", "") for name in names] == [f"{LONG}{i}" for i in range(8)]


def test_the_figure_of_many_mechanisms_ranks_them(tmp_path, monkeypatch):
    bits = {f"kind{i}": 2.0 + (i * 3 % 8) / 10 for i in range(8)}
    runs = [
        result(name, seed, b + seed / 10, tokens_per_second=1000.0 * b)
        for name, b in bits.items()
        for seed in range(2)
    ]
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    figure.write_figure(tmp_path, runs)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    loss, speed = drawn[0].axes
    ranked = sorted(bits, key=bits.get)
    assert [label.get_text() for label in loss.get_yticklabels()] == ranked
    assert loss.yaxis_inverted()
    dots = [line.get_xydata()[0].tolist() for line in loss.lines]
    assert dots == [[pytest.approx(bits[name] + 0.05), row] for row, name in enumerate(ranked)]
    ranges = [c.get_segments()[0][:, 0].tolist() for c in loss.collections]
    assert ranges == [[pytest.approx(bits[n]), pytest.approx(bits[n] + 0.1)] for n in ranked]
    assert [line.get_xdata()[0] for line in speed.lines] == pytest.approx(sorted(bits.values()))
