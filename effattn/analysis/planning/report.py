"""Plans as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UNITS = ("", "k", "M", "G", "T", "P", "E")


def text(plan: Any) -> str:
    """Tables of a plan."""
    setting, used = plan.setting, plan.memory
    step = "training" if plan.training else "decoding"
    names = {group["name"] for group in setting.config.layer_mixer(0)}
    head = (
        f"{step} of {setting.config.num_layers} layers of {setting.config.features} features with "
        f"{', '.join(sorted(map(str, names)))}: {setting.batch} x {setting.context:,} tokens\n"
        f"{setting.devices:,} {plan.hardware.name} ({mesh(plan)}), {setting.precision}"
    )
    rows = [(name, amount(size, "B")) for name, size in used._asdict().items() if size >= 1000]
    fits = "fits" if plan.fits else "does not fit"
    limit = amount(plan.hardware.memory, "B")
    memory = aligned([("memory of a device", ""), *rows, ("total", f"{amount(used.total, 'B')}")])
    operations = aligned(
        [("operations of a device", ""), *((n, amount(x, "")) for n, x in plan.operations.items())]
    )
    times = [
        ("time of a step", ""),
        ("computing", span(plan.computing)),
        ("transfers, hidden", span(plan.hidden)),
        ("transfers, waited for", span(plan.waiting)),
        ("bubble", f"{100 * plan.bubble:.1f} %"),
        ("total", span(plan.seconds)),
        ("tokens a second", amount(plan.tokens_per_second, "")),
        ("utilisation", f"{100 * plan.utilisation:.1f} %"),
    ]
    parts = [head, memory + f"\n{fits} in {limit}", operations]
    if plan.transfers:
        header = ("transfers", "collective", "count", "each", "sent")
        body = [
            (t.kind, t.operation, f"{t.number:,}", amount(t.size, "B"), amount(t.sent, "B"))
            for t in plan.transfers
        ]
        parts.append(aligned([header, *body], left=2))
    return "\n\n".join([*parts, aligned(times)])


def meshes(plans: Sequence[Any], refused: Mapping[str, int]) -> str:
    """A table of plans, and the reasons against other meshes."""
    header = ("mesh", "microbatches", "step", "tokens/s", "utilisation", "memory")
    body = [
        (
            mesh(plan),
            str(plan.setting.microbatches),
            span(plan.seconds),
            amount(plan.tokens_per_second, ""),
            f"{100 * plan.utilisation:.0f} %",
            amount(plan.memory.total, "B"),
        )
        for plan in plans
    ]
    against = [(f"{count:,}", reason) for reason, count in refused.items()]
    table = aligned([header, *body])
    return f"{table}\n\nmeshes left out\n{aligned(against, left=2)}" if against else table


def mesh(plan: Any) -> str:
    """The sizes of a plan's mesh."""
    sizes = (f"{axis}={size}" for axis, size in plan.setting.mesh.items() if size > 1)
    return ", ".join(sizes) or "one device"


def aligned(rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Rows in columns, of which the first `left` are aligned to the left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first of them its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def amount(number: float, unit: str) -> str:
    """A number in words, such as "1.07 GB"."""
    for prefix in UNITS:
        if number < 999.5 or prefix == UNITS[-1]:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    raise AssertionError


def span(seconds: float) -> str:
    """Seconds in words, such as "12 ms"."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError
