"""Hedgehog: linear attention with learned feature maps."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.cores import feature_attention, recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_pairs, with_naive
from effattn.options import FeatureMapped, declared


def naive(query, key, value, pairs, *, query_projection, key_projection, initial_state=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, projections `(F, H)`."""

    def phi(x):
        return jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], 1)

    query, key = phi(query @ query_projection.T), phi(key @ key_projection.T)
    return pairs.linear(query, key, value, initial_state)


@with_naive(over_pairs(naive, per_head={"query_projection": 2, "key_projection": 2}, wide=True))
@declared
def hedgehog_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_projection: jax.Array,
    key_projection: jax.Array,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""Hedgehog (Zhang et al. 2024, "The Hedgehog & the Porcupine").

    Over the keys s that query t may attend to, with learned matrices W and W' of each key head,

        out_t = sum_s w_ts v_s / sum_s w_ts,    w_ts = phi(W q_t) . phi(W' k_s)
        phi(x) = [softmax(x), softmax(-x)]

    phi is the normalised form of the paper, which cannot overflow. With trained W and W', the
    weights are as peaked as softmax weights and grow with q . k. This is linear attention with 2 F
    features, computed for one block of tokens at a time: time O((T + S) F (H + Hv)), memory
    O(T + S).

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      query_projection: W, `(K, F, H)`, one matrix for the queries of each key head, or `(1, F, H)`.
      key_projection: W', `(K, F, H)`, one matrix for each key head, or `(1, F, H)`.
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`. The state is
      `(*B, K, 2 F, Hv + 1)`, the sum of phi(W' k) v^T and, in the last column, of phi(W' k), in the
      promoted dtype of query, key and value, at least float32. Queries without keys, or with
      weights that sum to zero, give zeros.

    Raises:
      ValueError: projections to unequal numbers of features; and the errors of `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    of_query = feature_attention.check_projection("query_projection", query_projection, key)
    of_key = feature_attention.check_projection("key_projection", key_projection, key)
    if of_query.shape[-2] != of_key.shape[-2]:
        raise ValueError(
            "query_projection and key_projection must have the same number of features, got "
            f"{of_query.shape[-2]} and {of_key.shape[-2]}"
        )
    terms = recurrence.Bound(_terms, (given.precision,))
    return feature_attention.attend("hedgehog_attention", terms, given, (of_query, of_key))


def _terms(precision, projections, query, keys) -> Terms:
    """Terms phi(W q), phi(W' k) and v."""
    key, value = keys
    query, key = (
        _phi(feature_attention.products(x, projection, precision))
        for x, projection in zip((query, key), projections, strict=True)
    )
    return Terms(query, key, value)


def _phi(x):
    return jnp.concatenate([jax.nn.softmax(x, -1), jax.nn.softmax(-x, -1)], -1)


registry.register(
    registry.Mechanism(
        name="hedgehog",
        family="linear",
        paper="Zhang et al. 2024, The Hedgehog & the Porcupine: Expressive Linear Attentions with "
        "Softmax Mimicry",
        function=hedgehog_attention,
        capabilities=frozenset({"cross"}),
        builder="effattn.nn.hedgehog:HedgehogSelfAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F (H + Hv))",
        time_exponent=1.0,
    )
)
