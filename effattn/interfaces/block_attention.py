"""Static configuration and inputs of a block-attention call, as every implementation receives them.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K, query length T, key length S,
head sizes H and Hv.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.arrays import dtypes
from effattn.patterns.layouts import BlockLayout

NO_KEY = np.iinfo(np.int32).min  # the id of a key that nobody may attend to


Origin = Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is fixed when the program is traced.

    Attributes:
      tile: queries and keys in a tile; with a layout it is the layout's. None is what the
        implementation chooses.
      scale: multiplies the products of queries and keys; None if it is the operand `scale`.
      left, right: how far back and ahead of its position a query sees; None is without limit.
        Causality is right = 0.
      offset: position of the first query; None if it is traced, as the operand `offset`.
      soft_cap: c, for c * tanh(logits / c) after the bias.
      score_mod: `(constants, logit, b, h, i, j) -> logit` on scalars, the last step.
      dropout_rate: share of the weights that are dropped.
      precision: of the matrix products.
      pattern: `pattern.allows(i, j, h)` says which pairs may attend; in a layout, of partial tiles.
      key_tiles: how many of the layout's tiles are read in a step.
      origin: `(b, h, i, j) -> (b, h, i, j)`, from the example, head and positions here to those
        that `score_mod` and dropout are told, where a mechanism has rearranged its tokens or heads.
      activation: "sigmoid" or "squared_relu", of each logit, in place of a softmax; the log-sum-exp
        then says nothing.
      implementations: as `effattn.dispatch.choose` gives them.
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
    origin: Origin | None = None
    activation: str | None = None
    implementations: dispatch.Chosen = dispatch.XLA


class Inputs(NamedTuple):
    """The arrays; None where absent. Those marked * have gradients.

    Attributes:
      query: `(*B, T, N, H)` *.
      key: `(*B, S, K, H)` *.
      value: `(*B, S, K, Hv)` *.
      bias: `(*#B, #K, #G, #T, #S)`, added to the logits *.
      scale: `()`, multiplies the products *.
      additive: v `(N, H)` of additive scores, sum_h v_h tanh(q_h + k_h), in place of products of
        queries and keys; K is N *.
      constants: arrays that `score_mod` closes over *.
      mask: bool `(*#B, #K, #G, #T, #S)`, the pairs that may attend.
      key_mask: bool `(*B, S)`, the keys that anyone may attend to.
      segments: int ids of the queries `(*B, T)` and of the keys `(*B, S)`; equal ids may attend.
      offset: int `()` or `(*B)`, position of the first query.
      positions: int, of the queries `(*B, T)` and of the keys `(*B, S)`, where tokens have been
        gathered; in place of their order, for the window, `score_mod` and dropout.
      seed: uint32 `(2,)` of the dropout.
      layout: the tiles to visit.
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


def ids(x: Inputs) -> tuple[jax.Array | None, jax.Array | None]:
    """int32 of the queries `(*B, T)` and of the keys `(*B, S)`, of which equal ones may attend.

    They are what segments and the mask of keys say together. None of queries is 1 of all of them,
    and None of keys is no restriction.
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


def softmax_dtype(x: Inputs) -> jnp.dtype:
    """Of logits, weights and sums."""
    return dtypes.wide(x.query, x.key, x.value)
