"""Block attention on CPUs, in float32: the implementation that `effattn.cores` calls.

`effattn.llvm.block_kernels` generates the kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.dispatch.partition import may_be_divided
from effattn.dispatch.places import HEADS
from effattn.interfaces import block_attention
from effattn.interfaces.block_attention import Attended, Config, Inputs
from effattn.llvm import layouts, runtime
from effattn.llvm.block_kernels import ATTRIBUTES, MAX_FLOATS, MAX_TILES, UNLIMITED
from effattn.llvm.primitive import kernel
from effattn.llvm.tiles import TILE
from effattn.xla import block_attention as by_xla
from effattn.xla import tiling

LIMITS = dispatch.Limits(
    ("float32",),
    others="llvmlite; no options beyond causality, windows, lengths, documents, a bias of keys or "
    "of pairs, a soft cap and layouts, which must be known when the program is traced, and be "
    "shared by all examples and, on several devices, by all heads; static query_offset and scale",
)

_FLOAT32 = jnp.dtype(jnp.float32)


def refusal(config: Config, x: Inputs) -> str | None:
    """Reason why the kernels do not take these inputs, or None."""
    for array in (x.query, x.key, x.value):
        if reason := LIMITS.refusal(array.dtype):
            return reason
    arrays = "additive", "mask", "positions"
    options = ["activation", "score_mod"]
    options += ["tile"] if x.layout is None else []
    options += ["pattern"] if x.layout is None and not _has_layout(config.pattern) else []
    given = [name for name in arrays if getattr(x, name) is not None]
    given += [name for name in options if getattr(config, name) is not None]
    given += ["dropout"] if config.dropout_rate else []
    given += ["a traced scale"] if config.scale is None else []
    given += ["a traced query_offset"] if config.offset is None else []
    given += (
        []
        if x.bias is None or _is_of_keys(x) or _is_of_pairs(x)
        else ["a bias other than float32 numbers of keys or of pairs"]
    )
    given += (
        []
        if x.layout is None or _is_known(x.layout)
        else ["a layout that is traced, or that examples or divided heads do not share"]
    )
    if given:
        return f"does not take {' and '.join(given)}"
    return runtime.refusal()


def _is_of_keys(x):
    """Returns whether the bias is one number for each key, whatever the query."""
    *_, queries, keys = x.bias.shape
    return queries == 1 and keys == x.key.shape[-3] and x.bias.dtype == _FLOAT32


def _is_of_pairs(x):
    """Returns whether the bias has one number for each pair of a query and a key."""
    pairs = x.query.shape[-3], x.key.shape[-3]
    return x.bias.shape[-2:] == pairs and x.bias.dtype == _FLOAT32


def _has_layout(pattern):
    """Returns whether a layout can be made from the pattern, for all heads if divided."""
    is_shared = getattr(pattern, "heads", None) is None
    return hasattr(pattern, "layout") and (is_shared or not may_be_divided())


def _is_known(layout):
    """Returns whether the layout is known now, for all examples, and for all heads if divided."""
    *leading, _ = np.shape(layout.partial_counts)
    return not layout.is_traced and len(leading) <= (0 if may_be_divided() else 1)


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns no tilings to try: the kernels have one tile size."""
    return {}


def forward(config: Config, x: Inputs, exact: bool) -> Attended:
    """Returns the output, its rounding error if `exact`, and the log-sum-exp."""
    arrays = _with_bias(config, x.query, x.key, x.value, x.bias)
    static = "forward", _without_bias(config, x)
    return Attended.of(x, *_attention(static, *arrays, *_ids(x)))


def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, delta: jax.Array
) -> Inputs:
    """Returns the gradients; `delta` `(*B, T, N)` is rowsum(dO * O) - dL.

    The gradient of a bias of pairs takes three more passes: of the kernel forward, and of XLA
    forward and backward. If the caller does not need it, XLA removes them.
    """
    given = x.query, x.key, x.value, x.bias
    arrays, pull_back = jax.vjp(functools.partial(_with_bias, config), *given)
    static = "backward", _without_bias(config, x)
    gradients = _attention(static, *arrays, *_ids(x), lse, d_out, delta)
    d_query, d_key, d_value, d_bias = pull_back((*gradients, jnp.zeros_like(arrays[3])))
    if x.bias is not None and not _is_of_keys(x):
        kernels, config = config, dataclasses.replace(config, implementations=dispatch.XLA)
        # All terms must have the same rounding, which matters where logits are large.
        ours, theirs = forward(kernels, x, True), by_xla.forward(config, x, True)
        delta = delta + jnp.sum((theirs.out - ours.out) * d_out, -1)
        d_bias = by_xla.backward(config, x, theirs.lse, d_out, delta).bias
    return Inputs(query=d_query, key=d_key, value=d_value, bias=d_bias)


