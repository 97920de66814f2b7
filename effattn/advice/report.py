"""The result of `effattn.advise`: options with their costs, in rank order, and as text."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence

from effattn.advice import facts
from effattn.advice.layers import Layer
from effattn.advice.quality import Result

REFERENCE = "softmax"
EXPLAINED = 3  # options with reasons in the text
WIDTH = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A mechanism as an option for a case. Costs are those of one layer and one sequence.

    Attributes:
      layer: the layer.
      length: N, tokens of the sequence.
      operations: operations of a forward and a backward pass.
      share: operations (with `measure`, seconds) divided by those of exact softmax attention.
      pays: whether the costs grow more slowly than those of exact softmax attention, and are at
        most half as large.
      compiled: whether the layer was compiled, as are the best ten.
      temporary_bytes: memory of the compiled forward and backward pass; None if unknown.
      seconds: median time of a forward and a backward pass; None if not measured.
      state_bytes: size of the decode state; None without decoding.
      constant_state: whether a sequence of twice the length has a decode state of the same size.
      error: relative error of the output on the sample; None without error.
      error_note: reason why there is no error, or "".
      quality: measured results of this direction.
      kernels: names of the kernels for the device, for compiled options.
    """

    layer: Layer
    length: int
    operations: int
    share: float = 1.0
    pays: bool = False
    compiled: bool = False
    temporary_bytes: int | None = None
    seconds: float | None = None
    state_bytes: int | None = None
    constant_state: bool | None = None
    error: float | None = None
    error_note: str = ""
    quality: tuple[Result, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the mechanism."""
        return self.layer.entry.name

    @property
    def label(self) -> str:
        """The name, with the caller's options."""
        given = self.layer.given.items()
        return ", ".join([self.name, *(f"{option}={value!r}" for option, value in given)])

    @property
    def kind(self) -> str:
        """Kind of the mechanism, a key of `effattn.advice.facts.KINDS`."""
        return facts.kind(self.layer.entry)

    @property
    def score(self) -> float | None:
        """Mean difference from the score of a typical mechanism, over tasks; or None."""
        better = [result.score - result.typical for result in self.quality]
        return sum(better) / len(better) if better else None

    @property
    def code(self) -> str:
        """Program that makes the layer and calls it; for decoding, it also takes one step."""
        return self.layer.code(self.length, self.state_bytes is not None)

    @property
    def may_lead(self) -> bool:
        """True if the option may rank above exact softmax attention."""
        known = facts.compares_tokens(self.layer.entry) or self.score is not None
        return self.pays and known

    @property
    def gives_up(self) -> tuple[str, ...]:
        """Drawbacks, compared with exact softmax attention."""
        return facts.gives_up(self.layer.entry)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Facts that led to the rank."""
        cost = "operations" if self.seconds is None else "seconds"
        if self.name == REFERENCE:
            found = ["the reference for costs, errors and quality"]
        else:
            found = [f"{100 * self.share:.0f} % of the {cost} of exact softmax attention"]
        if self.state_bytes is not None:
            grows = "at any length" if self.constant_state else "and grows with the length"
            found.append(f"the decode state takes {in_bytes(self.state_bytes)} {grows}")
        if self.name != REFERENCE and not self.pays:
            found.append("these costs are too high to rank above exact softmax attention")
        elif self.name != REFERENCE and not self.may_lead:
            found.append(
                "ranks below exact softmax attention, as it compares no tokens and its quality is "
                "not known"
            )
        if self.error is not None:
            found.append(f"the output on the sample has an error of {self.error:.2g}")
        elif self.error_note:
            found.append(f"no error on the sample: {self.error_note}")
        for task in self.quality:
            found.append(f"{task.task}: {task.in_words} ({task.source})")
        if not self.quality:
            found.append("no quality yet: results in fewer than three tasks")
        if self.compiled:
            found.append(f"kernels: {', '.join(self.kernels) or 'none, runs in XLA'}")
        return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """Ranked options for a case; `str` gives a report of 80 columns.

    Attributes:
      case: the case in words.
      options: the options, best first; at least one.
      left_out: reasons by the names of mechanisms that are no candidates.
    """

    case: str
    options: tuple[Option, ...]
    left_out: Mapping[str, str]

    @property
    def best(self) -> Option:
        """The first option."""
        return self.options[0]

    @property
    def code(self) -> str:
        """Program that makes a layer of the best option and calls it."""
        return self.best.code

    def __str__(self) -> str:
        rows = [(rank, o) for rank, o in enumerate(self.options, 1) if o.compiled]
        parts = [filled(f"{self.case}."), _table(rows)]
        if hidden := len(self.options) - len(rows):
            parts[-1] += f"\n({hidden} more options rank lower)"
        parts.append(filled(_COSTS))
        for rank, option in rows:
            if rank <= EXPLAINED or option.name == REFERENCE:
                parts.append(_explained(option))
        sources = dict.fromkeys(task.source for _, option in rows for task in option.quality)
        if sources:
            parts.append("\n".join([filled(_QUALITY), *(filled(f"  {name}") for name in sources)]))
        parts.append(f"Code for {self.best.label}:\n\n{textwrap.indent(self.code, '    ')}")
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        if by_reason:
            lines = (f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items())
            parts.append("\n".join(["Left out:", *map(filled, lines)]))
        return "\n\n".join(part.rstrip("\n") for part in parts)


def filled(line: str) -> str:
    """Returns the line wrapped at `WIDTH` columns; further lines are indented like its text."""
    indent = len(line) - len(line.lstrip(" -"))
    return textwrap.fill(
        line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def in_bytes(size: float | None) -> str | None:
    """Returns a number of bytes in words, such as "1.07 GB"."""
    if size is None:
        return None
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _explained(option: Option) -> str:
    lines = [
        option.label,
        f"  {facts.idea(option.layer.entry)}.",
        "  Costs and quality:",
        *(f"  - {reason}" for reason in option.reasons),
        "  Drawbacks:",
        *(f"  - {loss}" for loss in option.gives_up),
    ]
    return "\n".join(map(filled, lines))


_COSTS = (
    "Costs are those of a forward and a backward pass of one layer. The share is relative to "
    "exact softmax attention."
)

_QUALITY = (
    "Quality is the mean difference between the score of a mechanism, 0 to 1, and that of a "
    "typical mechanism on the same tasks, with the number of tasks in brackets. Scores are from:"
)


_COLUMNS: Mapping[str, Callable[[int, Option], str | None]] = {
    "rank": lambda rank, o: str(rank),
    "mechanism": lambda rank, o: textwrap.shorten(o.label, 30, placeholder=" ..."),
    "operations": lambda rank, o: f"{o.operations:.3g}",
    "share": lambda rank, o: f"{100 * o.share:.0f} %",
    "memory": lambda rank, o: in_bytes(o.temporary_bytes),
    "time": lambda rank, o: None if o.seconds is None else f"{o.seconds:.2g} s",
    "state": lambda rank, o: in_bytes(o.state_bytes),
    "error": lambda rank, o: None if o.error is None else f"{o.error:.2g}",
    "quality": lambda rank, o: None if o.score is None else f"{o.score:+.2f} ({len(o.quality)})",
}


def _table(rows: Sequence[tuple[int, Option]]) -> str:
    """Returns the table of options with their ranks; columns without values are left out."""
    lines = [""] * (len(rows) + 1)
    for title, cell in _COLUMNS.items():
        cells = [cell(*row) for row in rows]
        if any(text is not None for text in cells):
            texts = [title, *("-" if text is None else text for text in cells)]
            width = max(map(len, texts))
            align = str.ljust if title == "mechanism" else str.rjust
            pairs = zip(lines, texts, strict=True)
            lines = [f"{line}  {align(text, width)}" for line, text in pairs]
    return "\n".join(line[2:].rstrip() for line in lines)
