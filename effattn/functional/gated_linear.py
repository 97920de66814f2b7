"""Gated linear attention: a recurrent state with data-dependent decay of each feature."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, log_decay, scale):
    """One token of one head: state `(H, Hv)`, query and key `(H,)`, value `(Hv,)`."""
    state = jnp.exp(log_decay)[..., None] * state + jnp.outer(key, value)
    return state, scale * (query @ state)


@with_naive(over_tokens(naive, per_token=("log_decay",)))
@declared
def gated_linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Gated linear attention (Yang et al. 2023, "Gated Linear Attention Transformers").

        S_t = diag(alpha_t) S_(t-1) + k_t v_t^T;    out_t = scale * S_t^T q_t

    Always causal, without a normaliser. Time O(T (C (H + Hv) + H Hv)) for chunks of C tokens,
    memory O(T), state H x Hv numbers a key head. One decay for each token and head is faster than
    one for each feature. With the key 1 - exp(log_decay) this is HGRN2 (Qin et al. 2024, "HGRN2:
    Gated Linear RNNs with State Expansion").

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: log alpha, `(*B, T, K, H)`, or `(*B, T, K)` for one decay a head; 0 or less,
        checked if concrete. -inf clears the state.
      scale: multiplies q . k; default H**-0.5.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state
      `(*B, K, H, Hv)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, or a log decay above 0.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = recurrence.check(query, key, value, **options)
    shape = key.shape if jnp.ndim(log_decay) == key.ndim else key.shape[:-1]
    log_decay = recurrence.check_log_decay(log_decay, shape)
    keys, multiplier = (key, value, log_decay), recurrence.check_scale(scale, query)
    out, state = recurrence.run("gated_linear_attention", _terms, given, query, keys, multiplier)
    return recurrence.results(out, state, given)


def _terms(scale, query, keys) -> Terms:
    return Terms(dtypes.product(query, scale), *keys)


registry.register(
    registry.Mechanism(
        name="gated_linear",
        family="recurrent",
        paper="Yang et al. 2023, Gated Linear Attention Transformers with Hardware-Efficient "
        "Training",
        function=gated_linear_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.gated_linear:GatedLinearAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
