"""Checkpoints of one run by Orbax: the latest is kept, and a kill leaves no half of one."""

import logging
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.common.errors import UserError

# Orbax narrates every save and every leftover of a kill, which it removes.
logging.getLogger("absl").setLevel(logging.CRITICAL)
# What a read leaves behind that failed.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _quiet_threads() -> None:
    """Leaves errors of the threads of Orbax and TensorStore to those who wait for them."""
    of_threads, of_others = threading.excepthook, sys.excepthook

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("orbax."):
            of_threads(arguments)

    def hook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        # TensorStore reports to an event loop that ended with the first error.
        if str(error) != "Event loop is closed":
            of_others(kind, error, where)

    threading.excepthook, sys.excepthook = thread_hook, hook


_quiet_threads()


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; a context manager.

    Args:
      folder: made if missing.
      identity: of the configuration and the run; only checkpoints that carry it are read.
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
        """The step of the newest whole checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Writes the arrays of `state` and what JSON can hold of `progress`; on return it is safe.

        Args:
          step: larger than any before.
          state: a pytree of arrays.
          progress: where the run stands, such as the position in its data.

        Raises:
          UserError: it cannot be written, as where a disk is full; the one before stays.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_name(state)),
            progress=ocp.args.JsonSave({"identity": self._identity, **progress}),
        )
        # Orbax and TensorStore raise many types for what the system refuses.
        try:
            self._manager.save(step, args=items)
        except Exception as error:
            raise UserError(
                f"the checkpoint {self._folder / str(step)} cannot be written ({_reason(error)}); "
                "the same command goes on from the one before"
            ) from error

    def restore(self, template: Any, keys: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
        """The newest `(state, progress)`, the state in the structure of `template`.

        Args:
          template: a pytree of arrays.
          keys: that the progress must have.

        Raises:
          UserError: it cannot be read, or another configuration wrote it.
        """
        where = self._folder / str(self.latest)
        progress = self._read(where, progress=ocp.args.JsonRestore()).progress
        if progress.pop("identity", None) != self._identity:
            raise UserError(
                f"the checkpoint {where} was written with another configuration; "
                "choose another --output, or delete it"
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
        # What Orbax raises for a damaged file depends on which part of it is damaged.
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
    """The first line of what an error says, without TensorStore's account of its own state."""
    line = str(error).strip().partition("\n")[0]
    return re.split(r" \[[a-z_ ]+=", line)[0]


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, in order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
