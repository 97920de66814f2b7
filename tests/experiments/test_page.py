"""The page of all results: intervals, Pareto fronts, published numbers, quality for advice."""

import json
import shutil

import pytest

import effattn.advice.quality
from experiments import report
from experiments.harness.report import SCHEMA
from experiments.harness.statistics import Mean, mean

# Mechanism: accuracies of the seeds, decode state and speed.
MEASURED = {
    "softmax": ((0.9, 1.0, 0.95), 1000, 5.0),
    "linear": ((0.5, 0.52, 0.54), 100, 9.0),
    "retention": ((0.3, 0.4, 0.35), 200, 8.0),
    "linear/softmax": ((0.8, 0.8, 0.8), 1000, 4.0),
}


def summary(**changes):
    runs = [
        {
            "mechanism": mechanism,
            "seed": seed,
            "held_out": {"short": {"accuracy": value}, "long": {"accuracy": value / 2}},
            "accuracy": value,
            "tokens_per_second": speed,
            "temporary_bytes": 5,
            "state_bytes": state,
        }
        for mechanism, (values, state, speed) in MEASURED.items()
        for seed, value in enumerate(values)
    ]
    return {
        "schema": SCHEMA,
        "title": "Toys compared",
        "reference": "A paper",
        "command": "python -m experiments.toys",
        "is_causal": True,
        "headline": "accuracy",
        "more_is_better": True,
        "columns": {"accuracy": "accuracy"},
        "config": {},
        "environment": {"jax": "0.0", "device": "toy", "effattn": "0.1"},
        "runs": runs,
    } | changes


@pytest.fixture
def folder(tmp_path):
    for name, content in {
        "toys": summary(),
        "old": summary(schema=1),
        "unmade": {k: v for k, v in summary().items() if k != "command"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(content))
    return tmp_path


def test_intervals_are_those_of_student():
    # For two degrees of freedom the quantile is 4.303.
    found = mean([1.0, 2.0, 3.0])
    assert found.value == 2.0 and found.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert mean([1.0]) == Mean(1.0, None)
    assert Mean(1.0, 0.4).separates(Mean(2.0, 0.5))
    assert not Mean(1.0, 0.6).separates(Mean(2.0, 0.5))
    assert not Mean(1.0, None).separates(Mean(9.0, 0.1))


def test_only_results_that_say_how_they_were_made_are_shown(folder):
    (table,) = report.tables(folder)
    assert table.name == "toys"
    assert table.ranked() == ["softmax", "linear/softmax", "linear", "retention"]
    assert table.shown(table.measured("short")["linear"]) == "52.0 ± 5.0"


def test_a_front_has_what_nothing_else_beats(folder):
    points = {"a": (1.0, 5.0), "b": (2.0, 4.0), "c": (1.5, 3.0), "d": (3.0, 1.0), "e": (1.0, 5.0)}
    assert sorted(report.front(points)) == ["a", "b", "d", "e"]
    (table,) = report.tables(folder)
    assert set(report.fronts(table)["decode state"]) == {"softmax", "linear"}
    assert set(report.fronts(table)["speed"]) == {"softmax", "linear"}


def test_an_order_that_is_not_the_published_one_is_named(folder):
    (table,) = report.tables(folder)
    published = [
        {"table": "toys", "mechanism": "softmax", "value": 10, "source": "X"},
        {"table": "toys", "mechanism": "linear", "value": 20, "source": "X"},
        {"table": "toys", "mechanism": "retention", "value": 15, "source": "X"},
        {"table": "toys", "mechanism": "linear/softmax", "value": 99, "source": "Y"},
        {"table": "others", "mechanism": "linear", "value": 1, "source": "X"},
    ]
    lines = report.disagreements(table, published)
    assert len(lines) == 2 and all("softmax at 10" in line for line in lines)
    assert report.published_of(table, published)["linear"] == "20 [X]"


def test_the_page_shows_all_and_the_adviser_reads_the_quality(folder, tmp_path, capsys):
    page, quality = tmp_path / "docs" / "report.md", tmp_path / "quality.json"
    page.parent.mkdir()
    command = ["--results", str(folder), "--page", str(page), "--quality", str(quality)]
    assert report.main([*command, "--images", str(tmp_path / "docs" / "images")]) == 0
    text = page.read_text()
    assert "| softmax        | 95.0 ± 12.4 | 47.5 ± 6.2 |" in text
    assert "`python -m experiments.toys` with effattn 0.1" in text
    assert (tmp_path / "docs" / "images" / "report.png").stat().st_size > 10_000
    # One task says little about others.
    assert not quality.exists()
    for name in ("other_toys", "more_toys"):
        shutil.copytree(folder / "toys", folder / name)
    assert report.main([*command, "--images", str(tmp_path / "docs" / "images")]) == 0
    found = {result.mechanism: result for result in effattn.advice.quality.read(quality)}
    # A combination is no registered mechanism.
    assert set(found) == {"softmax", "linear", "retention"}
    assert found["softmax"].relative == 1 and found["linear"].relative == pytest.approx(0.5474)


def test_published_numbers_have_their_sources():
    published = json.loads(report.PUBLISHED.read_text())
    for row in published["numbers"]:
        assert row.keys() == {"table", "mechanism", "value", "source"}
        assert row["source"] in published["sources"]
    assert {row["source"] for row in published["numbers"]} == set(published["sources"])
