"""The page of results: intervals, Pareto fronts, published numbers, scores for advice."""

import itertools
import json
import math
import pathlib
import re
import shutil
import time

import numpy as np
import pytest

import effattn
import effattn.advice.quality
from effattn import registry
from experiments import lra, recall, report, states
from experiments.harness.errors import UserError
from experiments.harness.report import SCHEMA
from experiments.harness.statistics import Mean, front, mean
from experiments.page import comparisons, figures, published, results, scores, sections

# Mechanism: accuracies of the seeds, decode state and speeds of the seeds.
MEASURED = {
    "softmax": ((0.9, 1.0, 0.95), 1000, (5.0, 5.0, 5.0)),
    "linear": ((0.5, 0.52, 0.54), 100, (9.0, 9.0, 9.0)),
    "retention": ((0.3, 0.4, 0.35), 200, (8.0, 2.0, 2.0)),
    "linear/softmax": ((0.8, 0.8, 0.8), 1000, (4.0, 4.0, 4.0)),
}
MADE = {
    "schema": SCHEMA,
    "command": "python -m experiments.toys --title '{}'",
    "config": {"experiment": "toys", "task": "toy,size=3", "preset": "small"},
    "environment": {"jax": "0.0", "device": "toy", "effattn": "0.1"},
}


def summary(**changes):
    runs = [
        {
            "mechanism": mechanism,
            "seed": seed,
            "held_out": {
                "short": {"accuracy": value, "scaled_accuracy": 2 * value - 1},
                "long": {"accuracy": value / 2, "scaled_accuracy": value - 1},
            },
            "accuracy": value,
            "loss": 1 - value,
            "tokens_per_second": speed,
            "temporary_bytes": 5,
            "state_bytes": state,
        }
        for mechanism, (values, state, speeds) in MEASURED.items()
        for seed, (value, speed) in enumerate(zip(values, speeds, strict=True))
    ]
    return {
        "title": "Toys compared",
        "reference": "A paper",
        "is_causal": True,
        "headline": "accuracy",
        "more_is_better": True,
        "columns": {"accuracy": "accuracy", "loss": "loss"},
        "runs": runs,
        **MADE,
        **changes,
    }


def of_runs(**changes):
    """The runs of a summary, with changes in the first run."""
    first, *others = summary()["runs"]
    return [{**first, **changes}, *others]


def of_efficiency():
    layers = [
        {
            "mechanism": mechanism,
            "direction": "causal",
            "length": length,
            "passes": {
                which: {"ratio": ratio, "needed_bytes": length**power}
                for which in ("forward", "backward", "step")
            },
        }
        for length in (256, 1024)
        for mechanism, ratio, power in (("softmax", 1.0, 2), ("linear", length / 512, 1))
    ]
    longest = [{"mechanism": "linear", "direction": "causal", "forward": 2**20, "step": 2**18}]
    workload = {"features": 64, "heads": 2, "precision": "bfloat16", "tokens": 4096}
    of = {"layers": layers, "longest": longest, "caches": [], "plain": [], "memory": 8e9}
    of["workload"] = workload
    config = {"rounds": 1, "environment": MADE["environment"]}
    return {"schema": SCHEMA, "command": "toys", "config": config, **of}


def of_compress():
    def run(way, *losses):
        return {"way": way, "bits": losses[-1], "curve": [{"bits": loss} for loss in losses]}

    runs = [run("original", 2.0), run("int4", 2.5, 2.25), run("heads-2", 4.0, 3.0)]
    sizes = {"original": 4000, "int4": 1000, "heads-2": 3200}
    of = {"headline": "bits", "heading": "bits/byte", "heads": [], "bytes": sizes, "runs": runs}
    return MADE | of | {"config": {"mechanisms": ["softmax"]}}


