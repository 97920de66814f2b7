"""Forgetting attention: causal softmax attention with a forget gate."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, sums_of_runs, valid
from effattn.cores import attention, recurrence
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import (
    Dropout,
    Execution,
    Offset,
    Packing,
    Padding,
    Residual,
    Scale,
    Tile,
    Window,
    declared,
)


class Options(
    Offset, Window, Padding, Packing, Scale, Dropout, Residual, Tile, Execution, total=False
):
    """The shared options of `forgetting_attention`."""


def naive(query, key, value, pairs, *, log_forget, scale):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, log_forget `(S,)`."""
    sums = jnp.cumsum(log_forget)
    of_queries = sums[jnp.clip(pairs.i, 0, len(sums) - 1)]
    weights, lse = pairs.softmax(scale * dot(query, key.T) + of_queries[:, None] - sums)
    return dot(weights, value), lse


@with_naive(over_pairs(naive, per_token=("log_forget",)))
@declared
def forgetting_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_forget: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""Forgetting attention (Lin et al. 2025, "Forgetting Transformer").

    Softmax attention in which each token multiplies the weights of all earlier tokens by its forget
    gate f, one number for each head:

        out_i = sum_(j <= i) softmax_j(logits_ij) v_j
        logits_ij = scale * q_i . k_j + sum_(l = j + 1 to i) log f_l

    The sum is c_i - c_j for the cumulative sums c of log f. The softmax does not depend on c_i, so
    -c_j is a bias of the keys, and memory stays linear. In self-attention c starts at 0 in each
    document. Rounding in c costs about |c| times the precision of float32 in a logit. Always
    causal. Gates of 1 give `dot_product_attention`.

    Time O(T S (H + Hv)) over the tiles that causality and the window keep, memory O(T + S).

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      log_forget: log f of each key's token, `(*B, S, N)`; finite and 0 or less, checked if
        concrete. A gate of 0 is the border of a document: see `segment_ids`.
      **options: offset, window, padding, packing, scale, dropout, log-sum-exp, tiles and execution:
        see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also the log-sum-exp
      `(*B, T, N)` of the logits above, at least float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: a log forget gate above 0 or infinite; and the errors of `effattn.options`.
    """
    checks.known_length("forgetting_attention", query, key)
    given = attention.check("forgetting_attention", query, key, value, is_causal=True, **options)
    keys, heads = key.shape[-3], query.shape[-2]
    shape = (*key.shape[:-3], keys, heads)
    log_forget = recurrence.check_log_decay(log_forget, shape, "log_forget")
    known = checks.known(log_forget)
    if known is not None and not np.isfinite(known).all():
        raise ValueError(
            f"log_forget must be finite, got {known[~np.isfinite(known)][0]}; a gate of 0 is the "
            "border of a document: pass segment_ids"
        )
    present = valid(given.key_lengths, given.segments and given.segments[1], keys)
    log_forget = log_forget.astype(dtypes.wide(query, key, value, log_forget))
    if present is not None:
        log_forget = jnp.where(present[..., None], log_forget, 0)
    # The positions of queries that are not the tokens of the keys may lie in other documents.
    is_pair = checks.is_pair(options.get("segment_ids"), key.shape[:-2])
    is_self = isinstance(given.query_offset, int) and given.query_offset == 0 and not is_pair
    runs = given.segments[1] if is_self and given.segments else None
    sums = jnp.moveaxis(sums_of_runs(log_forget, runs), -1, -2)  # (*B, N, S)
    given = dataclasses.replace(given, bias=-sums[..., None, :])
    with jax.named_scope("forgetting_attention"):
        out, lse = attention.attend(query, key, value, given)
    if given.return_residual:
        lse = _with_sums_of_queries(lse, sums, given.query_offset)
    return attention.results(out, lse, given)


def _with_sums_of_queries(lse, sums, offset):
    """Adds the sum of each query's position, which the softmax does not need."""
    positions = positions_from(jnp.broadcast_to(offset, lse.shape[:-2]), lse.shape[-2])
    positions = jnp.clip(positions, 0, sums.shape[-1] - 1)[..., None, :]
    positions = jnp.broadcast_to(positions, (*sums.shape[:-1], positions.shape[-1]))
    of_queries = jnp.take_along_axis(sums, positions, -1)
    is_empty = lse == dtypes.lowest(lse.dtype)
    return jnp.where(is_empty, lse, lse + jnp.swapaxes(of_queries, -1, -2))


registry.register(
    registry.Mechanism(
        name="forgetting",
        family="exact",
        paper="Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate",
        function=forgetting_attention,
        capabilities=frozenset({"causal", "cross"}),
        builder="effattn.nn.forgetting:ForgettingAttention",
        decoder="effattn.decode.forgetting:ForgettingDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
        knows_order=True,
    )
)
