"""Random feature attention: the Gaussian kernel by sines and cosines, with or without a gate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.arrays import checks
from effattn.cores import feature_attention, recurrence
from effattn.interfaces.linear_recurrence import Terms


@checks.checked
def random_feature_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    projection: jax.Array,
    gate: jax.Array | None = None,
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
    r"""Random feature attention (Peng et al. 2021, "Random Feature Attention").

    With features of vectors w_1 .. w_m, of queries and keys divided by their Euclidean norms,

        phi(x) = [sin(w_1 . x), .., sin(w_m . x), cos(w_1 . x), .., cos(w_m . x)] / sqrt(m)
        out_t = sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s)

    over the keys s that query t may attend to. If w_i ~ N(0, diag(sigma^2)), the mean of
    phi(q) . phi(k) over draws is a Gaussian kernel of sigma (q - k), which for one sigma and unit
    vectors is exp(sigma^2 q . k) but for a factor that cancels. A product of features may be
    negative, and a sum of them zero; nothing is added to it.

    A gate g_t in [0, 1] makes it forget: with the sums S and z of phi(k) v^T and phi(k),

        S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T,   z_t = g_t z_(t-1) + (1 - g_t) phi(k_t)

    and out_t = S_t^T phi(q_t) / z_t . phi(q_t). Time is O((T + S) m (H + Hv)) and memory O(T + S).

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      projection: the vectors w, `(1, m, H)` for all heads or `(K, m, H)`: sigma times what
        `performer_features` draws. The query heads of one key head share its vectors.
      gate: `(*B, T, K)`, for `is_causal=True`; None forgets nothing.
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
        `effattn.dot_product_attention`; `effattn.support("random_features")` lists the names and
        what they take.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`, the state being
      S with z in its last column, `(*B, K, 2 m, Hv + 1)`, in the promoted dtype of query, key and
      value, at least float32. A query without keys, or whose weights sum to zero, gives zeros.

    Raises:
      ValueError: wrong shapes, dtypes or options; a gate outside of [0, 1], where it is concrete.
      NotImplementedError: an implementation that there is not.
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
    projection = feature_attention.check_projection("projection", projection, key)
    gates = () if gate is None else (_check_gate(gate, key.shape[:-1], is_causal),)
    out, state = recurrence.run(
        "random_feature_attention",
        _RandomFeatureTerms(precision),
        given,
        query,
        (key, value, *gates),
        projection,
        initial_state=initial_state,
        normalized=True,
        attend=attend,
        implementation=implementation,
    )
    return (out, state) if return_state else out


@dataclasses.dataclass(frozen=True)
class _RandomFeatureTerms:
    """phi(q), phi(k), and with a gate its logarithm as a decay."""

    precision: Any

    def __call__(self, projection, queries, keys) -> Terms:
        key, value, *gates = keys
        query, key = (self.features(x, projection) for x in (queries, key))
        if not gates:
            return Terms(query, key, value)
        (gate,) = gates
        log_gate = jnp.log(jnp.maximum(gate, jnp.finfo(gate.dtype).tiny))
        return Terms(query, key * (1 - gate)[..., None], value, log_gate)

    def features(self, x, projection):
        """Sines and cosines, `(*B, L, N, 2 m)`."""
        angles = feature_attention.products(_unit(x), projection, self.precision)
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return features * projection.shape[1] ** -0.5


def _unit(x):
    """Vectors divided by their norms, whose squares neither overflow nor vanish; zeros stay."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), -1, keepdims=True))
    x = x / jnp.where(largest == 0, 1, largest)
    square = jnp.sum(x * x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.where(square == 0, 1, square))


def _check_gate(gate, shape, is_causal):
    gate = jnp.asarray(gate)
    if not is_causal:
        raise ValueError("gate needs is_causal=True: it says how the past is forgotten")
    if gate.shape != shape or not jnp.issubdtype(gate.dtype, jnp.floating):
        raise ValueError(
            f"gate must be floating point of shape {shape}, got {gate.dtype} of shape {gate.shape}"
        )
    if not isinstance(gate, jax.core.Tracer):
        values = np.asarray(gate)
        if np.any(values < 0) or np.any(values > 1):
            raise ValueError(
                f"gate must be in [0, 1], got {values.min():.4g} to {values.max():.4g}; of a logit "
                "pass jax.nn.sigmoid"
            )
    return gate


registry.register(
    registry.Mechanism(
        name="random_features",
        family="linear",
        paper="Peng et al. 2021, Random Feature Attention",
        function=random_feature_attention,
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
        builder="effattn.nn.random_features:RandomFeatureSelfAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N m (H + Hv))",
        time_exponent=1.0,
    )
)
