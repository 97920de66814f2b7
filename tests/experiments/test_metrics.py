import errno
import json
import os
import re

import pytest

from experiments.harness import metrics, schedules
from experiments.harness.errors import UserError
from experiments.harness.schedules import Schedule

SCHEDULE = Schedule(steps=5, batch=1, accumulate=1, evaluate_every=2)


def line(step, **more):
    more = more or {"train_loss": 1.0}
    return json.dumps({"step": step, "tokens": step, "seconds": 0.5, **more}) + "\n"


def evaluation(step):
    return line(step, loss=2.5, perplexity=None, bits_by_position={"1": 2.5, "2": 2})


# The losses of five steps and the evaluations of the steps 2, 4 and 5.
LINES = [
    line(1),
    line(2),
    evaluation(2),
    line(3),
    line(4),
    evaluation(4),
    line(5),
    evaluation(5),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_records_until_a_step_are_read(path):
    path.write_text("".join(LINES))
    for step, count in enumerate((0, 1, 3, 4, 6, 8)):
        records = metrics.read(path, SCHEDULE, step)
        assert records == [json.loads(text) for text in LINES[:count]]
    assert metrics.evaluations(path, SCHEDULE, 5) == [json.loads(LINES[i]) for i in (2, 5, 7)]


@pytest.mark.parametrize("tail", ["", "\0\0\0", '{"step": 3', LINES[3], "".join(LINES[3:]) + "{"])
def test_all_that_follows_the_step_of_the_checkpoint_is_removed(path, tail):
    path.write_text("".join(LINES[:3]) + tail)
    with metrics.Metrics(path, SCHEDULE, 2) as file:
        file.write(json.loads(LINES[3]))
    assert path.read_text() == "".join(LINES[:4])


@pytest.mark.parametrize(
    ("number", "text", "reason"),
    [
        (2, "garbage\n", "no JSON object"),
        (2, "\0\0\n", "no JSON object"),
        (2, "[]\n", "no JSON object"),
        (3, '{"step": 2, "tok\n', "no JSON object"),
        (1, "{}\n", "no step"),
        (5, '{"step": 4, "tokens": 4, "loss": 1.0}\n', "no seconds"),
        (1, line("1"), "step is '1', which is not a number"),
        (1, line(True), "step is True, which is not a number"),
        (1, line([1]), "step is [1], which is not a number"),
        (4, line(3, train_loss="1.0"), "train_loss is '1.0', which is not a number"),
        (6, line(4, loss={"a": []}), "loss is {'a': []}, which is not a number"),
        (2, "", "no train_loss at step 2"),
        (4, "", "step 4 in place of step 3"),
        (3, "", "step 3 in place of step 2"),
        (2, LINES[0], "step 1 in place of step 2"),
        (3, LINES[1], "no evaluation at step 2"),
        (1, evaluation(1), "no train_loss at step 1"),
    ],
)
def test_a_damaged_line_is_one_sentence(path, number, text, reason):
    lines = [*LINES[: number - 1], text, *LINES[number:]]
    path.write_text("".join(lines))
    sentence = re.escape(f"{path} is damaged at line {number} ({reason}); delete {path.parent} to")
    with pytest.raises(UserError, match=sentence):
        metrics.read(path, SCHEDULE, 5)
    with pytest.raises(UserError, match=sentence):
        metrics.Metrics(path, SCHEDULE, 5)
    assert path.read_text() == "".join(lines)


def test_metrics_that_end_before_the_checkpoint_are_one_sentence(path):
    path.write_text("".join(LINES[:4]))
    sentence = f"{path} ends at step 3, and the run went on to 4; delete {path.parent} to train"
    with pytest.raises(UserError, match=sentence):
        metrics.read(path, SCHEDULE, 4)


def test_long_runs_record_evenly_spaced_losses(path, monkeypatch):
    monkeypatch.setattr(schedules, "MAX_LOGGED_LOSSES", 3)
    path.write_text("".join(LINES[i] for i in (1, 2, 4, 5, 7)))
    assert [record["step"] for record in metrics.read(path, SCHEDULE, 5)] == [2, 2, 4, 4, 5]


def test_a_full_disk_is_one_sentence(path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    sentence = "cannot write .*metrics.jsonl: No space left on device; .* the same command goes on"
    with monkeypatch.context() as patch:
        with pytest.raises(UserError, match=sentence), metrics.Metrics(path, SCHEDULE, 0) as file:
            patch.setattr(os, "fsync", full)
            file.write(json.loads(LINES[0]))
            file.flush()
        with pytest.raises(UserError, match=sentence):
            metrics.write_atomically(path, "new")
    assert path.read_text() == LINES[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_write_that_fails_is_reported_once(path):
    with pytest.raises(UserError, match="No space left on device"):
        with metrics.Metrics(path, SCHEDULE, 0) as file:
            file._file = open("/dev/full", "a")
            file.write(json.loads(LINES[0]))
            file.flush()
