"""The battery's subjects as fixtures, and what the laws of one mechanism may cost.

Cost is processor time, which a busy machine and parallel workers change less than the time on the
clock: on two idle cores it is that of one worker. Above `BUDGET` the run says so, and above
`LIMIT`, which leaves room for slower machines than those it was set on, the run fails.
"""

import collections
import gc
import os

import pytest

from effattn import registry
from tests.laws.battery import MECHANISMS, SUBJECTS

BUDGET, LIMIT = 12.0, 36.0  # seconds a mechanism

seconds: dict[str, float] = collections.defaultdict(float)


def pytest_generate_tests(metafunc):
    for fixture, subjects in (("mechanism", MECHANISMS), ("subject", SUBJECTS)):
        if fixture in metafunc.fixturenames and not _is_parametrized(metafunc, fixture):
            metafunc.parametrize(fixture, subjects, ids=str)


def _is_parametrized(metafunc, fixture):
    marks = metafunc.definition.iter_markers("parametrize")
    return any(fixture in mark.args[0] for mark in marks)


def pytest_collection_modifyitems(items):
    """All of one mechanism together, so that a worker that compiles a program uses it again."""
    # Tracing makes many objects and little garbage: searching it for cycles is an eighth of it all.
    gc.freeze()
    gc.set_threshold(100_000)
    order = {name: place for place, name in enumerate(registry.names())}
    places = [place for place, item in enumerate(items) if _name(item) is not None]
    laws = sorted((items[place] for place in places), key=lambda item: order[_name(item)])
    for place, item in zip(places, laws, strict=True):
        items[place] = item


def _name(item):
    parameters = getattr(item, "callspec", None)
    parameters = {} if parameters is None else parameters.params
    subject = parameters.get("subject", parameters.get("mechanism"))
    return getattr(subject, "name", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        if _name(item) is not None:
            spent = sum(os.times()[:4]) - before
            item.user_properties.append(("laws", (_name(item), spent)))


def pytest_runtest_logreport(report):
    for key, value in report.user_properties:
        if report.when == "call" and key == "laws":
            name, spent = value
            seconds[name] += spent


def pytest_terminal_summary(terminalreporter):
    if seconds:
        terminalreporter.section("processor seconds of the laws")
        for name, spent in seconds.items():
            over = f", over the budget of {BUDGET:.0f}" if spent > BUDGET else ""
            terminalreporter.line(f"{name}: {spent:.1f}{over}")


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and any(spent > LIMIT for spent in seconds.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
