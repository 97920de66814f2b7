"""Delta rule: a recurrent state whose write corrects the value stored under a key."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, beta, log_decay=None, scale):
    """One token of one head: state `(H, Hv)`, query and key `(H,)`, value `(Hv,)`."""
    if log_decay is not None:
        state = jnp.exp(log_decay)[..., None] * state
    state = state + beta * jnp.outer(key, value - key @ state)
    return state, scale * (query @ state)


@with_naive(over_tokens(naive, per_token=("beta", "log_decay")))
@declared
def delta_rule_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""DeltaNet (Schlag et al. 2021, Yang et al. 2024), Gated DeltaNet and Kimi delta attention.

    The state of a key head, H x Hv, maps keys to values. Each token decays the state by alpha_t and
    moves the value stored under its key towards its own value, with strength beta_t:

        S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_(t-1) + beta_t k_t v_t^T
        out_t = scale * S_t^T q_t,    alpha = exp(log_decay)

    Without decays this is DeltaNet, with one decay a head Gated DeltaNet, and with one decay a
    feature Kimi delta attention.

    With beta_t = 1, the value of a key of length 1 is replaced; with beta_t = 0, nothing is
    written. Keys are not normalised: the state stays bounded if beta_t |k_t|^2 is at most 2, for
    example with keys of length 1. Always causal. Time is O(T (C (H + Hv) + H Hv)) for
    chunks of C tokens, and memory O(T).

    Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers"; Yang et al.
    2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"; Yang, Kautz
    and Hatamizadeh 2024, "Gated Delta Networks"; Kimi Team 2025, "Kimi Linear".

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      beta: `(*B, T, K)`, write strength of each token, in [0, 1] or up to 2.
      log_decay: log alpha, `(*B, T, K)` for one decay a head or `(*B, T, K, H)` for one a feature;
        0 or less, checked if concrete. None means no decay.
      scale: multiplies the queries; default H**-0.5.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state being
      `(*B, K, H, Hv)`. State and sums have the promoted dtype of query, key and value, at least
      float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, and decays above 1.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = recurrence.check(query, key, value, **options)
    beta = checks.shaped("beta", beta, given.key.shape[:-1])
    if log_decay is not None:
        by_feature = jnp.ndim(log_decay) == given.key.ndim
        shape = given.key.shape if by_feature else given.key.shape[:-1]
        log_decay = recurrence.check_log_decay(log_decay, shape)
    out, state = recurrence.run(
        "delta_rule_attention",
        terms,
        given,
        given.query,
        (given.key, given.value, beta, log_decay),
        recurrence.check_scale(scale, given.query),
    )
    return recurrence.results(out, state, given)


def terms(scale, query, keys) -> Terms:
    """Terms of the delta rule for the core.

    The core removes the value recalled by b_t = alpha_t k_t, which reads the decayed state, and
    writes under the key a_t = beta_t k_t.
    """
    key, value, beta, log_decay = keys
    recalled = key if log_decay is None else dtypes.product(_decay(log_decay, key), key)
    return Terms(
        dtypes.product(query, scale),
        dtypes.product(beta[..., None], key),
        value,
        log_decay,
        recalled=recalled,
    )


def _decay(log_decay, key):
    """The decays, with an axis for the features of the keys."""
    return jnp.exp(log_decay if log_decay.ndim == key.ndim else log_decay[..., None])


registry.register(
    registry.Mechanism(
        name="delta_net",
        family="recurrent",
        paper="Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule",
        function=delta_rule_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.delta_net:DeltaNet",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
