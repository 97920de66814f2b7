"""The command `experiments.lm`, on models of a few thousand parameters."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import lm
from experiments.costs import curves
from experiments.harness import folders, outcome
from experiments.harness.errors import UserError
from experiments.tasks import corpora
from experiments.tasks.text import NextToken
from tests.marks import slow, slow_but_for

ROOT = Path(lm.__file__).resolve().parents[1]
TINY = """--layers 1 --width 8 --heads 2 --context 16 --window 4 --batch 4 --eval-windows 4
    --optimiser adamw --no-costs""".split()


SCHEDULE = "--steps 6 --evaluate-every 2 --seeds 0 7".split()


def arguments(corpus, output, *more):
    return [*TINY, "--corpus", str(corpus), "--output", str(output), *more]


def parameters(run_folder):
    """Returns step and arrays, as bytes by name, of a run's last checkpoint."""
    with ocp.CheckpointManager((run_folder / "checkpoints").resolve()) as manager:
        step = manager.latest_step()
        state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    return step, {name: np.asarray(leaf).tobytes() for name, leaf in state.state.items()}


def files_of(folder):
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@dataclasses.dataclass(frozen=True)
class Finished:
    """Finished comparison: command line, corpus, run folder, and batches of the runs by seed."""

    command: list[str]
    corpus: Path
    output: Path
    batches: dict[int, list[list[np.ndarray]]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, documents):
    """Comparison of three mechanisms with two seeds each, and the data that the runs read."""
    corpus = tmp_path_factory.mktemp("corpus")
    for index, document in enumerate(documents):
        (corpus / f"{index:02d}.txt").write_bytes(document)
    command = arguments(corpus, tmp_path_factory.mktemp("runs") / "all", *SCHEDULE)
    batches = {0: [[] for _ in range(6)], 7: [[] for _ in range(6)]}
    training = NextToken.training

    def recorded(task, size, seed, step):
        batch = training(task, size, seed, step)
        batches[seed][step].append(np.stack([*batch.inputs, batch.targets]))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextToken, "training", recorded)
        assert lm.main(command) == 0
    return Finished(command, corpus, Path(command[-len(SCHEDULE) - 1]), batches)


def test_a_run_folder_holds_all_that_was_promised(finished):
    output = finished.output
    names = {path.name for path in output.iterdir() if path.is_file()}
    assert names == {"config.json", "summary.json", "summary.md", "results.png"}
    summary = json.loads((output / "summary.json").read_text())
    assert [row["mechanism"] for row in summary["mechanisms"]] == list(lm.Config.mechanisms)
    for row in summary["mechanisms"]:
        assert row["seeds"] == [0, 7]
        for key in ("bits_per_byte", "bits_per_byte_std", "perplexity", "tokens_per_second"):
            assert row[key] > 0
    for run in summary["runs"]:
        assert (output / run["folder"] / "metrics.jsonl").is_file()
        assert len(run["sample"]) > 0


def test_mechanisms_differ_in_nothing_but_themselves(finished):
    output = finished.output
    rows = json.loads((output / "summary.json").read_text())["mechanisms"]
    assert len({row["parameters"] for row in rows}) == 1
    assert len({row["tokens"] for row in rows}) == 1
    assert len({row["bits_per_byte"] for row in rows}) == 3
    softmax, window, linear = (row["state_bytes"] for row in rows)
    assert linear != softmax > window


def test_every_mechanism_sees_the_same_data_in_the_same_order(finished):
    for steps in finished.batches.values():
        for softmax, window, linear in steps:
            np.testing.assert_array_equal(softmax, window)
            np.testing.assert_array_equal(softmax, linear)
    assert not np.array_equal(finished.batches[0], finished.batches[7])
    assert not np.array_equal(finished.batches[0][0], finished.batches[0][1])


def test_a_finished_comparison_only_prints_its_table_again(finished, capsys):
    command, output = finished.command, finished.output
    before = files_of(output)
    assert lm.main(command) == 0
    out = capsys.readouterr().out
    assert f"delete {output} or change --output" in out
    assert "| softmax " in out and "| sliding_window " in out and "| linear " in out
    assert files_of(output) == before


