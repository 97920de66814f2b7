"""Orbax checkpoints of one run: the latest is kept, and a killed process leaves no partial one."""

import logging
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.harness.errors import UserError

# Orbax logs every save, and every partial checkpoint that it removes.
logging.getLogger("absl").setLevel(logging.CRITICAL)
# A failed read leaves errors in unfinished tasks of asyncio.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _quiet_threads() -> None:
    """Hides errors in threads of Orbax and TensorStore, which their callers also receive."""
    of_threads, of_others = threading.excepthook, sys.excepthook

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("orbax."):
            of_threads(arguments)

    def hook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        # TensorStore reports further errors to an event loop that the first error closed.
        if str(error) != "Event loop is closed":
            of_others(kind, error, where)

    threading.excepthook, sys.excepthook = thread_hook, hook


_quiet_threads()


class Checkpoints:
    """Context manager for the checkpoints of a run, in a folder of their own.

    Args:
      folder: created if missing.
      identity: text that identifies the configuration and the run; checkpoints with another
        identity are refused.
    """

    def __init__(self, folder: Path, identity: str):
        self._folder = folder
        self._identity = identity
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None without a checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Writes a checkpoint, which is complete on return.

        Args:
          step: larger than the steps of earlier checkpoints.
          state: a pytree of arrays.
          progress: a JSON object, such as the position in the data.

        Raises:
          UserError: the checkpoint cannot be written, for example to a full disk; the previous
            checkpoint is kept.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_name(state)),
            progress=ocp.args.JsonSave({"identity": self._identity, **progress}),
        )
        # Orbax and TensorStore raise many types of error for a write that fails.
        try:
            self._manager.save(step, args=items)
        except Exception as error:
            raise UserError(
                f"the checkpoint {self._folder / str(step)} cannot be written ({_reason(error)}); "
                "the same command resumes from the previous checkpoint"
            ) from error

    def restore(self, template: Any, keys: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
        """Returns the newest `(state, progress)`, with the state in the structure of `template`.

        Args:
          template: a pytree of arrays.
          keys: keys that the progress must have.

        Raises:
          UserError: the checkpoint cannot be read, or another configuration wrote it.
        """
        where = self._folder / str(self.latest)
        progress = self._read(where, progress=ocp.args.JsonRestore()).progress
        if progress.pop("identity", None) != self._identity:
            raise UserError(
                f"the checkpoint {where} was written with another configuration; "
                "choose another --output, or delete the checkpoint"
            )
        missing = ", ".join(key for key in keys if key not in progress)
        if missing:
            raise self._unreadable(where, f"it lacks {missing}")
        arrays = self._read(where, state=ocp.args.StandardRestore(_by_name(template))).state
        names = _by_name(template)
        return jax.tree.unflatten(
            jax.tree.structure(template), [arrays[n] for n in names]
        ), progress

    def _read(self, where: Path, **items: Any) -> Any:
        # The error type of Orbax depends on the part of the checkpoint that is damaged.
        try:
            return self._manager.restore(self.latest, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._unreadable(where, _reason(error)) from error

    def _unreadable(self, where: Path, reason: str) -> UserError:
        return UserError(
            f"the checkpoint {where} cannot be read ({reason}); delete {self._folder.parent} to "
            "train that run again"
        )


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, without TensorStore's internal state."""
    line = str(error).strip().partition("\n")[0]
    return re.split(r" \[[a-z_ ]+=", line)[0]


def _by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by path, in order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
