import pytest

from experiments.common.comparison import compare, planned_runs
from experiments.common.errors import Diverged

LOSSES = {0.1: 2.0, 0.2: 1.0, 0.4: 3.0}


class Runner:
    """Losses by learning rate; rates above `limit` diverge."""

    def __init__(self, limit=1.0):
        self.limit, self.asked, self.said = limit, [], []

    def run(self, mechanism, rate, seed):
        self.asked.append((mechanism, rate, seed))
        if rate > self.limit:
            raise Diverged("run", 3, None)
        return {"mechanism": mechanism, "learning_rate": rate, "valid_loss": LOSSES[rate]}


def test_every_mechanism_runs_with_every_seed():
    runner = Runner()
    comparison = compare("ab", [0.1], [5, 6], runner.run, runner.said.append)
    assert runner.asked == [("a", 0.1, 5), ("a", 0.1, 6), ("b", 0.1, 5), ("b", 0.1, 6)]
    assert len(comparison.runs) == planned_runs(2, 1, 2) == 4
    assert comparison.sweep == [] and runner.said == []


def test_a_sweep_finds_the_best_rate_of_each_mechanism_with_the_first_seed():
    runner = Runner()
    comparison = compare("ab", [0.1, 0.2, 0.4], [5, 6], runner.run, runner.said.append)
    assert runner.asked[:4] == [("a", 0.1, 5), ("a", 0.2, 5), ("a", 0.4, 5), ("a", 0.2, 6)]
    assert len(runner.asked) == planned_runs(2, 3, 2) == 8
    assert {run["learning_rate"] for run in comparison.runs} == {0.2}
    assert [run["learning_rate"] for run in comparison.sweep] == [0.1, 0.2, 0.4] * 2
    assert runner.said == ["a: the best learning rate is 0.2", "b: the best learning rate is 0.2"]


def test_a_rate_that_diverges_is_left_out_of_the_sweep():
    runner = Runner(limit=0.15)
    comparison = compare("a", [0.1, 0.2], [5], runner.run, runner.said.append)
    assert [run["learning_rate"] for run in comparison.runs] == [0.1]
    assert "left out of the sweep" in runner.said[0]


@pytest.mark.parametrize("rates", [[0.1], [0.1, 0.2]])
def test_if_every_rate_diverges_so_does_the_comparison(rates):
    with pytest.raises(Diverged):
        compare("a", rates, [5], Runner(limit=0.0).run, print)
