"""Results in a folder: those for the page, and the reasons why others are left out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.errors import UserError
from experiments.harness.metrics import read_json
from experiments.harness.report import SCHEMA

COMPARISON = "comparison"
# Keys by which the summaries of the experiments are told apart.
KINDS: Mapping[str, frozenset[str]] = {
    COMPARISON: frozenset({"columns", "headline", "runs"}),
    "approximation": frozenset({"errors", "effective_rank"}),
    "compress": frozenset({"bytes", "heads", "heading", "runs"}),
    "downstream": frozenset({"records"}),
    "efficiency": frozenset({"layers", "longest", "caches", "plain", "memory", "workload"}),
    "finetune": frozenset({"conversions", "heading", "runs"}),
    "scaling": frozenset({"points", "fits"}),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one command.

    Attributes:
      folder: its folder.
      summary: content of `summary.json`.
    """

    folder: Path
    summary: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kind(self) -> str | None:
        """A key of `KINDS`, or None."""
        return next((kind for kind, keys in KINDS.items() if keys <= self.summary.keys()), None)

    @property
    def environment(self) -> Mapping[str, str]:
        """Versions and device; empty if unknown."""
        return self.summary.get("environment") or self._config.get("environment") or {}

    @property
    def _config(self) -> Mapping[str, Any]:
        return self.summary.get("config") or {}

    def reason_against(self) -> str:
        """Returns the reason why the page leaves the result out, or ""."""
        if self.kind is None:
            return "written by an older version of its command, or by an unknown command"
        version = self.summary.get("schema")
        if self.kind == COMPARISON and version != SCHEMA:
            return f"has version {version} of the results, and this page reads version {SCHEMA}"
        made = {
            "command": self.summary.get("command"),
            "configuration": self._config,
            "environment": self.environment,
        }
        lacking = [what for what, value in made.items() if not value]
        return f"does not say its {' and its '.join(lacking)}" if lacking else ""

    def made(self, link: str) -> str:
        """Returns a sentence on the command, versions and files; `link` leads to all results."""
        versions = " and ".join(
            f"{name} {self.environment[name]}"
            for name in ("effattn", "jax")
            if name in self.environment
        )
        files = [("all numbers and the configuration", "summary.md")]
        files += [(path.stem, path.name) for path in sorted(self.folder.glob("*.png"))]
        links = ", ".join(f"[{text}]({link}/{self.name}/{name})" for text, name in files)
        device = self.environment.get("device", "an unknown device")
        return f"Made by `{self.summary['command']}` with {versions} on {device}: {links}."


def gather(folder: Path) -> tuple[list[Result], dict[str, str]]:
    """Returns the results for the page by name, and the reasons against others by name.

    Raises:
      UserError: the folder does not exist, or a file is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"--results must be a folder with results, got {folder}")
    found, left_out = [], {}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        path = inner / "summary.json"
        # The commands write summary.md last of all.
        if not path.is_file() or not (inner / "summary.md").is_file():
            left_out[inner.name] = "unfinished: summary.json or summary.md is missing"
            continue
        result = Result(inner, read_json(path, (), f"delete {inner}, and make that table again"))
        if reason := result.reason_against():
            left_out[inner.name] = reason
        else:
            found.append(result)
    return found, left_out
