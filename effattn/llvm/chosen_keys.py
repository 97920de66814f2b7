"""Attention to chosen keys on CPUs, in float32, by the kernels of `chosen_key_kernels`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.axes import over_batch
from effattn.arrays.linear_map import with_derivatives
from effattn.llvm import runtime
from effattn.llvm.block_attention import splits_of
from effattn.llvm.key_chunks import CHUNK, whole
from effattn.llvm.primitive import kernel
from effattn.xla import tiling

LIMITS = dispatch.Limits(("float32",), others="llvmlite")


class Config(NamedTuple):
    """Static configuration of a call.

    Attributes:
      scale: multiplies the products.
      plain: the call in XLA, `(query, key, value, at) -> (output, log-sum-exp)`.
    """

    scale: float
    plain: Callable[..., tuple[jax.Array, jax.Array]]


def refusal(*arrays: jax.Array) -> str | None:
    """Reason why the kernels do not take these arrays, or None."""
    return runtime.refusal_of(LIMITS, arrays)


def attend(
    config: Config, query: jax.Array, key: jax.Array, value: jax.Array, at: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output `(T, G, Hv)` and log-sum-exp `(T, G)` of a key head.

    Args:
      config: static configuration.
      query: `(T, G, H)`, with at least one token and one head.
      key: `(S, H)`.
      value: `(S, Hv)`.
      at: int32 `(T, k)`; the keys of a query are distinct, and -1 is none.
    """
    return _attention(config, *mesh_axes.vary_alike((query, key, value, at)))


def _forward(config, *operands):
    return _kernel(("forward", config), *operands)


def _with_residuals(config, *operands):
    out, lse = _forward(config, *operands)
    return (out, lse), (operands, out, lse)


def _backward(config, residuals, cotangents):
    operands, out, lse = residuals
    d_out, d_lse = cotangents
    delta = (d_out * out).sum(-1) - d_lse
    return *_kernel(("backward", config), *operands, lse, d_out, delta), None


_attention = with_derivatives(_forward, _with_residuals, _backward)


def _shapes(static, query, key, value, *_):
    if static[0] == "backward":
        return query.shape, key.shape, value.shape
    return (*query.shape[:-1], value.shape[-1]), query.shape[:-1]


def _by_xla(static, *arrays):
    direction, config = static
    *heads, at = arrays[:4]
    run = config.plain
    run = over_batch(run, at.ndim - 2)
    if direction == "forward":
        return run(*heads, at)
    _, d_out, delta = arrays[4:]
    (out, lse), pull_back = jax.vjp(lambda *heads: run(*heads, at), *heads)
    return pull_back((d_out, (d_out * out).sum(-1) - delta))


def _names(static, *_):
    axes, results = [3, 2, 2, 2], [3, 2]
    if static[0] == "backward":
        axes, results = [*axes, 2, 3, 2], [3, 2, 2]
    return [(None,) * count for count in axes], [(None,) * count for count in results]


def _by_kernel(static, shapes, *arrays):
    direction, config = static
    lanes = runtime.lanes()
    query, key, value = (whole(x, -1, lanes) for x in arrays[:3])
    at = whole(arrays[3], -1, CHUNK, fill=-1)
    name, scale = f"effattn_chosen_keys_{direction}", np.float32(config.scale)
    if direction == "forward":
        rows = shapes[1]
        wanted = [(*rows, value.shape[-1]), rows, rows]
        attributes: dict[str, Any] = {"limits": np.array([1], np.int64), "scale": scale}
        out, largest, total = runtime.call(name, wanted, (query, key, value, at), **attributes)
        lse = largest + jnp.log(jnp.where(total == 0, 1, total))
        lse = jnp.where(total == 0, dtypes.lowest(lse.dtype), lse)
        return out[..., : shapes[0][-1]], lse
    lse, d_out, delta = arrays[4:]
    operands = query, key, value, at, lse, whole(d_out, -1, lanes), delta
    *batch, tokens, heads, _ = shapes[0]
    splits = splits_of(tiling.known_product(batch), tokens)
    of_keys = [(splits, *batch, *x.shape[-2:]) for x in (key, value)]
    wanted = [(*batch, tokens, heads, query.shape[-1]), *of_keys]
    attributes = {"limits": np.array([splits], np.int64), "scale": scale}
    d_query, d_key, d_value = runtime.call(name, wanted, operands, **attributes)
    found = d_query, d_key.sum(0), d_value.sum(0)
    return tuple(x[..., : shape[-1]] for x, shape in zip(found, shapes, strict=True))


_kernel = kernel("effattn_chosen_keys", _by_kernel, _by_xla, _shapes, _names)
