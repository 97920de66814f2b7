"""Tables of an efficiency run, in Markdown."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from effattn import registry
from experiments.costs import theory
from experiments.costs.caches import capacity
from experiments.costs.figures import short
from experiments.costs.layers import EXACT, PASSES, Workload
from experiments.costs.measuring import Record
from experiments.harness.report import markdown_table

NONE = "-"
SHARED_MEMORY = 256 * 1024  # bytes of a multiprocessor
MATRIX_LENGTHS = tuple(2**n for n in range(10, 21, 2))  # 1k to 1M


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a run has measured.

    Attributes:
      layers: records of `measuring.measure`.
      longest: records with the longest lengths that fit, by mechanism and direction.
      caches: records of decode caches.
      plain: bytes of attention that stores its matrices, by length and pass.
      memory: bytes that the longest lengths must fit into.
      workload: size of the layers and batches.
      fast_memory: bytes of the fast memory, for the bound of exact attention.
    """

    layers: Sequence[Record]
    longest: Sequence[Record]
    caches: Sequence[Record]
    plain: Sequence[Record]
    memory: int
    workload: Workload = Workload()
    fast_memory: int = SHARED_MEMORY

    def directions(self) -> list[str]:
        return list(dict.fromkeys(record["direction"] for record in self.layers))

    def mechanisms(self, direction: str) -> list[str]:
        """Returns the mechanisms of a direction in the order of the registry."""
        there = {r["mechanism"] for r in self.layers if r["direction"] == direction}
        return [name for name in registry.names() if name in there]

    def line(self, name: str, direction: str, which: str, key: str) -> dict[int, float]:
        """Returns a quantity of a pass by length, in rising order, without unmeasured lengths."""
        found = {
            record["length"]: record["passes"][which].get(key)
            for record in self.layers
            if (record["mechanism"], record["direction"]) == (name, direction)
        }
        return {length: found[length] for length in sorted(found) if found[length] is not None}


def all_tables(results: Results) -> list[str]:
    """Returns the paragraphs, tables and headings of the summary."""
    parts = []
    for direction in results.directions():
        parts += [f"## Crossover with exact attention, {direction}", crossovers(results, direction)]
    text = (
        "The columns up to the bytes of a step give the length in tokens beyond which a layer with "
        f"the mechanism takes less time, or needs fewer bytes, than a layer with `{EXACT}`. These "
        f'lengths are interpolated between measured lengths. "{NONE}" means that the layer still '
        "takes more at the longest length at which both were measured. Times are compared in "
        "rounds, in each of which both layers run once; exact attention is timed alone where one "
        "call takes longer than the time above. Bytes are those of arguments, results and "
        "temporary arrays."
    )
    if results.longest:
        text += (
            " The last two columns give the longest sequence, a power of two, whose forward pass "
            f"or training step fits into {results.memory / 1e9:.1f} GB; programs are compiled for "
            "it, but not run."
        )
    parts.append(text)
    for direction in results.directions():
        parts += [f"## Growth with the length, {direction}", exponents(results, direction)]
    parts.append(
        "Time, FLOPs and temporary bytes of a forward and backward pass of a sequence grow like a "
        "power of the length; the table shows the exponents. They are fitted by least squares to "
        "logarithms, over the longer half of the lengths. FLOPs are counted in the XLA form of the "
        "program, and those in loops count once for each iteration. The claimed exponents are "
        "those of the mechanism's entry in the registry; they hold for lengths above all windows, "
        "blocks and ranks."
    )
    for direction in results.directions():
        length = _common_length(results, direction)
        heading = f"## Costs at {short(length)} tokens, {direction}"
        parts += [heading, costs(results, direction, length)]
    parts += [
        'Times are medians over rounds. "Times as fast" is the median over rounds of the time of '
        "exact attention divided by the time of the mechanism; where exact attention was timed "
        "alone, it is the quotient of both medians. MB are megabytes of temporary arrays. The "
        "decode state is that of one sequence of this length.",
        "## Bytes moved, and the bound for exact attention",
        moved(results),
        "The bytes moved by a forward pass are estimated as arguments + results + 2 x temporary "
        "arrays, because each temporary array is written once and read once. For each head, exact "
        "attention must move about N^2 H^2 / M numbers or more (Dao et al. 2022), where N is the "
        "length, H the head dimension and M the number of entries in the fast memory, here "
        f"{results.fast_memory / 1024:,.0f} KiB. If queries, keys, values and outputs have more "
        "numbers than that, the bound is their size. The layer also moves the parameters of its "
        f'projections, which the bound does not include. "{NONE}" stands where the keys and values '
        "of a head do not fit in the fast memory: a program in tiles reads them again for each "
        "tile of queries, and the sizes of the arrays do not show how often.",
    ]
    if results.caches:
        parts += [
            "## Decode caches",
            caches(results.caches),
            "The table shows the decode cache of one layer for one sequence: the bytes that each "
            "token adds, the bytes that do not depend on the length, and the speed of decode steps "
            "after a prefix. A cache with 0 bytes per token does not grow with the length."
            + on_capacity(results.caches),
        ]
    return [*parts, *classical(results)]


