"""Marks the tests of `slow.txt` as slow, as a plugin, and writes this list.

    pytest -n 2 --dist worksteal -m "not slow and not devices" --list-slow
    pytest -n 2 --dist worksteal -m "not slow and devices" --devices 8 --list-slow

run all tests but those that their files mark as slow, and write the names of those that take more
than `LIMIT` seconds; the names of tests that did not run stay. If all cases of a test take more
than `LIMIT`, the quickest is left out of the list, unless it takes `LIMIT_OF_FIRST` seconds. So
most tests have a quick case. The laws of `ALWAYS` are never listed.

The seconds are those of the processor, and those of the compilation that an earlier run has saved:
on a new machine all programs are compiled.
"""

import collections
import os
import pathlib

import jax
import pytest

LIMIT, LIMIT_OF_FIRST = 0.5, 1.5  # seconds
ALWAYS = (
    "agrees_with_the_naive_form",
    "nothing_reaches_back",
    "any_split_equals_the_whole",
)
LIST = pathlib.Path(__file__).with_name("slow.txt")

_saved = [0.0]
_seconds: dict[str, float] = {}


def pytest_addoption(parser):
    parser.addoption("--list-slow", action="store_true", help="write the list of slow tests")


def pytest_configure(config):
    if config.getoption("--list-slow"):
        jax.monitoring.register_event_duration_secs_listener(_count)


def _count(event, seconds, **_):
    if event == "/jax/compilation_cache/compile_time_saved_sec":
        _saved[0] += max(seconds, 0.0)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses tests by their marks
def pytest_collection_modifyitems(config, items):
    if config.getoption("--list-slow"):
        return
    listed = frozenset(LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = sum(os.times()[:4]) + _saved[0]
    try:
        return (yield)
    finally:
        item.user_properties.append(("seconds", sum(os.times()[:4]) + _saved[0] - before))


def pytest_runtest_logreport(report):
    if report.when == "call":
        _seconds[report.nodeid] = dict(report.user_properties)["seconds"]


def pytest_sessionfinish(session):
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--list-slow") and not is_worker:
        others = set(LIST.read_text(encoding="utf-8").splitlines()) - _seconds.keys()
        names = sorted({*others, *slow_of(_seconds)})
        LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def slow_of(seconds: dict[str, float]) -> list[str]:
    """Names of the slow tests, from the seconds of all tests."""
    cases = collections.defaultdict(list)
    for name in seconds:
        function, _, case = name.partition("[")
        if case.split("-")[0] not in ALWAYS:
            cases[function].append(name)
    found = []
    for names in cases.values():
        slow = [name for name in names if seconds[name] > LIMIT]
        first = min(names, key=seconds.__getitem__)
        if len(slow) == len(names) and seconds[first] < LIMIT_OF_FIRST:
            slow.remove(first)
        found += slow
    return found
