"""The tables of `docs/plan.md` are what the commands beside them print."""

import pathlib
import re

import pytest

import effattn
from effattn.analysis.planning import tables

PAGE = pathlib.Path(effattn.__file__).parents[1] / "docs" / "plan.md"
NAMES = ["states", pytest.param("contexts", marks=pytest.mark.slow)]

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="installed without its documents")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_what_the_command_prints(name):
    command = f"    python -m effattn.analysis.planning.tables {name}\n\n"
    committed = re.search(re.escape(command) + r"((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert committed[1] == tables.TABLES[name]() + "\n"


def test_states_of_zero_are_those_of_the_paper():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 devices, mixed precision.
    parts = {"states": 12, "gradients": 2, "parameters": 2}
    left = [tables.left_on_each(7.5e9, parts, stage, 64) / 1e9 for stage in (0, 1, 2, 3)]
    assert left == pytest.approx([120, 31.4, 16.6, 1.88], rel=5e-3)
