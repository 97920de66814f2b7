"""Sigmoid attention: each weight is the sigmoid of its own logit."""

import dataclasses
import math

import jax

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention


@checks.checked
def sigmoid_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    logit_bias: float | None = None,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    score_mod: attention.ScoreMod | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    tile: tuple[int, int] | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    r"""Sigmoid attention (Ramapuram et al. 2024, "Theory [...] for Sigmoid Self-Attention").

        out_t = sum_s sigmoid(scale * q_t . k_s + b) v_s

    A weight depends on its own query and key alone; the bias b keeps the sum of many of them small.
    Time is O(T S (H + Hv)), memory O(T + S), forward and backward.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      bias: added to the logits, broadcastable to `(*B, N, T, S)`.
      mask: bool, broadcastable to `(*B, N, T, S)`, True where a pair may attend.
      logit_bias: b; default -log S, as in the paper. Give the number where calls of other lengths
        are to agree, as in decoding.
      scale: multiplies q . k; default H**-0.5.
      is_causal: each query sees the keys up to its own position.
      query_offset: int, or int array `(*B)`; query t is at position t + query_offset.
      query_seq_lengths: `(*B)` int, valid queries of each row; the others give zeros.
      key_value_seq_lengths: `(*B)` int, valid keys of each row.
      segment_ids: int `(*B, T)`, or a pair `(*B, T)`, `(*B, S)`: tokens attend within equal ids; 0
        is padding.
      local_window_size: w, or (left, right), tokens on each side that a query sees.
      logits_soft_cap: c, for c * tanh(logits / c), before b.
      score_mod: `(logit, b, h, i, j) -> logit`, traceable; before b.
      dropout_rate: share of the weights that are dropped.
      dropout_rng: a key of `jax.random`, for the dropout.
      precision: of the matrix products, as in `jax.lax.dot`.
      tile: queries and keys in a tile; tuning only.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("sigmoid")` lists the names and what they
        take.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`, zeros for a query that sees nothing.

    Raises:
      ValueError: wrong shapes, dtypes or options.
      NotImplementedError: an implementation that it does not have.
      TypeError: in forward-mode differentiation.
    """
    given = attention.check(
        "sigmoid_attention",
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        score_mod=score_mod,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        tile=tile,
        implementation=implementation,
    )
    if logit_bias is None:
        logit_bias = -math.log(max(key.shape[-3], 1))
    added = checks.real("logit_bias", logit_bias, "a finite number")
    if not math.isfinite(added):
        raise ValueError(f"logit_bias must be a finite number, got {logit_bias}")
    score = attention.Then(score_mod, add=added)
    given = dataclasses.replace(given, score_mod=score, activation="sigmoid")
    with jax.named_scope("sigmoid_attention"):
        return attention.attend(query, key, value, given)[0]


registry.register(
    registry.Mechanism(
        name="sigmoid",
        family="exact",
        paper="Ramapuram et al. 2024, Best Practices for Sigmoid Self-Attention",
        function=sigmoid_attention,
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
                "bias",
                "mask",
                "score_mod",
                "soft_cap",
                "dropout",
                "decode",
            }
        ),
        # That of 1024 tokens: calls of all lengths agree, and decoding with them.
        options={"logit_bias": -math.log(1024)},
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
