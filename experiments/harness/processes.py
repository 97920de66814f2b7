"""Runs over several processes: their start and their end.

All processes run the same program. The first one prints, and writes to the output folder. Each of
the others works in a copy of that folder, which it deletes at the end.
"""

import os
import re
import shutil
import signal
import socket
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.harness.errors import Stopped, UserError
from experiments.harness.watch import Watch, end_at_once, on_exit, own_address

# Seconds until the others are sure that a process is gone, and for all to start.
HEARTBEAT, START = 30, 300
# Seconds that the watch has to notice a lost process, before an error is shown as one's own.
NOTICED = 2

_number = 0
_count = 1
_calls = 0


def is_first() -> bool:
    """True in the process that prints and whose files stay."""
    return _number == 0


def are_several() -> bool:
    """True in a run over several processes."""
    return _count > 1


@contextmanager
def started(text: str, command: str) -> Iterator[None]:
    """Connects this process with the others of its run.

    Args:
      text: "auto" for what `jax.distributed` finds of the cluster (Slurm, Kubernetes, Open MPI and
        others); ADDRESS:PORT,INDEX,COUNT, which also uses the next port; or an empty string for one
        process.
      command: command line, which must be the same in all processes, apart from the index.

    Raises:
      UserError: the text has another form, processes are missing, or they differ.
    """
    global _number, _count
    if not text:
        yield
        return
    import jax

    options: Any = {"heartbeat_timeout_seconds": HEARTBEAT, "initialization_timeout": START}
    if text == "auto":
        try:
            jax.distributed.initialize(**options)
        except ValueError as error:
            raise UserError(
                "--processes auto: JAX finds no cluster here; give ADDRESS:PORT,INDEX,COUNT"
            ) from error
        _number, _count = jax.process_index(), jax.process_count()
        watch = _watch_of_cluster()
    else:
        host, port, _number, _count = _parsed(text)
        watch = _watch(host, port + 1)
        jax.distributed.initialize(f"{host}:{port}", _count, _number, **options)
    _leave_signals_to_jax()
    identity = f"{command} with effattn {version('effattn')} and jax {jax.__version__}"
    _check_equal(
        identity,
        "--processes: the processes have different options or versions of packages; start all of "
        f"them alike; this one has {identity}",
    )
    with _silent_others():
        try:
            yield
        except Stopped:  # as all processes have agreed
            watch.close()
            raise
    # After an error, the others must not wait for this process.
    watch.close()


def _parsed(text: str) -> tuple[str, int, int, int]:
    """Host, port, index and count."""
    found = re.fullmatch(r"([^,]+):(\d+),(\d+),(\d+)", text)
    if not found or int(found[3]) >= int(found[4]):
        raise UserError(
            "--processes must be auto, or ADDRESS:PORT,INDEX,COUNT with an index below the count, "
            f"got {text!r}"
        )
    return found[1], int(found[2]), int(found[3]), int(found[4])


def _watch(host: str, port: int) -> Watch:
    """Meets the other processes."""
    advice = f"start all {_count} with the same address"
    try:
        if is_first():
            return Watch.of_first(socket.create_server(("", port)), _count, START)
        return Watch.of_other(host, port, START)
    except TimeoutError:
        raise UserError(
            f"--processes: some processes did not start within {START} seconds; {advice}"
        ) from None
    except OSError as error:
        raise UserError(
            f"--processes: cannot use port {port} of {host} ({error.strerror}); {advice}"
        ) from error


def _watch_of_cluster() -> Watch:
    if is_first():
        server = socket.create_server(("", 0))
        _from_the_first(f"{own_address()}:{server.getsockname()[1]}")
        return Watch.of_first(server, _count, START)
    host, _, port = _from_the_first("").rpartition(":")
    return Watch.of_other(host, int(port), START)


@contextmanager
def _silent_others() -> Iterator[None]:
    """Hides what processes other than the first one print."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
        yield


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Yields the folder in the first process, and a copy of it, for a while, in the others.

    Raises:
      UserError: the processes see different files.
    """
    if not are_several():
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        on_exit(lambda: shutil.rmtree(scratch, ignore_errors=True))
        own = folder if is_first() else Path(scratch) / "copy"
        if own != folder and folder.is_dir():
            shutil.copytree(folder, own)
        # Also waits until all have their copy.
        _check_equal(_listed(own), _NOT_SHARED)
        try:
            yield own
        except UserError as error:
            raise UserError(str(error).replace(str(own), str(folder))) from error


def check_same_run(identity: str, step: int) -> None:
    """Raises `UserError` unless all processes train the same run from the same step."""
    if are_several():
        _check_equal(f"{identity} {step}", _NOT_SHARED)


_NOT_SHARED = (
    "--processes: the processes see different files in --output; give all of them the same one, in "
    "a file system that they share"
)


def _listed(folder: Path) -> str:
    """Paths and sizes of all files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "\n".join(f"{path.relative_to(folder)} {path.stat().st_size}" for path in files)


def stops_now() -> bool:
    """True in all processes at the same call, soon after one of them received SIGTERM.

    All processes make the same calls: one a training step, of all runs.
    """
    global _calls
    if not are_several():
        return False
    from jax.experimental import multihost_utils

    # JAX wants a number that grows, also from run to run.
    _calls += 1
    return multihost_utils.reached_preemption_sync_point(_calls)


def whole(tree: Any) -> Any:
    """Copies arrays whose parts several processes have to the memory of each host."""
    if not are_several():
        return tree
    import jax
    from jax.experimental import multihost_utils

    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


def _check_equal(text: str, sentence: str) -> None:
    """Raises `UserError` with the sentence unless all processes have the same text."""
    import numpy as np
    from jax.experimental import multihost_utils

    number = np.uint32(zlib.crc32(text.encode()))
    if len({*np.ravel(multihost_utils.process_allgather(number)).tolist()}) > 1:
        raise UserError(sentence)


def _from_the_first(text: str) -> str:
    """The text that the first process gives."""
    import numpy as np
    from jax.experimental import multihost_utils

    letters = np.zeros(256, np.uint8)
    letters[: len(text)] = [*text.encode()]
    return bytes(multihost_utils.broadcast_one_to_all(letters)).rstrip(b"\0").decode()


@contextmanager
def errors_end() -> Iterator[None]:
    """Prints an error within, in a run over several processes, and ends this process.

    If the error comes from the loss of another process, the watch says so and ends this process.
    """
    try:
        yield
    except Exception:
        if are_several():
            time.sleep(NOTICED)
            traceback.print_exc()
            end()
        raise


def end() -> None:
    """Ends a process of several after an error: in order, it would wait for the others."""
    if are_several():
        end_at_once()


def _leave_signals_to_jax() -> None:
    """Makes Ctrl-C a SIGTERM, of which JAX tells all processes of the run; see `stops_now`."""
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
