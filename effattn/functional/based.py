"""Based: linear attention by a second-order Taylor feature map, with an optional exact window."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.combine import combine
from effattn.cores import feature_attention, recurrence
from effattn.cores.feature_maps import taylor
from effattn.functional.linear import taylor_features
from effattn.functional.sliding_window import sliding_window_attention
from effattn.interfaces.linear_recurrence import Terms, Tokens, append_one, normalize
from effattn.naive import given_option, masked_softmax, over_pairs, with_naive
from effattn.options import FeatureMapped, declared


class BasedState(NamedTuple):
    """Recurrent state of `based_attention` with a window.

    Attributes:
      sums: `(*B, K, F, Hv + 1)`, sums over the tokens that have left the window.
      key: `(*B, w, K, H)`, the last w keys, right aligned.
      value: `(*B, w, K, Hv)`, the last w values.
      length: `(*B)` int32, number of valid tokens in the window.
    """

    sums: jax.Array
    key: jax.Array
    value: jax.Array
    length: jax.Array


def naive(query, key, value, pairs, *, scale, initial_state=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, state `(F, Hv + 1)`."""
    query, key = (jax.vmap(taylor_features)(scale**0.5 * x) for x in (query, key))
    return pairs.linear(query, key, value, initial_state)


def naive_with_window(query, key, value, pairs, *, scale, local_window_size, initial_state=None):
    """One head: exact weights in the window of w tokens, and those of `naive` before the window."""
    phi, w = jax.vmap(taylor_features), local_window_size
    state = initial_state or _empty_state(key, value, w)
    # Key s is token s - w of the call; the first w keys come from the state.
    key = jnp.concatenate([state.key.astype(key.dtype), key])
    value = jnp.concatenate([state.value.astype(value.dtype), value])
    token = jnp.arange(len(key)) - w
    present = jnp.concatenate([token[:w] >= -state.length, pairs.present])
    allowed = jnp.concatenate([pairs.valid[:, None] & present[:w], pairs.allowed], 1)
    new = pairs.present.sum()
    last = new + jnp.arange(w)
    keys, values = (jnp.where(present[:, None], x, 0)[last] for x in (key, value))
    count = jnp.minimum(state.length + new, w).astype(jnp.int32)

    wide = jnp.result_type(query, key, value, jnp.float32)
    query, key, value, sums = (x.astype(wide) for x in (query, key, value, state.sums))
    query, key = scale**0.5 * query, scale**0.5 * key
    z = query @ key.T
    logits = jnp.where(token < pairs.i[:, None] - w, jnp.log(1 + z + z**2 / 2), z)
    # The tokens that the sums hold are one more key.
    far = phi(query) @ sums
    total = far[:, -1:]
    reads = pairs.reads_initial[:, None] & (total > 0)
    total = jnp.where(reads, total, 1)
    logits, allowed = jnp.append(jnp.log(total), logits, 1), jnp.append(reads, allowed, 1)
    weights = masked_softmax(logits, allowed)
    out = weights[:, :1] * far[:, :-1] / total + weights[:, 1:] @ value

    leaving = phi(key) * (present & (token < new - w))[:, None]
    sums = sums + leaving.T @ jnp.append(value, jnp.ones_like(value, shape=(len(value), 1)), 1)
    return out, BasedState(sums, keys, values, count)


def _empty_state(key, value, w):
    features = (key.shape[1] + 1) * (key.shape[1] + 2) // 2
    sums = jnp.zeros((features, value.shape[1] + 1), value.dtype)
    key, value = (jnp.zeros((w, x.shape[1]), x.dtype) for x in (key, value))
    return BasedState(sums, key, value, jnp.zeros((), jnp.int32))


# Axes of heads in the state of one example.
_STATE_AXES: Any = BasedState._make((0, 1, 1, None))


def _window(*, key, local_window_size, initial_state=None, return_state=False, **_):
    """The number w; without a state, no more than there are tokens."""
    is_pair = isinstance(local_window_size, tuple | list)
    w = local_window_size[0] if is_pair else local_window_size
    has_state = initial_state is not None or return_state
    return {"local_window_size": w if has_state else min(w, key.shape[-3])}


