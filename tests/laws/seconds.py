"""Cost of the laws by mechanism, as a plugin that also sums over parallel workers.

The cost is processor time. A run of many mechanisms fails if one of them takes more than a minute
and more than `MOST` times the median, and the report names it. A slow machine changes all of them
alike; programs that an earlier run compiled can make the median small.

Laws of a core are not counted: their modules try them on a few mechanisms for all that share the
core, so that one mechanism would pay for many. Slow tests have no budget.
"""

import collections
import math
import os
import statistics

import pytest

# Without compiled programs of earlier runs the median is about 5 seconds. Native sparse attention,
# with three branches in two forms, takes 3 to 3.6 times as long.
MOST = 5.0  # times the median
LEAST_BUDGET = 60.0  # seconds
FEWEST = 60  # mechanisms; a run of fewer has chosen some of the laws

OF_CORES = frozenset("debug default export precision promotion sharding transformations".split())

seconds: dict[str, float] = collections.defaultdict(float)


def name_of(item: pytest.Item) -> str | None:
    """The mechanism that a law is tested for, or None."""
    parameters = getattr(item, "callspec", None)
    parameters = {} if parameters is None else parameters.params
    subject = next(
        (parameters[k] for k in ("subject", "mechanism", "mixer") if k in parameters), None
    )
    # Without a claimed mechanism, pytest passes a placeholder that has no `entry`.
    return subject.entry.name if hasattr(subject, "entry") else None


def pays(item: pytest.Item) -> bool:
    """Returns whether the mechanism of a test pays for it."""
    return name_of(item) is not None and item.path.stem.removeprefix("test_") not in OF_CORES


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        if pays(item):
            spent = sum(os.times()[:4]) - before
            item.user_properties.append(("laws", (name_of(item), spent)))


def pytest_runtest_logreport(report):
    for key, value in report.user_properties:
        if report.when == "call" and key == "laws":
            name, spent = value
            seconds[name] += spent


def budget() -> float:
    """Most seconds of a mechanism; infinite for a run of some of them."""
    if len(seconds) < FEWEST:
        return math.inf
    return max(LEAST_BUDGET, MOST * statistics.median(seconds.values()))


def pytest_terminal_summary(terminalreporter):
    if seconds:
        terminalreporter.section("processor seconds of the laws")
        for name, spent in seconds.items():
            over = f", over the budget of {budget():.0f}" if spent > budget() else ""
            terminalreporter.line(f"{name}: {spent:.1f}{over}")


def pytest_sessionfinish(session, exitstatus):
    is_quick = "not slow" in session.config.option.markexpr
    if is_quick and exitstatus == 0 and any(spent > budget() for spent in seconds.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
