"""cosFormer: linear attention by ReLU features with a cosine weight of the distance."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.angles import angles
from effattn.arrays.segments import positions_from_segment_ids
from effattn.cores import feature_attention, recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_pairs, with_naive
from effattn.options import FeatureMapped, declared


def naive(query, key, value, pairs, *, max_length, positions=None, initial_state=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, state `(2 H, Hv + 1)`."""

    def cos_and_sin(position):
        angle = (np.pi / (2 * max_length) * position).astype(value.dtype)
        return jnp.cos(angle), jnp.sin(angle)

    def phi(x, position):
        cos, sin = cos_and_sin(position[:, None])
        return jnp.concatenate([jax.nn.relu(x) * cos, jax.nn.relu(x) * sin], 1)

    t, s = _naive_positions(pairs, positions)
    out, sums = pairs.linear(phi(query, t), phi(key, s), value, initial_state)
    # The state counts positions from the one after the last key.
    last_key = jnp.where(pairs.present, pairs.j, -1).max(initial=-1)
    cos, sin = cos_and_sin(jnp.where(pairs.j == last_key, s + 1, 0).sum())
    of_cos, of_sin = jnp.split(sums, 2)
    return out, jnp.concatenate([of_cos * cos + of_sin * sin, of_sin * cos - of_cos * sin])


def _naive_positions(pairs, positions):
    """Positions `(T,)` and `(S,)`; by default the index of each token in its document."""
    if positions is None:
        query_ids, key_ids = pairs.query_ids, pairs.key_ids
        first_query, first_key = (
            jnp.where(ids[:, None] == ids, jnp.arange(ids.size), ids.size).min(1, initial=ids.size)
            for ids in (query_ids, key_ids)
        )
        return jnp.arange(query_ids.size) - first_query, jnp.arange(key_ids.size) - first_key
    return positions if isinstance(positions, tuple | list) else (positions, positions)


@with_naive(over_pairs(naive, per_example=("positions",), wide=True))
@declared
def cosformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    max_length: int,
    positions: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""cosFormer (Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention").

    Over the keys s that query t may attend to, at positions t and s, with M = max_length,

        out_t = sum_s w_ts v_s / sum_s w_ts
        w_ts = relu(q_t) . relu(k_s) cos(pi (t - s) / (2 M))

    This is linear attention with the features relu(x) cos(a) and relu(x) sin(a) at the angle
    a = pi t / (2 M) of a token. Time is O((T + S) H Hv) and memory O(T + S).

    Weights depend only on distances, so each packed document counts positions from its start. The
    state is stored relative to the position after its last token, so it holds no position.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      max_length: M, at least T and S. Tokens of a call and of its initial state may not be more
        than M apart either: weights would be negative.
      positions: int `(*B, T)`, or a pair `((*B, T), (*B, S))`: positions of the tokens;
        default 0, 1, ... in each document. Tokens that attend to each other may not be more than M
        apart. With an initial state, 0 is the position after the last key of the state.
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`. The state is
      `(*B, K, 2 H, Hv + 1)`, the sum of phi(k) v^T and, in the last column, of phi(k), in the
      promoted dtype of query, key and value, at least float32. Queries without keys, or with
      weights that sum to zero, give zeros.

    Raises:
      ValueError: more than `max_length` tokens; and the errors of `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    max_length = checks.at_least("max_length", max_length, 1, "tokens")
    checks.known_length("cosformer_attention", query, key)
    longest = max(query.shape[-3], key.shape[-3])
    if longest > max_length:
        raise ValueError(
            f"max_length must be at least {longest}, the number of tokens, got {max_length}"
        )
    of_query, of_key, of_next = (
        angles(places, np.asarray(np.pi / (2 * max_length)), given.dtype)
        for places in _positions(given, options.get("segment_ids"), positions)
    )
    out, state = recurrence.run(
        "cosformer_attention",
        _terms,
        given,
        (query, of_query),
        (key, value, of_key),
        normalized=True,
    )
    return recurrence.results(out, _turned(state, of_next), given)


def _terms(_, queries, keys) -> Terms:
    query, of_query = queries
    key, value, of_key = keys
    return Terms(_phi(query, of_query), _phi(key, of_key), value)


def _phi(x, angle):
    """The features relu(x) cos(a) and relu(x) sin(a)."""
    x = jax.nn.relu(x)
    return jnp.concatenate(
        [dtypes.product(x, turned) for turned in (jnp.cos(angle), jnp.sin(angle))], -1
    )


def _positions(given, segment_ids, positions):
    """Returns positions of queries and keys, `(*B, L, 1, 1)`, and the position after the keys."""
    *batch, queries, _, _ = given.query.shape
    keys = given.key.shape[-3]
    if positions is not None:
        both = positions if isinstance(positions, tuple | list) else (positions,) * 2
        of_query, of_key = _checked(both, ((*batch, queries), (*batch, keys)))
    elif segment_ids is None:
        of_query, of_key = jnp.arange(queries), jnp.arange(keys)
    else:
        both = checks.segment_ids(segment_ids, batch, queries, keys) or ()
        of_query, of_key = map(positions_from_segment_ids, both)
    of_query = jnp.broadcast_to(of_query, (*batch, queries))
    of_key = jnp.broadcast_to(of_key, (*batch, keys))
    present = given.tokens.key_mask
    present = jnp.ones_like(of_key, bool) if present is None else present
    index = jnp.broadcast_to(jnp.arange(keys), (*batch, keys))
    last = jnp.max(jnp.where(present, index, -1), -1, keepdims=True, initial=-1)
    # The sum has one term, or none if there is no valid key; then the state does not turn.
    of_next = jnp.sum(jnp.where(index == last, of_key + 1, 0), -1)
    return of_query[..., None, None], of_key[..., None, None], of_next


def _checked(positions, shapes):
    """Returns the checked integer positions of queries and keys."""
    arrays = tuple(map(jnp.asarray, positions))
    if tuple(x.shape for x in arrays) != shapes or not all(
        jnp.issubdtype(x.dtype, jnp.integer) for x in arrays
    ):
        got = ", ".join(f"{x.dtype} of shape {x.shape}" for x in arrays)
        raise ValueError(
            f"positions must be integers of shape {shapes[0]} for the queries and {shapes[1]} for "
            f"the keys, or one array for both if these shapes are equal, got {got}"
        )
    return arrays


def _turned(state, angle):
    """Rotates the state to be relative to a token at `angle`, `()` or `(*B)`."""
    cosine, sine = (f(angle)[..., None, None, None] for f in (jnp.cos, jnp.sin))
    of_cosines, of_sines = jnp.split(state, 2, -2)
    return jnp.concatenate(
        [of_cosines * cosine + of_sines * sine, of_sines * cosine - of_cosines * sine], -2
    )


registry.register(
    registry.Mechanism(
        name="cosformer",
        family="linear",
        paper="Qin et al. 2022, cosFormer: Rethinking Softmax in Attention",
        function=cosformer_attention,
        capabilities=frozenset({"cross"}),
        options={"max_length": 16384},
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
    )
)
