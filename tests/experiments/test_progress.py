"""Progress display as lines, in a pipe or a log."""

from experiments.harness.progress import Progress


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_line_says_which_run_stands_where(capsys):
    with Progress(runs=2, steps=4) as progress, progress.begin("softmax", 0) as run:
        run.step(1, 2.5, 1234.5)
        run.step(2, 2.25, 1234.5)
        run.evaluated("bits_per_byte", {"bits_per_byte": 3.0, "loss": 2.0})
    (line,) = lines_of(capsys)
    assert line.startswith("softmax (1 of 2)  step 2/4  loss 2.250  1,234 tokens/s  ")
    assert "validation bits per byte 3.000  " in line and line.endswith(" left")


def test_time_left_counts_what_runs_beside_each_other_still_have_to_do(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress(runs=3, steps=100) as progress:
        # A run that resumes after 40 steps has 60 left; earlier steps do not count for the speed.
        with progress.begin("one", 40) as one, progress.begin("two", 0) as two:
            one.step(50, 1.0, 1.0)
            two.step(10, 1.0, 1.0)
            now += 40.0  # for 20 steps
            assert progress.time_left == "8:00"  # 50 + 90 + 100 more
            one.step(100, 1.0, 1.0)
        # A run that ended early counts as done.
        assert progress.time_left == "0:57"  # 100 more, at 70 steps in 40 s
        with progress.begin("read back", 100):
            pass
        assert progress.time_left == "0:00"


def test_a_warning_is_a_line(capsys):
    with Progress(runs=1, steps=4) as progress:
        progress.warn("the disk fails")
    assert lines_of(capsys) == ["warning: the disk fails"]