def _with_bias(config, query, key, value, bias):
    """Query, key, value, and the bias `(*B, N or 1, T, S)` or `(*B, 1, 0, 0)`.

    A bias `(*#B, #K, #G, 1, S)` becomes one more feature of the keys. The queries have a 1 there,
    and the scale in the other features, so no bias is rounded.
    """
    none = jnp.zeros((*(1,) * (query.ndim - 3), 1, 0, 0), _FLOAT32)
    if bias is None:
        return query, key, value, none
    if bias.shape[-2] == query.shape[-3] and bias.shape[-2:] != (1, key.shape[-3]):
        return query, key, value, _by_head(bias, query.shape[-2], key.shape[-2])
    if bias.shape[-3] > 1:  # query heads of a key head have different biases
        key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], -2) for x in (key, value))
    *batch, keys, heads, _ = key.shape
    bias = bias[..., 0, :].reshape(*bias.shape[:-4], -1, keys)  # (*#B, #N, S)
    of_keys = jnp.broadcast_to(jnp.swapaxes(bias, -1, -2), (*batch, keys, heads))
    of_queries = jnp.ones((*query.shape[:-1], 1), query.dtype)
    query = jnp.concatenate([query * np.float32(config.scale), of_queries], -1)
    return query, jnp.concatenate([key, of_keys[..., None]], -1), value, none


