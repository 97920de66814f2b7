"""`scripts/lint_prose.py`: the problems that it reports, and the prose that it accepts."""

import runpy
from pathlib import Path

import pytest

lint = runpy.run_path(str(Path(__file__).parents[2] / "scripts/lint_prose.py"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('"""Shapes. Of the keys, padded ones."""', "sentence of this docstring begins with 'Of'"),
        ('class A:\n    """Those of B."""', "sentence of this docstring begins with 'Those'"),
        ("x = 1\n# Sorted. What\n# follows is not.", "sentence of this comment begins with 'What'"),
        ('def f():\n    """It was run."""', "docstring begins with 'It', whose noun is missing"),
        ('def f():\n    """Return 1."""', "docstring begins with the imperative 'Return'"),
    ],
)
def test_a_problem_is_reported_at_its_line(tmp_path, capsys, source, problem):
    (tmp_path / "module.py").write_text(source + "\n")
    assert lint["main"]([str(tmp_path)]) == 1
    report, total = capsys.readouterr().out.splitlines()
    line = 1 if source.startswith('"') else 2
    assert report.startswith(f"{tmp_path / 'module.py'}:{line}: ") and report.endswith(problem)
    assert total == "1 files, 1 problems"


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Returns whether x is even, which callers ask first."""',
        'def f():\n    """Copy of the table."""',
        'class A:\n    """Load balancer. All of its queues are fair."""',
        'x = 1  # What stands behind code is not checked\ny = "# Of"',
    ],
)
def test_good_prose_has_no_problems(tmp_path, source):
    (tmp_path / "module.py").write_text(source + "\n")
    assert lint["main"]([str(tmp_path / "module.py")]) == 0


def test_a_long_line_may_stand_in_few_docstrings_only(tmp_path, capsys):
    def write(count):
        text = "x" * lint["LONG"]
        functions = (f'def f{n}():\n    """Adds.\n\n    {text}\n    """' for n in range(count))
        (tmp_path / "module.py").write_text("\n\n".join(functions) + "\n")
        return lint["main"]([str(tmp_path)])

    assert write(lint["REPEATS"] - 1) == 0
    assert write(lint["REPEATS"]) == 1
    assert f"{lint['REPEATS']} docstrings repeat the line 'xxx" in capsys.readouterr().out
