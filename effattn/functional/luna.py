"""Luna: attention to a short packed sequence, into which learned queries pack all tokens."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.cores import feature_attention, feature_maps, recurrence
from effattn.cores.running_maxima import log_ratio, maximum_of_parts, units_of_keys
from effattn.functional.linear import elu_features
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_pairs, with_naive
from effattn.options import FeatureMapped, declared

SOFTMAX = "softmax"
ACTIVATIONS = {"elu": feature_maps.elu, "softplus": jax.nn.softplus}


class LunaState(NamedTuple):
    """State of `luna_attention`: the packed sequence as sums; zeros are the empty state.

    Packed keys are `keys / total`, packed values `values / total`.

    Attributes:
      keys: `(*B, K, H, l)`, sums of weighted keys.
      values: `(*B, K, l, Hv)`, sums of weighted values.
      total: `(*B, K, l)`, sums of the weights of a softmax; with another activation `(*B, K, 1)`,
        the number of keys.
      maximum: `(*B, K, l)`, M: the weights of a softmax in the sums are divided by exp(M). The
        gradient through the sums treats M as a constant. Ignored where `total` is zero. None with
        another activation.
    """

    keys: jax.Array
    values: jax.Array
    total: jax.Array
    maximum: jax.Array | None


_NAIVE_ACTIVATIONS = {
    "elu": elu_features,
    "softplus": lambda x: jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x))),
}


def naive(
    query, key, value, pairs, *, pack_query, activation, scale, pack_key=None, initial_state=None
):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, pack query `(l, H)`."""
    logits = scale * (key if pack_key is None else pack_key) @ pack_query.T  # (S, l)
    by_softmax = activation == SOFTMAX
    before = initial_state or _naive_empty(key, value, pack_query, by_softmax)

    def pack(allowed, reads):  # bool (S,) and ()
        """Sums over the keys that one query may attend to, and the state if the query reads it."""
        allowed, largest = allowed[:, None], None
        if by_softmax:
            own = lax.stop_gradient(jnp.where(allowed, logits, -jnp.inf).max(0, initial=-jnp.inf))
            old = jnp.where(reads & (before.total > 0), before.maximum, -jnp.inf)
            largest = jnp.maximum(own, lax.stop_gradient(old))
            unit = jnp.where(largest == -jnp.inf, 0, largest)
            weights = jnp.exp(jnp.where(allowed, logits - unit, -jnp.inf))
            kept = jnp.exp(lax.stop_gradient(old) - unit)
            # Unchanged, the maximum keeps its gradient.
            largest = jnp.where(own > old, own, before.maximum)
        else:
            weights = jnp.where(allowed, _NAIVE_ACTIVATIONS[activation](logits), 0)
            kept = reads.astype(weights.dtype)[None]
        counts = (weights if by_softmax else allowed).sum(0)
        return LunaState(
            key.T @ weights + kept * before.keys,
            weights.T @ value + kept[:, None] * before.values,
            counts + kept * before.total,
            largest,
        )

    def read(query, packed):
        total = jnp.where(packed.total == 0, 1, packed.total)
        weights = jax.nn.softmax(scale * query @ (packed.keys / total))
        return weights @ (packed.values / total[:, None])

    out = jax.vmap(read)(query, jax.vmap(pack)(pairs.allowed, pairs.reads_initial))
    return out, pack(pairs.reaches_final, pairs.keeps_initial)


def _naive_empty(key, value, pack_query, by_softmax):
    packed = len(pack_query)
    keys, values = (jnp.zeros((x.shape[1], packed), value.dtype) for x in (key, value))
    total = jnp.zeros(packed if by_softmax else 1, value.dtype)
    return LunaState(keys, values.T, total, total if by_softmax else None)