def of_finetune():
    def run(way, mechanism, seed, *losses):
        curve = [{"tokens": i, "bits": loss} for i, loss in enumerate(losses)]
        of = {"way": way, "mechanism": mechanism, "seed": seed}
        return {**of, "bits": losses[-1], "curve": curve}

    runs = [
        *(run("original", "softmax", seed, 2.0) for seed in (0, 1)),
        *(run("scratch", "softmax", seed, 1.9) for seed in (0, 1)),
        *(run("scratch", "linear", seed, 2.5) for seed in (0, 1)),
        *(run("distill", "linear", seed, 4.0, 2.25 + seed / 100) for seed in (0, 1)),
    ]
    of = {"headline": "bits", "heading": "bits/byte", "conversions": {}, "runs": runs}
    return MADE | of | {"config": {"ways": ["distill"], "mechanisms": ["linear"]}}


def of_scaling():
    law = {"values": {"alpha": 0.3, "beta": 0.4, "log E": 0.0}}
    law["intervals"] = {"alpha": [0.2, 0.4], "beta": [0.3, 0.5]}
    law["at_bound"] = ["log E"]
    share = {"value": 0.57, "interval": [0.5, 0.6]}
    fit = {"chinchilla": law, "optimal_parameters": share}
    return MADE | {"points": [{}] * 6, "fits": {"linear": fit}}


def of_approximation():
    of = {"source": "Gaussian", "family": "window", "matrix": [0.5]}
    errors = [{**of, "size": size, "output": [1 / size, 3 / size]} for size in (16, 8)]
    errors.append({**of, "family": "best of that rank", "size": 8, "output": None})
    config = {"config": {"length": 64}}
    return MADE | config | {"errors": errors, "effective_rank": {"Gaussian": [3.0]}}


def of_downstream():
    records = [
        {"task": task, "family": "window", "size": size, "kept": size / 100}
        for task, size in itertools.product(("similarity", "atoms"), (8, 16))
    ]
    return MADE | {"records": records}


def write(folder, name, content):
    (folder / name).mkdir(parents=True)
    (folder / name / "summary.json").write_text(json.dumps(content))
    (folder / name / "summary.md").touch()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "results"
    write(folder, "toys", summary())
    write(folder, "unmade", {k: v for k, v in summary().items() if k != "command"})
    write(folder, "half", summary())
    (folder / "half" / "summary.md").unlink()
    return folder


@pytest.fixture
def table(folder):
    (found,), _ = results.gather(folder)
    return comparisons.Table(found.folder, found.summary)


def run(folder, place):
    options = {
        "results": folder,
        "page": place / "docs" / "report.md",
        "images": place / "docs" / "images",
        "quality": place / "quality.json",
    }
    argv = [text for name, path in options.items() for text in (f"--{name}", str(path))]
    assert report.main(argv) == 0
    return options["page"].read_text()


def source(measure="accuracy", scale=100, held_out="first"):
    return published.Source("X", "A paper", measure, scale, held_out)


def numbers(of, **values):
    rows = [
        {"task": "toy", "mechanism": m, "value": v, "source": of.key} for m, v in values.items()
    ]
    others = [{**rows[0], "task": "toys"}, {**rows[0], "source": "Y"}]
    return published.Published({of.key: of}, [*rows, *others])


def test_intervals_are_those_of_student():
    # For two degrees of freedom the quantile is 4.303.
    found = mean([1.0, 2.0, 3.0])
    assert found.value == 2.0 and found.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert mean([1.0]) == Mean(1.0, None)
    assert Mean(1.0, 0.4).separates(Mean(2.0, 0.5))
    assert not Mean(1.0, 0.6).separates(Mean(2.0, 0.5))
    assert not Mean(1.0, None).separates(Mean(9.0, 0.1))


