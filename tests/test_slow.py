"""The list of slow tests."""

import pathlib
import re

from tests import slow

ROOT = pathlib.Path(__file__).parents[1]


def test_the_quickest_case_stays_unless_it_takes_very_long():
    quick, middle, long = 0.9 * slow.LIMIT, 0.9 * slow.LIMIT_OF_FIRST, 9 * slow.LIMIT_OF_FIRST
    seconds = {
        **dict.fromkeys(("a::quick", "b::t[1]", "c::t[1]"), quick),
        **dict.fromkeys(("d::t[1]", "f::alone"), middle),
        **dict.fromkeys(("b::t[2]", "d::t[2]", "e::t[1]", "e::t[2]"), long),
        "laws::t[nothing_reaches_back-softmax]": long,
    }
    assert sorted(slow.slow_of(seconds)) == ["b::t[2]", "d::t[2]", "e::t[1]", "e::t[2]"]


def test_all_names_are_those_of_tests():
    names = slow.LIST.read_text(encoding="utf-8").splitlines()
    assert names == sorted(set(names))
    for function in {name.split("[")[0] for name in names}:
        path, *_, name = function.split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*def {name}\(", text, re.MULTILINE), f"{function} is no test"