def test_finished_runs_are_not_trained_again(finished, capsys):
    command, output = finished.command, finished.output
    (output / "summary.md").unlink()
    before = {path: path.stat().st_mtime_ns for path in output.rglob("checkpoints/*")}
    assert lm.main(command) == 0
    assert "step" not in capsys.readouterr().out.replace("step temporaries", "")
    assert {path: path.stat().st_mtime_ns for path in output.rglob("checkpoints/*")} == before
    assert (output / "summary.md").is_file()


@pytest.fixture
def copied(finished, tmp_path):
    """Command line and run folder of a copy of the finished comparison."""
    output = shutil.copytree(finished.output, tmp_path / "copy")
    return [str(output) if part == str(finished.output) else part for part in finished.command]


def test_a_table_that_is_written_again_says_how_many_runs_were_made_at_a_time(copied, monkeypatch):
    """Another machine, which would run more at a time, has run none of them."""
    (output,) = (Path(part) for part in copied if part.endswith("copy"))
    path = output / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"at_once": 1}))
    (output / "summary.md").unlink()
    monkeypatch.setattr("experiments.harness.machine.default_at_once", lambda: 3)
    assert lm.main(copied) == 0
    assert json.loads(path.read_text())["at_once"] == 1


def trained(output, before):
    """Returns the names of the runs whose checkpoints are newer than `before`."""
    return {
        path.parents[1].name
        for path in output.glob("*/checkpoints/*")
        if path.stat().st_mtime_ns > before
    }


@pytest.mark.slow
def test_a_folder_trains_only_the_runs_that_it_lacks(copied, capsys):
    output, before = Path(copied[-len(SCHEDULE) - 1]), time.time_ns()
    others = ["--mechanisms", "retention", "linear"]
    assert lm.main([*copied, *others]) == 0
    assert trained(output, before) == {f"retention-rate0.003-seed{seed}" for seed in (0, 7)}
    out = capsys.readouterr().out
    assert "| retention " in out and "| linear " in out and "| softmax " not in out

    before = time.time_ns()
    assert lm.main([*copied, *others, "--seeds", "0", "3"]) == 0
    assert trained(output, before) == {f"{m}-rate0.003-seed3" for m in ("retention", "linear")}
    summary = json.loads((output / "summary.json").read_text())
    assert [row["seeds"] for row in summary["mechanisms"]] == [[0, 3], [0, 3]]

    before = time.time_ns()
    again = ["--mechanisms", "linear", "--seeds", "0", "--learning-rate", "0.5"]
    assert lm.main([*copied, *again]) == 0
    assert trained(output, before) == {"linear-rate0.5-seed0"}

    # The first comparison is reported again without training.
    before = time.time_ns()
    assert lm.main(copied) == 0
    assert trained(output, before) == set()
    assert "| softmax " in (output / "summary.md").read_text()


def test_runs_of_a_report_are_known_without_their_folders(copied, capsys):
    output = Path(copied[-len(SCHEDULE) - 1])
    for path in output.glob("*/"):
        shutil.rmtree(path)
    assert lm.main([*copied, "--mechanisms", "linear", "softmax", "--seeds", "7"]) == 0
    assert not list(output.glob("*/"))
    rows = json.loads((output / "summary.json").read_text())["mechanisms"]
    assert [(row["mechanism"], row["seeds"]) for row in rows] == [("linear", [7]), ("softmax", [7])]
    # The report keeps the other seeds.
    assert lm.main([*copied, "--mechanisms", "linear", "softmax", "--seeds", "0", "7"]) == 0
    assert not list(output.glob("*/"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--steps", "5"], "steps was 6, now 5"),
        (["--width", "16"], "width was 8, now 16"),
        (["--redraw", "3"], "redraw was 0, now 3"),
    ],
)
def test_a_folder_of_another_configuration_is_left_alone(finished, capsys, more, reason):
    command, output = finished.command, finished.output
    before = files_of(output)
    assert_refused([*command, *more], capsys, rf"{output} holds a run with another .*\({reason}\)")
    assert files_of(output) == before