def test_only_results_that_say_how_they_were_made_are_shown(folder, table):
    assert (table.name, table.task, table.seeds) == ("toys", "toy", "3 seeds")
    assert table.ranked() == ["softmax", "linear/softmax", "linear", "retention"]
    assert table.shown(table.measured("short")["linear"]) == "52.0 ± 5.0"
    _, left_out = results.gather(folder)
    assert left_out == {
        "half": "unfinished: summary.json or summary.md is missing",
        "unmade": "does not say its command",
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            summary(schema=1),
            f"has version 1 of the results, and this page reads version {SCHEMA}; delete",
        ),
        (
            {k: v for k, v in of_downstream().items() if k != "schema"},
            f"has version None of the results, and this page reads version {SCHEMA}; delete",
        ),
        (
            of_downstream() | {"records": [{"task": "atoms", "kept": math.nan}]},
            "has NaN in place of the number records.kept; delete",
        ),
        (
            summary(runs=of_runs(state_bytes=math.inf)),
            "has Infinity in place of the number runs.state_bytes of softmax; delete",
        ),
        (
            summary(runs=of_runs(tokens_per_second=None)),
            "has null in place of the number runs.tokens_per_second of softmax; delete",
        ),
        (
            summary(runs=of_runs(held_out={"short": {"accuracy": None}})),
            "has null in place of the number runs.held_out.short.accuracy of softmax; delete",
        ),
        (summary(runs=of_runs(seed=1)), "has two runs of softmax with seed 1; delete"),
        (
            {k: v for k, v in summary().items() if k not in ("schema", "columns")},
            "was written by an older version of its command, or by an unknown command; delete",
        ),
    ],
    ids=["version", "of another", "nan", "infinite", "none", "null score", "repeated", "form"],
)
def test_results_of_another_form_end_the_command(content, reason, folder, tmp_path):
    write(folder, "old", content)
    with pytest.raises(UserError, match=f"old/summary.json {reason}"):
        report.write(report.Config(folder, *(tmp_path / name for name in "abc")))
    assert not any((tmp_path / name).exists() for name in "abc")


def test_a_folder_without_results_changes_nothing(folder, tmp_path):
    quality = tmp_path / "quality.json"
    quality.write_text("{}")
    shutil.rmtree(folder / "toys")
    with pytest.raises(UserError, match="got .* with half: unfinished: .*; unmade: does not say"):
        report.write(report.Config(folder, tmp_path / "a", tmp_path / "b", quality))
    assert quality.exists() and not (tmp_path / "a").exists()


def test_runs_of_several_machines_are_named(folder):
    runs = summary()["runs"]
    runs[0] = {**runs[0], "environment": {"jax": "0.9", "device": "a GPU"}}
    write(folder, "mixed", summary(runs=runs))
    found, _ = results.gather(folder)
    text = found[0].made("results")
    assert "with effattn 0.1 and jax 0.0 on toy (some runs: jax 0.9 on a GPU):" in text


def test_a_front_has_what_nothing_else_beats(table):
    points = {"a": (1.0, 5.0), "b": (2.0, 4.0), "c": (1.5, 3.0), "d": (3.0, 1.0), "e": (1.0, 5.0)}
    assert sorted(front(points)) == ["a", "b", "d", "e"]
    fronts = comparisons.fronts(table)
    assert set(fronts["decode state"]) == {"softmax", "linear"}
    # The speed is the mean over the seeds: the first seed of retention is faster than that.
    assert set(fronts["speed"]) == {"softmax", "linear"}
    assert table.costs("speed")["retention"] == pytest.approx(4e-3)
    assert "operations" not in fronts
    table.summary["at_once"] = 3
    assert "speed" not in comparisons.fronts(table)
    text = comparisons.section(table, published.Published({}, []), "results", None)
    assert "Speeds are not compared, because several runs shared the machine." in text


def test_speeds_of_several_environments_are_not_compared(table):
    table.summary["runs"][-1]["environment"] = {"device": "another"}
    assert set(comparisons.fronts(table)) == {"training memory", "decode state"}
    text = comparisons.section(table, published.Published({}, []), "results", None)
    assert "Speeds are not compared, because the runs were made in several environments." in text


