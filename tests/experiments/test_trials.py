import json
import types

import pytest

from experiments.harness import machine, trials
from experiments.harness.errors import UserError
from experiments.harness.programs import ProgramCache
from experiments.harness.schedules import Schedule
from experiments.harness.trials import Trials, better, key_of
from tests.experiments.counting import Counting

PROGRAMS = types.SimpleNamespace(parameters=1, state_bytes=3, model=lambda params: None)


class Sampled(Counting):
    def sample(self, model, seed):
        return {"sample": f"seed {seed}"}


@pytest.fixture
def one(tmp_path, monkeypatch, lines):
    """Returns trials whose final loss in nats equals the learning rate."""

    def train(run, schedule, programs, task, progress):
        run.folder.mkdir()
        trained.append(run)
        record = {"step": 4, "tokens": 8, "seconds": 2.0, "loss": run.learning_rate}
        record |= {"temporary_bytes": 6, "accuracy": 0.5}
        at = {"tokens": 8, "seconds": 2.0}
        losses = [{"step": step, **at, "train_loss": 9.0} for step in range(1, 5)]
        records = [*losses[:2], {**record, "step": 2}, *losses[2:], record]
        (run.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        return run.learning_rate, record

    trained = []
    monkeypatch.setattr(trials, "train", train)
    sets = {"validation": {"loss": 1.0}, "longer": {"loss": 2.0}}
    monkeypatch.setattr(trials, "held_out", lambda programs, params, *_: {**sets, "at": params})
    found = Trials(
        tmp_path, "me", Schedule(4, 2, 1, 2), Sampled(), lambda _: PROGRAMS, lines, known={}
    )
    return types.SimpleNamespace(trials=found, folder=tmp_path, trained=trained, run=found.run)


def test_a_result_has_the_record_and_all_held_out_sets(one):
    result = one.run("softmax", 2.0, 5)
    record = {"step": 4, "tokens": 8, "seconds": 2.0, "loss": 2.0, "temporary_bytes": 6}
    record["accuracy"] = 0.5
    assert result == {
        "mechanism": "softmax",
        "seed": 5,
        "learning_rate": 2.0,
        "folder": "softmax-rate2.0-seed5",
        **record,
        "tokens_per_second": 4.0,
        "parameters": 1,
        "state_bytes": 3,
        "held_out": {"validation": {"loss": 1.0}, "longer": {"loss": 2.0}, "at": 2.0},
        "sample": "seed 5",
        "environment": machine.environment(),
        "curve": [{**record, "step": 2}, record],
    }
    (run,) = one.trained
    assert (run.folder, run.identity) == (one.folder / run.name, f"me {run.name}")
    assert json.loads((run.folder / "result.json").read_text()) == result
    assert key_of(result) == ("softmax", 2.0, 5)


def test_a_known_result_is_not_trained_again(one):
    result = one.run("softmax", 2.0, 5)
    assert one.run("softmax", 2.0, 5) == result and len(one.trained) == 1
    one.run("softmax", 2.0, 6)
    assert len(one.trained) == 2
    # A result of an earlier report stands for a folder that is gone.
    one.trials.known[("linear", 2.0, 5)] = {**result, "mechanism": "linear"}
    assert one.run("linear", 2.0, 5)["mechanism"] == "linear" and len(one.trained) == 2


@pytest.mark.parametrize("content", ["", "{}", "null", '{"mecha', '{"mechanism": "softmax"}'])
def test_a_damaged_result_is_one_sentence(one, content):
    result = one.run("softmax", 2.0, 0)
    (one.folder / result["folder"] / "result.json").write_text(content)
    with pytest.raises(UserError, match=r"result\.json is damaged; delete .* measure that run"):
        one.run("softmax", 2.0, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", "low"),
        ("accuracy", [True]),
        ("seed", 0.5),
        ("tokens", None),
        ("held_out", {}),
        ("curve", {"loss": 1.0}),
    ],
)
def test_a_result_of_another_form_is_damaged(one, key, value):
    result = one.run("softmax", 2.0, 0)
    (one.folder / result["folder"] / "result.json").write_text(json.dumps({**result, key: value}))
    with pytest.raises(UserError, match=r"result\.json is damaged; delete .* measure that run"):
        one.run("softmax", 2.0, 0)


@pytest.mark.parametrize(("key", "value"), [("mechanism", "linear"), ("seed", 1)])
def test_the_result_of_another_run_is_refused(one, key, value):
    result = one.run("softmax", 2.0, 0)
    (one.folder / result["folder"] / "result.json").write_text(json.dumps({**result, key: value}))
    with pytest.raises(UserError, match=r"result\.json is the result of another run; delete"):
        one.run("softmax", 2.0, 0)


def test_results_are_compared_by_the_headline_and_then_by_the_loss():
    class Accurate(Counting):
        headline, more_is_better = "accuracy", True

    results = [
        {"accuracy": a, "loss": b} for a, b in ((0.5, 1.0), (0.9, 2.0), (0.9, 1.5), (0.2, 0.1))
    ]
    assert min(results, key=better(Accurate())) == results[2]
    assert min(results, key=better(Counting())) == results[3]


def test_programs_are_kept_until_the_process_is_full(monkeypatch):
    made, forgotten = [], []
    kept = ProgramCache(lambda name: made.append(name) or object())
    monkeypatch.setattr(machine, "forget_programs", lambda: forgotten.append(len(made)))
    monkeypatch.setattr(machine, "is_full", lambda: False)
    first = kept("softmax"), kept("linear")
    assert (kept("softmax"), kept("linear")) == first
    monkeypatch.setattr(machine, "is_full", lambda: True)
    assert kept("softmax") is not first[0]
    assert made == ["softmax", "linear", "softmax"]
    assert forgotten == [2]


def test_a_process_with_many_mappings_is_full(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    monkeypatch.setattr(machine, "_MAPPINGS", maps)
    assert not machine.is_full()  # as on other systems than Linux
    for lines, expected in ((machine.MOST_MAPPINGS, False), (machine.MOST_MAPPINGS + 1, True)):
        maps.write_bytes(b"\n" * lines)
        assert machine.is_full() == expected
