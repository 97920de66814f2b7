"""Linear attention: a product of feature maps in place of the softmax."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import dtypes
from effattn.cores import feature_attention, feature_maps, recurrence
from effattn.cores.feature_maps import FeatureMap
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_pairs, with_naive
from effattn.options import FeatureMapped, declared

# Feature maps of naive forms, written independently of `effattn.cores.feature_maps`.


def elu_features(x):
    """elu(x) + 1. The plain sum cancels: in float32 it is zero below -17."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


_NAIVE_MAPS = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "elu": elu_features,
    "exp": jnp.exp,
    "squared_relu": lambda x: jax.nn.relu(x) ** 2,
    "taylor": lambda x: jax.vmap(taylor_features)(x),
}


def taylor_features(x):
    """Features of one vector `(H,)` whose products are 1 + s + s^2 / 2 for s = x . y."""
    first, second = jnp.triu_indices(x.size, 1)
    return jnp.concatenate([jnp.ones(1, x.dtype), x, 0.5**0.5 * x**2, x[first] * x[second]])


def naive(query, key, value, pairs, *, scale, feature_map, normalize, initial_state=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, state `(F, Hv + 1)`."""
    phi = _NAIVE_MAPS.get(feature_map, feature_map)
    normalize = feature_map != "identity" if normalize is None else normalize
    query = phi(query) if normalize else scale * phi(query)
    return pairs.linear(query, phi(key), value, initial_state, normalize=normalize)


@with_naive(over_pairs(naive, wide=True))
@declared
def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    feature_map: str | FeatureMap = "elu",
    normalize: bool | None = None,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs").

    With a feature map phi, over the keys s that query t may attend to,

        out_t = sum_s sim_ts v_s / sum_s sim_ts,    sim_ts = scale * phi(q_t) . phi(k_s)

    or only the numerator, if not normalised. Time is O((T + S) F Hv) and memory O(T + S); the
    causal form runs in chunks, as a recurrence whose state is one F x Hv matrix a key head.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      scale: multiplies the similarity; default H**-0.5. The scale cancels if normalised.
      feature_map: a name: "elu" (elu + 1), "relu", "squared_relu", "exp", "taylor" or "identity";
        or a callable from `(..., H)` to `(..., F)` that gets all queries, or all keys, and treats
        each vector independently of the others.
      normalize: divide by the sum of the similarities; default True, except for "identity".
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`. The state is
      `(*B, K, F, Hv)`, the sum of phi(k) v^T, or, if normalised, `(*B, K, F, Hv + 1)` with the sum
      of phi(k) in the last column. The state has the promoted dtype of query, key and value, at
      least float32. Queries without keys, or with similarities that sum to zero, give zeros.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    phi = feature_maps.resolve(feature_map)
    normalized = phi is not feature_maps.identity if normalize is None else bool(normalize)
    multiplier = recurrence.check_scale(scale, query)
    if phi not in feature_maps.FEATURE_MAPS.values():
        # A caller's map may close over arrays, so it is applied outside of the core.
        query = _features(phi, clear(query, given.tokens.query_mask))
        key = _features(phi, clear(key, given.tokens.key_mask))
        phi = feature_maps.identity
    out, state = recurrence.run(
        "linear_attention",
        recurrence.Bound(_terms, (phi,)),
        given,
        query,
        (key, value),
        None if normalized else multiplier,
        normalized=normalized,
    )
    return recurrence.results(out, state, given)


def _terms(phi, scale, query, keys) -> Terms:
    """Terms scale * phi(q), phi(k) and v; a scale of None is 1."""
    key, value = keys
    query = phi(query) if scale is None else dtypes.product(phi(query), scale)
    return Terms(query, phi(key), value)


def _features(phi, x):
    """The features of `x (..., H)` by a caller's map, checked."""
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
        paper="Katharopoulos et al. 2020, Transformers are RNNs: Fast Autoregressive Transformers "
        "with Linear Attention",
        function=linear_attention,
        capabilities=frozenset({"cross"}),
        options={"feature_map": "elu", "normalize": None},
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F Hv)",
        time_exponent=1.0,
    )
)
