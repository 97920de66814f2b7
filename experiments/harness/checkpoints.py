"""Orbax checkpoints of one run: the last two are kept, and each has digests of its arrays."""

import hashlib
import json
import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.harness import processes, stages
from experiments.harness.errors import UserError

# Orbax logs every save, and every partial checkpoint that it removes.
logging.getLogger("absl").setLevel(logging.CRITICAL)
# A failed read leaves errors in unfinished tasks of asyncio.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _quiet_threads() -> None:
    """Hides errors of threads and tasks that the callers of Orbax also receive."""
    of_threads, of_others = threading.excepthook, sys.unraisablehook

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("orbax."):
            of_threads(arguments)

    def hook(arguments: Any) -> None:
        # After the first failed read, TensorStore reports the others to a closed event loop, and
        # their coroutines end when they are collected.
        code = getattr(arguments.object, "cr_code", None)
        is_read = code is not None and "orbax" in code.co_filename
        if not is_read and str(arguments.exc_value) != "Event loop is closed":
            of_others(arguments)

    threading.excepthook, sys.unraisablehook = thread_hook, hook


_quiet_threads()


# One thread writes the checkpoints of all runs: asynchronous saves of several managers of Orbax in
# one process wait for each other's events.
_writer = ThreadPoolExecutor(1)


class _Damaged(Exception):
    """Signal that a checkpoint is not whole; the message is the reason."""


class Checkpoints:
    """Context manager for the checkpoints of a run, in a folder of their own.

    A thread writes a checkpoint, and a killed process leaves a whole one or none.
    The JSON file `<step>/progress/metadata` has a digest (SHA-256) of each array and one of the
    whole state, which is the same for runs that end with the same bits. An array is restored with
    the sharding of the template, whatever sharding it was saved with. A model in stages is saved as
    one without stages.

    Args:
      folder: created if missing.
      identity: text that identifies the configuration and the run; checkpoints with another
        identity are refused.
    """

    def __init__(self, folder: Path, identity: str):
        self._folder = folder
        self._identity = identity
        self._written: Future[None] | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            enable_async_checkpointing=False,
            lightweight_initialize=True,
            # Each process of a run has a folder of its own.
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index(), active_processes={jax.process_index()}
            ),
        )
        folder.mkdir(parents=True, exist_ok=True)
        # Orbax can do so too, but in a thread that may delete what a later manager writes.
        for partial in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.wait()
        except UserError:
            if kind is None:
                raise
        finally:
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None without a checkpoint."""
        self.wait()
        return self._manager.latest_step()

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Copies the arrays and starts to write them, after the checkpoint before is complete.

        Args:
          step: larger than the steps of earlier checkpoints.
          state: a pytree of arrays.
          progress: a JSON object, such as the position in the data.

        Raises:
          UserError: the checkpoint before cannot be written, for example to a full disk; earlier
            checkpoints are kept.
        """
        self.wait()
        leaves = processes.whole(_by_name(state))
        copies = stages.apart({name: np.array(leaf) for name, leaf in leaves.items()})
        self._written = _writer.submit(self._write, step, copies, progress)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete; `UserError` if it cannot be written."""
        if self._written is not None:
            written, self._written = self._written, None
            written.result()

    def _write(self, step: int, leaves: dict[str, np.ndarray], progress: dict[str, Any]) -> None:
        arrays = {name: _described(leaf, _sha256(leaf)) for name, leaf in leaves.items()}
        content = {
            "identity": self._identity,
            "state": _digest(arrays),
            "arrays": arrays,
            "progress": progress,
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(leaves),
            progress=ocp.args.JsonSave({**content, "digest": _digest(content)}),
        )
        # Orbax and TensorStore raise many types of error for a write that fails.
        try:
            self._manager.save(step, args=items)
        except Exception as error:
            raise UserError(
                f"the checkpoint {self._folder / str(step)} cannot be written ({_reason(error)}); "
                "the same command resumes from the previous checkpoint"
            ) from error

    def restore(
        self, template: Any, warn: Callable[[str], None]
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns step, state and progress of the newest whole checkpoint; None without one.

        Damaged checkpoints are renamed, so that training can go on from the one before, or anew.

        Args:
          template: a pytree of arrays, whose structure and shardings the state gets.
          warn: receives a sentence about each damaged checkpoint.

        Raises:
          UserError: another configuration, another model or an earlier version wrote a checkpoint.
        """
        steps, found = sorted(self._manager.all_steps(), reverse=True), None
        for step in steps:
            where = self._folder / str(step)
            try:
                found = step, *self._whole(step, template)
                break
            except _Damaged as error:
                aside = where.with_name(f"{step}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                where.rename(aside)
                warn(f"the checkpoint {where} is damaged ({error}) and was renamed to {aside.name}")
        self._manager.reload()
        if found is None and steps:
            warn(f"no checkpoint in {self._folder} is whole; training starts anew")
        elif found is not None and found[0] != steps[0]:
            warn(f"training goes on from the checkpoint of step {found[0]}")
        return found

    def _whole(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        """Returns state and progress of a checkpoint whose digests are right."""
        where = self._folder / str(step)
        content = self._read(step, progress=ocp.args.JsonRestore())["progress"]
        advice = f"delete {self._folder.parent} to train that run again"
        if not isinstance(content, dict):
            raise _Damaged("its progress is no JSON object")
        if content.keys() == {"identity", "record"}:
            raise UserError(
                f"an earlier version wrote the checkpoint {where}, without digests; {advice}"
            )
        digest = content.pop("digest", None)
        if digest != _digest(content):
            raise _Damaged("its progress differs from the digest")
        if content["identity"] != self._identity:
            raise UserError(
                f"the checkpoint {where} was written with another configuration; "
                "choose another --output, or delete the checkpoint"
            )
        leaves, arrays = _by_name(template), content["arrays"]
        names = stages.shapes_apart(leaves)
        expected = {
            name: _described(leaf, arrays.get(name, {}).get("sha256"))
            for name, leaf in names.items()
        }
        if expected != arrays:
            both = expected.keys() | arrays.keys()
            name = min(name for name in both if expected.get(name) != arrays.get(name))
            raise UserError(
                f"the model has another array {name} than the checkpoint {where}; {advice}"
            )
        state = self._read(step, state=ocp.args.StandardRestore(_on_host(names)))["state"]
        for name in names:
            if _sha256(state[name]) != arrays[name]["sha256"]:
                raise _Damaged(f"the array {name} differs from its digest")
        whole = stages.together(leaves, state)
        placed = [_placed(whole[name], leaf) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(template), placed), content["progress"]

    def _read(self, step: int, **items: Any) -> Any:
        # The error type of Orbax depends on the part of the checkpoint that is damaged.
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise _Damaged(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, without TensorStore's internal state."""
    line = str(error).strip().partition("\n")[0]
    line = re.split(r" \[[a-z_ ]+(?:\[\d+\])?=|\. See full TensorStore details", line)[0]
    clauses = line.split(": ")
    # Clauses with quotation marks name drivers and files within the checkpoint.
    return ": ".join([clause for clause in clauses if '"' not in clause] or clauses)


def _by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by path, in order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _on_host(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of these shapes in the memory of the host."""
    return {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}


def _placed(array: np.ndarray, like: Any) -> Any:
    """The array with the sharding of another one."""
    if not isinstance(like, jax.Array):
        return array
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])


def _described(array: Any, sha256: str | None) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": sha256}


def _sha256(array: Any) -> str:
    """Digest of the bytes of an array."""
    values = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(values.view(np.uint8)).hexdigest()


def _digest(content: Any) -> str:
    """Digest of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