@with_naive(over_pairs(naive, per_token=("pack_key",), per_head={"pack_query": 2}, wide=True))
@declared
def luna_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    pack_query: jax.Array,
    pack_key: jax.Array | None = None,
    activation: str = SOFTMAX,
    scale: float | jax.Array | None = None,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""Luna attention (Ma et al. 2021, "Luna: Linear Unified Nested Attention").

    Pack attention of l learned queries p_i makes l packed keys and values from the keys j that
    query t may attend to, and unpack attention of the query reads them:

        k'_ti = sum_j a_ij k_j / z_ti;    v'_ti = sum_j a_ij v_j / z_ti
        out_t = sum_i softmax_i(scale * q_t . k'_ti) v'_ti

    With u_j the pack key of token j and x = scale * p_i . u_j, the weights a_ij are

        softmax         exp(x), and z_ti is their sum over j: a softmax over the keys
        elu, softplus   elu(x) + 1 or log(1 + exp(x)), and z_ti is the number of keys j

    The paper has the softmax in its bidirectional form, elu and softplus in its causal form. Here
    each activation works in both: the causal softmax is over the keys up to t.

    Products are sums over keys of outer products, so this is linear attention three times: for z,
    for the logits, and for the output. Time is O((T + S) l (H + Hv)), memory O((T + S) l). The
    causal softmax needs decays of values, which run in XLA on all devices.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      pack_query: p, `(K, l, H)`, l vectors for each key head, or `(1, l, H)`.
      pack_key: u, `(*B, S, K, H)`; default `key`.
      activation: "softmax", "elu" or "softplus".
      scale: scale of the logits of both steps; default H**-0.5.
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, LunaState)`, in the
      promoted dtype of query, key and value, at least float32. Queries without keys give zeros.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    checks.one_of("activation", activation, (SOFTMAX, *ACTIVATIONS))
    pack_query = feature_attention.check_projection("pack_query", pack_query, given.key)
    of_pack = given.key if pack_key is None else pack_key
    of_pack = checks.shaped("pack_key", of_pack, given.key.shape)
    multiplier = recurrence.check_scale(scale, given.query)
    state = _check_state(given, pack_query.shape[-2], activation)
    weights, log_decay, state = _weights(activation, given, pack_query, of_pack, multiplier, state)
    counts = weights if activation == SOFTMAX else jnp.ones_like(weights[..., :1])

    def run(terms, query, keys, value, state, scale=None):
        # `value` only tells the dtype and the sharding of the output.
        of_pass = dataclasses.replace(given, value=value, initial_state=state)
        keys = *keys, *log_decay
        return recurrence.run("luna_attention", terms, of_pass, query, keys, scale)

    one = jnp.ones_like(given.query[..., :1])
    total, totals = run(_count_terms, one, (counts,), counts, state.total[..., None, :])
    total = jnp.where(total == 0, 1, total)
    logits, keys = run(
        _key_terms, given.query, (given.key, weights), weights, state.keys, multiplier
    )
    shares = jax.nn.softmax(logits / total, -1) / total
    out, values = run(_value_terms, shares, (weights, given.value), given.value, state.values)
    state = LunaState(keys, values, totals[..., 0, :], state.maximum)
    return recurrence.results(out, state, given)


def _count_terms(_, query, keys) -> Terms:
    counts, *log_decay = keys
    return Terms(query, jnp.ones_like(counts[..., :1]), counts, value_log_decay=_decay(log_decay))


def _key_terms(scale, query, keys) -> Terms:
    key, weights, *log_decay = keys
    query = dtypes.product(query, scale)
    return Terms(query, key, weights, value_log_decay=_decay(log_decay))


def _value_terms(_, shares, keys) -> Terms:
    weights, value, *log_decay = keys
    return Terms(shares, weights, value, _decay(log_decay))


def _decay(log_decay):
    return log_decay[0] if log_decay else None


def _weights(activation, given, pack_query, pack_key, scale, state):
    """The weights of the keys in the packed sequence, and the state in their unit.

    Returns:
      a, `(*B, S, K, l)`; a tuple with the log decay of the sums, of the same shape, or an empty
      tuple; and the initial state, with the maximum of the final state.
    """
    *rows, time, heads, _ = mesh_axes.spec(given.key)
    of_keys, of_state = PartitionSpec(*rows, time, heads, None), PartitionSpec(*rows, heads, None)

    def logits_of(arrays, mask):
        pack_query, pack_key, scale = (x.astype(given.dtype) for x in arrays)
        return feature_attention.products(
            clear(pack_key, mask) * scale, pack_query, given.precision
        )

    arrays, mask = (pack_query, pack_key, scale), given.tokens.key_mask
    if activation != SOFTMAX:

        def activate(arrays, mask):
            return (ACTIVATIONS[activation](logits_of(arrays, mask)),)

        (weights,) = mesh_axes.placed(activate, given.query, of_keys)(arrays, mask)
        return weights, (), state

    lowest, ids = dtypes.lowest(given.dtype), given.documents and given.documents[1]

    def exponentiate(arrays, mask, starts, ids, state):
        first = jnp.where(state.total > 0, lax.stop_gradient(state.maximum), lowest)
        logits = logits_of(arrays, mask)
        present = True if mask is None else mask[..., None, None]
        constant = lax.stop_gradient(jnp.where(present, logits, lowest))
        # Each packed vector has a maximum of its own.
        flat = lax.collapse(constant, constant.ndim - 2)
        flat_first, last = lax.collapse(first, first.ndim - 2), None
        if given.is_causal:
            flat_first, last = maximum_of_parts(
                "luna_attention", flat_first, jnp.zeros_like(flat), flat, starts
            )
        unit, log_decay, own_last = units_of_keys(
            flat_first, flat, starts, is_causal=given.is_causal, ids=ids
        )
        last = (own_last if last is None else last).reshape(first.shape)
        unit, log_decay = (x.reshape(constant.shape) for x in (unit, log_decay))
        weights = jnp.exp(jnp.where(present, logits - unit, lowest))
        # The given maximum keeps its gradient where it did not change.
        maximum = jnp.where(last == first, state.maximum, last)
        if given.is_causal:  # the sums decay to the unit of each token
            return weights, log_decay, *state._replace(maximum=maximum)
        ratio = jnp.exp(log_ratio(first, last))
        sums = state.keys * ratio[..., None, :], state.values * ratio[..., None]
        return weights, log_decay, *sums, state.total * ratio, maximum

    of_sums = PartitionSpec(*rows, heads, None, None)
    specs = of_keys, of_keys, of_sums, of_sums, of_state, of_state
    run = mesh_axes.placed(exponentiate, given.query, *specs)
    weights, log_decay, *state = run(arrays, mask, given.tokens.starts, ids, state)
    return weights, (log_decay,) if given.is_causal else (), LunaState(*state)


def _check_state(given, packed, activation):
    """The checked initial state, or zeros."""
    state, by_softmax = given.initial_state, activation == SOFTMAX
    *batch, _, heads, size = given.value.shape
    of_heads = (*batch, heads)
    shapes: dict[str, Any] = {
        "keys": (*of_heads, given.key.shape[-1], packed),
        "values": (*of_heads, packed, size),
        "total": (*of_heads, packed if by_softmax else 1),
        "maximum": (*of_heads, packed) if by_softmax else None,
    }
    if state is None:
        empty: dict[str, Any] = {
            n: None if s is None else jnp.zeros(s, given.dtype) for n, s in shapes.items()
        }
        return LunaState(**empty)
    if not isinstance(state, LunaState) or (state.maximum is None) == by_softmax:
        got = type(state).__name__
        if isinstance(state, LunaState):
            got = f"one with{'out' if state.maximum is None else ''} a maximum"
        raise ValueError(
            "initial_state must be the LunaState that an earlier call with the same activation "
            f"returned, with a maximum for a softmax alone, got {got} for activation={activation!r}"
        )
    found: dict[str, Any] = {
        name: None
        if shape is None
        else checks.shaped(f"initial_state.{name}", getattr(state, name), shape).astype(given.dtype)
        for name, shape in shapes.items()
    }
    return LunaState(**found)


registry.register(
    registry.Mechanism(
        name="luna",
        family="low rank",
        paper="Ma et al. 2021, Luna: Linear Unified Nested Attention",
        function=luna_attention,
        capabilities=frozenset({"cross"}),
        options={"activation": SOFTMAX},
        builder="effattn.nn.luna:LunaSelfAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N l (H + Hv))",
        time_exponent=1.0,
    )
)