@with_naive(
    given_option(
        "local_window_size",
        over_pairs(naive_with_window, derived=_window, state_axes=_STATE_AXES),
        otherwise=over_pairs(naive, wide=True),
    )
)
@declared
def based_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    local_window_size: int | tuple[int, int] | None = None,
    scale: float | jax.Array | None = None,
    **options: Unpack[FeatureMapped],
) -> Any:
    r"""Based's linear attention (Arora et al. 2024, "Simple linear attention language models").

    Over the keys s that query t may attend to, with logits z_ts = scale * q_t . k_s,

        out_t = sum_s w_ts v_s / sum_s w_ts,    w_ts = 1 + z_ts + z_ts^2 / 2

    the second-order Taylor series of exp(z_ts). Each weight is at least 1/2. This is linear
    attention with F = (H + 1) (H + 2) / 2 features: 1, the entries of sqrt(scale) x, and the
    products of pairs of entries, each pair once. Features are computed for one block of tokens at a
    time. Time is O((T + S) H^2 Hv), memory O(T + S), and the state is one F x Hv matrix a key head.
    The head dimension of queries and keys should be small (16 in the paper); that of values need
    not be.

    The feature map is smooth and cannot select single tokens; a small exact window can. With
    `local_window_size` w, the weights of a token and of the w tokens before it are exp(z_ts), under
    the same normaliser: attention to the window and to the tokens that have left the window is
    computed separately, then combined. The models of the paper use separate window layers between
    linear layers; for such models, do not pass a window (see `effattn.nn.BasedSelfAttention`).

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      local_window_size: w or (w, 0), number of earlier tokens with exact weights, for causal calls;
        None for no window.
      scale: scale of the logits; default H**-0.5.
      **options: direction, padding, packing, state, chunks and execution: see
        `effattn.options.FeatureMapped`. Calls without a window also take the implementations of
        `effattn.support("linear")`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, state)`. The state is
      `(*B, K, F, Hv + 1)`, the sum of phi(k) v^T and, in the last column, of phi(k), in the
      promoted dtype of query, key and value, at least float32; with a window, a `BasedState`.
      Queries without keys give zeros.

    Raises:
      ValueError: a window with later tokens or in a bidirectional call; a state together with a
        window and `segment_ids`; and the errors of `effattn.options`.
    """
    given = feature_attention.check(query, key, value, **options)
    if local_window_size is not None:
        window = checks.window(local_window_size)[0]
        segment_ids = options.get("segment_ids")
        _check_window(local_window_size, given, segment_ids)
        lengths = [options.get(name) for name in _LENGTHS]
        alike = lengths[0] is lengths[1]
        of_queries, of_keys = map(checks.lengths, _LENGTHS, lengths, (given.batch, given.batch))
        padding = of_queries, of_queries if alike else of_keys, segment_ids
        if given.initial_state is None and not given.return_state:
            # The sequence has no more tokens.
            window = min(window, key.shape[-3])
        out, state = _with_window(
            given,
            window,
            feature_attention.positive_scale(scale, query),
            padding,
        )
        return recurrence.results(out, state, given)
    root = jnp.sqrt(feature_attention.positive_scale(scale, query).astype(given.dtype))
    return feature_attention.attend("based_attention", _terms, given, root)


def _terms(root, query, keys) -> Terms:
    """Terms with second-order Taylor features of queries and keys."""
    key, value = keys
    query, key = (taylor(dtypes.product(x, root)) for x in (query, key))
    return Terms(query, key, value)


_LENGTHS = "query_seq_lengths", "key_value_seq_lengths"


def _check_window(window, given, segment_ids):
    if not given.is_causal:
        raise ValueError(
            f"local_window_size={window!r} needs is_causal=True, got is_causal=False: the window "
            "holds a token and the tokens before it"
        )
    if isinstance(window, tuple | list) and window[1] != 0:
        raise ValueError(
            "local_window_size must be w or (w, 0), the number of tokens before each token, got "
            f"{window!r}"
        )
    if segment_ids is not None and (given.initial_state is not None or given.return_state):
        raise ValueError(
            "initial_state and return_state cannot be given with both local_window_size and "
            "segment_ids; pass one document a row, padded by key_value_seq_lengths"
        )


