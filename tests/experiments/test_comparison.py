import threading
import time

import pytest

from experiments.harness import side_by_side
from experiments.harness.comparison import compare, planned_runs
from experiments.harness.errors import Diverged, Stopped, UserError

LOSSES = {0.1: 2.0, 0.2: 1.0, 0.4: 3.0}


class Runner:
    """Runs that diverge above a learning rate of `limit`; also replaces the progress display."""

    def __init__(self, limit=1.0):
        self.limit, self.asked, self.said, self.stops = limit, [], [], 0

    def run(self, mechanism, rate, seed):
        self.asked.append((mechanism, rate, seed))
        if rate > self.limit:
            raise Diverged("run", 3, "try less")
        run = {"mechanism": mechanism, "learning_rate": rate, "seed": seed}
        return {**run, "loss": LOSSES[rate]}

    def say(self, text):
        self.said.append(text)

    def stop(self):
        self.stops += 1


def of(run):
    return run["mechanism"], run["learning_rate"], run["seed"]


def by_loss(result):
    return (result["loss"],)


def compare_of(runner, mechanisms, rates, seeds, at_once=1, cost=by_loss):
    return compare(mechanisms, rates, seeds, runner.run, cost, runner, at_once)


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_mechanism_runs_with_every_seed(at_once):
    runner = Runner()
    comparison = compare_of(runner, "ab", [0.1], [5, 6], at_once)
    expected = [("a", 0.1, 5), ("a", 0.1, 6), ("b", 0.1, 5), ("b", 0.1, 6)]
    assert sorted(runner.asked) == expected
    assert [of(run) for run in comparison.runs] == expected
    assert len(comparison.runs) == planned_runs(2, 1, 2) == 4
    assert comparison.sweep == [] and runner.said == []
    assert comparison.at_once == at_once


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_sweep_finds_the_best_rate_of_each_mechanism_with_the_first_seed(at_once):
    runner = Runner()
    comparison = compare_of(runner, "ab", [0.1, 0.2, 0.4], [5, 6], at_once)
    tried = [("a", 0.1, 5), ("a", 0.2, 5), ("a", 0.4, 5)]
    assert set(runner.asked[:6]) == {*tried, ("b", 0.1, 5), ("b", 0.2, 5), ("b", 0.4, 5)}
    assert len(runner.asked) == planned_runs(2, 3, 2) == 8
    expected = [("a", 0.2, 5), ("a", 0.2, 6), ("b", 0.2, 5), ("b", 0.2, 6)]
    assert [of(run) for run in comparison.runs] == expected
    assert [of(run) for run in comparison.sweep[:3]] == tried
    assert [run["learning_rate"] for run in comparison.sweep] == [0.1, 0.2, 0.4] * 2
    assert runner.said == ["a: the best learning rate is 0.2", "b: the best learning rate is 0.2"]


def test_the_best_is_that_of_least_cost():
    runner = Runner()
    worst = compare_of(runner, "a", [0.1, 0.2, 0.4], [5], cost=lambda run: (-run["loss"],))
    assert [run["learning_rate"] for run in worst.runs] == [0.4]
    tied = compare_of(runner, "a", [0.1, 0.4], [5], cost=lambda run: (0, -run["loss"]))
    assert [run["learning_rate"] for run in tied.runs] == [0.4]


def test_a_rate_that_diverges_is_left_out_of_the_sweep():
    runner = Runner(limit=0.15)
    comparison = compare_of(runner, "a", [0.1, 0.2], [5])
    assert [run["learning_rate"] for run in comparison.runs] == [0.1]
    assert [run["learning_rate"] for run in comparison.sweep] == [0.1]
    assert "left out of the sweep" in runner.said[0]


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("rates", [[0.1], [0.1, 0.2]])
def test_if_every_rate_diverges_so_does_the_comparison(rates, at_once):
    runner = Runner(limit=0.0)
    with pytest.raises(Diverged):
        compare_of(runner, "a", rates, [5], at_once)


def test_calls_go_on_beside_each_other_and_keep_their_order():
    together = threading.Barrier(3)

    def function(each):
        together.wait(timeout=60)  # breaks unless three are called at once
        time.sleep(0.01 * (6 - each))
        return each * each

    assert side_by_side.call(function, range(6), 3, stop=pytest.fail) == [0, 1, 4, 9, 16, 25]


@pytest.mark.parametrize("error", [Diverged("run", 3, "try less"), KeyboardInterrupt()])
def test_an_error_stops_the_calls_beside_it_and_those_not_begun(error):
    stopping, begun = threading.Event(), []
    both_begun = threading.Barrier(2, timeout=60)

    def function(each):
        begun.append(each)
        if each < 2:
            both_begun.wait()
        if each == 1:
            raise error
        assert stopping.wait(timeout=60)
        raise Stopped

    with pytest.raises(type(error)):
        side_by_side.call(function, range(9), 2, stopping.set)
    # The thread of the failed call may have started another call before `stop`.
    assert {0, 1} <= set(begun) and len(begun) <= 3


def test_ctrl_c_while_calls_are_begun_stops_them():
    stopping = threading.Event()

    class Interrupted(list):
        def __iter__(self):
            yield 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side.call(lambda _: stopping.wait(timeout=60), Interrupted(), 2, stopping.set)
    assert stopping.is_set()


def test_calls_are_in_other_threads_which_signals_do_not_reach():
    here = threading.get_ident()
    assert here not in side_by_side.call(lambda _: threading.get_ident(), range(2), 1, print)


def test_a_signal_while_a_thread_starts_leaves_no_call_behind(monkeypatch):
    """The pool does not know of such a thread, and so does not wait for it."""
    start, begun, ended, stopping = threading.Thread.start, [], [], threading.Event()
    threads = []

    def interrupted(thread):
        start(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    def function(each):
        begun.append(each)
        assert stopping.wait(timeout=60)
        ended.append(each)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            side_by_side.call(function, range(2), 1, stopping.set)
    assert begun == ended
    for thread in threads:
        thread.join(timeout=60)
    assert begun == ended == []


@pytest.mark.parametrize("error", [UserError("the disk is full"), TypeError("the disk is full")])
def test_a_call_that_cannot_end_in_order_is_heard_of_after_ctrl_c(error):
    stopping, all_begun = threading.Event(), threading.Barrier(3, timeout=60)

    def function(each):
        all_begun.wait()
        if each == 0:
            raise KeyboardInterrupt
        assert stopping.wait(timeout=60)
        raise error if each == 2 else Stopped

    with pytest.raises(type(error), match="the disk is full"):
        side_by_side.call(function, range(3), 3, stopping.set)


@pytest.mark.parametrize("rates", [[0.2], [0.2, 0.4]])
def test_optional_mechanisms_that_diverge_are_left_out(rates):
    class Partly(Runner):
        def run(self, mechanism, rate, seed):
            self.limit = 0.1 if mechanism == "b" and seed == 6 or mechanism == "c" else 1.0
            return super().run(mechanism, rate, seed)

    runner = Partly()
    given = rates, [5, 6], runner.run, by_loss, runner, 1
    comparison = compare("abc", *given, optional="bc")
    assert {run["mechanism"] for run in comparison.runs} == {"a"}
    assert set(comparison.left_out) == {"b", "c"}
    assert "became NaN or infinite at step 3; try less" in comparison.left_out["b"]
    with pytest.raises(Diverged):
        compare("abc", *given, optional="c")
    with pytest.raises(Diverged):
        compare("c", *given, optional="c")
