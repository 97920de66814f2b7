"""Gated slot attention: softmax attention over slots, which gates fill with keys and values."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


class GatedSlotState(NamedTuple):
    """State of `gated_slot_attention`; zeros are the empty state.

    Attributes:
      keys: `(*B, K, H, m)`, the keys in the m slots.
      values: `(*B, K, m, Hv)`, the values in the slots.
    """

    keys: jax.Array
    values: jax.Array


def naive(state, query, key, value, *, log_decay, scale):
    """One token of one head: query and key `(H,)`, value `(Hv,)`, log decay `(m,)`."""
    alpha = jnp.exp(log_decay)
    keys = alpha * state.keys + (1 - alpha) * key[:, None]
    values = alpha[:, None] * state.values + (1 - alpha)[:, None] * value
    out = jax.nn.softmax(scale * (query @ keys)) @ values
    return GatedSlotState(keys, values), out


def _empty(key, value, log_decay, **_):
    m, dtype = log_decay.size, value.dtype
    return GatedSlotState(jnp.zeros((key.size, m), dtype), jnp.zeros((m, value.size), dtype))


@with_naive(over_tokens(naive, per_token=("log_decay",), empty=_empty))
@declared
def gated_slot_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Gated slot attention.

    Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling".

    Each key head has m slots. A slot i holds a key and a value, averages of those of past tokens,
    and a query attends to the slots:

        K_t = diag(alpha_t) K_(t-1) + (1 - alpha_t) k_t^T;    V_t likewise with v_t
        out_t = V_t^T softmax(scale * K_t q_t)

    These are two passes of gated linear attention: the first one, with decays of values, gives the
    logits K_t q_t, and the second one, with decays of features, reads the values. Always causal.
    Time is O(T m (C + H + Hv)) for chunks of C tokens, memory O(T), the state m (H + Hv) numbers a
    key head. The first pass runs in XLA on all devices.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: log alpha, `(*B, T, K, m)`; 0 or less, checked if concrete.
      scale: multiplies the logits; default H**-0.5. The paper has 1.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, GatedSlotState)`, in the
      promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    log_decay = _check_log_decay(log_decay, given.key)
    keys, values = _check_state(given.initial_state, given, log_decay.shape[-1])

    def run(terms, query, keys, value, state, scale=None):
        # `value` only tells the dtype and the sharding of the output.
        of_pass = dataclasses.replace(given, value=value, initial_state=state)
        return recurrence.run("gated_slot_attention", terms, of_pass, query, keys, scale)

    multiplier, slots = recurrence.check_scale(scale, given.query), log_decay.astype(given.dtype)
    logits, keys = run(_key_terms, given.query, (given.key, slots), slots, keys, multiplier)
    weights = jax.nn.softmax(logits, -1)
    out, values = run(_value_terms, weights, (given.value, slots), given.value, values)
    return recurrence.results(out, GatedSlotState(keys, values), given)


def _key_terms(scale, query, keys) -> Terms:
    key, log_decay = keys
    query = dtypes.product(query, scale)
    return Terms(query, key, -jnp.expm1(log_decay), value_log_decay=log_decay)


def _value_terms(_, weights, keys) -> Terms:
    value, log_decay = keys
    return Terms(weights, -jnp.expm1(log_decay), value, log_decay)


def _check_log_decay(value, key):
    slots = jnp.shape(value)[-1:] or (1,)
    if not slots[0]:
        raise ValueError(
            f"log_decay must have at least one slot, (*B, T, K, m), got {jnp.shape(value)}"
        )
    return recurrence.check_log_decay(value, (*key.shape[:-1], *slots))


def _check_state(state, given, slots):
    """The checked keys and values of the initial state; None for an empty state."""
    if state is None:
        return None, None
    if not isinstance(state, GatedSlotState):
        raise ValueError(
            "initial_state must be the GatedSlotState that an earlier call returned, got "
            f"{type(state).__name__}"
        )
    *batch, _, heads, size = given.value.shape
    of_heads, features = (*batch, heads), given.key.shape[-1]
    return (
        checks.shaped("initial_state.keys", state.keys, (*of_heads, features, slots)),
        checks.shaped("initial_state.values", state.values, (*of_heads, slots, size)),
    )


registry.register(
    registry.Mechanism(
        name="gated_slot",
        family="recurrent",
        paper="Zhang et al. 2024, Gated Slot Attention for Efficient Linear-Time Sequence Modeling",
        function=gated_slot_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.gated_slot:GatedSlotAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N m (H + Hv))",
        time_exponent=1.0,
        knows_order=True,
    )
)
