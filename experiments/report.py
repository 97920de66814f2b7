"""One page of the results in a folder.

`make report` reads every `summary.json` in `experiments/results`, and writes `docs/report.md`, its
figures and the quality of mechanisms for `effattn.advise`. Numbers without the command, the
configuration and the version that made them are not shown; the page names their folders.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as `python experiments/report.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from experiments.harness import outcome
from experiments.harness.errors import UserError
from experiments.harness.metrics import write_atomically
from experiments.page import comparisons, figures, published, results, scores, sections

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
PUBLISHED = ROOT / "experiments" / "published.json"
PAGES = ROOT / "docs" / "report.md", ROOT / "docs" / "images"
QUALITY = ROOT / "effattn" / "advice" / "quality.json"


@dataclasses.dataclass(frozen=True)
class Config:
    """Writes the report of the results in a folder."""

    # Folder with a folder for each result, with summary.json and summary.md.
    results: Path = RESULTS
    # Markdown file to write. By default docs/report.md for the results of this repository, and
    # RESULTS-report/report.md for other results.
    page: Path | None = None
    # Folder for the figures. By default docs/images for the results of this repository, and
    # RESULTS-report/images for other results.
    images: Path | None = None
    # File for the quality of mechanisms, which `effattn.advise` reads. By default that of the
    # package for the results of this repository, and none for other results.
    quality: Path | None = None

    def placed(self) -> tuple[Path, Path, Path | None]:
        """The page, the folder of its figures and the file of qualities, or None."""
        own = self.results.resolve() == RESULTS.resolve()
        folder = self.results.with_name(f"{self.results.name}-report")
        page, images = PAGES if own else (folder / "report.md", folder / "images")
        return self.page or page, self.images or images, self.quality or (QUALITY if own else None)


@contextlib.contextmanager
def _readable(result: results.Result) -> Iterator[None]:
    """Names the result if the work on it shows that its file has another form."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{result.folder / 'summary.json'} has another form than this page reads "
            f"({type(error).__name__}: {error}); delete {result.folder}, and make that table again"
        ) from error


def write(config: Config) -> None:
    """Writes the page, its figures and the quality of mechanisms."""
    page, folder_of_images, quality = config.placed()
    found, left_out = results.gather(config.results)
    left_out_by_name = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
    if not found:
        raise UserError(
            f"--results must have the results of a command of experiments, got {config.results}"
            + (f" with {left_out_by_name}" if left_out else " without any")
        )
    tables = [comparisons.Table(r.folder, r.summary) for r in found if r.kind == results.COMPARISON]
    others = [result for result in found if result.kind != results.COMPARISON]
    numbers = published.Published.read(PUBLISHED)
    page.parent.mkdir(parents=True, exist_ok=True)
    link, images = (
        Path(os.path.relpath(folder, page.parent)).as_posix()
        for folder in (config.results, folder_of_images)
    )
    for table in tables:
        with _readable(table):
            table.check_runs()
            comparisons.overview([table])
            comparisons.section(table, numbers, link, None)
    drawn = figures.draw_all(folder_of_images, tables)

    def of_table(table: comparisons.Table) -> str:
        image = f"{images}/{drawn[table.name]}" if table.name in drawn else None
        return comparisons.section(table, numbers, link, image)

    def of_other(result: results.Result) -> str:
        with _readable(result):
            return sections.section(result, link)

    parts = [
        "# Report",
        "This page gathers the results in `experiments/results` that say by which command, with "
        "which configuration and by which version they were made. Other folders are named at the "
        "end. Numbers after ± are half of a 95 % interval over seeds, by Student's t distribution. "
        "`make report` writes this page.",
        "## Overview",
        comparisons.overview(tables) or "There are no comparisons yet.",
        *map(of_table, tables),
        *map(of_other, others),
        *published.sections(tables, numbers),
    ]
    if left_out:
        lines = [f"- {name}: {reason}" for name, reason in left_out.items()]
        parts += ["## Folders that are left out", "\n".join(lines)]
    write_atomically(page, "\n\n".join(parts) + "\n")
    judged: dict[str, Any] = {"results": []} if quality is None else scores.scores(tables)
    if quality is not None and judged["results"]:
        write_atomically(quality, json.dumps(judged, indent=1) + "\n")
    elif quality is not None:
        quality.unlink(missing_ok=True)
    print(
        f"Wrote {page} from {len(found)} results, and {len(judged['results'])} scores for "
        f"effattn.advise. Left out: {left_out_by_name or 'nothing'}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.report", args=argv)
    return outcome.exit_status(lambda: write(config), "stopped; the same command starts again")


if __name__ == "__main__":
    sys.exit(main())
