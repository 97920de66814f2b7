"""Gated DeltaNet-2: the delta rule with separate gates for erasing and for writing."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, log_decay, erase, write, scale):
    """One token of one head: state `(H, Hv)`, value and write `(Hv,)`, all others `(H,)`."""
    state = jnp.exp(log_decay)[:, None] * state
    state = state + jnp.outer(key, write * value - (erase * key) @ state)
    return state, scale * (query @ state)


@with_naive(over_tokens(naive, per_token=("log_decay", "erase", "write")))
@declared
def gated_delta_rule_2_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    erase: jax.Array,
    write: jax.Array,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Gated DeltaNet-2 (Hatamizadeh, Choi and Kautz 2026).

    A gate b of each key feature says how much of the stored value is erased, and a gate w of each
    value feature how much of the new value is written:

        S_t = (I - k_t (b_t * k_t)^T) diag(alpha_t) S_(t-1) + k_t (w_t * v_t)^T
        out_t = scale * S_t^T q_t,    alpha = exp(log_decay)

    With b = w = beta, one number for each head, this is Kimi delta attention
    (`delta_rule_attention`). Keys are not normalised. Where b differs between features, the
    state can grow even with keys of length 1. Always causal. Time is O(T (C (H + Hv) + H Hv)) for
    chunks of C tokens, memory O(T), the state H x Hv numbers for each key head.

    "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention".

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: log alpha, `(*B, T, K, H)`; 0 or less, checked if concrete.
      erase: b, `(*B, T, K, H)`; in [0, 1] in the paper, or up to 2.
      write: w, `(*B, T, K, Hv)`; in [0, 1] in the paper.
      scale: multiplies the queries; default H**-0.5.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state
      `(*B, K, H, Hv)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: a log decay above 0; and the errors of `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    out, state = recurrence.run(
        "gated_delta_rule_2_attention",
        _terms,
        given,
        given.query,
        (
            given.key,
            given.value,
            recurrence.check_log_decay(log_decay, given.key.shape),
            checks.shaped("erase", erase, given.key.shape),
            checks.shaped("write", write, given.value.shape),
        ),
        recurrence.check_scale(scale, given.query),
    )
    return recurrence.results(out, state, given)


def _terms(scale, query, keys) -> Terms:
    """Terms of the rule for the core, which reads the state before its decay."""
    key, value, log_decay, erase, write = keys
    recalled = dtypes.product(jnp.exp(log_decay), erase, key)
    return Terms(
        dtypes.product(query, scale),
        key,
        dtypes.product(write, value),
        log_decay,
        recalled=recalled,
    )


registry.register(
    registry.Mechanism(
        name="gated_delta_net_2",
        family="recurrent",
        paper="Hatamizadeh, Choi and Kautz 2026, Gated DeltaNet-2",
        function=gated_delta_rule_2_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.gated_delta_net_2:GatedDeltaNet2",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
