"""Published tables and results: no two rows of a table are equal.

Two mechanisms whose numbers agree to the last digit are one mechanism under two names.
"""

import json
import pathlib
import re

import pytest

import effattn

ROOT = pathlib.Path(effattn.__file__).parents[1]
MADE = {"_build", "copied"}  # folders of pages that are made when the site is built
TEXTS = [
    *ROOT.glob("*.md"),
    *(
        path
        for name in ("docs", "experiments", "benchmarks")
        for path in (ROOT / name).rglob("*.md")
        # Its numbers are rounded from the JSON records below, which are compared with all digits.
        if path.name != "report.md" and MADE.isdisjoint(path.relative_to(ROOT).parts)
    ),
]
NUMBERS = [
    path
    for name in ("experiments", "benchmarks")
    for path in (ROOT / name).rglob("results/*/*.json")
]

# Texts round times to two or three digits, which may agree by chance, so only tables of losses and
# accuracies are compared. The JSON records have all digits.
LEARNT = re.compile("bits/byte|perplexity|loss|error|matches|accuracy")
# Speeds differ from run to run, even of the same program.
SPEEDS = re.compile(r"/s$|per_second|seconds|^step$")
# Settings are often equal, and say nothing about results.
SETTINGS = re.compile("^learning[ _]rate$")
# Several mechanisms may solve a task.
PERFECT = {1.0, 0.0, "100.0 %", "0.0 %", "100.0 ± 0.0 %"}
# Or always give the same one of two equally frequent answers.
CHANCE, SCORES = {0.5, "50.0 %"}, re.compile("accuracy|held_out")
FIGURE = re.compile(r"^[-+]?\d[\d.,]*([eE][-+]?\d+)?( ?(±.*|%|×|[kMG]?B|ms|s))?$")


def cells_of(line):
    return [cell.strip(" `*") for cell in line.strip().strip("|").split("|")]


def tables_of(text):
    """Yields `(header, rows)` for each Markdown table."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        header, rule, *rows = map(cells_of, table.splitlines())
        if set("".join(rule)) <= set("-: "):
            yield header, rows


def rows_of_text(text):
    """Yields the rows of each table of losses or accuracies: numbers by column, and the row."""
    for header, rows in tables_of(text):
        if not any(map(LEARNT.search, header)):
            continue
        yield [
            ({h: c for h, c in zip(header, row, strict=False) if FIGURE.match(c)}, row)
            for row in rows
        ]


def rows_of_numbers(value):
    """Yields the records of each list: floats by name, and the record."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from rows_of_numbers(inner)
    elif isinstance(value, list):
        records = [record for record in value if isinstance(record, dict)]
        yield [(dict(leaves(record)), record) for record in records]
        for record in value:
            yield from rows_of_numbers(record)


def leaves(value, name=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}")
    elif isinstance(value, float):
        yield name, value


def is_expected(name, number):
    """Returns whether several mechanisms may have this number."""
    return number in PERFECT or (number in CHANCE and SCORES.search(name) is not None)


def repeated(rows):
    """Returns the first two rows with equal numbers; speeds are compared only if nothing else is.

    Rows with fewer than two numbers that are neither settings nor expected are skipped, and so are
    rows whose learnt numbers are all expected, as two mechanisms may have equal sizes.
    """
    for place, (one, first) in enumerate(rows):
        named = {name for name in one if not SPEEDS.search(name)} or {*one}
        results = {name for name in named if not SETTINGS.search(name)}
        telling = {name for name in results if not is_expected(name, one[name])}
        learnt = set(filter(LEARNT.search, results))
        if len(telling) < 2 or (learnt and not learnt & telling):
            continue
        for other, second in rows[place + 1 :]:
            if one.keys() == other.keys() and all(one[name] == other[name] for name in named):
                return first, second
    return None


@pytest.mark.skipif(not TEXTS, reason="installed without its documents")
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_two_rows_of_a_table_are_equal(path):
    for rows in rows_of_text(path.read_text(encoding="utf-8")):
        assert repeated(rows) is None


@pytest.mark.skipif(not NUMBERS, reason="installed without its results")
@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_two_records_are_equal(path):
    for rows in rows_of_numbers(json.loads(path.read_text(encoding="utf-8"))):
        assert repeated(rows) is None


def test_two_mechanisms_may_solve_a_task():
    header = "| mechanism | accuracy | learning rate |\n|---|---:|---:|\n"
    (rows,) = rows_of_text(header + "| lstm | 100.0 % | 0.01 |\n| gru | 100.0 % | 0.01 |\n")
    assert repeated(rows) is None
    header = "| mechanism | accuracy | parameters | memory |\n|---|---:|---:|---:|\n"
    for accuracy, is_expected in (("100.0 ± 0.0 %", True), ("99.1 ± 0.0 %", False)):
        lines = (f"| {name} | {accuracy} | 129,472 | 37.5 MB |\n" for name in ("one", "other"))
        (rows,) = rows_of_text(header + "".join(lines))
        assert (repeated(rows) is None) == is_expected


def test_equal_accuracies_of_one_set_are_told_apart_by_other_sets():
    means = {"accuracy": 0.875, "learning_rate": 0.1}
    records = [
        {"mechanism": name, "held_out": {"short": [0.875, None], "long": [long, None]}, **means}
        for name, long in (("softmax", 0.8), ("bigbird", 0.4), ("random", 0.4))
    ]
    (rows, *_) = rows_of_numbers({"mechanisms": records})
    assert repeated(rows[:2]) is None
    assert repeated(rows) == tuple(records[1:])
    header = "| mechanism | accuracy | learning rate |\n|---|---:|---:|\n"
    (rows,) = rows_of_text(header + "| based | 99.9 % | 0.1 |\n| softmax | 99.9 % | 0.1 |\n")
    assert repeated(rows) is None


def test_a_window_under_two_names_is_found():
    """These rows were published once: only the speeds differ."""
    header = "| mechanism | bits/byte | parameters | tokens/s |\n|---|---:|---:|---:|\n"
    window = "| sliding_window | 1.993 ± 0.002 | 117,056 | 36,038 |\n"
    longformer = "| longformer | 1.993 ± 0.002 | 117,056 | 30,639 |\n"
    softmax = "| softmax | 2.021 ± 0.006 | 117,056 | 36,914 |\n"
    (rows,) = rows_of_text(header + window + softmax)
    assert repeated(rows) is None
    (rows,) = rows_of_text(header + window + softmax + longformer)
    assert [row[0] for row in repeated(rows)] == ["sliding_window", "longformer"]
    records = [
        {
            "mechanism": "sliding_window",
            "loss": 1.99,
            "perplexity": 3.98,
            "tokens_per_second": 36.1,
        },
        {"mechanism": "longformer", "loss": 1.99, "perplexity": 3.98, "tokens_per_second": 30.6},
    ]
    (rows,) = rows_of_numbers({"mechanisms": records})
    assert repeated(rows) == tuple(records)
