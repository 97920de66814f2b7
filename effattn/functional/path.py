"""PaTH attention: positions by products of Householder-like transformations of the tokens."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import valid
from effattn.cores import attention, sequence_parts
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Chunk, Packing, Padding, Precision, Residual, Scale, declared
from effattn.xla import path_attention as tiled


class Options(Padding, Packing, Scale, Residual, Chunk, Precision, total=False):
    """The shared options of `path_attention`."""


def naive(query, key, value, pairs, *, reflection, beta, scale):
    """One head: query, key and reflection `(T, H)`, value `(T, Hv)`, beta `(T,)`."""

    def step(keys, token):
        i, q, w, strength = token
        reflected = keys - strength * jnp.outer(keys @ w, w)
        keys = jnp.where((pairs.j < i)[:, None], reflected, keys)
        return keys, keys @ q

    _, logits = lax.scan(step, key, (pairs.i, query, reflection, beta))
    weights, lse = pairs.softmax(scale * logits)
    return dot(weights, value), lse


@with_naive(over_pairs(naive, per_token=("reflection", "beta")))
@declared
def path_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    reflection: jax.Array,
    beta: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""PaTH attention.

    Yang et al. 2025, "PaTH Attention: Position Encoding via Accumulating Householder
    Transformations".

    Softmax attention in which every token between a key and a query transforms their logit:

        out_i = sum_(j <= i) softmax_j(scale * q_i^T H_i H_(i-1) ... H_(j+1) k_j) v_j
        H_t = I - beta_t w_t w_t^T

    With w_t of length 1, H_t is a reflection for beta_t = 2, a projection for 1, and the identity
    for 0. Always causal. With beta = 0 this is `dot_product_attention`.

    Time O(T^2 (H + Hv + H^2 / C)) for chunks of C tokens, memory O(T (C + H^2 / C)), forward and
    backward. Derivatives in forward mode and of any order work.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      reflection: w, `(*B, T, K, H)`. It is not normalised here: products stay bounded if
        beta_t |w_t|^2 is between 0 and 2.
      beta: `(*B, T, K)`.
      **options: padding, packing, scale, log-sum-exp, chunks and precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also the log-sum-exp
      `(*B, T, N)`, at least float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: another number of queries than keys; and the errors of `effattn.options`.
    """
    out, lse, _ = attend(query, key, value, reflection, beta, **options)
    return (out, dtypes.logarithms(lse)) if options.get("return_residual") else out


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    reflection: jax.Array,
    beta: jax.Array,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`path_attention`, with all that decoding needs.

    Returns:
      The output `(*B, T, N, Hv)`; the log-sum-exp `(*B, T, N)`, `dtypes.lowest` for empty rows; and
      the queries times `scale` and all transformations up to them, `(*B, T, N, H)`.
    """
    checks.known_length("path_attention", query, key)
    sequence_parts.refuse("path_attention")
    tokens = _tokens(query, key, value, reflection, beta, **options)
    *batch, time, heads, _ = mesh_axes.spec(query)
    of_rows = PartitionSpec(*batch, time, heads)
    of_heads = PartitionSpec(*batch, time, heads, None)

    def run(tokens):
        results = tiled.attend(options.get("chunk_size"), options.get("precision"), tokens)
        axis = tokens.query.ndim - 3
        return tuple(lax.collapse(x, axis, axis + 2) for x in results)

    with jax.named_scope("path_attention"):
        out, lse, carried = mesh_axes.placed(run, query, of_heads, of_rows, of_heads)(tokens)
    return out.astype(value.dtype), lse, carried


def _tokens(query, key, value, reflection, beta, *, chunk_size=None, **options):
    """Checks the arguments; returns the tokens of the XLA form."""
    if chunk_size is not None:
        checks.at_least("chunk_size", chunk_size, 1, "tokens")
    given = attention.check("path_attention", query, key, value, is_causal=True, **options)
    *_, length, key_heads, size = key.shape
    if query.shape[-3] != length:
        raise ValueError(
            "path_attention needs as many queries as keys, because each token transforms the "
            f"logits, got {query.shape[-3]} and {length}"
        )
    reflection = checks.shaped("reflection", reflection, key.shape)
    beta = checks.shaped("beta", beta, key.shape[:-1])
    wide = dtypes.wide(query, key, value, reflection, beta)
    query_ids, key_ids = given.segments or (None, None)
    valid_queries = valid(given.query_lengths, query_ids, length)
    present = valid(given.key_lengths, key_ids, length)

    def clear(x, mask):
        x = x.astype(wide)
        if mask is None:
            return x
        return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, 0)

    def ids(known, mask, absent):
        known = jnp.ones(key.shape[:-2], jnp.int32) if known is None else known
        return known if mask is None else jnp.where(mask, known, absent)

    query = clear(query, valid_queries) * jnp.asarray(given.scale, wide)
    groups = query.shape[-2] // key_heads if key_heads else 0
    return tiled.Tokens(
        query.reshape(*query.shape[:-2], key_heads, groups, size),
        clear(key, present),
        clear(value, present),
        clear(reflection, present),
        clear(beta, present),
        ids(query_ids, valid_queries, -1),
        ids(key_ids, present, 0),
    )


registry.register(
    registry.Mechanism(
        name="path",
        family="exact",
        paper="Yang et al. 2025, PaTH Attention: Position Encoding via Accumulating Householder "
        "Transformations",
        function=path_attention,
        capabilities=frozenset({"causal"}),
        reasons={"bidirectional": "the tokens from a key to a later query transform their logit"},
        builder="effattn.nn.path:PathAttention",
        decoder="effattn.decode.path:PathDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
        knows_order=True,
    )
)
