"""RWKV-7: the delta rule with data-dependent decays and a separate removal key."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, log_decay, removal_key, learning_rate):
    """One token of one head: state `(H, Hv)`, value `(Hv,)`, all others `(H,)`."""
    removed = jnp.outer(learning_rate * removal_key, removal_key @ state)
    state = jnp.exp(log_decay)[:, None] * state - removed + jnp.outer(key, value)
    return state, query @ state


@with_naive(over_tokens(naive, per_token=("log_decay", "removal_key", "learning_rate")))
@declared
def rwkv7_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    removal_key: jax.Array,
    learning_rate: jax.Array,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Time mixing of RWKV-7 (Peng et al. 2025, "RWKV-7 Goose").

        S_t = (diag(w_t) - (a_t * kappa_t) kappa_t^T) S_(t-1) + k_t v_t^T;    out_t = S_t^T r_t

    The receptance r is the query. This is the delta rule with a decay and an in-context learning
    rate a for each feature, and a removal key kappa that differs from the written key. With kappa
    of length 1 and one 0 <= a <= 1 for all features of a head, the state stays bounded; where a
    differs between features, it can grow without decays. Always causal, without scale or
    normaliser; the layer adds the bonus of the paper to the output. Time is O(T (C (H + Hv) + H
    Hv)) for chunks of C tokens, memory O(T), state H x Hv numbers a key head.

    Args:
      query: the receptance, `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: log w, `(*B, T, K, H)`; 0 or less, checked if concrete.
      removal_key: kappa, `(*B, T, K, H)`; of length 1 in the paper.
      learning_rate: a, `(*B, T, K, H)`; in [0, 1] in the paper.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state
      `(*B, K, H, Hv)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, or a log decay above 0.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = recurrence.check(query, key, value, **options)
    out, state = recurrence.run(
        "rwkv7_attention",
        _terms,
        given,
        given.query,
        (
            given.key,
            given.value,
            recurrence.check_log_decay(log_decay, given.key.shape),
            checks.shaped("removal_key", removal_key, given.key.shape),
            checks.shaped("learning_rate", learning_rate, given.key.shape),
        ),
    )
    return recurrence.results(out, state, given)


def _terms(_, query, keys) -> Terms:
    key, value, log_decay, removal_key, learning_rate = keys
    removed = dtypes.product(learning_rate, removal_key)
    return Terms(query, key, value, log_decay, removed=removed, recalled=removal_key)


registry.register(
    registry.Mechanism(
        name="rwkv7",
        family="recurrent",
        paper="Peng et al. 2025, RWKV-7 Goose with Expressive Dynamic State Evolution",
        function=rwkv7_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.rwkv7:RWKV7",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
