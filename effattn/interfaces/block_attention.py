"""Static configuration and inputs of a block-attention call.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K, query length T, key length S,
head dimensions H and Hv. `#` marks an axis that may have length 1 and broadcast.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.arrays import dtypes
from effattn.patterns.layouts import BlockLayout, KnownLayout

NO_KEY = np.iinfo(np.int32).min  # segment id of a key that no query may attend to


Origin = Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration of a block-attention call.

    Attributes:
      tile: (queries, keys) in a tile. With a layout, the tile of the layout. None is the default of
        the implementation.
      scale: factor of the products of queries and keys; None if `Inputs.scale` has the factor.
      left, right: number of positions that a query sees before and after its position; None is
        without limit. Causal attention has right = 0.
      offset: position of the first query; None if `Inputs.offset` has the position.
      soft_cap: c, for c * tanh(logits / c) after the bias.
      score_mod: `(constants, logit, b, h, i, j) -> logit` on scalars, applied last.
      dropout_rate: fraction of the weights that are dropped.
      precision: precision of the matrix products.
      pattern: an object whose `allows(i, j, h)` is True for pairs that may attend. With a layout
        it is evaluated in partial tiles only.
      key_tiles: number of key tiles of the layout in a step.
      known_layout: the layout, for implementations that need its tiles when the program is traced.
      origin: `(b, h, i, j) -> (b, h, i, j)`, for mechanisms that rearrange tokens or heads. It maps
        example, head and positions of this call to those passed to `score_mod` and dropout.
      activation: "sigmoid", "squared_relu" or "laplace", applied to each logit in place of the
        softmax. The log-sum-exp then has no meaning.
      implementations: the result of `effattn.dispatch.choose`.
    """

    tile: tuple[int, int] | None
    scale: float | None
    left: int | None = None
    right: int | None = None
    offset: int | None = 0
    soft_cap: float | None = None
    score_mod: Callable[..., jax.Array] | None = None
    dropout_rate: float = 0.0
    precision: Any = None
    pattern: Any = None
    key_tiles: int = 1
    known_layout: KnownLayout | None = None
    origin: Origin | None = None
    activation: str | None = None
    implementations: dispatch.Chosen = dispatch.XLA


class Inputs(NamedTuple):
    """Arrays of a block-attention call; None if absent. Arrays marked * have gradients.

    Attributes:
      query: `(*B, T, N, H)` *.
      key: `(*B, S, K, H)` *.
      value: `(*B, S, K, Hv)` *.
      bias: `(*#B, #K, #G, #T, #S)`, added to the logits *.
      scale: `()`, factor of the products of queries and keys *.
      additive: v `(N, H)`, for additive scores sum_h v_h tanh(q_h + k_h) in place of products of
        queries and keys; needs K = N *.
      constants: arrays that `score_mod` closes over *.
      mask: bool `(*#B, #K, #G, #T, #S)`, True for pairs that may attend.
      key_mask: bool `(*B, S)`, False for keys that no query may attend to.
      segments: int segment ids of the queries `(*B, T)` and of the keys `(*B, S)`; a query attends
        to keys with an equal id; id 0 is padding.
      offset: int `()` or `(*B)`, position of the first query.
      positions: int positions of the queries `(*B, T)` and of the keys `(*B, S)`, for tokens that a
        mechanism has gathered. Windows, patterns, `score_mod` and dropout use these positions.
      seed: uint32 `(2,)`, seed of the dropout.
      layout: block-sparse layout, the tiles to visit.
      layout_of_keys: the transposed layout, for kernels; None if it is not known yet.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    scale: jax.Array | None = None
    additive: jax.Array | None = None
    constants: tuple[jax.Array, ...] = ()
    mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    segments: tuple[jax.Array, jax.Array] | None = None
    offset: jax.Array | None = None
    positions: tuple[jax.Array, jax.Array] | None = None
    seed: jax.Array | None = None
    layout: BlockLayout | None = None
    layout_of_keys: BlockLayout | None = None


def ids(x: Inputs) -> tuple[jax.Array | None, jax.Array | None]:
    """Combines `segments` and `key_mask` into int32 ids of queries `(*B, T)` and keys `(*B, S)`.

    A query attends to keys with an equal id. Query ids of None mean 1 for every query; key ids of
    None mean no restriction.
    """
    query_ids: Any = None
    key_ids: Any = None
    if x.segments is not None:
        query_ids, key_ids = (ids.astype(jnp.int32) for ids in x.segments)
        key_ids = jnp.where(key_ids == 0, jnp.int32(NO_KEY), key_ids)
    if x.key_mask is not None:
        present = jnp.int32(1) if key_ids is None else key_ids
        key_ids = jnp.where(x.key_mask, present, jnp.int32(NO_KEY))
    return query_ids, key_ids


class Attended(NamedTuple):
    """Results of a forward pass.

    Attributes:
      out: output `(*B, T, N, Hv)`, in the dtype of `value`. Rows without keys are zero.
      out_error: rounding error of `out`, the exact output minus `out`, in the dtype of `value`.
        None if it is not asked for, or if nothing was rounded.
      lse: log-sum-exp L `(*B, T, N)`, -inf for rows without keys.
      lse_error: rounding error of L, the exact log-sum-exp minus L, `(*B, T, N)`.
    """

    out: jax.Array
    out_error: jax.Array | None
    lse: jax.Array
    lse_error: jax.Array

    @classmethod
    def of(cls, x: Inputs, out: jax.Array, lse: jax.Array, lse_error: jax.Array) -> "Attended":
        """Rounds an output that has `output_dtype` to the dtype of `value`."""
        dtype, out_error = x.value.dtype, None
        if out.dtype != dtype:
            # XLA may remove a conversion to a narrower dtype and back.
            info = jnp.finfo(dtype)
            rounded = jax.lax.reduce_precision(out, info.nexp, info.nmant)
            # Without the barrier XLA stores the wide output, and rounds it where it is read.
            both = rounded.astype(dtype), (out - rounded).astype(dtype)
            out, out_error = jax.lax.optimization_barrier(both)
        return cls(out, out_error, lse, lse_error)


def output_dtype(x: Inputs, exact: bool) -> jnp.dtype:
    """Dtype of the output that a forward pass computes: that of the sums, or that of `value`."""
    return softmax_dtype(x) if exact else x.value.dtype


def softmax_dtype(x: Inputs) -> jnp.dtype:
    """Dtype of logits, weights and sums: the promoted dtype, at least float32."""
    return dtypes.wide(x.query, x.key, x.value)
