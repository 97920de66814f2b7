"""Checkpoints of one run by Orbax: the latest is kept, and a kill leaves no half of one."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.common.errors import UserError

# Orbax narrates every save and every leftover of a kill, which it removes.
logging.getLogger("absl").setLevel(logging.ERROR)


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
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_by_name(state)),
                progress=ocp.args.JsonSave({"identity": self._identity, **progress}),
            ),
        )

    def restore(self, template: Any) -> tuple[Any, dict[str, Any]]:
        """The newest `(state, progress)`, the state in the structure of `template`.

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
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"the checkpoint {where} cannot be read ({reason}); delete {self._folder.parent} "
                "to train that run again"
            ) from error


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, in order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