def _by_head(bias, heads, key_heads):
    """The bias `(*#B, #K, #G, T, S)` as `(*#B, N or 1, T, S)`."""
    *batch, _, _, queries, keys = bias.shape
    if bias.shape[-4:-2] != (1, 1):
        bias = jnp.broadcast_to(bias, (*batch, key_heads, heads // key_heads, queries, keys))
    return bias.reshape(*batch, -1, queries, keys)


def _without_bias(config, x):
    """Configuration of the arrays of `_with_bias`."""
    is_feature = x.bias is not None and _is_of_keys(x)
    return dataclasses.replace(config, scale=1.0) if is_feature else config


# The primitive. Forward, (query, key, value, bias[, query_ids, key_ids]) -> (out, lse, lse_error);
# backward, the same arrays and (lse, d_out, delta) -> (d_query, d_key, d_value). The static
# argument is (direction, config).

_ROWS = {"forward": 0, "backward": 3}  # number of arrays after the inputs


def _ids(x: Inputs) -> tuple[jax.Array, ...]:
    query_ids, key_ids = block_attention.ids(x)
    if key_ids is None:
        return ()
    if query_ids is None:
        batch = (1,) * (x.query.ndim - 3)
        query_ids = jnp.ones((*batch, x.query.shape[-3]), jnp.int32)
    return query_ids, key_ids


def _split(direction: str, arrays: Any) -> tuple[Inputs, Any]:
    """Splits arrays into the inputs and, backward, (lse, d_out, delta)."""
    count = len(arrays) - _ROWS[direction]
    (query, key, value, bias, *ids), rows = arrays[:count], arrays[count:]
    return Inputs(query, key, value, bias=bias, segments=tuple(ids) or None), rows


def _shapes(static, *arrays):
    x, _ = _split(static[0], arrays)
    if static[0] == "backward":
        return x.query.shape, x.key.shape, x.value.shape
    rows = x.query.shape[:-1]
    return (*rows, x.value.shape[-1]), rows, rows


def _by_xla(static, *arrays):
    direction, config = static
    x, rows = _split(direction, arrays)
    if config.known_layout is not None:
        x = x._replace(layout=jax.tree.map(jnp.asarray, config.known_layout.layout))
    groups = x.key.shape[-2], x.query.shape[-2] // x.key.shape[-2]
    has_bias = x.bias is not None and x.bias.size
    x = x._replace(bias=_by_group(x.bias, groups) if has_bias else None)
    if direction == "forward":
        attended = by_xla.forward(config, x, True)
        return attended.out, attended.lse, attended.lse_error
    found = by_xla.backward(config, x, *rows)
    return found.query, found.key, found.value


def _by_group(bias, groups):
    """The bias `(*B, N or 1, T, S)` as `(*B, #K, #G, T, S)`."""
    *batch, heads, queries, keys = bias.shape
    return bias.reshape(*batch, *((1, 1) if heads == 1 else groups), queries, keys)


def _names(static, *arrays):
    tokens, each_query, ids = (None, HEADS, None), (None, HEADS), (None,)
    of_inputs = *(tokens,) * 3, (HEADS, None, None)
    given = of_inputs if len(arrays) == 4 + _ROWS[static[0]] else (*of_inputs, ids, ids)
    if static[0] == "backward":
        return (*given, each_query, tokens, each_query), of_inputs[:3]
    return given, (tokens, each_query, each_query)


def _by_kernel(static, shapes, *arrays):
    direction, config = static
    x, rows = _split(direction, arrays)
    batch = (1,) * (x.query.ndim - 3)
    none = jnp.zeros((*batch, 0), jnp.int32)
    ids = (*x.segments, _ranges(x.segments[1])) if x.segments else (none,) * 3
    group, row_count = 0, 0
    steps: tuple[jax.Array, ...] = (none,) * 3
    if config.known_layout is not None:
        group = _tiles_of_steps(direction, x)
        layout = config.known_layout.layout
        found = layouts.steps_of(layout, config.pattern, config.offset, group)
        row_count = len(found.starts)
        steps = tuple(jnp.asarray(array.reshape(*batch, -1)) for array in found)
    operands = (x.query, x.key, x.value, x.bias, *ids, *steps)
    limits = {"has_ids": x.segments is not None, "group": group, "rows": row_count, "splits": 1}
    if direction == "forward":
        out, largest, total = _call(config, direction, shapes, operands, limits)
        log_total = jnp.log(jnp.where(total == 0, 1, total))
        lse = largest + log_total
        return out, jnp.where(total == 0, -jnp.inf, lse), log_total - (lse - largest)
    lse, d_out, delta = rows
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # rows without keys
    heads = tiling.known_product(shapes[1][:-3]) * shapes[1][-2]
    limits["splits"] = splits = splits_of(heads, x.query.shape[-3])
    shapes = shapes[0], *((splits, *shape) for shape in shapes[1:])
    with_rows = (*operands, lse, d_out, delta)
    d_query, d_key, d_value = _call(config, direction, shapes, with_rows, limits)
    return d_query, d_key.sum(0), d_value.sum(0)


_attention = kernel("effattn_block_attention", _by_kernel, _by_xla, _shapes, _names)


def _ranges(ids: jax.Array) -> jax.Array:
    """The smallest and the largest id of each chunk of keys, int32 `(*B, 2 chunks)`."""
    *batch, keys = ids.shape
    padded = jnp.pad(ids, [(0, 0)] * len(batch) + [(0, -keys % TILE)], mode="edge")
    chunks = padded.reshape(*batch, -1, TILE)
    return jnp.stack([chunks.min(-1), chunks.max(-1)], -1).reshape(*batch, -1)


def _tiles_of_steps(direction, x):
    """Number of query tiles in a group, for a call with a layout, before the kernel runs."""
    size, value_size = x.query.shape[-1], x.value.shape[-1]
    features = size + value_size
    if direction == "backward":
        features = 3 * size + 2 * value_size
    most = MAX_FLOATS // ((features + 4) * TILE)  # 4: ids, their range, and two sums of rows
    rows = tiling.known_product(x.query.shape[:-3]) * x.query.shape[-2]
    fair = rows * -(-x.query.shape[-3] // TILE) // (4 * threads())
    return max(1, min(most, fair, MAX_TILES))


def _call(config, direction, shapes, operands, limits):
    limits |= {
        "left": UNLIMITED if config.left is None else config.left,
        "right": UNLIMITED if config.right is None else config.right,
        "offset": config.offset,
        "cap_bits": np.float32(config.soft_cap or 0).view(np.int32),
    }
    in_order = np.array([limits[each] for each in ATTRIBUTES], np.int64)
    attributes = {"limits": in_order, "scale": np.float32(config.scale)}
    return runtime.call(f"effattn_block_attention_{direction}", shapes, operands, **attributes)


def splits_of(heads: int, queries: int) -> int:
    """Number of tasks that share the work of a key head, if there are so many key heads.

    The gradients of these tasks are added up. There are enough tasks for all threads, and at most
    one for each query tile.
    """
    return max(1, min(-(-threads() // max(heads, 1)), -(-queries // TILE)))


@functools.cache
def threads() -> int:
    """Number of XLA's threads: one for each processor that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # on Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
