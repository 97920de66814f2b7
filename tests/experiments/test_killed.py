"""Runs in processes that are really killed."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.conftest import Lines
from tests.experiments.killed import train_in
from tests.marks import slow

ROOT = Path(__file__).resolve().parents[2]


def outcome(folder):
    """Returns the newest digest of the state, and the metrics without times."""
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    progress = json.loads(
        (folder / "checkpoints" / str(step) / "progress" / "metadata").read_text()
    )
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return (
        progress["state"],
        [{key: value for key, value in each.items() if key != "seconds"} for each in records],
    )


@pytest.mark.parametrize(("kills", "steps"), [(1, 60), slow(20, 700)])
def test_a_run_killed_at_random_moments_ends_as_the_unkilled_one(tmp_path, kills, steps):
    train_in(tmp_path / "whole", steps, Lines())
    draw = random.Random(kills)
    for _ in range(kills):
        moment = [str(draw.randrange(20)), str(draw.uniform(0, 0.05))]
        command = [sys.executable, "-m", "tests.experiments.killed", str(tmp_path / "killed")]
        done = subprocess.run(
            [*command, str(steps), *moment], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
    lines = Lines()
    train_in(tmp_path / "killed", steps, lines)
    assert lines.steps[-1] == steps and not lines.warnings
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