def crossovers(results: Results, direction: str) -> str:
    rows = []
    longest = {r["mechanism"]: r for r in results.longest if r["direction"] == direction}
    for name in results.mechanisms(direction):
        cells = []
        for which in PASSES:
            ratios = results.line(name, direction, which, "ratio")
            ours = [1 / ratio for ratio in ratios.values()]
            cells.append(_crossing(list(ratios), ours, [1.0] * len(ours)))
        own = results.line(name, direction, "step", "needed_bytes")
        exact = results.line(EXACT, direction, "step", "needed_bytes")
        shared = [length for length in own if length in exact]
        of_both = ([line[length] for length in shared] for line in (own, exact))
        cells.append(_crossing(shared, *of_both))
        if results.longest:
            fits = longest.get(name, {})
            cells += [short(fits[w]) if fits.get(w) else NONE for w in ("forward", "step")]
        rows.append([f"`{name}`", *([NONE] * 4 if name == EXACT else cells[:4]), *cells[4:]])
    header = ["mechanism", "forward", "forward + backward", "training step", "bytes of a step"]
    if results.longest:
        header += ["longest, forward", "longest, step"]
    return markdown_table(header, rows)


def exponents(results: Results, direction: str) -> str:
    rows = []
    for name in results.mechanisms(direction):
        entry = registry.get(name)
        fitted = []
        for key in ("seconds", "operations", "temporary_bytes"):
            of_batches = results.line(name, direction, "backward", key)
            line = {n: x / results.workload.sequences(n) for n, x in of_batches.items()}
            exponent = theory.growth(list(line), list(line.values()))
            fitted.append(NONE if exponent is None else f"{exponent:.2f}")
        time, flops, size = fitted
        claims = f"{entry.time_exponent:g}", f"{entry.memory_exponent:g}"
        rows.append([f"`{name}`", time, flops, claims[0], size, claims[1], entry.complexity])
    header = ["mechanism", "time", "FLOPs", "claimed", "bytes", "claimed", "complexity"]
    return markdown_table(header, rows)


def costs(results: Results, direction: str, length: int) -> str:
    """Returns the costs at one length, fastest training step first."""
    lines = []
    for record in results.layers:
        if (record["direction"], record["length"]) != (direction, length):
            continue
        passes = record["passes"]
        times = [_scaled(passes[which].get("seconds"), 1e-3, 1) for which in PASSES]
        step = passes["step"]
        cells = [
            *times,
            _scaled(step.get("ratio"), 1, 2),
            _scaled(passes["forward"].get("operations"), 1e9, 2),
            _scaled(passes["forward"].get("temporary_bytes"), 1e6, 1),
            _scaled(step.get("temporary_bytes"), 1e6, 1),
            _scaled(record["state_bytes"], 1e3, 0),
            f"{step['parameters']:,}" if "parameters" in step else NONE,
        ]
        lines.append((step.get("seconds") or float("inf"), [f"`{record['mechanism']}`", *cells]))
    header = [
        *("mechanism", "forward, ms", "forward + backward, ms", "step, ms"),
        *("step, times as fast", "forward, GFLOP", "forward, MB", "step, MB"),
        *("decode state, kB", "parameters"),
    ]
    return markdown_table(header, [cells for _, cells in sorted(lines, key=lambda line: line[0])])


def moved(results: Results) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for direction in results.directions():
        keys = ("argument_bytes", "result_bytes", "temporary_bytes")
        arguments, outputs, temporaries = (
            results.line(EXACT, direction, "forward", key) for key in keys
        )
        workload = results.workload
        head_size = workload.features // workload.heads
        for length in temporaries:
            heads = workload.heads * workload.sequences(length)
            size = arguments[length] + outputs[length] + 2 * temporaries[length]
            memory, itemsize = results.fast_memory, workload.itemsize
            bound = theory.io_bound(length, head_size, heads, memory, itemsize)
            fits = 2 * length * head_size * itemsize <= memory
            cells = (f"{size / 1e6:,.1f}", f"{size / bound:.2f}") if fits else (NONE, NONE)
            row = short(length), cells[0], f"{bound / 1e6:,.1f}", cells[1]
            rows.setdefault(row, []).append(direction)
    # Directions whose arrays are equally large share a row.
    lines = [[length, ", ".join(of), *cells] for (length, *cells), of in rows.items()]
    return markdown_table(["length", "direction", "moved, MB", "bound, MB", "ratio"], lines)


def prefixes_of(records: Sequence[Record]) -> list[int]:
    """Returns the prefixes of decode caches, in rising order."""
    return sorted({int(p) for record in records for p in record.get("seconds", ())})


def on_capacity(records: Sequence[Record]) -> str:
    """Returns a sentence on the allocated size of the caches, if any was timed."""
    prefixes = prefixes_of(records)
    if not prefixes:
        return ""
    return (
        f" Caches that grow have room for {short(capacity(prefixes))} tokens after every prefix. "
        "A step that computes with all of this room, as that of exact attention does in XLA, is "
        "equally fast after all prefixes."
    )


