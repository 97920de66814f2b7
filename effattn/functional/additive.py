"""Additive attention: logits come from a hidden layer over a query and a key."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import attention
from effattn.naive import dot, over_pairs, projected, with_naive
from effattn.options import (
    Direction,
    Dropout,
    Execution,
    Offset,
    Packing,
    Padding,
    Residual,
    Tile,
    Window,
    declared,
)


class Options(
    Direction, Offset, Window, Padding, Packing, Dropout, Residual, Tile, Execution, total=False
):
    """The shared options of `additive_attention`."""


def naive(query, key, value, pairs, *, query_kernel, key_kernel, score):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`; W_q, W_k `(H, A)`; v_a `(A,)`."""
    of_query, of_key = projected(query, query_kernel), projected(key, key_kernel)
    hidden = jnp.tanh(of_query[:, None] + of_key)  # (T, S, A)
    weights, lse = pairs.softmax(hidden @ score)
    return dot(weights, value), lse


@with_naive(over_pairs(naive, per_head={"query_kernel": 2, "key_kernel": 2, "score": 1}))
@declared
def additive_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    query_kernel: jax.Array,
    key_kernel: jax.Array,
    score: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""Additive attention (Bahdanau, Cho and Bengio 2014, "Neural Machine Translation").

        out_t = sum_s softmax_s(v_a . tanh(W_q^T q_t + W_k^T k_s)) v_s

    for each query head, with separate parameters. Computed in tiles: the hidden activations of all
    pairs are never in memory at once. Time is O(T S (A + Hv)), memory O(T + S), forward and
    backward.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      mask: bool, broadcastable to `(*B, N, T, S)`, True where a pair may attend.
      query_kernel: W_q, `(N, H, A)`.
      key_kernel: W_k, `(N, H, A)`.
      score: v_a, `(N, A)`.
      **options: direction, offset, window, padding, packing, dropout, log-sum-exp, tiles and
        execution: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for queries without keys; with
      `return_residual`, `(out, lse)`, the second `(*B, T, N)`, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = attention.check("additive_attention", query, key, value, mask=mask, **options)
    heads, size = query.shape[-2:]
    hidden = jnp.shape(score)[-1] if jnp.ndim(score) else 1
    score = checks.shaped("score", score, (heads, max(hidden, 1)))
    query_kernel = checks.shaped("query_kernel", query_kernel, (heads, size, hidden))
    key_kernel = checks.shaped("key_kernel", key_kernel, (heads, size, hidden))
    with jax.named_scope("additive_attention"):
        query, key, value = attention.without_padding(query, key, value, given)
        of_queries = _project("...tnh,nha->...tna", query, query_kernel, given.precision)
        # Keys are projected for each query head, because each query head has its own parameters.
        groups = heads // key.shape[-2]
        of_groups = key_kernel.reshape(key.shape[-2], groups, size, hidden)
        of_keys = _project("...skh,kgha->...skga", key, of_groups, given.precision)
        of_keys = of_keys.reshape(*key.shape[:-2], heads, hidden)
        *batch, key_heads, size = value.shape
        value = jnp.broadcast_to(value[..., None, :], (*batch, key_heads, groups, size))
        value = value.reshape(*batch, heads, size)
        given = dataclasses.replace(given, scale=1.0, additive=score)
        out, lse = attention.attend(of_queries, of_keys, value, given)
    return attention.results(out, lse, given)


def _project(form: str, x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
    """Projects in at least float32: rounding errors in the tanh argument change the weights."""
    wide = dtypes.wide(x, kernel)
    return jnp.einsum(form, x.astype(wide), kernel.astype(wide), precision=precision)


registry.register(
    registry.Mechanism(
        name="additive",
        family="exact",
        paper="Bahdanau, Cho and Bengio 2014, Neural Machine Translation by Jointly Learning to "
        "Align and Translate",
        function=additive_attention,
        capabilities=frozenset({"cross"}),
        builder="effattn.nn.additive:AdditiveSelfAttention",
        cross_builder="effattn.nn.additive:AdditiveCrossAttention",
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 A)",
        time_exponent=2.0,
    )
)
