"""Which implementations each mechanism has, where they run, and what they take."""

import importlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from effattn import dispatch, registry
from effattn.cores import block_attention, linear_recurrence
from effattn.functional import paged


def _without_llvm(modules: Mapping[str, str]) -> Mapping[str, str]:
    return {name: module for name, module in modules.items() if name != "llvm"}


# The modules that dispatch takes implementations from.
CORES: Mapping[str, Mapping[str, str]] = {
    "block_attention": block_attention.MODULES,
    "patterned_attention": _without_llvm(block_attention.MODULES),  # a layout, or a rule for each
    "additive_attention": {"xla": block_attention.MODULES["xla"]},
    "activated_attention": {"xla": block_attention.MODULES["xla"]},
    "linear_recurrence": linear_recurrence.MODULES,
    "decaying_recurrence": _without_llvm(linear_recurrence.MODULES),
    "removal_recurrence": {"xla": linear_recurrence.MODULES["xla"]},
    "diagonal_recurrence": {"xla": "effattn.xla.diagonal_recurrence"},
    "paged_attention": paged.MODULES,
}


class Row(NamedTuple):
    """One implementation of one mechanism.

    Attributes:
      mechanism: its name in the registry, or "paged_attention".
      implementation: what the argument `implementation` names.
      platform: that it runs on, as JAX calls it, or "any".
      dtypes: of queries, keys and values.
      size: the largest head size, or number of features; None is any.
      others: what else it asks for.
    """

    mechanism: str
    implementation: str
    platform: str
    dtypes: tuple[str, ...]
    size: int | None
    others: str


class Support(tuple[Row, ...]):
    """Rows; as text, a Markdown table."""

    def __str__(self) -> str:
        lines = [
            "| mechanism | implementation | runs on | dtypes | head size | asks for |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in self:
            size = "any" if row.size is None else f"up to {row.size}"
            cells = (
                f"`{row.mechanism}`",
                f"`{row.implementation}`",
                row.platform,
                ", ".join(row.dtypes),
                size,
                row.others,
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def support(mechanism: str | None = None) -> Support:
    """Which implementations there are of each mechanism, or of one: `print(effattn.support())`.

    Mechanisms that reduce to none of the cores are plain JAX, run everywhere, and have no row.

    It is read from what dispatch itself calls. Every option of a function is taken by all of its
    implementations, within these limits and what they ask for; a call beyond them is a
    `NotImplementedError` that says which it was.

    Args:
      mechanism: a name in the registry, or "paged_attention"; None for all.

    Raises:
      ValueError: an unknown name.
    """
    if mechanism is None:
        with_cores = (name for name in registry.names() if registry.get(name).cores)
        names: tuple[str, ...] = (*with_cores, "paged_attention")
    else:
        names = (mechanism,)
    return Support(row for name in names for row in _rows(name))


def _rows(name: str) -> Iterator[Row]:
    cores = (name,) if name == "paged_attention" else registry.get(name).cores
    if not cores:
        return
    for implementation, platform in dispatch.PLATFORMS.items():
        modules = [CORES[core].get(implementation) for core in cores]
        if implementation == "cudnn" and name == "softmax":
            limits = [dispatch.Limits(("bfloat16", "float16"), others="what `jax.nn` takes")]
        elif None in modules:
            continue
        else:
            limits = [importlib.import_module(module).LIMITS for module in modules if module]
        dtypes = [
            dtype
            for dtype in dispatch.Limits().dtypes
            if all(_computed_in(name, dtype) in one.dtypes for one in limits)
        ]
        if not dtypes:
            continue
        sizes = [one.size for one in limits if one.size is not None]
        pieces = (piece for one in limits for piece in one.others.split("; ") if piece)
        others = "; ".join(dict.fromkeys(pieces))
        where = platform or ("cuda" if implementation == "cudnn" else "any")
        yield Row(name, implementation, where, tuple(dtypes), min(sizes, default=None), others)


def _computed_in(name, dtype):
    in_float32 = name in registry.names() and registry.get(name).in_float32
    return str(jnp.promote_types(dtype, jnp.float32)) if in_float32 else dtype