def test_an_order_that_is_not_the_published_one_is_named(table):
    known = numbers(source(), softmax=10, linear=20, retention=5, lstm=99)
    compared, (line,) = published.disagreements(table, known)
    assert compared == 2
    both = "`linear` 20.0 (here 52.0 ± 5.0) and `softmax` 10.0 (here 95.0 ± 12.4)"
    assert line == f"toys, accuracy (%): [X] has {both}."
    assert "Pairs compared: 2." in published.sections([table], known)[1]
    text = comparisons.section(table, known, "results", None)
    assert "published accuracy (%) [X]" in text and " 20.0 |" in text
    assert "those of the preset `small`" in text


@pytest.mark.parametrize(
    ("measure", "scale", "shown"), [("accuracy", 1, "60.0"), ("scaled_accuracy", 100, "0.6")]
)
def test_published_numbers_are_compared_on_their_own_scale(measure, scale, shown, table):
    known = numbers(source(measure, scale, "last"), linear=0.6)
    ((_, values),) = known.of(table)
    assert values == {"linear": 0.6 / scale}
    assert f" {shown} |" in comparisons.section(table, known, "results", None)
    heading = {"accuracy": "accuracy (%)", "scaled_accuracy": "long: scaled_accuracy (%)"}
    assert f" {heading[measure]} " in comparisons.section(table, known, "results", None)


def test_a_measure_that_a_table_lacks_is_not_compared(table):
    assert numbers(source("perplexity"), linear=20).of(table) == []


def test_the_page_says_if_nothing_could_be_compared(table):
    verdict = "No published order could be compared yet"
    known = numbers(source(), softmax=10)
    difference, text, title, cited = published.sections([table], known)
    assert verdict in text and title == "## Published sources" and cited == "- [X] A paper"
    none = published.Published(known.sources, [])
    assert len(published.sections([table], none)) == 2


@pytest.fixture
def few(monkeypatch):
    """Tables of two mechanisms count."""
    monkeypatch.setattr(scores, "LEAST_MECHANISMS", 2)


def test_the_page_shows_results_and_the_adviser_reads_the_scores(few, folder, tmp_path):
    text = run(folder, tmp_path)
    assert "| softmax        | 95.0 ± 12.4 | 47.5 ± 6.2 | 0.050 ± 0.124 |" in text
    assert "toys: accuracy (%)" in text and "(s)" not in text
    assert "`python -m experiments.toys --title '{}'` with effattn 0.1 and jax 0.0" in text
    assert "(../results/toys/summary.md)" in text and "(images/report-toys.png)" in text
    assert "- unmade: does not say its command" in text
    assert (tmp_path / "docs" / "images" / "report-toys.png").stat().st_size > 10_000
    # One task says little about others.
    quality = tmp_path / "quality.json"
    assert not quality.exists()
    for name in ("other_toys", "more_toys"):
        shutil.copytree(folder / "toys", folder / name)
    run(folder, tmp_path)
    found = {result.mechanism: result for result in effattn.advice.quality.read(quality)}
    # A combination is no registered mechanism.
    assert set(found) == {"softmax", "linear", "retention"}
    assert found["softmax"].score == 0.45  # of 0.9 and of less than a guess
    assert sum(r.score - r.typical for r in found.values()) == pytest.approx(0, abs=1e-3)
    assert found["linear"].source == "experiments/results/toys: 3 seeds, effattn 0.1"
    # Scores and figures do not outlive their results.
    for name in ("toys", "other_toys"):
        shutil.rmtree(folder / name)
    run(folder, tmp_path)
    assert not quality.exists()
    assert [path.name for path in (tmp_path / "docs" / "images").iterdir()] == [
        "report-more_toys.png"
    ]


def test_own_results_change_no_page_of_the_package(folder):
    own, packaged = report.Config(folder), report.Config(report.RESULTS)
    page = folder.with_name(f"{folder.name}-report") / "report.md"
    assert own.placed() == (page, page.with_name("images"), None)
    assert packaged.placed() == report.Config().placed() == (*report.PAGES, report.QUALITY)
    for _ in range(2):
        report.write(own)
        assert "(images/report-toys.png)" in page.read_text()
        assert "images: unfinished" not in page.read_text()


