"""RWKV-6: a recurrent state with data-dependent decay, and a bonus for the present token."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, log_decay, bonus):
    """One token of one head: state `(H, Hv)`, query, key, decay and bonus `(H,)`, value `(Hv,)`."""
    out = query @ (state + jnp.outer(bonus * key, value))
    return jnp.exp(log_decay)[:, None] * state + jnp.outer(key, value), out


@with_naive(over_tokens(naive, per_token=("log_decay",), per_head={"bonus": 1}))
@declared
def rwkv6_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    bonus: jax.Array,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Time mixing of RWKV-6 (Peng et al. 2024, "Eagle and Finch").

        out_t = (S_(t-1) + diag(u) k_t v_t^T)^T r_t;    S_t = diag(w_t) S_(t-1) + k_t v_t^T

    The receptance r is the query. The bonus u weighs the key and value of the present token;
    earlier tokens decay. With decays that do not depend on the token, this is RWKV-5. Always
    causal, without scale or normaliser. Time is O(T (C (H + Hv) + H Hv)) for chunks of C tokens,
    memory O(T), state H x Hv numbers a key head.

    Args:
      query: the receptance, `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: log w, `(*B, T, K, H)`; 0 or less, checked if concrete.
      bonus: u, `(K, H)`.
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
        "rwkv6_attention",
        _terms,
        given,
        given.query,
        (given.key, given.value, recurrence.check_log_decay(log_decay, given.key.shape)),
        checks.shaped("bonus", bonus, given.key.shape[-2:]),
    )
    return recurrence.results(out, state, given)


def _terms(bonus, query, keys) -> Terms:
    key, value, log_decay = keys
    return Terms(query, key, value, log_decay, bonus=bonus)


registry.register(
    registry.Mechanism(
        name="rwkv6",
        family="recurrent",
        paper="Peng et al. 2024, Eagle and Finch: RWKV with Matrix-Valued States",
        function=rwkv6_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.rwkv6:RWKV6",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
