"""Schedules of kernels that the compiler for TPUs writes: bundles, use of units, spills, memory.

A bundle has the instructions that a core starts in one cycle, so the number of bundles of straight
code is a lower bound of its cycles: waits for memory are not in it.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

# One line of the listing for each bundle: its number, and the label of a jump's target.
_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+([A-Z]{2})?\s*:")
_JUMP = "sbr.rel"
_ALLOCATION = re.compile(r"(#allocation\d+) \[.*?space=(\w+), size = (0x[0-9a-f]+)")
_UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "SALU")
_SPILLS = ("VLOAD:FILL", "VSTORE:SPILL")


@dataclasses.dataclass
class Schedule:
    """The schedule of a kernel.

    Attributes:
      kernel: name of the kernel.
      bundles: bundles of the whole kernel.
      body: bundles of one step of the grid without masks: those of the shortest piece of code
        without jumps that has at least 80 % of the largest number of matrix products of a piece.
      use: share of the slots of each unit that the body uses, by unit, in whole percent.
      spills: loads and stores of spilled registers in the body.
      vector_memory: bytes of VMEM that the kernel allocates itself.
    """

    kernel: str
    bundles: int
    body: int
    use: dict[str, int]
    spills: int
    vector_memory: int


def read(folder: Path) -> list[Schedule]:
    """The schedules of all kernels of Pallas in a folder of the compiler's output."""
    found = []
    for listing in sorted(folder.glob("*final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+?)-\d+-final_bundles\.txt", listing.name)
        if match is None or not re.search(r"attention|recurrence", match[1]):
            continue
        (use,) = folder.glob(f"*-{match[1]}-*final_hlo-static-per-bundle-utilization.txt")
        (source,) = folder.glob(f"*-{match[1]}-*-original.txt")
        found.append(_schedule(match[1], *(path.read_text() for path in (listing, use, source))))
    return found


def _schedule(kernel: str, listing: str, use: str, source: str) -> Schedule:
    names, slots, counts = _uses(use)
    pieces = list(_pieces(listing))
    total = sum(len(piece) for piece in pieces)
    if total != len(counts):
        raise ValueError(f"{kernel} has {total} bundles, and {len(counts)} lines of their use")

    def sums(piece):
        rows = [counts[number] for number in piece]
        return dict(zip(names, map(sum, zip(*rows, strict=True)), strict=True))

    of_pieces = [(piece, sums(piece)) for piece in pieces]
    products = max(used["MATMUL"] for _, used in of_pieces)
    # Among the pieces with nearly as many products as any, the shortest: others also mask.
    body, used = min(
        ((piece, used) for piece, used in of_pieces if used["MATMUL"] >= 0.8 * products),
        key=lambda pair: len(pair[0]),
    )
    return Schedule(
        kernel=kernel,
        bundles=total,
        body=len(body),
        use={unit: round(100 * used[unit] / (slots[unit] * len(body))) for unit in _UNITS},
        spills=sum(used[name] for name in _SPILLS),
        vector_memory=_allocated(source),
    )


def _uses(text: str) -> tuple[list[str], dict[str, int], list[list[int]]]:
    """Names of the units, the slots of each in a bundle, and the slots that each bundle uses."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    slots = dict(zip(names, map(int, lines[2].split()), strict=True))
    start = next(n for n, line in enumerate(lines) if "UTILIZATION" in line) + 1
    counts = [[int(number) for number in line.split()] for line in lines[start:] if line.strip()]
    return names, slots, counts


def _pieces(listing: str) -> Iterator[list[int]]:
    """Numbers of the bundles of each piece of code without jumps into it or out of it."""
    lines = [line for line in listing.splitlines() if _BUNDLE.match(line)]
    piece: list[int] = []
    for number, line in enumerate(lines):
        if piece and (_BUNDLE.match(line)[1] or _JUMP in lines[number - 1]):  # type: ignore[index]
            yield piece
            piece = []
        piece.append(number)
    if piece:
        yield piece


def _allocated(source: str) -> int:
    """Bytes of the scratch and of the windows in VMEM."""
    found = {
        name: int(size, 16) for name, space, size in _ALLOCATION.findall(source) if space == "vmem"
    }
    return sum(found.values())
