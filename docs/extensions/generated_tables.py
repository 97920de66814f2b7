"""Tables that pages ask for by a comment, `<!-- table: NAME -->`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import effattn
from effattn import registry
from effattn.advice import facts

from . import measurements
from .markdown import table

_PLACE = re.compile(r"^<!-- table: (.+) -->$", re.M)
LENGTHS = 1024, 4096, 16384
LONG = 65536


def setup(app: Any) -> dict[str, bool]:
    """Puts the tables in place as Sphinx reads a page."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True}


def _fill(app, docname, source):
    source[0] = _PLACE.sub(lambda match: _TABLES[match[1]](), source[0])


def costs(direction: str) -> str:
    """Time and state of every mechanism, the fastest first."""
    entries = [e for e in map(registry.get, registry.names()) if direction in e.capabilities]
    lines = []
    for entry in entries:
        of_length = {layer["length"]: layer for layer in measurements.layers(entry.name, direction)}
        steps = {n: of_length[n]["passes"]["step"] for n in LENGTHS if n in of_length}
        relative = {n: measurements.times(step) for n, step in steps.items()}
        quality = measurements.mean_quality(entry.name, direction == "causal")
        cells = [
            f"[`{entry.name}`](mechanisms/{entry.name}.md)",
            facts.kind(entry),
            *(_number(relative.get(n)) for n in LENGTHS),
            _number(of_length[LONG]["passes"]["step"].get("seconds")) if LONG in of_length else "-",
        ]
        if direction == "causal":
            cells.append(_state(of_length))
        cells.append(
            "-" if quality is None else f"{quality[0]:+.2f}\N{NO-BREAK SPACE}({quality[1]})"
        )
        slowness = [relative.get(n) or float("inf") for n in (16384, 4096)]
        lines.append((slowness, cells))
    rows = [cells for _, cells in sorted(lines)]
    headings = ["mechanism", "kind", *(f"{n:,}" for n in LENGTHS), f"{LONG:,} (s)"]
    if direction == "causal":
        headings.append("state at 16,384")
    return table([*headings, "quality (tasks)"], rows)


def _number(value):
    return "-" if value is None else f"{value:.2f}"


def _state(of_length):
    """Bytes of the decode state, with an arrow if they grow with the length."""
    before, size = (of_length.get(n, {}).get("state_bytes") for n in LENGTHS[-2:])
    if size is None:
        return "-"
    return _bytes(size) if size == before else f"{_bytes(size)}\N{NO-BREAK SPACE}\N{UPWARDS ARROW}"


def _bytes(size):
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f}\N{NO-BREAK SPACE}{unit}"
    return f"{size} B"


def by_device() -> str:
    """Implementations of every mechanism on each device."""
    platforms = {"CPU": "cpu", "GPU": "cuda", "TPU": "tpu"}
    rows = []
    for name in registry.names():
        known = effattn.support(name)
        cells = []
        for platform in platforms.values():
            runs = [row.implementation for row in known if row.platform in ("any", platform)]
            cells.append(", ".join(f"`{each}`" for each in runs) or "plain JAX")
        rows.append([f"[`{name}`](mechanisms/{name}.md)", *cells])
    return table(["mechanism", *platforms], rows)


def kernels() -> str:
    """Requirements of each implementation of block attention and of the recurrences."""
    of = {
        "softmax": "block attention",
        "linear": "recurrences without decay",
        "gated_linear": "recurrences with decay, delta rules",
    }
    rows = [
        (f"`{row.implementation}`", what, row.platform, ", ".join(row.dtypes), row.others or "")
        for name, what in of.items()
        for row in effattn.support(name)
        if row.implementation != "xla"
    ]
    headings = "kernel", "for", "runs on", "dtypes", "needs"
    return table(headings, sorted(rows))


_TABLES: Mapping[str, Callable[[], str]] = {
    "costs of causal mechanisms": lambda: costs("causal"),
    "costs of bidirectional mechanisms": lambda: costs("bidirectional"),
    "implementations by device": by_device,
    "kernels": kernels,
}
