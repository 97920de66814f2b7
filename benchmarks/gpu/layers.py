"""A layer of every mechanism on a GPU: checked against the CPU, then timed.

python -m benchmarks.gpu.layers --help

A process for each CPU core takes a share of the layers, because compilation takes most of the time:
it checks its layers, then compiles the programs that are timed. When all have ended or `--minutes`
are over, the processes time their programs one after the other, so that each program has the GPU
for itself. `layers.json` is written anew after each result, `layers.md` at the end.

Many processes compile fast only if each compiles in one thread. Without XLA's search for the
fastest products of matrices, compilation is several times faster, and layers in XLA are slower:

XLA_FLAGS="--xla_gpu_force_compilation_parallelism=1 --xla_gpu_autotune_level=0"

A layer is wrong if an error in float32, with products in full precision, exceeds 2e-3, or if its
error in bfloat16 exceeds both 5e-2 and three times that of the CPU in bfloat16. All are compared
with the CPU in float32, decoded outputs with those of the whole sequence.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import machine
from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.gpu.device import about_device
from benchmarks.mixers import mixer_of
from effattn import registry

MOST_BYTES = 30e9  # of parameters, and of temporaries
TOLERANCE, HALF_TOLERANCE = 2e-3, 5e-2  # relative errors in float32, and in bfloat16
ROUNDS, ENOUGH_SECONDS = 7, 0.5
GRACE = 45  # seconds that a layer may take beyond the limit of the first phase
CHECKED: dict[str, Any] = {"features": 128, "heads": 4}
CHECKED_LENGTH = 200  # not a multiple of a tile
PROMPT, DECODED = 150, 4  # tokens


class Sizes(NamedTuple):
    """Size of the timed layers."""

    rows: int
    length: int
    features: int
    heads: int


@dataclasses.dataclass
class Row:
    """Layer of a mechanism.

    Attributes:
      mechanism: registered name.
      direction: "causal" or "bidirectional".
      error: relative error of output and gradients in float32 against the CPU.
      half_error: the same in bfloat16 against the CPU in float32.
      half_error_on_cpu: the same error of the CPU in bfloat16.
      decode_error: relative error of decoded outputs in float32; None without decoding.
      seconds: time of a call by pass, the median of the rounds.
      temporary_bytes: temporary memory of the compiled program by pass.
      failed: what went wrong, or None.
      skipped: reason why a pass was not timed, or None.
    """

    mechanism: str
    direction: str
    error: float | None = None
    half_error: float | None = None
    half_error_on_cpu: float | None = None
    decode_error: float | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    temporary_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: str | None = None
    skipped: str | None = None


def both(state, x, *, forward):
    """The output, and the gradients of the parameters and of the tokens; the cotangent is `x`."""
    out, pull_back = jax.vjp(forward, state, x)
    return out, pull_back(x.astype(out.dtype))


def relative_error(found: Any, wanted: Any) -> float:
    """Largest error of an array in the tree, by norms, relative to the array.

    An array that is small beside the others of its tree, as a gradient that cancels, is compared
    with a hundredth of their largest norm.
    """
    norms = [float(np.linalg.norm(leaf)) for leaf in jax.tree.leaves(wanted)]
    largest = max(norms)
    errors = [
        float(np.linalg.norm(np.asarray(a, np.float64) - b)) / max(norm, 0.01 * largest, 1e-30)
        for a, b, norm in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), norms, strict=True)
    ]
    return max(errors) if np.isfinite(errors).all() else float("inf")


class Layer:
    """Layer of the checked size, with parameters and tokens as NumPy arrays."""

    def __init__(self, row: Row):
        self.name, self.is_causal = row.mechanism, row.direction == "causal"
        with jax.default_device(jax.devices("cpu")[0]):
            state = nnx.state(self.mixer(jnp.float32))
            self.state = jax.tree.map(np.asarray, state)
        draw = np.random.default_rng(0)
        shape = 2, CHECKED_LENGTH, CHECKED["features"]
        self.x = np.asarray(jnp.asarray(draw.normal(size=shape), jnp.bfloat16), np.float32)

    def mixer(self, dtype: Any) -> Any:
        return mixer_of(self.name, CHECKED_LENGTH, self.is_causal, dtype=dtype, **CHECKED)

    def graph(self, dtype: Any) -> Any:
        return nnx.split(nnx.eval_shape(lambda: self.mixer(dtype)))[0]

    def run(self, device: jax.Device, dtype: Any) -> Any:
        """Returns output and gradients on a device."""
        graph = self.graph(dtype)

        def forward(state, x):
            return nnx.merge(graph, state)(x)

        with jax.default_device(device), _precision(dtype):
            call = jax.jit(lambda state, x: both(state, x, forward=forward))
            found = call(self.state, self.x.astype(dtype))
            return jax.tree.map(lambda x: np.asarray(x, np.float64), found)

    def decode(self, device: jax.Device) -> np.ndarray:
        """Returns the outputs of a few tokens after a prompt."""
        graph = self.graph(jnp.float32)

        def extend(state, x, decoded):
            return nnx.merge(graph, state).extend(x, decoded)

        with jax.default_device(device), _precision(jnp.float32):
            mixer = nnx.merge(graph, self.state)
            decoded = mixer.init_state(len(self.x), CHECKED_LENGTH, jnp.float32)
            call, outputs = jax.jit(extend), []
            _, decoded = call(self.state, self.x[:, :PROMPT], decoded)
            for token in range(PROMPT, PROMPT + DECODED):
                out, decoded = call(self.state, self.x[:, token : token + 1], decoded)
                outputs.append(np.asarray(out, np.float64))
        return np.concatenate(outputs, 1)


def _precision(dtype: Any) -> Any:
    """Full precision for float32; the default for 16 bits."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def check(row: Row) -> None:
    """Compares a layer on the first device with the CPU."""
    cpu, device = jax.devices("cpu")[0], jax.devices()[0]
    layer = Layer(row)
    wanted = layer.run(cpu, jnp.float32)
    row.error = relative_error(layer.run(device, jnp.float32), wanted)
    row.half_error_on_cpu = relative_error(layer.run(cpu, jnp.bfloat16), wanted)
    row.half_error = relative_error(layer.run(device, jnp.bfloat16), wanted)
    if layer.is_causal and "decode" in registry.get(row.mechanism).capabilities:
        expected = wanted[0][:, PROMPT : PROMPT + DECODED]
        row.decode_error = relative_error(layer.decode(device), expected)
    wrong = max(row.error, row.decode_error or 0) > TOLERANCE
    if wrong or row.half_error > max(HALF_TOLERANCE, 3 * row.half_error_on_cpu):
        row.failed = "disagrees with the CPU"


