"""Linear attention: a kernel of feature maps in the place of the softmax."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from effattn import _checks, registry
from effattn.functional import feature_maps, recurrence
from effattn.functional.feature_maps import FeatureMap
from effattn.xla import mesh_axes
from effattn.xla.linear_recurrence import (
    Terms,
    Tokens,
    clear,
    linear_recurrence,
    linear_sum,
    packed,
)


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    feature_map: str | FeatureMap = "elu",
    normalize: bool | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    precision: jax.lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs").

    With a feature map phi, over the keys s that query t may attend to,

        out_t = sum_s sim_ts v_s / sum_s sim_ts,    sim_ts = scale * phi(q_t) . phi(k_s)

    or the numerator alone if not normalised. Time is O((T + S) F Hv) and memory O(T + S); the
    causal form runs in chunks, as a recurrence whose state is one F x Hv matrix a key head.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      scale: multiplies the similarity; default H**-0.5. It cancels when normalised.
      feature_map: "elu" (elu + 1), "relu", "identity", or a callable from `(..., H)` to `(..., F)`
        that treats vectors alike. It is applied to queries and keys.
      normalize: divide by the sum of the similarities; default yes, except for the identity.
      is_causal: query t attends to the keys up to t; needs T == S.
      query_seq_lengths: `(*B)` int, valid queries of each row; the others give zeros.
      key_value_seq_lengths: `(*B)` int, valid keys of each row.
      segment_ids: int `(*B, T)`, or if not causal a pair `((*B, T), (*B, S))`: tokens attend within
        equal ids, which are one contiguous run; 0 is padding.
      initial_state: the state before the first token, as returned by an earlier call. With
        `segment_ids` it belongs to the first document.
      return_state: also return the state after the last valid token. With `segment_ids` it is that
        of the last document.
      precision: of the matrix products, as in `jax.lax.dot`.
      chunk_size: tokens of one masked product of the causal form; tuning only.
      implementation: None or "xla", or a tuple of names tried in order.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state being
      the sum of phi(k) v^T, `(*B, K, F, Hv)`, or if normalised `(*B, K, F, Hv + 1)` with the sum of
      phi(k) in its last column. State and sums have the promoted dtype of query, key and value, at
      least float32. A query without keys, or whose similarities sum to zero, gives zeros.

    Raises:
      ValueError: wrong shapes, dtypes or options.
      NotImplementedError: an implementation that linear attention does not have.
      TypeError: in forward-mode differentiation of the causal or packed form.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    batch = _checks.query_key_value(query, key, value)
    queries, keys = query.shape[-3], key.shape[-3]
    ids = _checks.segment_ids(segment_ids, batch, queries, keys)
    query_lengths = _checks.lengths("query_seq_lengths", query_seq_lengths, batch)
    key_lengths = _checks.lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    _check_options(queries, keys, is_causal, segment_ids, initial_state, return_state)
    phi = feature_maps.resolve(feature_map)
    normalized = phi is not feature_maps.identity if normalize is None else bool(normalize)
    multiplier = recurrence.check_scale(scale, query)
    query_ids, key_ids = (None, None) if ids is None else ids
    tokens = Tokens(_mask(query_lengths, query_ids, queries), _mask(key_lengths, key_ids, keys))
    if phi not in feature_maps.FEATURE_MAPS.values():
        # The core's own map is a constant of the program; a caller's may close over arrays.
        query = _features(phi, clear(query, tokens.query_mask))
        key = _features(phi, clear(key, tokens.key_mask))
        phi = feature_maps.identity
    if not is_causal:
        attend = linear_sum if ids is None else _WithinDocuments(*ids).attend
    else:
        attend = linear_recurrence
        tokens = tokens if ids is None else packed(ids[1], tokens)
    given = recurrence.Arguments(
        batch=batch,
        query=query,
        key=key,
        value=value,
        tokens=tokens,
        precision=precision,
        chunk=recurrence.check_chunk_size(chunk_size),
        dtype=recurrence.sum_dtype(query, key, value),
    )
    out, state = recurrence.run(
        "linear_attention",
        _LinearTerms(phi),
        given,
        query,
        (key, value),
        None if normalized else multiplier,
        initial_state=initial_state,
        normalized=normalized,
        attend=attend,
        implementation=implementation,
    )
    return (out, state) if return_state else out


@dataclasses.dataclass(frozen=True)
class _LinearTerms:
    """phi(q), times the scale if there is one, phi(k) and v."""

    feature_map: FeatureMap

    def __call__(self, scale, queries, keys) -> Terms:
        key, value = keys
        query = self.feature_map(queries)
        return Terms(query if scale is None else query * scale, self.feature_map(key), value)


def _check_options(queries, keys, is_causal, segment_ids, initial_state, return_state):
    """What may not go together."""
    if is_causal and queries != keys:
        raise ValueError(
            f"is_causal=True needs as many queries as keys, got {queries} and {keys}; to continue "
            "a sequence pass only its new tokens, and as initial_state the state that "
            "return_state=True gave"
        )
    if is_causal and isinstance(segment_ids, tuple | list):
        raise ValueError(
            "segment_ids must be one array (*B, T) where is_causal=True, got a pair: query t and "
            "key t are the same token"
        )
    with_state = initial_state is not None or return_state
    if with_state and segment_ids is not None and not is_causal:
        raise ValueError(
            "initial_state and return_state with segment_ids need is_causal=True: a packed "
            "bidirectional row has a sum for each document; pass one document a row, padded by "
            "key_value_seq_lengths"
        )


def _features(phi, x):
    """The features by a caller's map."""
    features = phi(x)
    if features.shape[:-1] != x.shape[:-1] or not jnp.issubdtype(features.dtype, jnp.floating):
        raise ValueError(
            "feature_map must map (..., H) to floating point (..., F); "
            f"it mapped {x.shape} to {features.dtype} of shape {features.shape}"
        )
    return features


