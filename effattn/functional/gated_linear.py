"""Gated linear attention: each token says what the state forgets, feature by feature."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms


@checks.checked
def gated_linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    scale: float | jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    precision: jax.lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Gated linear attention (Yang et al. 2023, "Gated Linear Attention Transformers").

        S_t = diag(alpha_t) S_(t-1) + k_t v_t^T;    out_t = scale * S_t^T q_t

    It is always causal and has no normaliser. Time is O(T (C + H) Hv) for chunks of C tokens,
    memory O(T), the state H x Hv numbers a key head. A decay of each token and head, instead of
    each feature, takes less time.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: log alpha, `(*B, T, K, H)`, or `(*B, T, K)` where all features of a head decay
        alike; 0 or less, which is checked where it is concrete. -inf forgets all.
      scale: multiplies q . k; default H**-0.5.
      query_seq_lengths: `(*B)` int, valid queries of each row; the others give zeros.
      key_value_seq_lengths: `(*B)` int, valid keys of each row; the others leave the state as it
        is.
      segment_ids: int `(*B, T)`: tokens see their own run of equal ids; 0 is padding.
      initial_state: the state before the first token, as returned by an earlier call. With
        `segment_ids` it belongs to the first document.
      return_state: also return the state after the last valid token.
      precision: of the matrix products, as in `jax.lax.dot`.
      chunk_size: tokens of one masked product; tuning only.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("gated_linear")` lists the names and what
        they take.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state
      `(*B, K, H, Hv)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, or a log decay above 0.
      NotImplementedError: an implementation that it does not have.
      TypeError: in forward-mode differentiation.
    """
    given = recurrence.check(
        query,
        key,
        value,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        precision=precision,
        chunk_size=chunk_size,
    )
    log_decay = jnp.asarray(log_decay)
    shape = given.key.shape if log_decay.ndim == given.key.ndim else given.key.shape[:-1]
    out, state = recurrence.run(
        "gated_linear_attention",
        _terms,
        given,
        given.query,
        (given.key, given.value, recurrence.check_log_decay(log_decay, shape)),
        recurrence.check_scale(scale, given.query),
        initial_state=initial_state,
        implementation=implementation,
    )
    return (out, state) if return_state else out


def _terms(scale, query, keys) -> Terms:
    return Terms(dtypes.product(query, scale), *keys)


registry.register(
    registry.Mechanism(
        name="gated_linear",
        family="recurrent",
        paper="Yang et al. 2023, Gated Linear Attention Transformers",
        function=gated_linear_attention,
        capabilities=recurrence.CAPABILITIES,
        builder="effattn.nn.gated_linear:GatedLinearAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