def compiled(row: Row, sizes: Sizes) -> dict[str, Callable[[], list[float]]]:
    """Compiles the passes of the timed size; returns calls by pass."""
    is_causal = row.direction == "causal"

    def mixer():
        return mixer_of(
            row.mechanism, sizes.length, is_causal,
            features=sizes.features, heads=sizes.heads, dtype=jnp.bfloat16,
        )  # fmt: skip

    graph, shapes = nnx.split(nnx.eval_shape(mixer))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    if needed > MOST_BYTES:
        row.skipped = f"needs {needed / 1e9:.1f} GB of parameters"
        return {}
    shape = sizes.rows, sizes.length, sizes.features
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def draw():
        return nnx.state(mixer()), jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    operands = jax.jit(draw).lower().compile()

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    passes = {"forward": forward, "backward": lambda state, x: both(state, x, forward=forward)}
    calls: dict[str, Callable[[], list[float]]] = {}
    for which, function in passes.items():
        program = jax.jit(function).lower(shapes, x).compile()
        memory = program.memory_analysis()
        row.temporary_bytes[which] = memory.temp_size_in_bytes if memory else 0
        if row.temporary_bytes[which] > MOST_BYTES:
            row.skipped = f"needs {row.temporary_bytes[which] / 1e9:.1f} GB of temporaries"
            break
        calls[which] = functools.partial(timed, program, operands)
    return calls


def timed(program: Any, operands: Callable[[], Any]) -> list[float]:
    """Times a program, whose operands are made now; returns seconds of each round."""
    state, x = operands()
    jax.block_until_ready(program(state, x))
    rounds: list[float] = []
    while len(rounds) < ROUNDS and (not rounds or sum(rounds) < ENOUGH_SECONDS):
        start = time.perf_counter()
        jax.block_until_ready(program(state, x))
        rounds.append(time.perf_counter() - start)
    return rounds