def _mask(lengths, segment_ids, length):
    """Which tokens are not padding, bool `(*B, length)`; None if all are."""
    mask = None if segment_ids is None else segment_ids != 0
    if lengths is None:
        return mask
    within = jnp.arange(length) < lengths[..., None]
    return within if mask is None else mask & within


class _WithinDocuments(NamedTuple):
    """Bidirectional attention inside packed documents.

    The tokens are reordered, each document's keys first and then its queries, and read by one
    causal recurrence. That is linear in T + S, whatever the documents are.
    """

    query_ids: jax.Array
    key_ids: jax.Array

    def attend(self, rule, parameters, state, query, key_value, tokens):
        """What `linear_sum` does, document by document; the state means nothing."""
        (query_ids, key_ids), query, key_value, tokens = mesh_axes.vary_alike(
            (tuple(self), query, key_value, tokens)
        )
        queries, keys = query_ids.shape[-1], key_ids.shape[-1]
        order = jnp.argsort(jnp.concatenate([key_ids, query_ids], -1), -1, stable=True)
        place = jnp.argsort(order, -1)

        def merge(of_keys, of_queries):
            return _permute(jnp.concatenate([of_keys, of_queries], -3), order, place)

        def merge_known(of_keys, of_queries):
            return jnp.take_along_axis(jnp.concatenate([of_keys, of_queries], -1), order, -1)

        def none(x, length):
            return jnp.zeros_like(x, shape=(*x.shape[:-3], length, *x.shape[-2:]))

        merged = Tokens(
            merge_known(jnp.zeros_like(tokens.key_mask), tokens.query_mask),
            merge_known(tokens.key_mask, jnp.zeros_like(tokens.query_mask)),
        )
        ids = merge_known(key_ids, query_ids)
        starts = ids != jnp.concatenate([ids[..., :1], ids[..., :-1]], -1)
        out, state = linear_recurrence(
            rule,
            parameters,
            state,
            merge(none(query, keys), query),
            tuple(merge(x, none(x, queries)) for x in key_value),
            merged._replace(starts=starts),
        )
        return _permute(out, place, order)[..., keys:, :, :], state


@jax.custom_vjp
def _permute(x, order, place):
    """The tokens of `x (*B, L, K, H)` in a new order, of which `place` is the inverse."""
    return jnp.take_along_axis(x, order[..., None, None], -3)


def _permute_bwd(inverse, cotangent):
    place, order = inverse
    return _permute(cotangent, place, order), None, None


_permute.defvjp(lambda x, order, place: (_permute(x, order, place), (place, order)), _permute_bwd)


registry.register(
    registry.Mechanism(
        name="linear",
        family="linear",
        paper="Katharopoulos et al. 2020, Transformers are RNNs",
        function=linear_attention,
        capabilities=frozenset(
            {
                "bidirectional",
                "causal",
                "cross",
                "grouped",
                "lengths",
                "segments",
                "state",
                "decode",
            }
        ),
        options={"feature_map": "elu", "normalize": None},
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F Hv)",
        time_exponent=1.0,
    )
)