def test_a_changed_corpus_is_another_configuration(finished, capsys):
    command, corpus = finished.command, finished.corpus
    (corpus / "extra.txt").write_text("more text\n")
    try:
        assert_refused(command, capsys, "another configuration .*corpus_sha256 was")
    finally:
        (corpus / "extra.txt").unlink()


def assert_refused(command, capsys, sentence):
    capsys.readouterr()
    assert lm.main(command) != 0
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("error: ")
    assert re.search(sentence, captured.err), captured.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "--corpus must be sotu, an existing file or folder"),
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0", "is not UTF-8 text"),
        (b"short\n", "the corpus is too short"),
    ],
)
def test_a_bad_corpus_leaves_nothing_behind(tmp_path, capsys, content, sentence):
    corpus = tmp_path / "corpus.txt"
    if content is not None:
        corpus.write_bytes(content)
    assert_refused(arguments(corpus, tmp_path / "run"), capsys, sentence)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path, folder_of_text, capsys):
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.txt").write_text("precious")
    assert_refused(arguments(folder_of_text, output), capsys, "not empty and holds no run")
    assert files_of(output) == {str(output / "thesis.txt"): b"precious"}


def test_a_folder_is_of_one_process_at_a_time(tmp_path, folder_of_text, capsys):
    output = tmp_path / "run"
    command = arguments(folder_of_text, output, *SCHEDULE)
    with pytest.raises(UserError, match="another process uses"):
        with folders.claimed(output, {}), folders.claimed(output, {}):
            pass
    (output / "config.json").unlink()
    with folders.claimed(output, {}):
        (output / "config.json").rename(output / "config.json.partial")
        assert_refused(command, capsys, f"another process uses .*{output}; wait for it")
    with folders.claimed(output, {}):
        pass


