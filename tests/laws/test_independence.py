"""References share no code with what they check."""

import ast
import os
import pathlib
import sys

import jax
import numpy as np
import pytest

import effattn
from tests.laws import battery, mixers
from tests.marks import slow_but_for

# A state's fields, and an option of a mixer: they hold numbers, and compute nothing here.
RECORDS = {"PerformerState", "RotaryEmbedding"}
REFERENCES = pathlib.Path(__file__).parents[1] / "references"
LIBRARY = os.path.dirname(effattn.__file__) + os.sep


def imports_of(path):
    """`(module, name)` of all that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted(REFERENCES.glob("*.py")), ids=lambda path: path.stem)
def test_a_reference_imports_records_of_the_library_at_most(path):
    for module, name in imports_of(path):
        package, *rest = module.split(".")
        assert package != "effattn" or name in RECORDS
        assert package != "tests" or rest[:1] == ["references"]


def library_code(run):
    """The functions of the library that are called, each with its file."""
    called = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            called.add((code.co_filename.removeprefix(LIBRARY), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called


@pytest.mark.parametrize(
    "subject", slow_but_for(battery.FIRST_OF_FAMILY, battery.SUBJECTS), ids=str
)
def test_no_code_of_the_library_runs_in_a_reference(subject):
    """Not by way of an argument, either. Arguments are made before."""
    sizes, extent = battery.SQUARE, battery.everything(subject)._replace(everything=False)
    arrays = battery.draw_arrays(subject, sizes, everything=True)
    pairs = battery.pairs_of(subject, sizes, extent, battery.neutral(subject, sizes, extent))
    options = battery.fixed_options(subject, extent, arrays)

    def attend(arrays, pairs):
        return subject.reference.attend(arrays, pairs, None, **options)

    assert not library_code(lambda: jax.eval_shape(attend, arrays, pairs))


@pytest.mark.parametrize("subject", slow_but_for(mixers.FIRST_OF_FAMILY, mixers.SUBJECTS), ids=str)
def test_no_code_of_the_library_runs_in_a_reference_of_a_mixer(subject):
    mixer = jax.eval_shape(lambda: mixers.build(subject))
    tokens = np.zeros((mixers.LENGTH, mixers.FEATURES), np.float32)
    assert not library_code(lambda: jax.eval_shape(subject.reference.mix, mixer, tokens))
