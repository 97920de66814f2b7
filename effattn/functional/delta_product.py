"""DeltaProduct: several steps of the delta rule for each token."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import recurrence
from effattn.functional.delta_net import terms
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, beta, later_keys, later_values, log_decay=None, scale):
    """One token of one head: state `(H, Hv)`, query and key `(H,)`, value `(Hv,)`, beta `(M,)`."""
    keys = jnp.concatenate([key[None], later_keys])
    values = jnp.concatenate([value[None], later_values])
    if log_decay is not None:
        state = jnp.exp(log_decay) * state
    for k, v, strength in zip(keys, values, beta, strict=True):
        state = state + strength * jnp.outer(k, v - k @ state)
    return state, scale * (query @ state)


@with_naive(over_tokens(naive, per_token=("beta", "later_keys", "later_values", "log_decay")))
@declared
def delta_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    beta: jax.Array,
    later_keys: jax.Array,
    later_values: jax.Array,
    log_decay: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""DeltaProduct, and with decays Gated DeltaProduct.

    Siems et al. 2025, "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
    Products".

    Each token takes M steps of the delta rule, with M keys, values and strengths, so that its
    transition is a product of M Householder matrices:

        S_(t,0) = alpha_t S_(t-1),    alpha = exp(log_decay)
        S_(t,m) = (I - beta_tm k_tm k_tm^T) S_(t,m-1) + beta_tm k_tm v_tm^T,    m = 1 to M
        S_t = S_(t,M);    out_t = scale * S_t^T q_t

    With M = 1 this is `delta_rule_attention`, and with M keys of length 1 and strengths up to 2 the
    transition can be any product of M reflections, such as a rotation for M = 2. Always causal.
    Time is O(T M (C (H + Hv) + H Hv)) for chunks of C steps, and memory O(T M).

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, the keys of the first step; N is a multiple of K: query head n reads key
        head n // (N // K).
      value: `(*B, T, K, Hv)`, the values of the first step.
      beta: `(*B, T, K, M)`, strength of each step, in [0, 1] or up to 2.
      later_keys: `(*B, T, K, M - 1, H)`, the keys of the other steps, in their order.
      later_values: `(*B, T, K, M - 1, Hv)`, the values of the other steps.
      log_decay: `(*B, T, K)`, log alpha, 0 or less; None means no decay.
      scale: multiplies the queries; default H**-0.5.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`; a
        chunk has `chunk_size` steps.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state being
      `(*B, K, H, Hv)` in the promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError: a log decay above 0; and the errors of `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    of_key, of_value = given.key.shape, given.value.shape
    steps = beta.shape[-1] if beta.ndim == len(of_key) else 0
    if steps < 1:
        raise ValueError(
            f"beta must have shape {(*of_key[:-1], 'M')}, a strength for each of M steps, got "
            f"{beta.shape}"
        )
    beta = checks.shaped("beta", beta, (*of_key[:-1], steps))
    later = (*of_key[:-1], steps - 1)
    later_keys = checks.shaped("later_keys", later_keys, (*later, of_key[-1]))
    later_values = checks.shaped("later_values", later_values, (*later, of_value[-1]))
    axis = len(given.batch) + 1

    def in_order(*steps_of_tokens):
        """The steps `(*B, T, heads, ...)` of all tokens in one row, `(*B, T M, heads, ...)`."""
        x = jnp.stack(steps_of_tokens, axis)
        return x.reshape(*x.shape[: axis - 1], x.shape[axis - 1] * steps, *x.shape[axis + 1 :])

    def each(x, at):
        """The array of each step, from an array with the steps along axis `at`."""
        return [jax.lax.index_in_dim(x, m, at, keepdims=False) for m in range(x.shape[at])]

    if log_decay is not None:
        # The state decays in the first step of a token.
        log_decay = recurrence.check_log_decay(log_decay, of_key[:-1])
        log_decay = in_order(log_decay, *[jnp.zeros_like(log_decay)] * (steps - 1))
    # The last step of a token has its query, and the outputs of the other steps are dropped.
    query, key, later_keys = dtypes.alike(given.query, given.key, later_keys)
    query = in_order(*[jnp.zeros_like(query)] * (steps - 1), query)
    key = in_order(key, *each(later_keys, axis + 1))
    value, later_values = dtypes.alike(given.value, later_values)
    value = in_order(value, *each(later_values, axis + 1))
    of_steps = _of_steps(options, steps, given.batch, given.key.shape[-3])
    given_steps = recurrence.check(query, key, value, **of_steps)
    out, state = recurrence.run(
        "delta_product_attention",
        terms,
        given_steps,
        query,
        (key, value, in_order(*each(beta, axis + 1)), log_decay),
        recurrence.check_scale(scale, given.query),
    )
    out = out[..., steps - 1 :: steps, :, :].astype(given.value.dtype)
    return recurrence.results(out, state, given)


def _of_steps(options: Any, steps: int, batch: tuple[int, ...], time: int) -> dict[str, Any]:
    """The shared options of a call in which every step of the `time` tokens is a token."""
    changed = dict(options)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        lengths = checks.lengths(name, changed.get(name), batch)
        if lengths is not None:  # at most T, so that the product does not overflow
            changed[name] = jnp.minimum(lengths, time) * steps
    if changed.get("segment_ids") is not None:
        changed["segment_ids"] = jnp.repeat(jnp.asarray(changed["segment_ids"]), steps, -1)
    return changed


registry.register(
    registry.Mechanism(
        name="delta_product",
        family="recurrent",
        paper="Siems et al. 2025, DeltaProduct: Improving State-Tracking in Linear RNNs",
        function=delta_product_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.delta_product:GatedDeltaProduct",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N M H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