@pytest.mark.parametrize("content", ["[]", "null", '{"steps', "\xff"])
def test_a_damaged_record_of_a_folder_is_one_sentence(tmp_path, folder_of_text, capsys, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(content, encoding="latin1")
    command = arguments(folder_of_text, tmp_path / "run")
    assert_refused(command, capsys, r"config\.json is damaged; .* choose another --output")


def test_an_output_within_the_corpus_is_refused(folder_of_text, capsys):
    for output in (folder_of_text, folder_of_text / "run"):
        assert_refused(arguments(folder_of_text, output), capsys, "lies in the corpus")
    assert not (folder_of_text / "run").exists()
    corpora.check_output(str(folder_of_text), folder_of_text / ".run")
    (folder_of_text / "wiki.valid.raw").write_text("text")
    corpora.check_output(str(folder_of_text), folder_of_text / "run")


def test_what_the_locale_has_no_characters_for_is_written_and_printed(tmp_path, folder_of_text):
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = f"""
import sys
from pathlib import Path
from experiments.harness import metrics, outcome
path = Path({str(tmp_path)!r}) / "summary.md"
metrics.write_atomically(path, chr(177) + chr(0xdcc3))
sys.exit(outcome.exit_status(lambda: print(path.read_text(encoding="utf-8"), chr(177)), ""))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | settings, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"?? ?\n"
    assert (tmp_path / "summary.md").read_bytes() == "\xb1?".encode()


def test_too_little_memory_is_one_sentence(capsys):
    # More bytes than any machine has.
    for module in (np, jnp):

        def work(module=module):
            module.ones((2**28, 2**28))

        assert outcome.exit_status(work, "") == 1
        assert re.fullmatch(
            r"error: out of memory.*; choose smaller sizes\n", capsys.readouterr().err
        )

    def too_many():
        raise RuntimeError("Bad StatusOr access: overflow in static extent product: dimensions=[]")

    assert outcome.exit_status(too_many, "") == 1
    said = "error: overflow in static extent product; choose smaller sizes\n"
    assert capsys.readouterr().err == said

    def other():
        raise RuntimeError("another reason")

    with pytest.raises(RuntimeError, match="another reason"):
        outcome.exit_status(other, "")


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        (["SIGINT"], 130),
        slow(["SIGTERM"], 143),
        (["SIGTERM", "SIGTERM"], 143),
        slow(["SIGINT", "SIGTERM"], 130),
        slow(["SIGINT", "SIGINT"], -signal.SIGINT),
        (["SIGTERM", "SIGINT"], -signal.SIGINT),
    ],
)
def test_a_signal_ends_the_work_in_order_and_a_further_ctrl_c_at_once(signals, status):
    code = f"""
import os, signal, sys
from experiments.harness import outcome
def work():
    try:
        os.kill(os.getpid(), signal.{signals[0]})
    finally:
        for number in {signals[1:]}:
            os.kill(os.getpid(), getattr(signal, number))
sys.exit(outcome.exit_status(work, "stopped"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (status, b"")
    assert done.stderr == (b"" if status < 0 else b"stopped\n")


def test_a_folder_that_a_kill_left_unmade_is_used(tmp_path):
    (tmp_path / "config.json.partial").write_text("{")
    folders.check_folder(tmp_path, {})
    with folders.claimed(tmp_path, {"steps": 3}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    folders.check_folder(tmp_path, {"steps": 3})


def test_a_run_folder_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.path_of(Path("~/run"), "lm") == tmp_path / "run"
    assert folders.path_of(Path("run~"), "lm") == Path("run~")
    assert folders.path_of(None, "lm") == Path("runs/lm")


def test_an_output_that_cannot_be_a_folder_is_refused(tmp_path, folder_of_text, capsys):
    (tmp_path / "file").write_text("text")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        assert_refused(arguments(folder_of_text, output), capsys, "file is not a folder")
    assert (tmp_path / "file").read_text() == "text"


def test_a_folder_without_permission_is_refused(tmp_path, folder_of_text, capsys, monkeypatch):
    # A real permission would not stop a superuser.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    output = tmp_path / "run"
    assert_refused(arguments(folder_of_text, output), capsys, f"{tmp_path} cannot be written")
    assert not output.exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--mechanisms", "softmaxx"], "'softmaxx'; causal mechanisms are softmax, additive, "),
        (["--mechanisms", "bigbird,block_size=0"], "--mechanisms: block_size must be an int, 1 or"),
        (["--mechanisms", "linear", "linear"], "--mechanisms must not repeat"),
        (["--width", "9"], "--width must be a multiple of --heads 2, got 9"),
        (["--width", "6"], "--heads must divide --width 6 into even head sizes"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--context", "2"], "--context must be at least 4, got 2"),
        (["--window", "0"], "--window must be at least 1, got 0"),
        (["--key-heads", "3"], "--key-heads must divide --heads 2, got 3"),
        (["--key-heads", "0"], "--key-heads must be at least 1, got 0"),
        (
            ["--key-heads", "1", "--mechanisms", "lsh"],
            "'lsh' has no option num_kv_heads",
        ),
        (["--redraw", "-1"], "--redraw must be at least 1, got -1"),
        (["--probes", "--tokenizer", "bpe"], "--probes needs --tokenizer bytes, got True"),
        (["--at-once", "0"], "--at-once must be at least 1, got 0"),
        (["--seeds"], "--seeds needs at least one value, got none"),
        (["--seeds", "-1"], "--seeds must not be negative, got -1"),
        (["--seeds", "2147483648"], "--seeds must be at most 2147483647, got 2147483648"),
        (["--steps", f"1{'0' * 20}"], "--steps must be at most 2147483647, got 10"),
        (["--vocabulary", f"1{'0' * 20}"], "--vocabulary must be at most 2147483647, got 10"),
        (["--mechanisms", "softmax,scale='a'"], "--mechanisms: scale must be a number .*got 'a'"),
        (["--mechanisms", "softmax,implementation='cudnn'"], "cannot be run .*takes bfloat16 and"),
        (["--corpus", ""], "--corpus must be sotu, an existing file or folder.*, got ''"),
        (["--accumulate", "3"], "--batch must be a multiple of --accumulate 3, got 4"),
        (["--learning-rate", "nan"], "--learning-rate must be positive and finite .*, got nan"),
        (["--learning-rate", "1e300"], "must be positive and finite in float32, got 1e.300"),
        (["--clip", "1e-300"], "--clip must be positive and finite in float32, got 1e-300"),
        (["--clip", "0"], "--clip must be positive and finite in float32, got 0"),
        (["--warmup", "1"], "--warmup must be a fraction from 0 to below 1, got 1"),
        (["--weight-decay", "-1"], "--weight-decay must be 0 or positive"),
        (["--weight-decay", "1e39"], "must be 0 or positive, and finite in float32, got 1e.39"),
        (["--sweep", "0.1", "inf"], "--sweep must be positive and finite in float32, got 0.1 inf"),
        (["--sweep", "0.1", "--learning-rate", "0.1"], "--sweep must be left out if"),
        (["--tokenizer", "bpe", "--vocabulary", "256"], "--vocabulary must be above 256, the"),
        (["--vocabulary", "300"], "--vocabulary needs --tokenizer bpe, got 300"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, folder_of_text, capsys, more, sentence):
    assert_refused(arguments(folder_of_text, tmp_path / "run", *more), capsys, sentence)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command", [["--preset", "huge"], ["--preset"], ["--steps", "many"], ["--optimizer", "sgd"]]
)
def test_what_cannot_be_parsed_is_explained_without_a_traceback(capsys, command):
    with pytest.raises(SystemExit) as caught:
        lm.main(command)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert command[0] in error and "Traceback" not in error
    assert "python -m experiments.lm --help" in error


def test_options_override_their_preset():
    config = lm.parse(["--preset", "medium", "--layers", "5"])
    assert (config.layers, config.width) == (5, lm.PRESETS["medium"].width)
    assert lm.parse([]) == lm.PRESETS["small"]
    assert lm.parse(["--optimiser", "adamw"]).rates == (0.003,)
    assert lm.parse(["--learning-rate", "0.5"]).rates == (0.5,)
    assert lm.parse(["--sweep", "0.5", "0.1"]).rates == (0.5, 0.1)


@pytest.mark.parametrize("name", lm.PRESETS)
@pytest.mark.parametrize("corpus", ["digits", "mnist:data", "dna", "dna:genome.fasta"])
def test_every_preset_takes_images_and_dna(name, corpus):
    """Options that a preset sets for text must not be refused as if the user had given them."""
    lm.parse(["--preset", name, "--corpus", corpus]).check()
    with pytest.raises(UserError, match="--eval-windows must be left out with --corpus"):
        lm.parse(["--preset", name, "--corpus", corpus, "--eval-windows", "3"]).check()


@pytest.mark.parametrize("name", slow_but_for(["small"], lm.PRESETS))
def test_presets_are_named_as_they_are_asked_for_and_fit_together(name):
    assert lm.PRESETS[name].preset == name
    lm.parse(["--preset", name]).check()


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_stops_with_the_step(tmp_path, folder_of_text, capsys):
    command = arguments(folder_of_text, tmp_path / "run", "--learning-rate", "1e30")
    command += ["--mechanisms", "softmax", "--steps", "6", "--evaluate-every", "1"]
    command += ["--warmup", "0.9"]
    assert_refused(command, capsys, r"softmax-rate1e\+30-seed\d became NaN or infinite at step \d")
    assert not (tmp_path / "run" / "summary.md").exists()


@pytest.mark.slow
def test_byte_pairs_learning_rates_and_accumulation_together(tmp_path, folder_of_text, capsys):
    output = tmp_path / "run"
    command = arguments(folder_of_text, output, "--steps", "3", "--seeds", "0")
    command += ["--mechanisms", "softmax", "--sweep", "0.001", "0.01", "--optimiser", "muon"]
    command += ["--tokenizer", "bpe", "--vocabulary", "300", "--accumulate", "2"]
    command += ["--precision", "bfloat16"]
    assert lm.main(command) == 0
    assert (output / "tokenizer.json").is_file()
    summary = json.loads((output / "summary.json").read_text())
    bits = {run["learning_rate"]: run["bits_per_byte"] for run in summary["sweep"]}
    assert set(bits) == {0.001, 0.01}
    assert summary["mechanisms"][0]["learning_rate"] == min(bits, key=bits.get)
    (run,) = summary["runs"]
    # The mean token stands for more than one byte.
    assert run["bits_per_byte"] < 0.7 * run["loss"] / np.log(2)
    assert "Learning rates tried" in (output / "summary.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_and_started_again_it_ends_with_the_same_parameters(finished, tmp_path, how):
    output = tmp_path / "run"
    command = arguments(finished.corpus, output, *SCHEDULE, "--mechanisms", "sliding_window")
    first = output / "sliding_window-rate0.003-seed0" / "checkpoints"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.lm", *command], cwd=ROOT, stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + 300
            while not first.is_dir() or not any(p.name.isdigit() for p in first.iterdir()):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.send_signal(how)
            status = process.wait(timeout=120)
    assert not (output / "summary.md").exists()
    if how != signal.SIGKILL:
        assert status == 128 + how
        assert (tmp_path / "log").read_text().endswith("resumes from the last checkpoint\n")

    # Runs one after the other end as simultaneous runs do.
    assert lm.main([*command, "--at-once", "1"]) == 0
    for seed in (0, 7):
        name = f"sliding_window-rate0.003-seed{seed}"
        assert parameters(output / name) == parameters(finished.output / name)
        assert untimed(output / name) == untimed(finished.output / name)


def untimed(run_folder):
    """Returns a run's metrics without times."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("command", [["experiments/lm.py"], ["-m", "experiments.lm"]])
def test_help_comes_without_the_library(command):
    modules = "import sys; sys.modules['jax'] = sys.modules['effattn'] = None; "
    if command[0] == "-m":
        code = modules + "import runpy; runpy.run_module('experiments.lm', run_name='__main__')"
    else:
        code = modules + f"import runpy; runpy.run_path('{command[0]}', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = ['lm.py', '--help']; {code}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for field in dataclasses.fields(lm.Config):
        name = "import" if field.name == "imports" else field.name.replace("_", "-")
        assert f"--{name} " in done.stdout or f"--{name}," in done.stdout


def test_time_and_memory_against_length_are_drawn_for_plain_names(tmp_path, monkeypatch):
    measured = []

    def measure(names):
        measured.append(names)
        return [curves.Point(name, n, n * 1e-6, n * 256) for name in names for n in (256, 1024)]

    monkeypatch.setattr(curves, "measure_lengths", measure)
    config = lm.parse(["--mechanisms", "softmax", "softmax/linear", "linear"])
    config.finish(tmp_path, {})
    assert measured == [["softmax", "linear"]]
    assert (tmp_path / "costs.png").stat().st_size > 10_000
    points = json.loads((tmp_path / "costs.json").read_text())["points"]
    assert [(p["mechanism"], p["length"]) for p in points[:2]] == [
        ("softmax", 256),
        ("softmax", 1024),
    ]
    config.finish(tmp_path, {})
    lm.parse(["--no-costs"]).finish(tmp_path / "other", {})
    assert len(measured) == 1
    # Other mechanisms in the same folder are measured again.
    dataclasses.replace(config, mechanisms=("linear", "softmax,dropout=0.1")).finish(tmp_path, {})
    assert measured[1:] == [["linear"]]
    # A figure of mechanisms that are not compared is removed.
    dataclasses.replace(config, mechanisms=("softmax/linear",)).finish(tmp_path, {})
    assert not list(tmp_path.glob("costs.*")) and len(measured) == 2
