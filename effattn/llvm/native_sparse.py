"""Native sparse attention on CPUs, in float32, by the kernels of `native_sparse_kernel`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.arrays.axes import over_batch
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch.places import Names
from effattn.llvm import runtime
from effattn.llvm.block_attention import splits_of
from effattn.llvm.key_chunks import CHUNK, chunks_of, whole
from effattn.llvm.native_sparse_kernel import ATTRIBUTES
from effattn.llvm.primitive import kernel
from effattn.xla import tiling

LIMITS = dispatch.Limits(
    ("float32",), others="llvmlite; whole sequences of one document, no decoding"
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration of a call.

    Attributes:
      sizes: l, d, b, n and w of `effattn.native_sparse_attention`.
      scale: multiplies the products.
      plain: the call in XLA, with the arrays of `attend`.
    """

    sizes: tuple[int, int, int, int, int]
    scale: float
    plain: Callable[..., jax.Array]


def refusal(*arrays: jax.Array) -> str | None:
    """Reason why the kernels do not take these arrays, or None."""
    return runtime.refusal_of(LIMITS, arrays)


def attend(
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    compressed_key: jax.Array,
    compressed_value: jax.Array,
    gates: jax.Array,
    limit: jax.Array,
) -> jax.Array:
    """The gated sum of the three branches for a key head, `(T, G, Hv)`.

    Args:
      config: static configuration.
      query: `(T, G, H)`, with at least one token and one head.
      key: `(T, H)`.
      value: `(T, Hv)`.
      compressed_key: `(M, H)`.
      compressed_value: `(M, Hv)`.
      gates: `(T, G, 3)`.
      limit: int32 `()`, valid keys.
    """
    arrays = query, key, value, compressed_key, compressed_value, gates, limit[None]
    return _attention(config, *mesh_axes.vary_alike(arrays))


def _forward(config, *operands):
    (out,) = _kernel(("forward", config), *operands)
    return out


def _backward(config, operands, cotangent):
    return *_kernel(("backward", config), *operands, cotangent), None


_attention = with_derivatives(
    _forward, lambda config, *operands: (_forward(config, *operands), operands), _backward
)


def _shapes(static, query, key, value, *others):
    if static[0] == "forward":
        return ((*query.shape[:-1], value.shape[-1]),)
    return tuple(x.shape for x in (query, key, value, *others[:3]))


def _by_xla(static, *arrays):
    direction, config = static
    *operands, limit = arrays[:7]

    def of_key_head(*operands):
        *some, limit = operands
        return config.plain(*some, limit[0])

    run = of_key_head
    run = over_batch(run, limit.ndim - 1)
    if direction == "forward":
        return (run(*operands, limit),)
    return jax.vjp(lambda *some: run(*some, limit), *operands)[1](arrays[7])


def _names(static, *arrays):
    axes = 3, 2, 2, 2, 2, 3, 1
    names: list[Names] = [(None,) * count for count in axes]
    if static[0] == "forward":
        return names, [names[0]]
    return [*names, names[0]], names[:-1]


def _by_kernel(static, shapes, *arrays):
    direction, config = static
    query, key, value, compressed_key, compressed_value, gates, limit = arrays[:7]
    sizes = [x.shape[-1] for x in (query, value)]
    rows = [x.shape[-2] for x in (key, compressed_key)]
    query = whole(query, -1, runtime.lanes())
    pairs: list[Any] = [(key, value), (compressed_key, compressed_value)]
    pairs = [[whole(whole(x, -1, runtime.lanes()), -2, CHUNK) for x in pair] for pair in pairs]
    operands = [query]
    for keys, values in pairs:
        operands += [chunks_of(keys), values]
    operands += [gates, limit]
    most = _most(config.sizes, *rows)
    if direction == "forward":
        shape = (*shapes[0][:-1], pairs[0][1].shape[-1])
        (out,) = _call(direction, config, [shape], operands, most, 1)
        return (out[..., : sizes[1]],)
    for keys, values in pairs:
        operands += [keys, chunks_of(values)]
    operands.append(whole(arrays[7], -1, runtime.lanes()))
    batch = shapes[0][:-3]
    splits = splits_of(tiling.known_product(batch), query.shape[-3])
    of_keys = [(splits, *batch, *x.shape[-2:]) for pair in pairs for x in pair]
    wanted = [(*shapes[0][:-1], query.shape[-1]), *of_keys, shapes[-1]]
    d_query, *d_keys, d_gates = _call(direction, config, wanted, operands, most, splits)
    summed = (
        x.sum(0)[..., : shape[-2], : shape[-1]]
        for x, shape in zip(d_keys, shapes[1:5], strict=True)
    )
    return d_query[..., : sizes[0]], *summed, d_gates


def _most(sizes, length, compressed):
    """The most keys of a branch, in whole chunks."""
    _, _, block, selected, window = sizes

    def chunks(count):
        return -(-count // CHUNK)

    # A block or a window that does not begin with a chunk may meet one chunk more.
    of_block = chunks(block) + (block % CHUNK != 0 and CHUNK % block != 0)
    of_blocks = min(selected, -(-length // block)) * of_block
    return CHUNK * max(chunks(compressed), of_blocks, chunks(min(window, length)) + 1)


def _call(direction, config, shapes, operands, most, splits):
    values = dict(zip(ATTRIBUTES, (*config.sizes, most, splits), strict=True))
    limits = np.array([values[name] for name in ATTRIBUTES], np.int64)
    name = f"effattn_native_sparse_{direction}"
    return runtime.call(name, shapes, operands, limits=limits, scale=np.float32(config.scale))


_kernel = kernel("effattn_native_sparse", _by_kernel, _by_xla, _shapes, _names)
