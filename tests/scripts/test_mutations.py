"""`scripts/mutations.py`: the table applies to the library, and survivors are reported."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from effattn import registry

ROOT = Path(__file__).parents[2]


def load():
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts/mutations.py")
    module = sys.modules["mutations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = load()
TABLE = mutations.read()


def test_there_are_enough_mutations_of_all_parts():
    parts = {mutation.file.split("/")[1] for mutation in TABLE}
    assert {"cores", "xla", "llvm", "functional", "nn", "decode"} <= parts


@pytest.mark.parametrize("mutation", TABLE, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_to_the_library(mutation):
    changed = mutation.mutated(ROOT)
    assert changed != (ROOT / mutation.file).read_text()
    compile(changed, mutation.file, "exec")


@pytest.mark.parametrize("file", sorted({mutation.file for mutation in TABLE}))
def test_the_rules_name_tests_that_there_are(file):
    runs = mutations.runs_of(file)
    assert runs
    for paths, selected in runs:
        assert paths and all((ROOT / path).exists() for path in paths)
        assert set((selected or "softmax").split(" or ")) <= {*registry.names()}


def test_a_mechanism_is_found_by_its_function_its_mixer_and_its_decoder():
    assert mutations.mechanisms_of("effattn/functional/retention.py") == ["retention", "lightning"]
    assert mutations.mechanisms_of("effattn/nn/hyena.py") == ["hyena"]
    assert mutations.mechanisms_of("effattn/decode/routing.py") == ["routing"]


@pytest.fixture
def project(tmp_path):
    """Project with one function and one test of this function."""
    (tmp_path / "twice.py").write_text("def twice(x):\n    return 2 * x + 0\n")
    (tmp_path / "test_twice.py").write_text(
        "from twice import twice\n\ndef test_twice():\n    assert twice(3) == 6\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("2 * x", "3 * x", "`test_twice.py::test_twice`"),
        ("+ 0", "- 0", "**SURVIVED**"),
        ("4 * x", "3 * x", "DOES NOT APPLY: its text occurs 0 times in twice.py, not once"),
    ],
)
def test_the_table_says_what_caught_a_mutation(project, before, after, expected):
    mutation = mutations.Mutation("wrong", "twice.py", before, after, "twice is wrong")
    original = (project / "twice.py").read_text()
    verdict = mutations.judge(mutation, project, [(("test_twice.py",), None)], 60)
    assert verdict.row() == f"| wrong | `twice.py` | twice is wrong | {expected} |"
    assert (project / "twice.py").read_text() == original


def test_a_test_that_fails_without_the_mutation_catches_nothing(project):
    (project / "test_twice.py").write_text("def test_never():\n    assert False\n")
    mutation = mutations.Mutation("wrong", "twice.py", "2 * x", "3 * x", "twice is wrong")
    verdict = mutations.judge(mutation, project, [(("test_twice.py",), None)], 60)
    assert verdict.caught is None and verdict.error == "FAILS ANYWAY: `test_twice.py::test_never`"


def test_what_survives_is_an_error(monkeypatch, capsys):
    survivor, caught = (
        mutations.Verdict(dataclasses.replace(TABLE[0], name=name), caught=by)
        for name, by in (("one", None), ("two", "tests/test_two.py::test_two"))
    )
    for verdicts, status in (([survivor, caught], 1), ([caught], 0), ([], 1)):
        monkeypatch.setattr(mutations, "judge_all", lambda *_, given=verdicts: given)
        assert mutations.main([]) == status
    assert "1 of 2 mutations were caught." in capsys.readouterr().out