def _with_window(given, window, scale, padding):
    """Returns `(out, BasedState)`: softmax over the window, Taylor weights over earlier tokens."""
    query_lengths, key_lengths, segment_ids = padding
    state = _initial_state(given, window)
    query, batch, length = given.query, given.batch, given.key.shape[-3]
    # Key s is token s - w of the call; the first w keys come from the state.
    key, value = (
        jnp.concatenate([old.astype(new.dtype), new], -3)
        for old, new in ((state.key, given.key), (state.value, given.value))
    )
    token = jnp.arange(length)
    ids = jnp.ones((*batch, length), jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
    query_ids, key_ids = (
        ids if lengths is None else jnp.where(token < lengths[..., None], ids, 0)
        for lengths in (query_lengths, key_lengths)
    )
    # A state excludes `segment_ids`, so all ids of keys from the state are 1.
    kept = jnp.arange(window) >= window - state.length[..., None]
    key_ids = jnp.concatenate([kept.astype(key_ids.dtype), key_ids], -1)
    near, near_lse = sliding_window_attention(
        query,
        key,
        value,
        local_window_size=(window, 0),
        scale=scale,
        query_offset=window,
        segment_ids=(query_ids, key_ids),
        precision=given.precision,
        implementation=given.implementation,
        return_residual=True,
    )
    # At step t, query t reads the sums; then the key of token t - w leaves the window.
    new = jnp.sum(key_ids[..., window:] != 0, -1, keepdims=True)
    leaving = key_ids[..., :length]

    def sums_of(leaving):
        far_tokens, reads = _leaving(leaving, query_ids)
        return recurrence.run(
            "based_attention",
            _far_terms,
            dataclasses.replace(
                given,
                tokens=far_tokens._replace(query_mask=reads),
                value=given.value.astype(given.dtype),
                initial_state=state.sums,
            ),
            query,
            (key[..., :length, :, :], value[..., :length, :, :]),
            jnp.sqrt(scale.astype(given.dtype)),
        )

    # In the final state, the last w tokens stay in the window. Queries after the last key, which
    # only unequal lengths allow, read sums that these tokens have joined.
    staying = leaving if segment_ids is not None else jnp.where(token < new, leaving, 0)
    if query_lengths is key_lengths:
        far, sums = sums_of(staying)
    else:
        far, sums = sums_of(leaving)
        sums = sums_of(staying)[1] if given.return_state else sums
    total = far[..., -1]
    lowest = dtypes.lowest(total.dtype)
    far_lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)), lowest)
    out, _ = combine([normalize(far), near.astype(given.dtype)], [far_lse, near_lse])
    last = (new + jnp.arange(window))[..., None, None]
    present = (key_ids != 0)[..., None, None]
    key, value = (
        jnp.take_along_axis(jnp.where(present, x, 0), last, -3, mode="clip") for x in (key, value)
    )
    count = jnp.minimum(state.length + new[..., 0], window).astype(jnp.int32)
    return out.astype(given.value.dtype), BasedState(sums, key, value, count)


def _initial_state(given, window) -> BasedState:
    """The caller's state, checked, or an empty one."""
    state, batch, (heads, size) = given.initial_state, given.batch, given.key.shape[-2:]
    values = given.value.shape[-1]
    if state is None:
        features = (size + 1) * (size + 2) // 2
        return BasedState(
            jnp.zeros((*batch, heads, features, values + 1), given.dtype),
            jnp.zeros_like(given.key, shape=(*batch, window, heads, size)),
            jnp.zeros_like(given.value, shape=(*batch, window, heads, values)),
            jnp.zeros(batch, jnp.int32),
        )
    if not isinstance(state, BasedState):
        raise ValueError(
            "initial_state must be the BasedState that an earlier call with local_window_size "
            f"returned, got {type(state).__name__}"
        )
    checks.shaped("initial_state.key", state.key, (*batch, window, heads, size))
    checks.shaped("initial_state.value", state.value, (*batch, window, heads, values))
    checks.lengths("initial_state.length", state.length, batch)
    return state


def _leaving(ids, query_ids):
    """Returns the tokens added to the sums, and the queries that read sums of their document."""
    token = jnp.arange(ids.shape[-1])
    last = jax.lax.cummax(jnp.where(ids != 0, token, -1), axis=ids.ndim - 1)
    document = jnp.take_along_axis(ids, jnp.maximum(last, 0), -1)
    document = jnp.where(last < 0, query_ids[..., :1], document)
    before = jnp.concatenate([document[..., :1], document[..., :-1]], -1)
    reads = (query_ids != 0) & (query_ids == before)
    return Tokens(None, ids != 0, document != before), reads


def _far_terms(root, query, keys) -> Terms:
    """Terms for tokens outside the window; the sum of weights is one more value feature.

    A query reads the sums before its token is added: the bonus is zero.
    """
    key, value = keys
    features = taylor(key * root)
    unread = jnp.zeros(features.shape[-2:], features.dtype)
    return Terms(taylor(query * root), features, append_one(value), bonus=unread)


registry.register(
    registry.Mechanism(
        name="based",
        family="linear",
        paper="Arora et al. 2024, Simple linear attention language models",
        function=based_attention,
        capabilities=frozenset({"cross"}),
        options={"local_window_size": None},
        builder="effattn.nn.based:BasedSelfAttention",
        decoder="effattn.decode.based:BasedDecoder",
        complexity="O(N H^2 Hv)",
        time_exponent=1.0,
    )
)
