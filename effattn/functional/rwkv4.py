"""Token mixing of RWKV-4: running averages with decaying weights, for each feature."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import token_mixing
from effattn.cores.token_mixing import cleared
from effattn.cores.weighted_sums import (
    LOWEST,
    Sums,
    one_token,
    passed_sums,
    running_sums,
    with_initial,
)
from effattn.naive import over_tokens, with_naive
from effattn.options import TokenMixing, declared


def naive(state, key, value, *, decay, bonus):
    """One token: key and value `(D,)`; the state is `Sums` over earlier tokens, `(D,)` each."""
    values, weights, largest = state
    largest = lax.stop_gradient(jnp.where(weights > 0, largest, LOWEST))

    def plus_token(largest, exponent):
        new = lax.stop_gradient(jnp.maximum(largest, exponent))
        kept, added = jnp.exp(largest - new), jnp.exp(exponent - new)
        return Sums(kept * values + added * value, kept * weights + added, new)

    here = plus_token(largest, bonus + key)
    return plus_token(largest - decay, key), here.values / here.weights


def _empty(key, **_):
    return Sums(jnp.zeros_like(key), jnp.zeros_like(key), jnp.full_like(key, LOWEST))


@with_naive(over_tokens(naive, heads=False, empty=_empty))
@jax.named_scope("rwkv4_mixing")
@declared
def rwkv4_mixing(
    key: jax.Array,
    value: jax.Array,
    *,
    decay: jax.Array,
    bonus: jax.Array,
    **options: Unpack[TokenMixing],
) -> jax.Array | tuple[jax.Array, Sums]:
    r"""WKV averages of RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs").

    For each feature separately, with decay w and bonus u:

        y_t = (sum_(s < t) exp(k_s - (t - 1 - s) w) v_s + exp(u + k_t) v_t)
              / (sum_(s < t) exp(k_s - (t - 1 - s) w) + exp(u + k_t))

    The mixing is always causal. Sums are divided by exp of their largest exponent, so keys of any
    size do not overflow. Time is O(T D log C) for chunks of C = 64 tokens, memory O(T D); the state
    has 3 D numbers a row. Gradients do not flow through the largest exponents, which cancel.

    Args:
      key: `(B, T, D)`.
      value: `(B, T, D)`, of the dtype of the key.
      decay: w, `(D,)`, 0 or more, checked if concrete.
      bonus: u, `(D,)`.
      **options: lengths, packing and state: see `effattn.options.TokenMixing`.

    Returns:
      `(B, T, D)` in the dtype of `value`; with `return_state`, `(y, state)`; the state is
      `Sums` of shape `(B, D)`, in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a state together with `segment_ids`.
    """
    key, value, valid, starts = token_mixing.check(
        "rwkv4_mixing", {"key": key, "value": value}, **options
    )
    initial = options.get("initial_state")
    dtype, size = key.dtype, (key.shape[-1],)
    wide = dtypes.wide(dtype)
    key, values = key.astype(wide), value.astype(wide)
    checks.between("decay", decay, 0)
    decay = checks.shaped("decay", decay, size).astype(wide)
    bonus = checks.shaped("bonus", bonus, size).astype(wide)
    given = key, values, decay, valid, starts
    initial, after = passed_sums("rwkv4_mixing", *given, initial)
    sums = with_initial(initial, running_sums(*given, initial))
    before = jax.tree.map(lambda x: x[:, :-1], sums)
    if starts is not None:
        before = before.emptied(starts[..., None])
    y = before.plus(one_token(key + lead(bonus, 3), values)).average()
    y = cleared(y, valid).astype(dtype)
    after = jax.tree.map(lambda x: x[:, -1], sums) if after is None else after
    return (y, after) if options.get("return_state") else y


registry.register(
    registry.Mechanism(
        name="rwkv4",
        family="recurrent",
        paper="Peng et al. 2023, RWKV: Reinventing RNNs for the Transformer Era",
        function=rwkv4_mixing,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.rwkv4:RWKV4",
        complexity="O(N D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
