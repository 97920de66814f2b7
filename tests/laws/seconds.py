"""Cost of the laws by mechanism, as a plugin that also sums over parallel workers.

The cost is processor time, which varies less than elapsed time on a busy machine. The budget of a
mechanism is 12 seconds of elapsed time in `make test`, whose work two workers share. A run above
the budget prints a warning. A run above `LIMIT` fails: the limit only guards against mistakes,
because two workers on the threads of one core double the time, and so does a newer compiler.
"""

import collections
import os

import pytest

BUDGET, LIMIT = 2 * 12.0, 72.0  # processor seconds for each mechanism

seconds: dict[str, float] = collections.defaultdict(float)


def name_of(item: pytest.Item) -> str | None:
    """The mechanism that a law is tested for."""
    parameters = getattr(item, "callspec", None)
    parameters = {} if parameters is None else parameters.params
    subject = next(
        (parameters[k] for k in ("subject", "mechanism", "mixer") if k in parameters), None
    )
    # Without a claimed mechanism, pytest passes a placeholder that has no `entry`.
    return subject.entry.name if hasattr(subject, "entry") else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        if name_of(item) is not None:
            spent = sum(os.times()[:4]) - before
            item.user_properties.append(("laws", (name_of(item), spent)))


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