def test_tasks_that_do_not_judge_give_no_scores(few, folder):
    asked = {"config": {**summary()["config"], "task": "mad-compression"}}
    table = comparisons.Table(folder / "toys", summary(**asked))
    assert scores.scores([table] * 3)["results"] == []


def test_a_mechanism_in_few_tables_gets_no_score(few, table):
    rare = summary(runs=[run for run in table.summary["runs"] if run["mechanism"] != "linear"])
    tables = [table, table, comparisons.Table(table.folder, rare)]
    assert {result["mechanism"] for result in scores.scores(tables)["results"]} == {
        "softmax",
        "retention",
    }


def test_a_table_of_few_mechanisms_gives_no_scores(table):
    assert len([name for name in table.runs if name.isidentifier()]) < scores.LEAST_MECHANISMS
    assert scores.scores([table] * 3)["results"] == []


def test_one_seed_is_marked(few, folder):
    one = [run for run in summary()["runs"] if run["seed"] == 0]
    table = comparisons.Table(folder / "toys", summary(runs=one))
    assert ": one seed, " in scores.scores([table] * 3)["results"][0]["source"]


def test_accuracies_are_scaled_where_the_task_does():
    """Guesses then score 0, and worse than a guess is no worse."""
    sets = {
        "softmax": {"a": {"accuracy": 0.9, "scaled_accuracy": 0.8}},
        "linear": {"a": {"accuracy": 0.4, "scaled_accuracy": -0.2}},
    }
    runs = [{**r, "held_out": sets[r["mechanism"]]} for r in summary()["runs"]
            if r["mechanism"] in sets]  # fmt: skip
    table = comparisons.Table(pathlib.Path("toys"), summary(runs=runs))
    assert scores.of_plain_names(table) == pytest.approx({"softmax": 0.8, "linear": 0.0})


def test_hard_tasks_are_no_disadvantage():
    """The second mechanism is better where both are measured, and alone in a hard task."""
    easy, hard = {"a": 0.9, "b": 0.95, "c": 0.6}, {"b": 0.3, "c": 0.05}
    level, of_hard = scores.levels([easy, hard])
    quality = {"a": 0.9 - level, "b": (0.95 - level + 0.3 - of_hard) / 2}
    assert quality["b"] > quality["a"] and of_hard < level
    # Sums of levels and qualities are fitted without an error.
    rng = np.random.default_rng(0)
    levels, qualities = rng.uniform(0.4, 0.6, 4), rng.uniform(-0.3, 0.3, 9)
    qualities -= qualities.mean()
    known = rng.uniform(size=(4, 9)) < 0.7
    known[:, 0] = True
    tables = [
        {str(m): levels[t] + qualities[m] for m in np.flatnonzero(known[t])} for t in range(4)
    ]
    assert known.any(0).all()
    np.testing.assert_allclose(scores.levels(tables), levels, atol=1e-12)


def test_of_losses_the_validation_set_alone_counts(folder):
    sets = {
        "softmax": {"a": {"bits": 2.0}, "b": {"bits": 9.0}},
        "linear": {"a": {"bits": 4.0}, "b": {"bits": 3.0}},
    }
    runs = [{**r, "held_out": sets[r["mechanism"]]} for r in summary()["runs"]
            if r["mechanism"] in sets]  # fmt: skip
    content = summary(runs=runs, headline="bits", more_is_better=False)
    assert scores.of_plain_names(comparisons.Table(folder / "toys", content))["linear"] == 0.5


def test_a_table_of_one_mechanism_has_no_figure(folder, tmp_path):
    alone = [run for run in summary()["runs"] if run["mechanism"] == "softmax"]
    table = comparisons.Table(folder / "toys", summary(runs=alone))
    assert figures.draw_all(tmp_path, [table]) == {}
    nothing = published.Published({}, [])
    assert "![" not in comparisons.section(table, nothing, "results", None)


