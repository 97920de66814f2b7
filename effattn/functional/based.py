"""Based: linear attention of a second-order Taylor series, for small queries and keys."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.functional import kernels, recurrence
from effattn.functional.feature_maps import taylor
from effattn.xla.linear_recurrence import Terms


def based_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    precision: jax.lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Based's linear attention (Arora et al. 2024, "Simple linear attention language models").

    Over the keys s that query t may attend to, with logits z_ts = scale * q_t . k_s,

        out_t = sum_s w_ts v_s / sum_s w_ts,    w_ts = 1 + z_ts + z_ts^2 / 2

    the second-order Taylor series of exp(z_ts). Each weight is at least 1/2. It is linear attention
    with F = (H + 1) (H + 2) / 2 features: 1, the entries of sqrt(scale) x, and their products in
    pairs, each pair once. They are made of a block of tokens at a time. Time is
    O((T + S) H^2 Hv), memory O(T + S), and the state is one F x Hv matrix a key head: so queries
    and keys are meant to be small, of size 16 in the paper, while values are not.

    In Based the other layers are attention in tiny sliding windows (of 64 tokens), which make up
    for what so smooth a kernel cannot pick out, and gated convolutions. Layers alternate; no layer
    adds the two kinds up. Neither does this function: `effattn.nn.BasedSelfAttention` says how such
    a model is made.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      scale: of the logits; default H**-0.5.
      is_causal: query t attends to the keys up to t; needs T == S.
      query_seq_lengths: `(*B)` int, valid queries of each row; the others give zeros.
      key_value_seq_lengths: `(*B)` int, valid keys of each row.
      segment_ids: int `(*B, T)`, or if not causal a pair `((*B, T), (*B, S))`: tokens attend within
        equal ids, which are one contiguous run; 0 is padding.
      initial_state: the state before the first token, as returned by an earlier call. With
        `segment_ids` it belongs to the first document.
      return_state: also return the state after the last valid token. With `segment_ids` it is that
        of the last document.
      precision: of the matrix products, as in `jax.lax.dot`.
      chunk_size: tokens of one masked product of the causal form; tuning only.
      implementation: None or "xla", or a tuple of names tried in order.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state being
      the sum of phi(k) v^T with that of phi(k) in its last column, `(*B, K, F, Hv + 1)`, in the
      promoted dtype of query, key and value, at least float32. A query without keys gives zeros.

    Raises:
      ValueError: wrong shapes, dtypes or options.
      NotImplementedError: an implementation that there is not.
      TypeError: in forward-mode differentiation of the causal or packed form.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    given, attend = kernels.check(
        query,
        key,
        value,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        initial_state=initial_state,
        return_state=return_state,
        precision=precision,
        chunk_size=chunk_size,
    )
    out, state = recurrence.run(
        "based_attention",
        _BasedTerms(),
        given,
        query,
        (key, value),
        jnp.sqrt(kernels.positive_scale(scale, query).astype(given.dtype)),
        initial_state=initial_state,
        normalized=True,
        attend=attend,
        implementation=implementation,
    )
    return (out, state) if return_state else out


@dataclasses.dataclass(frozen=True)
class _BasedTerms:
    """Second-order features of queries and keys."""

    def __call__(self, root, queries, keys) -> Terms:
        key, value = keys
        return Terms(taylor(queries * root), taylor(key * root), value)


registry.register(
    registry.Mechanism(
        name="based",
        family="linear",
        paper="Arora et al. 2024, Simple linear attention language models",
        function=based_attention,
        capabilities=frozenset(
            {
                "bidirectional",
                "causal",
                "cross",
                "grouped",
                "lengths",
                "segments",
                "state",
                "decode",
            }
        ),
        builder="effattn.nn.based:BasedSelfAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H^2 Hv)",
        time_exponent=1.0,
    )
)
