"""Costs of attention against length: time, FLOPs and memory of a layer of every mechanism.

The experiment measures a forward pass, forward + backward and a training step of each mechanism,
direction and length, and compiles programs that would not fit. The summary has the lengths at which
each mechanism becomes cheaper than exact attention, fitted exponents beside the claimed ones, the
longest sequence that fits, decode caches, and the classical tables of costs.
`python -m experiments.efficiency --quick` takes under five minutes on two cores; `--help` lists the
options.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tyro

if not __package__:  # run as `python experiments/efficiency.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, folders, machine, metrics, outcome, report, user_modules
from experiments.harness.errors import UserError
from experiments.harness.options import command_of

LENGTHS = tuple(2**n for n in range(8, 21))
QUICK_LENGTHS = (256, 1024, 4096, 16384)
QUICK_MECHANISMS = ("softmax", "sliding_window", "linear", "gated_delta_net")
PLAIN_LENGTHS = (256, 1024, 4096, 16384)
LEAST, MOST = 128, 2**26
PREFIXES, QUICK_PREFIXES, DECODE_STEPS = (1024, 16384), (1024,), 30
MOST_CACHE_BYTES = 1e9  # parameters of a layer that decodes; a table of N^2 has more

# Keys of the records.
OF_LAYER = ("mechanism", "direction", "length", "state_bytes", "passes")
OF_LONGEST = ("mechanism", "direction", "memory", "forward", "step")
OF_CACHE = ("cache", "fixed_bytes", "bytes_per_token")
OF_PLAIN = ("length", "forward", "step")

Record = dict[str, Any]
Extra = Literal["longest", "caches", "stored"]
EXTRAS: tuple[Extra, ...] = get_args(Extra)


@dataclasses.dataclass(frozen=True)
class Config:
    """Measures time, FLOPs and memory of a layer of every mechanism against the length.

    A stopped run goes on when the same command is given again. Further mechanisms and lengths may
    be added to a finished run, also where only its summary and `config.json` are left: only what is
    missing is measured.
    """

    quick: bool = False  # few mechanisms and lengths, in under five minutes
    mechanisms: tuple[str, ...] = ()  # registered names; default all, or four with --quick
    # Python modules that register mechanisms of their own. A mechanism whose code has changed needs
    # another name, or the command another --output, as nothing is measured twice.
    imports: user_modules.Modules = ()
    directions: tuple[Literal["causal", "bidirectional"], ...] = ()  # default both; quick: causal
    lengths: tuple[int, ...] = ()  # tokens, powers of two; default 256 to 1048576
    features: int = 256  # width of a layer
    heads: int = 4  # attention heads
    precision: Literal["float32", "bfloat16"] = "float32"  # parameters are float32
    # Tokens of a batch where sequences are shorter; longer sequences are measured one by one. One
    # short sequence leaves a GPU idle.
    tokens: int = 1
    rounds: int = 5  # calls of each program
    # Time for the rounds of a program; after a slower call, longer lengths are not timed.
    seconds: float = 1.0
    memory: float | None = None  # GB that the longest sequence must fit into; default the device's
    # Tables beside those of time and memory: the longest sequence that fits, decode caches, and
    # attention that stores its matrices. Each compiles many programs; "--extras" without names
    # leaves out all three, but tables of an earlier command in the folder stay.
    extras: tuple[Extra, ...] = EXTRAS
    output: Path | None = None  # run folder; default runs/efficiency-HASH, by machine and workload

    def all_directions(self) -> tuple[str, ...]:
        return self.directions or (("causal",) if self.quick else ("causal", "bidirectional"))

    def all_lengths(self) -> list[int]:
        return sorted(self.lengths or (QUICK_LENGTHS if self.quick else LENGTHS))


def check(config: Config) -> None:
    """Raises `UserError` if the options do not fit together."""
    checks.check_counts(config, "rounds", "features", "heads", "tokens")
    if config.features % config.heads:
        raise UserError(f"--heads {config.heads} must divide --features {config.features}")
    checks.check_positive(config, "seconds")
    if config.memory is not None:
        checks.check_positive(config, "memory")
    for length in config.lengths:
        if not LEAST <= length <= MOST or length & (length - 1):
            raise UserError(f"--lengths must be powers of two from {LEAST} to {MOST}, got {length}")
    for name in ("mechanisms", "lengths", "directions", "extras"):
        values = getattr(config, name)
        if len(set(values)) < len(values):
            raise UserError(f"--{name} must not repeat a value, got {' '.join(map(str, values))}")


def chosen(config: Config) -> list[str]:
    """Returns the mechanisms to measure, exact attention first.

    Raises:
      UserError: a name is not registered, or a mechanism has none of the directions.
    """
    from effattn import registry
    from experiments.costs.layers import EXACT, directions_of

    known = registry.names()
    for name in config.mechanisms:
        if name not in known:
            raise UserError(
                f"--mechanisms: unknown mechanism {name!r}; registered are {', '.join(known)}"
            )
        if not set(directions_of(name)) & set(config.all_directions()):
            only = " or ".join(directions_of(name))
            raise UserError(f"--mechanisms: {name} is {only} only; add it to --directions")
    names = config.mechanisms or (QUICK_MECHANISMS if config.quick else known)
    return list(dict.fromkeys((EXACT, *names)))


def recall(path: Path, keys: tuple[str, ...], make: Callable[[], Record]) -> Record:
    """Returns the record of a file; makes and writes it if it is missing."""
    if path.exists():
        return metrics.read_json(path, keys, "delete it, and the same command measures it again")
    path.parent.mkdir(exist_ok=True)
    record = make()
    metrics.write_atomically(path, json.dumps(record, indent=1) + "\n")
    # Integers are keys of text in JSON.
    return json.loads(json.dumps(record))


def restore(folder: Path) -> set[Extra]:
    """Writes the records of `summary.json` to files of their own, if the folder has no such files.

    Returns:
      The extras of which `summary.json` has records.

    Raises:
      UserError: `summary.json` is damaged.
    """
    path = folder / "summary.json"
    if not path.exists():
        return set()
    rows = {"layers": OF_LAYER, "longest": OF_LONGEST, "caches": OF_CACHE, "plain": OF_PLAIN}
    summary = metrics.read_json(path, (), "delete it, and the command measures again", rows)
    extras = {extra for extra in EXTRAS if summary["plain" if extra == "stored" else extra]}
    if (folder / "layers").exists():
        return extras
    found: dict[str, Record] = {}
    for row in summary["layers"]:
        found[f"layers/{row['mechanism']}-{row['direction']}-{row['length']}"] = row
    for row in summary["longest"]:
        found[f"longest/{row['mechanism']}-{row['direction']}"] = row
    for row in summary["caches"]:
        if "seconds" in row:
            found[f"caches/{row['cache']}-{max(map(int, row['seconds']))}"] = row
    for row in summary["plain"]:
        found[f"plain/{row['length']}"] = row
    for name, row in found.items():
        recall(folder / f"{name}.json", (), functools.partial(dict, row))
    return extras


def measure_layers(config: Config, names: Sequence[str], folder: Path) -> list[Record]:
    """Measures all layers, shortest length first; exact attention before all others."""
    from experiments.costs import measuring
    from experiments.costs.layers import EXACT, Layer, directions_of

    # Half of the memory: the operating system, or another program, also needs some.
    bytes_of_programs = memory_of(config) / 2
    budget = measuring.Budget(config.rounds, config.seconds, bytes_of_programs)
    records: dict[tuple[str, str, int], Record] = {}
    lengths = config.all_lengths()
    for length, shorter in zip(lengths, [None, *lengths], strict=False):
        for direction in config.all_directions():
            layers = {
                folder / "layers" / f"{name}-{direction}-{length}.json": Layer(
                    name, direction, length, workload_of(config)
                )
                for name in names
                if direction in directions_of(name)
            }
            missing = [layer for path, layer in layers.items() if not path.exists()]
            compiled = measuring.compile_layers(missing)
            for path, layer in layers.items():
                name = layer.mechanism
                exact = None if name == EXACT else records[EXACT, direction, length]
                before = records.get((name, direction, shorter or 0))
                make = functools.partial(_measure, layer, compiled, budget, before, exact)
                records[name, direction, length] = recall(path, OF_LAYER, make)
                if machine.is_full():
                    measuring.forget()
        measuring.forget()
    return list(records.values())


def _measure(layer: Any, compiled: Iterator[Any], *rest: Any) -> Record:
    """Measures the layer whose programs come next."""
    from experiments.costs import measuring

    programs = next(compiled)
    print(f"{layer.length} tokens  {layer.direction} {layer.mechanism}", flush=True)
    return measuring.measure(layer, programs, *rest)


def find_longest(
    config: Config, names: Sequence[str], layers: Sequence[Record], folder: Path
) -> list[Record]:
    """Finds the longest sequences that fit, from the sizes already known and by compilation."""
    from experiments.costs import measuring
    from experiments.costs.layers import Layer, directions_of

    memory, records = memory_of(config), []
    for name in names:
        for direction in (d for d in config.all_directions() if d in directions_of(name)):

            def make(name: str = name, direction: str = direction) -> Record:
                print(f"longest sequence  {direction} {name}", flush=True)
                record: Record = {"mechanism": name, "direction": direction, "memory": memory}
                for which in ("forward", "step"):
                    known = {
                        r["length"]: r["passes"][which]["needed_bytes"]
                        for r in layers
                        if (r["mechanism"], r["direction"]) == (name, direction)
                        and "needed_bytes" in r["passes"][which]
                    }
                    record[which] = measuring.longest(
                        lambda length: Layer(name, direction, length, workload_of(config)),
                        which,
                        memory,
                        known,
                    )
                return record

            path = folder / "longest" / f"{name}-{direction}.json"
            records.append(recall(path, OF_LONGEST, make))
    return records


def measure_caches(config: Config, names: Sequence[str], folder: Path) -> list[Record]:
    """Measures the decode caches of the mechanisms that decode."""
    from experiments.costs import caches

    prefixes, records = QUICK_PREFIXES if config.quick else PREFIXES, []
    for name in names:
        layers = caches.cache_layers(name, caches.capacity(prefixes), workload_of(config))
        for cache, layer in layers.items():

            def make(cache: str = cache, layer: Any = layer) -> Record:
                print(f"cache  {cache}", flush=True)
                fixed, each = caches.bytes_by_token(layer)
                record = {"cache": cache, "fixed_bytes": fixed, "bytes_per_token": each}
                if layer.parameter_bytes() > MOST_CACHE_BYTES:
                    return record
                return record | {"seconds": caches.step_seconds(layer, prefixes, DECODE_STEPS)}

            path = folder / "caches" / f"{cache}-{max(prefixes)}.json"
            records.append(recall(path, OF_CACHE, make))
    return records


def measure_plain(config: Config, folder: Path) -> list[Record]:
    """Compiles exact attention that stores its matrices, and returns its temporary bytes."""
    from experiments.costs.layers import EXACT, Layer, compile_pass

    records = []
    for length in PLAIN_LENGTHS:

        def make(length: int = length) -> Record:
            options = (("implementation", "naive"),)
            layer = Layer(EXACT, "causal", length, workload_of(config), options)
            programs = {w: compile_pass(layer, w, count=False) for w in ("forward", "step")}
            return {"length": length} | {w: p.temporary_bytes for w, p in programs.items()}

        records.append(recall(folder / "plain" / f"{length}.json", OF_PLAIN, make))
    return records


def workload_of(config: Config) -> Any:
    from experiments.costs.layers import Workload

    return Workload(config.features, config.heads, config.precision, config.tokens)


def memory_of(config: Config) -> int:
    """Returns the bytes that the longest sequence must fit into."""
    from experiments.costs import measuring

    return measuring.device_bytes() if config.memory is None else round(config.memory * 1e9)


def draw_all(folder: Path, results: Any) -> list[str]:
    """Draws time and memory against length for each direction; returns lines of Markdown."""
    from effattn import registry
    from experiments.costs import figures
    from experiments.costs.layers import EXACT, PASSES

    shown = []
    for direction in results.directions():
        for which, key, quantity in (
            ("forward", "seconds", figures.SECONDS),
            ("step", "seconds", figures.SECONDS),
            ("step", "needed_bytes", figures.BYTES),
        ):
            families: dict[str, dict[str, figures.Line]] = {}
            for name in results.mechanisms(direction):
                line = results.line(name, direction, which, key)
                if line:
                    family = families.setdefault(registry.get(name).family, {})
                    family[name] = (list(line), list(line.values()))
            if not families:  # no program was timed
                continue
            exact = families.get("exact", {}).get(EXACT, ([], []))
            kind = "time" if key == "seconds" else "memory"
            title = f"{kind.capitalize()} of a {PASSES[which]}".replace("forward", "forward pass")
            path = folder / f"{kind}-{which}-{direction}.png"
            figures.draw_families(path, f"{title}, {direction}", quantity, families, (EXACT, exact))
            shown.append(f"![{title}, {direction}]({path.name})")
    return shown


def write_summary(
    folder: Path, config: Config, settings: Mapping[str, Any], results: Any, command: str
) -> None:
    """Draws the figures and writes `summary.json` and `summary.md`."""
    from experiments.costs import tables
    from experiments.costs.layers import WINDOW

    figures = draw_all(folder, results)
    made = {"schema": report.SCHEMA, "command": command, "config": settings}
    summary = {**made, **dataclasses.asdict(results)}
    metrics.write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    about = ", ".join(f"{key} {value}" for key, value in settings["environment"].items())
    parts = [
        "# Costs of attention against length",
        f"One layer with its projections: {results.workload}. Windows have {WINDOW} tokens; "
        "options follow the length where the registry's complexity needs it.",
        f"    {command}",
        f"{about}. {config.rounds} rounds; after three rounds at most {config.seconds:g} s a "
        "program.",
        *figures,
        *tables.all_tables(results),
    ]
    if skipped := tables.not_timed(results):
        parts += ["## Not timed", "\n".join(skipped)]
    metrics.write_atomically(folder / "summary.md", "\n\n".join(parts) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.efficiency", args=argv)

    def work() -> None:
        check(config)
        user_modules.load(config.imports)
        names = chosen(config)
        from experiments.costs import tables

        # A later commit adds to the same table.
        environment = {k: v for k, v in machine.environment().items() if k != "commit"}
        settings = {
            "experiment": "efficiency",
            "rounds": config.rounds,
            "seconds": config.seconds,
            "memory": memory_of(config),
            "workload": dataclasses.asdict(workload_of(config)),
            "environment": environment,
        }
        folder = folders.path_of(config.output, f"efficiency-{folders.fingerprint(settings)}")
        with folders.claimed(folder, settings):
            print(f"Writing to {folder}. If stopped, the same command goes on.", flush=True)
            # The recorded command makes the whole summary, also the tables of earlier commands.
            extras = restore(folder) | {*config.extras}
            command = command_of(
                "efficiency",
                dataclasses.replace(config, extras=tuple(e for e in EXTRAS if e in extras)),
                Config(),
            )
            layers = measure_layers(config, names, folder)
            if "causal" not in config.all_directions():
                extras.discard("caches")
            results = tables.Results(
                layers,
                find_longest(config, names, layers, folder) if "longest" in extras else [],
                measure_caches(config, names, folder) if "caches" in extras else [],
                measure_plain(config, folder) if "stored" in extras else [],
                memory_of(config),
                workload_of(config),
                tables.fast_bytes(),
            )
            write_summary(folder, config, settings, results, command)
        print((folder / "summary.md").read_text(encoding="utf-8"))
        print(f"In {folder}: summary.md, summary.json, figures, and a file for each measurement.")

    return outcome.exit_status(work, "stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
