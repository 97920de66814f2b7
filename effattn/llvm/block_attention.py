"""Block attention for CPUs, in float32: what JAX sees of the kernels of `block_kernels`."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.interfaces import block_attention
from effattn.interfaces.block_attention import Config, Inputs
from effattn.llvm import compiled
from effattn.llvm.primitive import kernel
from effattn.xla import block_attention as by_xla
from effattn.xla import tiling

LIMITS = dispatch.Limits(
    ("float32",),
    others="llvmlite; causality, windows, lengths and documents alone; numbers as offset and scale",
)


_FLOAT32 = jnp.dtype(jnp.float32)


def refusal(config: Config, x: Inputs) -> str | None:
    """Why it does not take these operands, if so."""
    for array in (x.query, x.key, x.value):
        if reason := LIMITS.refusal(array.dtype):
            return reason
    arrays = "additive", "bias", "mask", "positions", "layout"
    options = "activation", "soft_cap", "score_mod", "pattern", "tile"
    given = [name for name in arrays if getattr(x, name) is not None]
    given += [name for name in options if getattr(config, name) is not None]
    given += ["dropout"] if config.dropout_rate else []
    given += ["a traced scale"] if config.scale is None else []
    given += ["a traced query_offset"] if config.offset is None else []
    if given:
        return f"does not take {' and '.join(given)}"
    return compiled.refusal()


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Its tiles have one size."""
    return {}


def forward(config: Config, x: Inputs, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output in the dtype given, the log-sum-exp, and what rounding took from it."""
    out, lse, lost = _attention(("forward", config), *_arrays(x))
    return out.astype(dtype), lse, lost


def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, shared: jax.Array
) -> Inputs:
    """The gradients, from that of the output and `shared` `(*B, T, N)`, dO . O - dL."""
    rows = lse, d_out, shared
    d_query, d_key, d_value = _attention(("backward", config), *_arrays(x), *rows)
    return Inputs(query=d_query, key=d_key, value=d_value)


# (query, key, value[, query_ids, key_ids]) to (out, lse, lost), and with (lse, d_out, shared) after
# these to (d_query, d_key, d_value). What is static is the direction and the rule.

_ROWS = {"forward": 0, "backward": 3}


def _arrays(x: Inputs) -> tuple[jax.Array, ...]:
    query_ids, key_ids = block_attention.ids(x)
    if key_ids is None:
        return x.query, x.key, x.value
    if query_ids is None:
        batch = (1,) * (x.query.ndim - 3)
        query_ids = jnp.ones((*batch, x.query.shape[-3]), jnp.int32)
    return x.query, x.key, x.value, query_ids, key_ids


def _split(direction: str, arrays: Any) -> tuple[Inputs, Any]:
    """The operands, and the rows of the backward."""
    count = len(arrays) - _ROWS[direction]
    (query, key, value, *ids), rows = arrays[:count], arrays[count:]
    return Inputs(query, key, value, segments=tuple(ids) or None), rows


def _shapes(static, *arrays):
    x, _ = _split(static[0], arrays)
    if static[0] == "backward":
        return x.query.shape, x.key.shape, x.value.shape
    rows = x.query.shape[:-1]
    return (*rows, x.value.shape[-1]), rows, rows


def _by_xla(static, *arrays):
    direction, config = static
    x, rows = _split(direction, arrays)
    if direction == "forward":
        return by_xla.forward(config, x, _FLOAT32)
    found = by_xla.backward(config, x, *rows)
    return found.query, found.key, found.value


def _axes(static, *arrays):
    ids = (1, 1) if len(arrays) > 3 + _ROWS[static[0]] else ()
    return (3, 3, 3, *ids, *(2, 3, 2)[: _ROWS[static[0]]])


def _by_kernel(static, shapes, *arrays):
    direction, config = static
    x, rows = _split(direction, arrays)
    none = (jnp.zeros((*(1,) * (x.query.ndim - 3), 0), jnp.int32),) * 2
    operands = (x.query, x.key, x.value, *(x.segments or none))
    if direction == "forward":
        out, largest, total = _call(config, x, direction, shapes, operands)
        log_total = jnp.log(jnp.where(total == 0, 1, total))
        lse = largest + log_total
        return out, jnp.where(total == 0, -jnp.inf, lse), log_total - (lse - largest)
    lse, d_out, shared = rows
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # of rows that see nothing
    splits = _splits(shapes[1], x.query.shape[-3])
    shapes = shapes[0], *((splits, *shape) for shape in shapes[1:])
    with_rows = (*operands, lse, d_out, shared)
    d_query, d_key, d_value = _call(config, x, direction, shapes, with_rows, splits)
    return d_query, d_key.sum(0), d_value.sum(0)


_attention = kernel("effattn_block_attention", _by_kernel, _by_xla, _shapes, _axes)


def _call(config, x, direction, shapes, operands, splits=1):
    from effattn.llvm import block_kernels  # where llvmlite is not, XLA is

    limits: dict[str, Any] = {
        "left": block_kernels.UNLIMITED if config.left is None else config.left,
        "right": block_kernels.UNLIMITED if config.right is None else config.right,
        "offset": config.offset,
        "has_ids": x.segments is not None,
        "splits": splits,
    }
    in_order = np.array([limits[each] for each in block_kernels.LIMITS], np.int64)
    attributes = {"limits": in_order, "scale": np.float32(config.scale)}
    return compiled.call(f"effattn_block_attention_{direction}", shapes, operands, **attributes)


def _splits(shape: tuple[int, ...], queries: int) -> int:
    """The number of tasks that share a key head, of keys of that shape; their gradients are added.

    Each thread has one.
    """
    from effattn.llvm.tiles import TILE

    heads = tiling.known_product(shape[:-3]) * shape[-2]
    return max(1, min(-(-threads() // heads), -(-queries // TILE)))


@functools.cache
def threads() -> int:
    """As many as XLA has: one for each processor that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # on Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
