"""The delta rule: a state that corrects what it holds under a key before it writes."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms


@checks.checked
def delta_rule_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
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
    r"""DeltaNet (Schlag et al. 2021, Yang et al. 2024), and with decays Gated DeltaNet.

    The state, H x Hv of each key head, maps keys to values. Each token moves what it finds under
    its key towards its value, by the strength beta_t, and of all that was there keeps alpha_t:

        S_t = alpha_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T,    alpha = exp(log_decay)
        out_t = scale * S_t^T q_t

    so that beta_t = 1 replaces the value of a key of length 1, and 0 writes nothing. Keys are
    taken as given: the state stays bounded where beta_t |k_t|^2 is at most 2, as with keys of
    length 1. Always causal. Time is O(T H (Hv + C)) for chunks of C tokens, and memory O(T).

    Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers"; Yang et al.
    2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"; Yang, Kautz
    and Hatamizadeh 2024, "Gated Delta Networks".

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      beta: `(*B, T, K)`, how strongly each token writes, in [0, 1] or up to 2.
      log_decay: `(*B, T, K)`, the logarithm of how much of the state each token keeps, 0 or less;
        None keeps all.
      scale: multiplies the queries; default H**-0.5.
      query_seq_lengths: `(*B)` int, valid queries of each row; the others give zeros.
      key_value_seq_lengths: `(*B)` int, valid keys of each row; the others leave the state as it
        is.
      segment_ids: int `(*B, T)`: tokens attend within equal ids, which are one contiguous run; 0 is
        padding.
      initial_state: the state before the first token, as returned by an earlier call. With
        `segment_ids` it belongs to the first document.
      return_state: also return the state after the last valid token. With `segment_ids` it is that
        of the last document.
      precision: of the matrix products, as in `jax.lax.dot`.
      chunk_size: tokens of one masked product; tuning only.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("delta_net")` lists the names and what
        they take.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state being
      `(*B, K, H, Hv)`. State and sums have the promoted dtype of query, key and value, at least
      float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, and decays above 1.
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
    beta = checks.shaped("beta", beta, given.key.shape[:-1])
    if log_decay is not None:
        log_decay = recurrence.check_log_decay(log_decay, given.key.shape[:-1])
    out, state = recurrence.run(
        "delta_rule_attention",
        _terms,
        given,
        given.query,
        (given.key, given.value, beta, log_decay),
        recurrence.check_scale(scale, given.query),
        initial_state=initial_state,
        implementation=implementation,
    )
    return (out, state) if return_state else out


def _terms(scale, query, keys) -> Terms:
    """What is found under the key, in the state as it has decayed, is taken away where beta v goes.

    In the core's words a_t = beta_t k_t, the written key, and b_t = alpha_t k_t.
    """
    key, value, beta, log_decay = keys
    recalled = key if log_decay is None else dtypes.product(jnp.exp(log_decay)[..., None], key)
    return Terms(
        dtypes.product(query, scale),
        dtypes.product(beta[..., None], key),
        value,
        log_decay,
        recalled=recalled,
    )


registry.register(
    registry.Mechanism(
        name="delta_net",
        family="recurrent",
        paper="Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule",
        function=delta_rule_attention,
        capabilities=recurrence.CAPABILITIES,
        builder="effattn.nn.delta_net:DeltaNet",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)

registry.register(
    registry.Mechanism(
        name="gated_delta_net",
        family="recurrent",
        paper="Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks",
        function=delta_rule_attention,
        capabilities=recurrence.CAPABILITIES,
        builder="effattn.nn.delta_net:GatedDeltaNet",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
