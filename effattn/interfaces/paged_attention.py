"""Static configuration and inputs of a paged-attention call."""

from typing import Any, NamedTuple

import jax


class Config(NamedTuple):
    """What is fixed when the program is traced.

    Attributes:
      left: how far back a query sees; None is without limit.
      soft_cap: c, for c * tanh(logits / c).
      precision: of the matrix products.
    """

    left: int | None = None
    soft_cap: float | None = None
    precision: Any = None


class Pages(NamedTuple):
    """Keys or values.

    Attributes:
      array: `(P, p, K, H)`.
      scales: `(P, p, K)`, of int8; None where there are none.
    """

    array: jax.Array
    scales: jax.Array | None
