"""Tables of `docs/plan.md`: `python -m effattn.analysis.planning.tables states` or `contexts`."""

import sys
from collections.abc import Callable, Mapping, Sequence

from effattn.analysis.planning import memory, report, settings
from effattn.analysis.planning.models import MODELS
from effattn.analysis.planning.plan import plan
from effattn.analysis.planning.settings import PRECISIONS

SHARDS = 64
MILLION = 1 << 20


def states() -> str:
    """Bytes of parameters, gradients and states of Adam, and their parts in ZeRO.

    Rajbhandari et al. 2020, section 5: the stages 1, 2 and 3 divide the states, then the gradients,
    then the parameters among the devices.
    """
    head = ("model", "parameters", "precision", "bytes a parameter", "one device")
    rows = [(*head, *(f"ZeRO-{stage} on {SHARDS}" for stage in (1, 2, 3)))]
    for name, config in MODELS.items():
        for precision, sizes in PRECISIONS.items():
            setting = settings.make(
                config,
                "softmax",
                4096,
                {},
                batch=1,
                microbatches=1,
                precision=precision,
                remat=True,
            )
            number = memory.parameters(setting).total
            whole = {
                "states": sizes["masters"] + sizes["optimiser"],
                "gradients": sizes["gradients"],
                "parameters": sizes["parameters"],
            }
            left = [left_on_each(number, whole, stage, SHARDS) for stage in (0, 1, 2, 3)]
            parts = ", ".join(f"{size} {part}" for part, size in sizes.items() if size)
            cells = [report.amount(size, "B") for size in left]
            each = f"{sum(sizes.values())} ({parts})"
            rows.append((name, report.amount(number, ""), precision, each, *cells))
    return report.markdown(rows)


def left_on_each(number: float, sizes: Mapping[str, int], stage: int, devices: int) -> float:
    """Bytes on each device if ZeRO divides the first parts among the devices, as its stage says."""
    stored = [number * size for size in sizes.values()]
    return sum(stored[:stage]) / devices + sum(stored[stage:])


# Model, sequences of a step, and mesh. Softmax attention divides its heads by `sequence`.
_CONTEXTS: Sequence[tuple[str, int, dict[str, int]]] = (
    ("1.3B", 1, {"sequence": 8}),
    ("7B", 8, {"fsdp": 8, "sequence": 8}),
    ("7B", 16, {"fsdp": 16, "sequence": 32}),
    ("7B", 128, {"fsdp": 128, "sequence": 32}),
)


def contexts() -> str:
    """Training steps on sequences of 1,048,576 tokens, with H100s, mixed precision and remat."""
    head = ("devices", "model", "mechanism", "mesh", "memory", "step", "tokens/s", "utilisation")
    rows = [(*head, "sent for the sequence")]
    for name, batch, mesh in _CONTEXTS:
        for mechanism in ("softmax", "gated_linear"):
            found = plan(MODELS[name], mechanism, MILLION, mesh, "h100", batch=batch)
            sent = sum(t.sent for t in found.transfers if t.kind.startswith("sequence: "))
            sent -= sum(t.sent for t in found.transfers if t.kind == "sequence: gradients")
            rows.append(
                (
                    f"{found.setting.devices:,}",
                    name,
                    f"`{mechanism}`",
                    report.mesh(found),
                    report.amount(found.memory.total, "B"),
                    report.span(found.seconds),
                    report.amount(found.tokens_per_second, ""),
                    f"{100 * found.utilisation:.0f} %",
                    report.amount(sent, "B"),
                )
            )
    return report.markdown(rows)


TABLES: Mapping[str, Callable[[], str]] = {"states": states, "contexts": contexts}

if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in TABLES]:
        sys.exit(f"give one of {', '.join(TABLES)}, got {' '.join(sys.argv[1:]) or 'nothing'}")
    print(TABLES[sys.argv[1]]())
