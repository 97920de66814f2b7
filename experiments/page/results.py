"""Results in a folder: those for the page, and the reasons why others are left out."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
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

    def check_form(self) -> None:
        """Raises `UserError` if the file has a form that the page does not read."""
        version, reason = self.summary.get("schema"), None
        if self.kind is None:
            reason = "was written by an older version of its command, or by an unknown command"
        elif version != SCHEMA:
            reason = f"has version {version} of the results, and this page reads version {SCHEMA}"
        else:
            numbers = {key: of for key, of in self.summary.items() if key != "config"}
            reason = next(_not_finite(numbers), None)
        if reason:
            raise self.refused(reason)

    def refused(self, reason: str) -> UserError:
        """Returns the error of a file that the page does not read; `reason` is a predicate."""
        remedy = f"delete {self.folder}, and make that table again"
        return UserError(f"{self.folder / 'summary.json'} {reason}; {remedy}")

    def reason_against(self) -> str:
        """Returns the reason why the page leaves the result out, or ""."""
        made = {
            "command": self.summary.get("command"),
            "configuration": self._config,
            "environment": self.environment,
        }
        lacking = [what for what, value in made.items() if not value]
        return f"does not say its {' and its '.join(lacking)}" if lacking else ""

    def made(self, link: str) -> str:
        """Returns a sentence on the command, versions and files; `link` leads to all results."""
        runs = self.summary.get("runs", ())
        places = [self.environment, *(run.get("environment", self.environment) for run in runs)]
        found = list(dict.fromkeys(map(_place, places)))
        files = [("all numbers and the configuration", "summary.md")]
        files += [(path.stem, path.name) for path in sorted(self.folder.glob("*.png"))]
        links = ", ".join(f"[{text}]({link}/{self.name}/{name})" for text, name in files)
        others = f" (some runs: {'; '.join(found[1:])})" if found[1:] else ""
        return f"Made by `{self.summary['command']}` with {found[0]}{others}: {links}."


def no_number(value: Any, name: str, mechanism: str = "") -> str:
    """Returns a predicate for a file that has no number under a name."""
    of = f" of {mechanism}" if mechanism else ""
    return f"has {json.dumps(value)} in place of the number {name}{of}"


def _not_finite(value: Any, keys: tuple[str, ...] = (), mechanism: str = "") -> Iterator[str]:
    """Yields a predicate for each number of a summary that is NaN or infinite."""
    if isinstance(value, Mapping):
        mechanism = value.get("mechanism", mechanism)
        for key, inner in value.items():
            yield from _not_finite(inner, (*keys, key), mechanism)
    elif isinstance(value, list):
        for inner in value:
            yield from _not_finite(inner, keys, mechanism)
    elif isinstance(value, float) and not math.isfinite(value):
        yield no_number(value, ".".join(keys), mechanism)


def _place(environment: Mapping[str, str]) -> str:
    """Versions and device in words."""
    names = [name for name in ("effattn", "jax") if name in environment]
    versions = " and ".join(f"{name} {environment[name]}" for name in names)
    device = environment.get("device", "an unknown device")
    return f"{versions or 'unknown versions'} on {device}"


def gather(folder: Path) -> tuple[list[Result], dict[str, str]]:
    """Returns the results for the page by name, and the reasons against others by name.

    Raises:
      UserError: the folder does not exist, or a file is damaged or has another form.
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
        result.check_form()
        if reason := result.reason_against():
            left_out[inner.name] = reason
        else:
            found.append(result)
    return found, left_out
