"""Additive attention: a query and a key are compared by a layer of hidden numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import attention


@checks.checked
def additive_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    query_kernel: jax.Array,
    key_kernel: jax.Array,
    score: jax.Array,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    return_residual: bool = False,
    precision: jax.lax.PrecisionLike = None,
    tile: tuple[int, int] | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Additive attention (Bahdanau, Cho and Bengio 2014, "Neural Machine Translation").

        out_t = sum_s softmax_s(v . tanh(W_q q_t + W_k k_s)) v_s

    of each query head, with weights of its own. In tiles: the hidden numbers of all pairs are never
    held. Time is O(T S (A + Hv)), memory O(T + S), forward and backward.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      mask: bool, broadcastable to `(*B, N, T, S)`, True where a pair may attend.
      query_kernel: W_q, `(N, H, A)`.
      key_kernel: W_k, `(N, H, A)`.
      score: v, `(N, A)`.
      is_causal: each query sees the keys up to its own position.
      query_offset: int, or int array `(*B)`; query t is at position t + query_offset.
      query_seq_lengths: `(*B)` int, valid queries of each row; the others give zeros.
      key_value_seq_lengths: `(*B)` int, valid keys of each row.
      segment_ids: int `(*B, T)`, or a pair `(*B, T)`, `(*B, S)`: tokens attend within equal ids; 0
        is padding.
      local_window_size: w, or (left, right), tokens on each side that a query sees.
      dropout_rate: share of the weights that are dropped.
      dropout_rng: a key of `jax.random`, for the dropout.
      return_residual: also return the log-sum-exp of the scores.
      precision: of the matrix products, as in `jax.lax.dot`.
      tile: queries and keys in a tile; tuning only.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("additive")` lists the names and what they
        take.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for a query that sees nothing; with
      `return_residual`, `(out, lse)`, the second `(*B, T, N)`, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options.
      NotImplementedError: an implementation that it does not have.
      TypeError: in forward-mode differentiation.
    """
    given = attention.check(
        "additive_attention",
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        local_window_size=local_window_size,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        tile=tile,
        implementation=implementation,
    )
    heads, size = query.shape[-2:]
    hidden = jnp.shape(score)[-1] if jnp.ndim(score) else 1
    score = checks.shaped("score", score, (heads, max(hidden, 1)))
    query_kernel = checks.shaped("query_kernel", query_kernel, (heads, size, hidden))
    key_kernel = checks.shaped("key_kernel", key_kernel, (heads, size, hidden))
    with jax.named_scope("additive_attention"):
        query, key, value = attention.without_padding(query, key, value, given)
        of_queries = _project("...tnh,nha->...tna", query, query_kernel, precision)
        # Of each query head, as its weights are its own.
        groups = heads // key.shape[-2]
        of_groups = key_kernel.reshape(key.shape[-2], groups, size, hidden)
        of_keys = _project("...skh,kgha->...skga", key, of_groups, precision)
        of_keys = of_keys.reshape(*key.shape[:-2], heads, hidden)
        *batch, key_heads, size = value.shape
        value = jnp.broadcast_to(value[..., None, :], (*batch, key_heads, groups, size))
        value = value.reshape(*batch, heads, size)
        given = dataclasses.replace(given, scale=1.0, additive=score)
        out, lse = attention.attend(of_queries, of_keys, value, given)
    return (out, dtypes.logarithms(lse)) if return_residual else out


def _project(form: str, x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
    """In float32 at least: a rounding of what tanh takes would be one of the weights."""
    wide = dtypes.wide(x, kernel)
    return jnp.einsum(form, x.astype(wide), kernel.astype(wide), precision=precision)


registry.register(
    registry.Mechanism(
        name="additive",
        family="exact",
        paper="Bahdanau, Cho and Bengio 2014, Neural Machine Translation by Jointly Learning",
        function=additive_attention,
        capabilities=frozenset(
            {
                "bidirectional",
                "causal",
                "cross",
                "grouped",
                "offset",
                "lengths",
                "segments",
                "window",
                "mask",
                "dropout",
                "residual",
                "decode",
            }
        ),
        builder="effattn.nn.additive:AdditiveSelfAttention",
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 A)",
        time_exponent=2.0,
    )
)
