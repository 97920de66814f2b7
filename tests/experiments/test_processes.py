"""Runs over several processes: equal to one process, and ended or stopped together."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from experiments import lm
from experiments.harness import processes, watch
from experiments.harness.errors import UserError

TINY = """--mechanisms linear --layers 1 --heads 2 --width 8 --context 16 --batch 8 --seeds 0
    --eval-windows 8 --steps 24 --evaluate-every 6 --no-equal-parameters --no-costs""".split()


@pytest.mark.parametrize("text", ["localhost", "localhost:1", "localhost:1,2,2", "localhost:1,a,2"])
def test_processes_of_another_form_are_refused(text, tmp_path, folder_of_text, capsys):
    command = ["--corpus", str(folder_of_text), "--output", str(tmp_path / "run")]
    assert lm.main([*TINY, *command, "--mesh", "data=1", "--processes", text]) == 1
    assert "--processes must be auto, or ADDRESS:PORT,INDEX,COUNT" in capsys.readouterr().err


def test_a_missing_cluster_is_said(tmp_path, folder_of_text, capsys, monkeypatch):
    def initialize(**options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    command = ["--corpus", str(folder_of_text), "--output", str(tmp_path / "run")]
    assert lm.main([*TINY, *command, "--mesh", "data=1", "--processes", "auto"]) == 1
    assert "--processes auto: JAX finds no cluster here; give ADDRESS" in capsys.readouterr().err


def test_processes_need_a_mesh(capsys):
    assert lm.main([*TINY, "--processes", "localhost:1,0,2"]) == 1
    assert "--processes needs --mesh, got localhost:1,0,2" in capsys.readouterr().err


def test_one_process_is_the_first_and_keeps_its_folder(tmp_path):
    assert processes.is_first() and not processes.are_several() and not processes.stops_now()
    processes.check_same_run("run", 3)
    with processes.own_folder(tmp_path) as folder:
        assert folder == tmp_path
    assert processes.whole(folder) is folder


def test_errors_of_other_processes_name_the_folder_and_not_their_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_number", 1)
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "_check_equal", lambda *_: None)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError) as raised, processes.own_folder(tmp_path / "run") as folder:
        assert folder != tmp_path / "run"
        raise UserError(f"{folder / 'config.json'} is torn; delete it")
    assert str(raised.value) == f"{tmp_path / 'run' / 'config.json'} is torn; delete it"


def pair(monkeypatch):
    """Two watches that are connected, and a list of their numbers when they have lost the other."""
    lost, calls = threading.Event(), []

    def end():
        calls.append(1)
        lost.set()

    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", (end,))
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    first = []
    thread = threading.Thread(
        target=lambda: first.append(watch.Watch.of_first(server, 2, seconds=20))
    )
    thread.start()
    other = watch.Watch.of_other("127.0.0.1", port, seconds=20)
    thread.join()
    return first[0], other, lost, calls


def test_a_process_that_ends_early_is_noticed(monkeypatch):
    first, other, lost, _ = pair(monkeypatch)
    (connection,) = other._others
    connection.shutdown(socket.SHUT_RDWR)
    assert lost.wait(20)
    first.close()  # no error


def test_a_process_that_ends_in_order_is_not_lost(monkeypatch):
    first, other, lost, calls = pair(monkeypatch)
    first.close()
    other.close()
    assert not lost.wait(0.3) and not calls


def test_an_error_that_comes_from_a_lost_process_is_not_shown():
    """JAX may raise an error of its own before the watch has noticed the loss."""
    program = """
import socket, threading
from experiments.harness import processes, watch
ours, theirs = socket.socketpair()
processes._count = 2
watch.Watch([ours])
threading.Timer(0.3, theirs.close).start()
with processes.errors_end():
    raise RuntimeError("a collective has failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (1, watch.LOST)


def test_missing_processes_are_said(monkeypatch):
    monkeypatch.setattr(processes, "START", 0.1)
    monkeypatch.setattr(processes, "_count", 2)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(processes.UserError, match=f"cannot use port {port} of here .*in use"):
            processes._watch("here", port)
    with pytest.raises(
        processes.UserError, match=r"did not start within 0\.1 seconds; start all 2"
    ):
        processes._watch("here", port)
    monkeypatch.setattr(processes, "_number", 1)
    with pytest.raises(processes.UserError, match="cannot use port .* of localhost .*refused"):
        processes._watch("localhost", port)


class Two:
    """A run over two processes of four devices each; `each` has further options for each."""

    def __init__(self, corpus, folder, *more, each=((), ())):
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "experiments.lm", *TINY, *more]
        command += ["--corpus", str(corpus), "--output", str(folder)]
        flags = "--xla_force_host_platform_device_count=4"
        environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}
        self.processes = [
            subprocess.Popen(
                [*command, *each[number], "--processes", f"localhost:{port},{number},2"],
                env=environment,
                stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]

    def until(self, step):
        """Waits until the first process has shown a step."""
        for line in self.processes[0].stdout:
            if f"step {step}/" in line:
                return
        raise AssertionError(self.processes[0].stderr.read())

    def ends(self, seconds=120):
        """Exit statuses, and the last lines of the errors."""
        outputs = [process.communicate(timeout=seconds)[1] for process in self.processes]
        statuses = [process.returncode for process in self.processes]
        return statuses, [text.strip().splitlines()[-1] if text else "" for text in outputs]


def digest(folder):
    """The digest of the last checkpoint of the only run of a folder."""
    (found,) = folder.glob("linear*/checkpoints/24/progress/metadata")
    return json.loads(found.read_text())["state"]


def losses(folder):
    (run,) = json.loads((folder / "summary.json").read_text())["runs"]
    return [record["loss"] for record in run["curve"]]


@pytest.mark.slow
def test_two_processes_equal_one_and_end_together(tmp_path, folder_of_text):
    whole = tmp_path / "whole"
    statuses, _ = Two(folder_of_text, whole, "--mesh", "data=4,tensor=2").ends()
    assert statuses == [0, 0]
    one = tmp_path / "one"
    assert lm.main([*TINY, "--corpus", str(folder_of_text), "--output", str(one)]) == 0
    assert losses(whole) == pytest.approx(losses(one), rel=1e-5)

    # A killed process ends the other one soon, and all resume.
    for number, signal_ in [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGTERM)]:
        folder = tmp_path / f"{signal_.name}-{number}"
        run = Two(folder_of_text, folder, "--mesh", "data=4,tensor=2")
        run.until(6)
        run.processes[number].send_signal(signal_)
        sent = time.monotonic()
        statuses, errors = run.ends()
        assert time.monotonic() - sent < 30
        if signal_ == signal.SIGTERM:
            assert statuses == [143, 143]
            assert all("stopped; the same command resumes" in error for error in errors)
        else:
            # JAX may abort first where the first process is lost, which coordinates all.
            aborted = number == 0 and statuses[1] == -signal.SIGABRT
            assert aborted or (statuses[1 - number], errors[1 - number]) == (1, watch.LOST)
        assert Two(folder_of_text, folder, "--mesh", "data=4,tensor=2").ends()[0] == [0, 0]
        assert digest(folder) == digest(whole)


@pytest.mark.slow
def test_processes_with_other_options_are_refused(tmp_path, folder_of_text):
    each = (["--steps", "24"], ["--steps", "12"])
    run = Two(folder_of_text, tmp_path / "run", "--mesh", "data=8", each=each)
    statuses, errors = run.ends()
    assert statuses == [1, 1]
    assert any("the processes have different options or versions" in error for error in errors)
    assert not (tmp_path / "run").exists()
