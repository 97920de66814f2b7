"""Linear attention: a kernel of feature maps in the place of the softmax."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import feature_attention, feature_maps, recurrence
from effattn.cores.feature_maps import FeatureMap
from effattn.interfaces.linear_recurrence import Terms, clear


@checks.checked
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
      feature_map: a name: "elu" (elu + 1), "relu",
        "squared_relu", "exp", "taylor" or "identity"; or a callable from `(..., H)` to `(..., F)`
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
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("linear")` lists the names and what they
        take.

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
    given, attend = feature_attention.check(
        query,
        key,
        value,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        initial_state=initial_state,
        return_state=return_state,
        precision=precision,
        chunk_size=chunk_size,
    )
    phi = feature_maps.resolve(feature_map)
    normalized = phi is not feature_maps.identity if normalize is None else bool(normalize)
    multiplier = recurrence.check_scale(scale, query)
    if phi not in feature_maps.FEATURE_MAPS.values():
        # The core's own map is a constant of the program; a caller's may close over arrays.
        query = _features(phi, clear(query, given.tokens.query_mask))
        key = _features(phi, clear(key, given.tokens.key_mask))
        phi = feature_maps.identity
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
        return Terms(
            query if scale is None else dtypes.product(query, scale), self.feature_map(key), value
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
