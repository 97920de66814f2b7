"""Retention: linear attention with a constant decay for each head."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def retention_log_decay(num_heads: int) -> jax.Array:
    """Returns the log decays of RetNet, `(K,)`: log(1 - 2^(-5 - h)) for head h."""
    heads = np.arange(checks.at_least("num_heads", num_heads, 1, "heads"))
    return jnp.log1p(-jnp.asarray(2.0 ** (-5 - heads)))


def naive(state, query, key, value, *, log_decay, scale):
    """One token of one head: state `(H, Hv)`, query and key `(H,)`, value `(Hv,)`."""
    state = jnp.exp(log_decay) * state + jnp.outer(key, value)
    return state, scale * (query @ state)


def _decays(*, key, log_decay, **_):
    """The decays of the paper, unless the caller has others."""
    decay = 1 - 2.0 ** (-5 - jnp.arange(key.shape[-2]))
    return {"log_decay": jnp.log(decay) if log_decay is None else log_decay}


@with_naive(
    over_tokens(naive, per_head={"log_decay": 0}, made_by_head=_decays, neutral={"log_decay": 0})
)
@declared
def retention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Retention (Sun et al. 2023, "Retentive Network: A Successor to Transformer").

        S_t = gamma S_(t-1) + k_t v_t^T;    out_t = scale * S_t^T q_t

    that is, out_t = scale * sum_(s <= t) gamma^(t - s) (q_t . k_s) v_s. Retention is always causal
    and has no normaliser: RetNet normalises the output of each head (`effattn.nn.RetNet`). Time is
    O(T (C (H + Hv) + H Hv)) for chunks of C tokens, memory O(T), the state H x Hv numbers a key
    head. Lightning attention (Qin et al. 2024, "Various Lengths, Constant Speed: Efficient Language
    Modeling with Lightning Attention") has other decays (`effattn.nn.LightningAttention`).

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: `(K,)`, log gamma of each key head, 0 or less, which is checked where it is
        concrete; default `retention_log_decay(K)`.
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
    heads = given.key.shape[-2]
    if log_decay is None:
        log_decay = retention_log_decay(heads)
    parameters = (
        recurrence.check_log_decay(log_decay, (heads,)),
        recurrence.check_scale(scale, given.query),
    )
    out, state = recurrence.run(
        "retention",
        _terms,
        given,
        given.query,
        (given.key, given.value),
        parameters,
    )
    return recurrence.results(out, state, given)


def _terms(parameters, query, keys) -> Terms:
    log_decay, scale = parameters
    key, value = keys
    return Terms(dtypes.product(query, scale), key, value, log_decay)


registry.register(
    registry.Mechanism(
        name="retention",
        family="recurrent",
        paper="Sun et al. 2023, Retentive Network: A Successor to Transformer for Large Language "
        "Models",
        function=retention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.retention:RetNet",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
    )
)