def message(error: Exception) -> str:
    """Returns type and first line of an error."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:200]}"


def direction_of(name: str) -> str:
    """Returns the direction in which a mechanism is measured."""
    return "causal" if name in registry.names("causal") else "bidirectional"


def work(pipe: Connection, platform: str, rows: list[Row], sizes: Sizes, end: float) -> None:
    """Checks and compiles layers until `end`, sends "ready", waits, and times them.

    Sends each row when it is checked, when it is compiled, and when it is timed.
    """
    jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    calls: dict[str, dict[str, Callable[[], Any]]] = {}

    def compile_passes(row):
        calls[row.mechanism] = compiled(row, sizes)

    def time_passes(row):
        for which, call in calls.get(row.mechanism, {}).items():
            row.seconds[which] = statistics.median(call())

    for phase in (check, compile_passes, time_passes):
        if phase is time_passes:
            pipe.send("ready")
            pipe.recv()
        for row in rows:
            if row.failed or row.skipped:
                continue
            try:
                if phase is not time_passes and time.time() > end:
                    row.skipped = "not reached within --minutes"
                else:
                    phase(row)
            except Exception as error:  # any failure is the result
                row.failed = message(error)
            pipe.send(row)


def measure(
    rows: Sequence[Row],
    platform: str,
    sizes: Sizes,
    processes: int,
    end: float,
    save: Callable[[list[Row]], None],
) -> list[Row]:
    """Runs the processes; returns the rows as far as they came, and saves them as they come."""
    context = multiprocessing.get_context("spawn")
    found = {row.mechanism: row for row in rows}
    pipes: dict[Any, Any] = {}  # the process at the other end
    for index in range(min(processes, len(rows))):
        ours, theirs = context.Pipe()
        share = list(rows[index::processes])
        worker = context.Process(target=work, args=(theirs, platform, share, sizes, end))
        worker.start()
        theirs.close()
        pipes[ours] = worker

    def receive(pipe) -> bool:
        """Takes a message; returns whether the process has no more of this phase."""
        try:
            message = pipe.recv()
        except EOFError:
            del pipes[pipe]
            return True
        if message == "ready":
            return True
        found[message.mechanism] = message
        times = ", ".join(f"{which} {1e3 * t:.2f} ms" for which, t in message.seconds.items())
        told = message.failed or times or message.skipped or "right"
        print(f"{message.mechanism}: {told}", flush=True)
        save(list(found.values()))
        return False

    busy = set(pipes)
    while busy:
        heard = wait(list(busy), timeout=max(0.0, end + GRACE - time.time()))
        for pipe in heard or list(busy):
            if not heard:
                pipes.pop(pipe).kill()
            if not heard or receive(pipe):
                busy.discard(pipe)
    for pipe in list(pipes):
        pipe.send("time")
        while not receive(pipe):
            pass
    for row in found.values():
        if not (row.seconds or row.failed or row.skipped):
            row.failed = "its process crashed, or did not end in time"
    return list(found.values())


def table(about: dict[str, Any], sizes: Sizes, rows: Sequence[Row]) -> str:
    """Returns the table, fastest layer first."""
    lines = [
        f"A layer of {sizes.features} features and {sizes.heads} heads with projections, on "
        f"{sizes.rows} sequences of {sizes.length:,} tokens, bfloat16, parameters in float32: "
        f"{about['device']['name']}, jax {about['versions']['jax']}.",
        "",
        "| mechanism | direction | forward | forward + backward | temporaries | error | in "
        "bfloat16 | on the CPU | decoding | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]

    def milliseconds(row, which):
        return f"{1e3 * row.seconds[which]:,.2f} ms" if which in row.seconds else "-"

    def error(value):
        return "-" if value is None else f"{value:.0e}"

    for row in sorted(rows, key=lambda row: row.seconds.get("backward", float("inf"))):
        memory = row.temporary_bytes.get("backward")
        cells = [
            f"`{row.mechanism}`", row.direction,
            milliseconds(row, "forward"), milliseconds(row, "backward"),
            "-" if memory is None else f"{memory / 1e6:,.0f} MB",
            error(row.error), error(row.half_error), error(row.half_error_on_cpu),
            error(row.decode_error), row.failed or row.skipped or "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Sizes`."""
    default = "default %(default)s"
    parser.add_argument("--rows", type=at_least(1), default=2, help=default)
    parser.add_argument(
        "--length", type=at_least(16), default=16384, metavar="TOKENS", help=default
    )
    parser.add_argument("--features", type=at_least(16), default=1024, help=default)
    parser.add_argument("--heads", type=at_least(1), default=8, help=default)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.layers",
        description="Checks a layer of every mechanism on a GPU against the CPU, and times it.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", choices=registry.names(), help="default: all")
    parser.add_argument("--platform", default="cuda", choices=("cuda", "cpu"))
    add_sizes(parser)
    parser.add_argument(
        "--processes", type=at_least(1), default=machine.cores(), help="default: all cores"
    )
    parser.add_argument("--minutes", type=at_least(1), default=10, help="default %(default)s")
    parser.add_argument("--output", type=output_folder, default=Path("runs/gpu"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, times, prints a table, and writes `layers.md` and `layers.json`."""
    options = parse(argv)
    if reason := reason_against(options.output):
        print(reason, file=sys.stderr)
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the memory
    names = options.only or registry.names()
    rows = [Row(name, direction_of(name)) for name in names]
    sizes = Sizes(options.rows, options.length, options.features, options.heads)
    end = time.time() + 60 * options.minutes
    try:
        about = about_device(jax.devices(options.platform)[0])
    except (RuntimeError, AssertionError) as error:  # an AssertionError under JAX_PLATFORMS=cuda
        reason = (str(error) or "no backend").splitlines()[0]
        print(f"JAX finds no device of {options.platform} ({reason})", file=sys.stderr)
        return 2

    def save(rows):
        record = {
            "machine": about,
            "sizes": sizes._asdict(),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        (options.output / "layers.json").write_text(json.dumps(record, indent=1) + "\n")

    rows = measure(rows, options.platform, sizes, options.processes, end, save)
    save(rows)
    text = table(about, sizes, rows)
    (options.output / "layers.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.output}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
