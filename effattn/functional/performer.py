"""Performer: softmax attention by random features, in time and memory linear in length."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.cores import feature_attention, recurrence
from effattn.cores.running_maxima import log_ratio, units_of_keys
from effattn.interfaces.linear_recurrence import Terms
from effattn.naive import over_pairs, with_naive
from effattn.options import FeatureMapped, declared

KERNELS = ("softmax", "relu")
BLOCK = 512  # tokens in memory at a time, to find the maximum of their exponents


class PerformerState(NamedTuple):
    """Recurrent state of `performer_attention`.

    Attributes:
      sums: `(*B, K, m, Hv + 1)`, the sum of phi(k) v^T, and of phi(k) in the last column.
      maximum: `(*B, K)`, M: features in the sums are divided by exp(M). The gradient through the
        sums treats M as a constant. None for the ReLU feature map. Ignored where the sums are zero,
        so that zeros are the empty state.
    """

    sums: jax.Array
    maximum: jax.Array | None


@checks.checked
def performer_features(
    rng: jax.Array,
    num_features: int,
    head_dim: int,
    *,
    num_heads: int = 1,
    orthogonal: bool = True,
    hyperbolic: bool = False,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Draws the random vectors w of `performer_attention`, each distributed as N(0, I).

    Args:
      rng: a `jax.random` key.
      num_features: m.
      head_dim: H.
      num_heads: 1 if all heads share the vectors, or K for one set of vectors a key head.
      orthogonal: make vectors orthogonal within blocks of H vectors, with the lengths of
        independent vectors, which lowers the variance. If False, all vectors are independent.
      hyperbolic: make the second half of the vectors the negative of the first half, which also
        lowers the variance. The features exp(w.x) and exp(-w.x) are SM^hyp+ in the paper.
      dtype: dtype of the result.

    Returns:
      `(num_heads, m, H)`.

    Raises:
      ValueError: counts below 1, or an odd `num_features` with `hyperbolic`.
    """
    rng, dtype = checks.key("rng", rng), checks.dtype("dtype", dtype)
    num_features = checks.at_least("num_features", num_features, 1)
    head_dim = checks.at_least("head_dim", head_dim, 1)
    num_heads = checks.at_least("num_heads", num_heads, 1)
    if hyperbolic and num_features % 2:
        raise ValueError(
            "hyperbolic=True needs an even num_features, because each vector w comes with -w, got "
            f"{num_features}"
        )
    drawn = num_features // 2 if hyperbolic else num_features
    of_directions, of_lengths = jax.random.split(rng)
    if orthogonal:
        blocks = -(-drawn // head_dim)
        normal = jax.random.normal(of_directions, (num_heads, blocks, head_dim, head_dim), dtype)
        rotations, triangles = jnp.linalg.qr(normal)
        # A positive diagonal makes the QR factorisation unique, so the rotations are uniform.
        rotations *= jnp.sign(jnp.diagonal(triangles, axis1=-2, axis2=-1))[..., None, :]
        directions = rotations.reshape(num_heads, -1, head_dim)[:, :drawn]
        like = jax.random.normal(of_lengths, directions.shape, dtype)
        vectors = directions * jnp.linalg.norm(like, axis=-1, keepdims=True)
    else:
        vectors = jax.random.normal(of_directions, (num_heads, drawn, head_dim), dtype)
    return jnp.concatenate([vectors, -vectors], 1) if hyperbolic else vectors


def naive(query, key, value, pairs, *, projection, kernel, scale, initial_state=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, projection `(m, H)`."""

    def exponents(x):
        return x @ projection.T - (x**2).sum(1, keepdims=True) / 2

    query, key = scale**0.5 * query, scale**0.5 * key
    if kernel == "relu":
        query, key = jax.nn.relu(query @ projection.T), jax.nn.relu(key @ projection.T)
        sums, maximum = None if initial_state is None else initial_state.sums, None
    else:
        query, key = exponents(query), exponents(key)
        largest = lax.stop_gradient(query.max(1, keepdims=True))
        unit, sums, maximum = _naive_units(key, pairs, initial_state)
        # Both factors, exp(-largest) and exp(-unit), cancel in the output.
        query, key = jnp.exp(query - largest), jnp.exp(key - unit[:, None])
    out, sums = pairs.linear(query, key, value, sums)
    return out, PerformerState(sums, maximum)


def _naive_units(exponents, pairs, state):
    """Largest exponents: `(S,)` in the document of each key, and `()` in the state after the keys.

    The second result is the sums of the state before the keys, in units of the first document.
    """
    first: Any = -jnp.inf
    if state is not None:
        first = jnp.where((state.sums == 0).all(), first, lax.stop_gradient(state.maximum))
    largest = jnp.where(pairs.present, lax.stop_gradient(exponents.max(1)), -jnp.inf)

    def maximum(document):
        of_keys = jnp.where(pairs.key_ids == document, largest, -jnp.inf).max(initial=-jnp.inf)
        both = jnp.where(document == pairs.first_id, jnp.maximum(of_keys, first), of_keys)
        return jnp.where(both == -jnp.inf, 0, both)

    unit = jnp.where(pairs.present, jax.vmap(maximum)(pairs.key_ids), 0)
    last = maximum(pairs.last_id)
    if state is None:
        return unit, None, last
    sums = jnp.exp(first - maximum(pairs.first_id)) * state.sums
    return unit, sums, jnp.where(last == first, state.maximum, last)


@with_naive(over_pairs(naive, per_head={"projection": 2}, wide=True))
@declared
def performer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    projection: jax.Array,
    kernel: str = "softmax",
    scale: float | jax.Array | None = None,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""FAVOR+ (Choromanski et al. 2020, "Rethinking Attention with Performers").

    Over the keys s that query t may attend to,

        out_t = sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s)

    with x = sqrt(scale) q or sqrt(scale) k, and random features of vectors w_1 .. w_m,

        softmax   phi(x) = exp(w_i . x - |x|^2 / 2) / sqrt(m)
        relu      phi(x) = max(w_i . x, 0) / sqrt(m)

    If w_i ~ N(0, I), the mean of phi(q) . phi(k) over draws is exp(scale q . k): this estimates
    softmax attention, with an error that falls as m^(-1/2) and grows with the size of q and k.
    Time is O((T + S) m (H + Hv)) and memory O(T + S); the features of all tokens are never in
    memory at once.

    Softmax features do not overflow, without an added constant. The features of a query are divided
    by their largest entry, and the features of keys by exp(M_t), the largest entry of the features
    of all keys up to t; the sums then decay by exp(M_(t-1) - M_t). Both factors cancel in the
    output, and causal outputs do not depend on later tokens, bit for bit. In bidirectional calls, M
    is the maximum over all keys (of the document). Finding M costs one more product of the keys
    with w.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      projection: the vectors w, `(1, m, H)` for all heads or `(K, m, H)`, as drawn by
        `performer_features`. All query heads of a key head share the vectors of the key head.
      kernel: feature map, "softmax" or "relu". The ReLU feature map does not estimate softmax
        attention. The small constant that the paper's experiments add to ReLU features is left out.
      scale: scale of the logits, above 0; default H**-0.5. Cancels for the ReLU feature map.
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, PerformerState)`, in the
      promoted dtype of query, key and value, at least float32. Queries without keys, or with
      weights that sum to zero (possible with ReLU), give zeros.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    checks.one_of("kernel", kernel, KERNELS)
    if kernel == "softmax":
        checks.known_length("performer_attention", query, key)
    projection = feature_attention.check_projection("projection", projection, key)
    parameters = (
        projection,
        jnp.sqrt(feature_attention.positive_scale(scale, query).astype(given.dtype)),
    )
    sums, maximum = _check_state(given.initial_state, given, projection.shape[-2], kernel)

    def run(keys, sums):
        return recurrence.run(
            "performer_attention",
            recurrence.Bound(_terms, (kernel, given.precision)),
            dataclasses.replace(given, initial_state=sums),
            query,
            keys,
            parameters,
            normalized=True,
        )

    if kernel == "relu":
        out, sums = run((key, value), sums)
        return recurrence.results(out, PerformerState(sums, None), given)
    if sums is not None and maximum is not None:
        # The largest feature of the keys is exp(M) / exp(M) = 1, so only empty sums are zero.
        empty = jnp.all(sums == 0, (-2, -1))
        first = jnp.where(empty, dtypes.lowest(given.dtype), lax.stop_gradient(maximum))
    else:
        shape = (*given.batch, key.shape[-2])
        first = jnp.full(shape, dtypes.lowest(given.dtype), given.dtype)
    packed_ids = None if given.documents is None else given.documents[1]
    units, log_decay, last = _units(parameters, given, first, given.is_causal, packed_ids)
    if sums is not None and not given.is_causal:
        sums = sums * jnp.exp(log_ratio(first, last))[..., None, None]
    out, sums = run((key, value, units, *log_decay), sums)
    # Keep the given maximum, with its gradient, where it did not change.
    maximum = jnp.where(last == first, jnp.zeros_like(last) if maximum is None else maximum, last)
    return recurrence.results(out, PerformerState(sums, maximum), given)


def _terms(kernel, precision, parameters, query, keys) -> Terms:
    """Terms phi(q) and phi(k) without 1 / sqrt(m), which cancels; keys are divided by exp(M)."""
    projection, root = parameters
    key, value, *units = keys
    products = feature_attention.products if kernel == "relu" else exponents
    query, key = (products(dtypes.product(x, root), projection, precision) for x in (query, key))
    if kernel == "relu":
        return Terms(jax.nn.relu(query), jax.nn.relu(key), value)
    unit, *log_decay = (lax.stop_gradient(x) for x in units)
    of_query = lax.stop_gradient(jnp.max(query, -1, keepdims=True))
    decay = log_decay[0] if log_decay else None
    return Terms(jnp.exp(query - of_query), jnp.exp(key - unit), value, decay)


def exponents(x: jax.Array, projection: jax.Array, precision: Any = None) -> jax.Array:
    """Returns w . x - |x|^2 / 2, `(*B, L, N, m)`."""
    return (
        feature_attention.products(x, projection, precision) - jnp.sum(x * x, -1, keepdims=True) / 2
    )


def _units(parameters, given, first, is_causal, ids):
    """Returns M: features of keys are divided by exp(M).

    `first (*B, K)` is M of the state before the keys.

    Returns:
      M of each key, `(*B, S, K, 1)`; a tuple with the log decay of the sums, `(*B, S, K)`, or an
      empty tuple if not causal; and M of the state after the keys, `(*B, K)`.
    """
    *rows, time, heads, _ = mesh_axes.spec(given.key)
    of_keys = PartitionSpec(*rows, time, heads)
    specs = of_keys, of_keys, PartitionSpec(*rows, heads)

    def units(parameters, key, mask, starts, first, ids):
        largest = _largest_exponents(parameters, key, given)
        if mask is not None:
            largest = jnp.where(mask[..., None], largest, dtypes.lowest(largest.dtype))
        return units_of_keys(first, largest, starts, is_causal=is_causal, ids=ids)

    arguments = parameters, given.key, given.tokens.key_mask, given.tokens.starts, first, ids
    arguments = lax.stop_gradient(arguments)
    after, log_decay, last = mesh_axes.placed(units, given.query, *specs)(*arguments)
    return after[..., None], (log_decay,) if is_causal else (), last


def _largest_exponents(parameters, key, given):
    """Returns the largest exponent of each key, `(*B, S, K)`, `BLOCK` tokens at a time."""
    projection, root = (x.astype(given.dtype) for x in parameters)

    def of_token(key):
        x = key.astype(given.dtype) * root
        return jnp.max(exponents(x, projection, given.precision), -1)

    by_token = jnp.moveaxis(key, -3, 0)
    if not len(by_token):
        return jnp.zeros(key.shape[:-1], given.dtype)
    return jnp.moveaxis(lax.map(of_token, by_token, batch_size=BLOCK), 0, -2)


def _check_state(state, given, features, kernel):
    """Returns the checked sums and maximum of a state; None for a missing part."""
    if state is None:
        return None, None
    if not isinstance(state, PerformerState) or (state.maximum is None) != (kernel == "relu"):
        got = type(state).__name__
        if isinstance(state, PerformerState):
            got = f"one with{'out' if state.maximum is None else ''} a maximum"
        raise ValueError(
            "initial_state must be the PerformerState that an earlier call with the same kernel "
            f"returned, with a maximum unless kernel='relu', got {got} for kernel={kernel!r}"
        )
    *batch, _, heads, size = given.value.shape
    shape = (*batch, heads, features, size + 1)
    sums = checks.shaped("initial_state.sums", state.sums, shape)
    if state.maximum is None:
        return sums, None
    maximum = checks.shaped("initial_state.maximum", state.maximum, shape[:-2])
    return sums.astype(given.dtype), maximum.astype(given.dtype)


registry.register(
    registry.Mechanism(
        name="performer",
        family="linear",
        paper="Choromanski et al. 2020, Rethinking Attention with Performers",
        function=performer_attention,
        capabilities=frozenset({"cross"}),
        options={"kernel": "softmax"},
        builder="effattn.nn.performer:PerformerSelfAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N m (H + Hv))",
        time_exponent=1.0,
    )
)