def test_other_experiments_have_sections(folder, tmp_path):
    made = {
        "approximation": of_approximation(),
        "compress": of_compress(),
        "downstream": of_downstream(),
        "efficiency": of_efficiency(),
        "finetune": of_finetune(),
        "scaling": of_scaling(),
    }
    for name, content in made.items():
        write(folder, name, content)
        (folder / name / "drawn.png").touch()
    text = run(folder, tmp_path)
    for name in made:
        part = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"[drawn](../results/{name}/drawn.png)" in part and "with effattn 0.1" in part
    assert "Similarity: rank correlation" in text and "Atoms: share" in text
    rows = {line.replace(" ", "") for line in text.splitlines()}
    assert {
        "|window|0.250|0.125|",
        "|window|0.080|0.160|0.080|0.160|",
        "|`linear`|512|512|512|<=256|1M|256k|",
        "|4bitsaweight|2.500|2.250|1kB|4.00|",
        "|linear|distill|4.000±0.000|2.255±0.064|2.500±0.000|",
        "|linear|0.30(0.20to0.40)|0.40(0.30to0.50)|1.000,atitsbound|0.57(0.50to0.60)|",
    } <= rows
    assert "best of that rank" not in text


def test_the_page_explains_only_the_tasks_of_a_result(folder):
    atoms = [record for record in of_downstream()["records"] if record["task"] == "atoms"]
    found = results.Result(folder / "downstream", {**of_downstream(), "records": atoms})
    text = sections.section(found, "results")
    assert "Atoms: share" in text and "Similarity" not in text


def test_the_page_is_quick_and_the_same_when_it_is_written_twice(few, folder, tmp_path):
    for number in range(5):
        shutil.copytree(folder / "toys", folder / f"toys-{number}")
    begin = time.process_time()
    run(folder, tmp_path / "one")
    # At this rate, `make report` takes under a minute for 40 tables.
    assert time.process_time() - begin < 9
    run(folder, tmp_path / "two")
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("one", "two")
    )
    assert len(first) == 8
    # Links are relative, so the pages are equal in folders side by side.
    assert first == second


def test_a_folder_that_does_not_exist_is_an_error_of_one_sentence(tmp_path, capsys):
    assert report.main(["--results", str(tmp_path / "none"), "--page", str(tmp_path / "page")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --results must be a folder") and error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        summary(runs=[]),
        summary(runs=[{"mechanism": "softmax"}]),
        summary(headline="another"),
        {**of_downstream(), "records": [{}]},
    ],
    ids=["no runs", "empty run", "headline", "records"],
)
def test_a_result_of_another_form_is_an_error_of_one_sentence(tmp_path, capsys, content):
    write(tmp_path / "results", "other", content)
    paths = {name: tmp_path / name for name in ("results", "page", "images", "quality")}
    assert report.main([word for name, path in paths.items() for word in (f"--{name}", str(path))])
    error = capsys.readouterr().err
    assert re.search(r"error: .*other/summary.json has another form than this page reads", error)
    assert error.count("\n") == 1
    assert not paths["page"].exists()


def test_published_numbers_have_sources_tasks_and_mechanisms():
    known = published.Published.read(report.PUBLISHED)
    tasks = {
        name: of["published"]
        for module in (lra, recall, states)
        for name, of in module.Config.tasks.items()
    }
    for row in known.numbers:
        assert row.keys() == {"task", "mechanism", "value", "source"}
        task, of = tasks[row["task"]], known.sources[row["source"]]
        assert of.measure == task.headline or of.measure in task.columns.values()
        assert row["mechanism"].partition(",")[0] in registry.names()
        assert 0 < row["value"] <= of.scale and math.isfinite(row["value"])
    assert {row["source"] for row in known.numbers} == set(known.sources)