def caches(records: Sequence[Record]) -> str:
    prefixes = prefixes_of(records)
    rows = []
    for record in records:
        seconds = {int(p): s for p, s in record.get("seconds", {}).items()}
        speeds = [f"{1 / seconds[p]:,.0f}" if p in seconds else NONE for p in prefixes]
        fixed = f"{record['fixed_bytes'] / 1e3:,.1f}"
        rows.append([record["cache"], f"{record['bytes_per_token']:,.0f}", fixed, *speeds])
    speeds = [f"steps/s after {short(prefix)}" for prefix in prefixes]
    return markdown_table(["cache", "bytes per token", "fixed, kB", *speeds], rows)


def classical(results: Results) -> list[str]:
    """Returns the classical tables, with what was measured beside them."""
    matrices = [
        [short(n), *(_bytes(theory.matrix_bytes(n, itemsize)) for itemsize in (4, 2))]
        for n in MATRIX_LENGTHS
    ]
    optimisers = [
        [
            name,
            str(each.weights),
            str(each.gradients),
            str(each.state),
            f"{theory.state_bytes(each.make):.2f}",
            NONE if isinstance(each.state, str) else str(
                each.weights + each.gradients + each.state
            ),
        ]
        for name, each in theory.optimisers().items()
    ]  # fmt: skip
    header = ["family", "time of a layer", "mechanisms", "sequential operations", "longest path"]
    weights = ["optimiser", "weights", "gradient", "state", "state, measured", "sum"]
    return [
        "## Attention matrix of one head",
        markdown_table(["length", "float32", "bfloat16"], matrices),
        *(stored(results) if results.plain else []),
        "## Time, sequential operations and path length by family",
        markdown_table(header, theory.complexities(registry.names())),
        "The columns are those of table 1 of Vaswani et al. 2017, for a sequence of N tokens, "
        "windows of w tokens and chunks of c tokens; causal sums and recurrences run chunk by "
        "chunk. The time of a layer is the complexity in the mechanism's entry in the registry.",
        "## Training memory by optimiser, bytes per parameter",
        markdown_table(weights, optimisers),
        "Training also stores activations; the temporary bytes of the training step in the tables "
        "above include them.",
    ]


def stored(results: Results) -> list[str]:
    """Returns the table of attention with stored matrices beside tiled attention."""
    workload, rows = results.workload, []
    matrix_bytes = 2 * workload.heads * workload.itemsize
    for record in results.plain:
        length = record["length"]
        cells = [_bytes(matrix_bytes * workload.sequences(length) * length**2)]
        for which in ("forward", "step"):
            tiled = results.line(EXACT, "causal", which, "temporary_bytes").get(length)
            cells += [_bytes(record[which]), NONE if tiled is None else _bytes(tiled)]
        rows.append([short(length), *cells])
    header = [
        *("length", "in theory", "forward, stored", "forward, tiled"),
        *("step, stored", "step, tiled"),
    ]
    return [
        "## Memory of a layer that stores its attention matrices",
        markdown_table(header, rows),
        'The table shows the temporary bytes of compiled programs at length N. "Stored" programs '
        'store the attention matrices, "tiled" ones compute them tile by tile. In theory, a '
        "forward pass that stores the matrices holds the logits and the weights, "
        f"2 x {workload.itemsize} N^2 bytes for each of {workload.heads} heads and sequence, "
        "unless the compiler merges them. A training step keeps the weights and makes two "
        "gradients of their size.",
    ]


def not_timed(results: Results) -> list[str]:
    """Returns a line for each mechanism and reason, with the lengths concerned."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for record in results.layers:
        for which, found in record["passes"].items():
            if found.get("skipped"):
                key = (record["mechanism"], record["direction"], found["skipped"])
                reasons.setdefault(key, []).append(f"{PASSES[which]} at {short(record['length'])}")
    return [
        f"- `{name}`, {direction}: {reason} ({', '.join(where)})"
        for (name, direction, reason), where in reasons.items()
    ]


def fast_bytes() -> int:
    """Returns the size of the fast memory M: the second-level cache of a CPU core.

    On an accelerator, and where the system does not say, that of the shared memory of a
    multiprocessor.
    """
    import jax

    path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    if jax.default_backend() != "cpu" or not path.exists():
        return SHARED_MEMORY
    return int(path.read_text().strip().removesuffix("K")) * 1024


def _common_length(results: Results, direction: str) -> int:
    """Returns the longest length at which the training step of exact attention was timed."""
    timed = results.line(EXACT, direction, "step", "seconds")
    return max(timed, default=min(record["length"] for record in results.layers))


def _crossing(lengths: Sequence[int], ours: Sequence[float], exact: Sequence[float]) -> str:
    found = theory.crossover(lengths, ours, exact)
    if found is None:
        return NONE
    return f"<= {lengths[0]:,}" if found == lengths[0] else f"{found:,.0f}"


def _scaled(value: Any, unit: float, digits: int) -> str:
    return NONE if value is None else f"{value / unit:,.{digits}f}"


def _bytes(count: float) -> str:
    """Returns bytes in units of 1024: 4 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
