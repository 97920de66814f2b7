"""Configuration, inputs and order of rows of paged attention, for all its implementations."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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


def by_key_head(query: jax.Array, key_heads: int) -> jax.Array:
    """Queries `(B, T, N, H)` as the rows of each key head, `(B, K, N / K * T, H)`."""
    batch, queries, heads, size = query.shape
    group = heads // key_heads
    grouped = jnp.moveaxis(query.reshape(batch, queries, key_heads, group, size), 1, 3)
    return grouped.reshape(batch, key_heads, group * queries, size)


def by_token(x: jax.Array, queries: int, heads: int) -> jax.Array:
    """Results of the rows of each key head, `(B, K, R, ...)`, as `(B, T, N, ...)`.

    Rows past the T N / K of the queries are left out.
    """
    batch, key_heads = x.shape[:2]
    group = heads // key_heads
    x = x[:, :, : group * queries].reshape(batch, key_heads, group, queries, *x.shape[3:])
    return jnp.moveaxis(x, 3, 1).reshape(batch, queries, heads, *x.shape[4:])


def refusal(query: jax.Array, keys: Pages, values: Pages, most_rows: int) -> str | None:
    """Why a kernel that has all rows of a key head in one tile takes no such call, or None."""
    if values.array.dtype not in (query.dtype, jnp.int8):
        return f"takes values in the dtype of the query or int8, got {values.array.dtype}"
    if 0 in query.shape:
        return f"takes at least one query, got shape {query.shape}"
    queries, group = query.shape[1], query.shape[2] // keys.array.shape[2]
    if queries * group > most_rows:
        return (
            f"takes up to {most_rows} queries times query heads of a key head, got {queries} x "
            f"{group}"
        )
    return None
