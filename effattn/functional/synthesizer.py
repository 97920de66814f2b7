"""Synthesizers: attention whose logits do not compare tokens with tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.functional.softmax import dot_product_attention


def synthesizer_attention(
    hidden: jax.Array,
    table: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    r"""Dense synthetic attention (Tay et al. 2020, "Synthesizer: Rethinking Self-Attention").

        y_t = sum_s softmax_s(h_t . r_s) v_s

    The logits are a learned function of the query's token and of the key's position: h_t is made
    of the token alone, and r_s is a learned row for each position. That is dot-product attention
    with learned keys, and runs on the block core: time O(T S A), memory O((T + S) A). With learned
    rows of positions as h too, it is the factorised random Synthesizer.

    Args:
      hidden: `(*B, T, N, A)`, in the paper relu(x W_1 + b).
      table: `(S, N, A)`, the columns of W_2; also `(*B, S, N, A)`.
      value: `(*B, S, N, Hv)`.
      is_causal: see `effattn.dot_product_attention`, for this and all that follow.
      query_offset: the position of the first query.
      query_seq_lengths: `(*B)` int.
      key_value_seq_lengths: `(*B)` int.
      segment_ids: int `(*B, T)`.
      implementation: None, or a name, or a tuple of names tried in order.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
      NotImplementedError: an implementation that does not take this call.
    """
    hidden, table, value = map(jnp.asarray, (hidden, table, value))
    heads = (value.shape[-3], *hidden.shape[-2:]) if value.ndim >= 3 <= hidden.ndim else None
    if heads is None or table.ndim < 3 or table.shape[-3:] != heads:
        raise ValueError(
            "table must have shape (S, N, A) for hidden (*B, T, N, A) and value (*B, S, N, Hv), "
            f"got {table.shape} for {hidden.shape} and {value.shape}"
        )
    keys = jnp.broadcast_to(table, (*value.shape[:-3], *heads)).astype(hidden.dtype)
    return dot_product_attention(
        hidden,
        keys,
        value,
        scale=1.0,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        implementation=implementation,
    )


_register: Any = functools.partial(
    registry.Mechanism,
    family="synthetic",
    paper="Tay et al. 2020, Synthesizer: Rethinking Self-Attention in Transformer Models",
    takes_heads=False,
    time_exponent=2.0,
    cores=(),
    knows_order=True,
)
_CAPABILITIES = frozenset({"causal", "bidirectional", "lengths", "segments", "decode"})

registry.register(
    _register(
        name="synthesizer",
        function=synthesizer_attention,
        capabilities=_CAPABILITIES,
        builder="effattn.nn.synthesizer:DenseSynthesizer",
        complexity="O(N^2 A)",
    )
)
registry.register(
    _register(
        name="synthesizer_factorized",
        function=None,
        capabilities=_CAPABILITIES,
        builder="effattn.nn.synthesizer:FactorizedSynthesizer",
        complexity="O(N^2 H)",
    )
)
registry.register(
    _register(
        name="synthesizer_random",
        function=None,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "decode"}),
        reasons={"segments": "its table is of positions in a row, not in a document"},
        builder="effattn.nn.synthesizer:RandomSynthesizer",
        complexity="O(N^2 H), and a table of N^2",
        memory_exponent=2.0,
    )
)
registry.register(
    _register(
        name="synthesizer_factorized_random",
        function=None,
        capabilities=_CAPABILITIES,
        builder="effattn.nn.synthesizer:FactorizedRandomSynthesizer",
        complexity="O(N^2 A)",
    )
)
registry.register(
    _register(
        name="synthesizer_mixture",
        function=None,
        capabilities=_CAPABILITIES,
        builder="effattn.nn.synthesizer:MixtureSynthesizer",
        complexity="O(N^2 (A + H))",
    )
)
