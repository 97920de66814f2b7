"""Description of the machine, and its rates of matrix products and exponentials."""

import datetime
import functools
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from benchmarks.workloads import HEAD_SIZE, HEADS
from experiments.harness.machine import commit, cores, processor

PACKAGES = ("jax", "jaxlib", "numpy", "tokamax", "torch")
SQUARE, TILE, EXPONENTIALS = 4096, 512, 2**20  # the exponentials stay in the cache


class Rate(NamedTuple):
    """Measured rate: floating-point operations of a matrix product, or exponentials, per second."""

    kind: str
    of: str
    per_second: float


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def describe(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Returns the machine, versions and load, which a reader needs to judge the numbers."""
    threads = {"XLA": cores()}
    if installed("torch"):
        import torch

        torch.set_num_threads(cores())
        threads["PyTorch"] = torch.get_num_threads()
    return {
        "cpu": processor(),
        "cores": cores(),
        "threads": threads,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            "effattn": effattn.__version__,
            **dict(zip(packages, map(_version, packages), strict=True)),
        },
        "commit": commit() or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def rates(seconds: float) -> list[Rate]:
    """Measures each rate for about this many seconds; returns the best of all calls."""
    draw = np.random.default_rng(0).standard_normal
    square = draw((SQUARE, SQUARE), dtype=np.float32)
    rows = draw((HEADS, TILE, HEAD_SIZE), dtype=np.float32)
    columns = draw((HEADS, HEAD_SIZE, TILE), dtype=np.float32)
    exponents = -np.abs(draw(EXPONENTIALS, dtype=np.float32))
    square_text = f"{SQUARE} x {SQUARE} by {SQUARE} x {SQUARE}"
    tile_text = f"{HEADS} of {TILE} x {HEAD_SIZE} by {HEAD_SIZE} x {TILE}"

    def measure(library: str, prepare: Callable, product: Callable, exp: Callable) -> list[Rate]:
        measured = []
        for kind, text, operations, call, operands in (
            ("product", square_text, 2 * SQUARE**3, product, (square, square)),
            ("product", tile_text, 2 * HEADS * TILE**2 * HEAD_SIZE, product, (rows, columns)),
            ("exponential", f"exp of {EXPONENTIALS}", EXPONENTIALS, exp, (exponents,)),
        ):
            placed = [prepare(operand) for operand in operands]
            best = _best(functools.partial(call, *placed), seconds)
            measured.append(Rate(kind, f"{text}, {library}", operations / best))
        return measured

    product, exp = jax.jit(jnp.matmul), jax.jit(jnp.exp)
    found = measure(
        "XLA",
        jnp.asarray,
        lambda a, b: product(a, b).block_until_ready(),
        lambda a: exp(a).block_until_ready(),
    )
    if installed("torch"):
        import torch

        torch.set_num_threads(cores())
        found += measure("PyTorch", torch.from_numpy, torch.matmul, torch.exp)
    return found


def _best(call: Callable[[], Any], seconds: float) -> float:
    call()
    taken: list[float] = []
    while sum(taken) < seconds:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
