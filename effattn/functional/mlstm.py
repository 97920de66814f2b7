"""mLSTM: linear attention with exponential input gates, forget gates and a bounded normaliser."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.cores import recurrence, sequence_parts
from effattn.cores.running_maxima import decaying_maxima, maximum_of_parts
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


class MLSTMState(NamedTuple):
    """State of `mlstm_attention`; zeros are the empty state.

    Attributes:
      sums: `(*B, K, H, Hv + 1)`, the matrix memory C^T / exp(m) of keys by values, and in the last
        column the normaliser n / exp(m), the sum of the keys.
      maximum: `(*B, K)`, m. Gradients treat m as a constant.
    """

    sums: jax.Array
    maximum: jax.Array


def naive(state, query, key, value, *, log_input_gate, log_forget_gate, scale):
    """One token of one head: query and key `(H,)`, value `(Hv,)`, gates `()`."""
    C, n, before = state.sums[:, :-1], state.sums[:, -1], lax.stop_gradient(state.maximum)
    kept = log_forget_gate + before
    m = lax.stop_gradient(jnp.maximum(jnp.maximum(kept, log_input_gate), 0))
    forget, write = jnp.exp(kept - m), jnp.exp(log_input_gate - m)
    C = forget * C + write * jnp.outer(key, value)
    n = forget * n + write * key
    out = scale * (query @ C) / jnp.maximum(abs(scale * (query @ n)), jnp.exp(-m))
    return MLSTMState(jnp.concatenate([C, n[:, None]], 1), m), out


def _empty(key, value, **_):
    return MLSTMState(jnp.zeros((key.size, value.size + 1), value.dtype), value.dtype.type(0))


@with_naive(over_tokens(naive, per_token=("log_input_gate", "log_forget_gate"), empty=_empty))
@declared
def mlstm_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_input_gate: jax.Array,
    log_forget_gate: jax.Array,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Matrix memory of the xLSTM (Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory").

        C_t = f_t C_(t-1) + i_t v_t k_t^T;    n_t = f_t n_(t-1) + i_t k_t
        out_t = scale * C_t q_t / max(|scale * n_t . q_t|, 1)

    with i_t = exp(log_input_gate) and f_t = exp(log_forget_gate), which may exceed 1. The sums are
    stored divided by exp(m_t), m_t = max(log f_t + m_(t-1), log i_t, 0), and so do not overflow;
    this factor cancels in the output. Always causal. Time is O(T (C (H + Hv) + H Hv)) for chunks of
    C tokens, memory O(T), the state H x (Hv + 1) + 1 numbers for each key head.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_input_gate: log i, `(*B, T, K)`, the logit of the exponential gate.
      log_forget_gate: log f, `(*B, T, K)`: the log sigmoid of a logit, or the logit of an
        exponential gate.
      scale: multiplies the queries; default H**-0.5. The paper multiplies the keys.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, MLSTMState)`, in the
      promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    checks.known_length("mlstm_attention", given.query)
    shape = given.key.shape[:-1]
    gates = (
        checks.shaped("log_input_gate", log_input_gate, shape).astype(given.dtype),
        checks.shaped("log_forget_gate", log_forget_gate, shape).astype(given.dtype),
    )
    multiplier = recurrence.check_scale(scale, given.query)
    sums, first = _check_state(given)
    key, value, log_input, log_forget = clear(
        (given.key, given.value, *gates), given.tokens.key_mask
    )
    before, after, last = _maxima(given, log_input, log_forget, first)
    # In this order: the difference of near maxima is exact.
    log_decay = log_forget + (before - after)
    if given.tokens.starts is not None:  # the recurrence resets the sums, and reads no decay
        log_decay = clear(log_decay, ~given.tokens.starts)
    # The keys of padding are zero already, and a query there reads the maximum.
    tokens = given.tokens._replace(key_mask=None)
    out, sums = recurrence.run(
        "mlstm_attention",
        _terms,
        dataclasses.replace(given, initial_state=sums, tokens=tokens),
        given.query,
        (key, value, log_input, after, log_decay),
        multiplier,
        normalized=True,
    )
    return recurrence.results(out, MLSTMState(sums, last), given)


def _terms(scale, query, keys) -> Terms:
    key, value, log_input, maximum, log_decay = keys
    key = dtypes.product(jnp.exp(log_input - maximum)[..., None], key)
    # A smaller divisor could make the quotient's derivatives overflow where the products are zero.
    least = jnp.maximum(jnp.exp(-maximum), jnp.finfo(maximum.dtype).tiny ** 0.5)
    return Terms(dtypes.product(query, scale), key, value, log_decay, least=least)


def _maxima(given, log_input, log_forget, first):
    """Returns m before and after each token, `(*B, T, K)`, and after all tokens, `(*B, K)`."""
    *rows, time, heads, _ = mesh_axes.spec(given.key)
    of_tokens = PartitionSpec(*rows, time, heads)

    def maxima(log_input, log_forget, first, mask, starts):
        floor = jnp.maximum(log_input, 0)
        if starts is not None:
            floor = jnp.maximum(floor, clear(log_forget, starts))
        if mask is not None:
            floor = jnp.where(mask[..., None], floor, dtypes.lowest(floor.dtype))
        change, floor, constant = lax.stop_gradient((log_forget, floor, first))
        own, last = maximum_of_parts("mlstm_attention", constant, change, floor, starts)
        before, after = decaying_maxima(own, change, floor, starts)
        if last is None and after.shape[-2]:
            last = after[..., -1, :]
        return before, after, first if last is None else _if_any(mask, last, first)

    specs = of_tokens, of_tokens, PartitionSpec(*rows, heads)
    arguments = log_input, log_forget, first, given.tokens.key_mask, given.tokens.starts
    return mesh_axes.placed(maxima, given.query, *specs)(*arguments)


def _if_any(mask, last, first):
    """The maximum after all tokens; the first one, with its gradient, if all are padding."""
    if mask is None:
        return last
    parts, count = sequence_parts.current(), mask.sum(-1, keepdims=True)
    count = count if parts is None else parts.sum(count)
    return jnp.where(count > 0, last, first)


def _check_state(given):
    """The checked sums and maximum of the initial state; the sums may be None."""
    state, (*batch, _, heads, size) = given.initial_state, given.value.shape
    if state is None:
        return None, jnp.zeros((*batch, heads), given.dtype)
    if not isinstance(state, MLSTMState):
        raise ValueError(
            "initial_state must be the MLSTMState that an earlier call returned, got "
            f"{type(state).__name__}"
        )
    shape = (*batch, heads, given.key.shape[-1], size + 1)
    sums = checks.shaped("initial_state.sums", state.sums, shape)
    maximum = checks.shaped("initial_state.maximum", state.maximum, shape[:-2])
    return sums.astype(given.dtype), maximum.astype(given.dtype)


registry.register(
    registry.Mechanism(
        name="mlstm",
        family="recurrent",
        paper="Beck et al. 2024, xLSTM: Extended Long Short-Term Memory",
        function=mlstm_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.mlstm:MLSTM",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
