"""Cost of the laws by mechanism, as a plugin that also sums over parallel workers.

The cost is processor time, which varies less than elapsed time on a busy machine. A run fails if a
mechanism takes more than its budget, and the report names the mechanism.

Laws of a core are not counted: their modules try them on a few mechanisms for all that share the
core, so that one mechanism would pay for many. Slow tests have no budget.
"""

import collections
import os

import jax
import pytest

# Processor seconds for each mechanism on the newest JAX, without compiled programs of earlier runs.
# Native sparse attention, with three branches in two forms, takes 15 to 17, most others 3 to 12.
BUDGET = 18.0
if jax.__version_info__ < (0, 12):
    BUDGET *= 2  # XLA compiled twice as slowly

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


def pytest_terminal_summary(terminalreporter):
    if seconds:
        terminalreporter.section("processor seconds of the laws")
        for name, spent in seconds.items():
            over = f", over the budget of {BUDGET:.0f}" if spent > BUDGET else ""
            terminalreporter.line(f"{name}: {spent:.1f}{over}")


def pytest_sessionfinish(session, exitstatus):
    is_quick = "not slow" in session.config.option.markexpr
    if is_quick and exitstatus == 0 and any(spent > BUDGET for spent in seconds.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
