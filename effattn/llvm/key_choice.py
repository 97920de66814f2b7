"""The choice of keys by index scores on CPUs, in float32, by the kernel of `key_choice_kernel`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn.arrays.axes import over_batch
from effattn.llvm import runtime
from effattn.llvm.key_choice_kernel import OTHER as OTHER
from effattn.llvm.key_chunks import CHUNK, chunks_of, whole
from effattn.llvm.primitive import kernel


class _Static(NamedTuple):
    """Static argument of the primitive; `plain` is the call in XLA, for an example."""

    plain: Callable[..., jax.Array]
    keys_of_query: int
    is_packed: bool


def choose(
    plain: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    weights: jax.Array,
    last: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    count: int,
) -> jax.Array:
    """The keys with the largest scores, int32 `(*B, T, count)`; those of a query are distinct.

    A query that sees fewer keys also gets keys that it does not see, as `OTHER` + key.

    Args:
      plain: the same in XLA for an example, with the arguments `(query, key, weights, last,
        query_ids, key_ids, count)`; without segments, the ids have length 0.
      query: `(*B, T, J, E)`.
      key: `(*B, S, E)`, at least `count` keys.
      weights: `(*B, T, J)`.
      last: int32 `(*B, T)`, the last key that each query may see, at most S - 1.
      segments: segment ids of queries `(*B, T)` and of keys `(*B, S)`, or None.
      count: keys of a query.
    """
    none = jnp.zeros((*key.shape[:-2], 0), jnp.int32)
    ids = (none, none) if segments is None else (x.astype(jnp.int32) for x in segments)
    static = _Static(plain, count, segments is not None)
    (found,) = _kernel(static, query, key, weights, last, *ids)
    return lax.bitcast_convert_type(found, jnp.int32)


def _shapes(static, query, *_):
    return ((*query.shape[:-2], static.keys_of_query),)


def _by_xla(static, *arrays):
    def of_example(*arrays):
        return static.plain(*arrays, static.keys_of_query)

    of_example = over_batch(of_example, arrays[0].ndim - 3)
    return (lax.bitcast_convert_type(of_example(*arrays), jnp.float32),)


def _names(static, *_):
    axes = 3, 2, 2, 1, 1, 1
    return [(None,) * count for count in axes], [(None, None)]


def _by_kernel(static, shapes, query, key, weights, last, query_ids, key_ids):
    keys = chunks_of(whole(key, -2, CHUNK))
    operands: Any = query, keys, weights, last, query_ids, whole(key_ids, -1, CHUNK)
    limits = np.array([static.keys_of_query, static.is_packed], np.int64)
    name = "effattn_key_choice_forward"
    return runtime.call(name, shapes, operands, limits=limits, scale=np.float32(1))


_kernel = kernel("effattn_key_choice", _by_kernel, _by_xla, _shapes, _names)
