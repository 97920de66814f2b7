"""Static configuration and inputs of a paged-attention call."""

from typing import Any, NamedTuple

import jax


class Config(NamedTuple):
    """Static configuration of a paged-attention call.

    Attributes:
      left: number of positions that a query sees before its position; None is without limit.
      soft_cap: c, for c * tanh(logits / c).
      precision: precision of the matrix products.
    """

    left: int | None = None
    soft_cap: float | None = None
    precision: Any = None


class Pages(NamedTuple):
    """Pages of a KV cache: its keys or its values.

    Attributes:
      array: `(P, p, K, H)`: P pages of p tokens, K key heads.
      scales: `(P, p, K)`, factors of int8 entries; None if the array is not quantised.
    """

    array: jax.Array
    scales: jax.Array | None
