"""Random feature attention: a sine and cosine feature map, with or without a gate."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.arrays import checks
from effattn.cores import feature_attention, recurrence
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import given_option, normalized, over_pairs, over_tokens, with_naive
from effattn.options import FeatureMapped, declared


def naive(query, key, value, pairs, *, projection, initial_state=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, state `(2 m, Hv + 1)`."""
    query, key = _naive_phi(query, projection), _naive_phi(key, projection)
    return pairs.linear(query, key, value, initial_state)


def naive_with_gate(state, query, key, value, *, projection, gate):
    """One token of one head: state `(2 m, Hv + 1)`, query and key `(H,)`, value `(Hv,)`."""
    query, key = _naive_phi(query, projection), _naive_phi(key, projection)
    state = gate * state + (1 - gate) * jnp.outer(key, jnp.append(value, 1))
    return state, normalized(query @ state)


def _naive_phi(x, projection):
    """Features `(..., 2 m)` of vectors `(..., H)`."""
    square = (x**2).sum(-1, keepdims=True)
    angle = x / jnp.sqrt(jnp.where(square == 0, 1, square)) @ projection.T
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) / len(projection) ** 0.5


def _empty(value, projection, **_):
    return jnp.zeros((2 * len(projection), value.size + 1), value.dtype)


@with_naive(
    given_option(
        "gate",
        over_tokens(
            naive_with_gate,
            per_token=("gate",),
            per_head={"projection": 2},
            empty=_empty,
            neutral={"gate": 1},
        ),
        otherwise=over_pairs(naive, per_head={"projection": 2}, wide=True),
    )
)
@declared
def random_feature_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    projection: jax.Array,
    gate: jax.Array | None = None,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""Random feature attention (Peng et al. 2021, "Random Feature Attention").

    With random vectors w_1 .. w_m, and queries and keys divided by their Euclidean norms,

        phi(x) = [sin(w_1 . x), .., sin(w_m . x), cos(w_1 . x), .., cos(w_m . x)] / sqrt(m)
        out_t = sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s)

    over the keys s that query t may attend to. If w_i ~ N(0, diag(sigma^2)), the mean of phi(q) .
    phi(k) over draws is exp(-|sigma * (q - k)|^2 / 2). For one sigma and unit vectors, this is
    exp(sigma^2 q . k) times a factor that cancels. Products of features may be negative, and their
    sum may be zero; no constant is added.

    A gate g_t in [0, 1] decays the sums S of phi(k) v^T and z of phi(k):

        S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T,   z_t = g_t z_(t-1) + (1 - g_t) phi(k_t)

    and out_t = S_t^T phi(q_t) / z_t . phi(q_t). Time is O((T + S) m (H + Hv)) and memory O(T + S).

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      projection: the vectors w, `(1, m, H)` for all heads or `(K, m, H)`: sigma times the
        result of `performer_features`. All query heads of a key head share its vectors.
      gate: g, `(*B, T, K)`, for `is_causal=True`; None for plain sums.
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`. The state is
      `(*B, K, 2 m, Hv + 1)`, S with z in the last column, in the promoted dtype of query, key and
      value, at least float32. Queries without keys, or with weights that sum to zero, give zeros.

    Raises:
      ValueError: a concrete gate outside of [0, 1]; and the errors of `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    projection = feature_attention.check_projection("projection", projection, key)
    gates = () if gate is None else (_check_gate(gate, key.shape[:-1], given.is_causal),)
    terms = recurrence.Bound(_terms, (given.precision,))
    return feature_attention.attend("random_feature_attention", terms, given, projection, *gates)


def _terms(precision, projection, query, keys) -> Terms:
    """Terms phi(q), phi(k) and v; with a gate, its logarithm is the decay."""
    key, value, *gates = keys
    query, key = (_phi(x, projection, precision) for x in (query, key))
    if not gates:
        return Terms(query, key, value)
    (gate,) = gates
    log_gate = jnp.log(jnp.maximum(gate, jnp.finfo(gate.dtype).tiny))
    return Terms(query, key * (1 - gate)[..., None], value, log_gate)


def _phi(x, projection, precision):
    """The sine and cosine features, `(*B, L, N, 2 m)`."""
    angles = feature_attention.products(_unit(x), projection, precision)
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    return features * projection.shape[1] ** -0.5


def _unit(x):
    """Divides vectors by their norms, without overflow or underflow; zero vectors stay zero."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), -1, keepdims=True))
    x = x / jnp.where(largest == 0, 1, largest)
    square = jnp.sum(x * x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.where(square == 0, 1, square))


def _check_gate(gate, shape, is_causal):
    if not is_causal:
        raise ValueError(
            "gate needs is_causal=True, got is_causal=False: a gate decays the sums over earlier "
            "tokens; leave out the gate in a bidirectional call"
        )
    gate = checks.shaped("gate", gate, shape)
    if not isinstance(gate, jax.core.Tracer):
        values = np.asarray(gate)
        if np.any(values < 0) or np.any(values > 1):
            raise ValueError(
                f"gate must be in [0, 1], got {values.min():.4g} to {values.max():.4g}; for a "
                "logit pass jax.nn.sigmoid of it"
            )
    return gate


registry.register(
    registry.Mechanism(
        name="random_features",
        family="linear",
        paper="Peng et al. 2021, Random Feature Attention",
        function=random_feature_attention,
        capabilities=frozenset({"cross"}),
        builder="effattn.nn.random_features:RandomFeatureSelfAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N m (H + Hv))",
        time_exponent=1.0,
    )
)
