"""Attention-free transformer: weighted averages of values for each feature, by keys and biases."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from_segment_ids
from effattn.cores import sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.cores.weighted_sums import (
    LOWEST,
    Sums,
    empty_sums,
    one_token,
    passed_sums,
    running_sums,
    with_initial,
)
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, TokenMixing, declared

# Queries in a tile of AFT-full. Pairs inside a causal tile are computed one by one.
_TILE = 64


class Options(Direction, TokenMixing, total=False):
    """The shared options of `attention_free`."""


def naive(query, key, value, pairs, *, position_bias, local_window_size, initial_state=None):
    """Query `(T, D)`, key and value `(S, D)`; the state is `Sums` over earlier tokens, `(D,)`."""
    bias = jax.tree.map(lambda x: jnp.asarray(x, key.dtype), position_bias)
    w = pair_biases(bias, local_window_size, pairs.places, key.shape[1])
    empty = jnp.zeros_like(key, shape=key.shape[1:])
    start = Sums(empty, empty, empty) if initial_state is None else initial_state
    before = lax.stop_gradient(jnp.where(start.weights > 0, start.largest, LOWEST))

    def sums(exponent, allowed):
        """`Sums` of the start and of the keys `allowed (S,)`; exponent `(S, D)`."""
        exponent = jnp.where(allowed[:, None], exponent, LOWEST)
        largest = lax.stop_gradient(jnp.maximum(exponent.max(0, initial=LOWEST), before))
        weights = jnp.where(allowed[:, None], jnp.exp(exponent - largest), 0)
        kept = jnp.exp(before - largest)
        values = kept * start.values + (weights * value).sum(0)
        return Sums(values, kept * start.weights + weights.sum(0), largest)

    values, weights, _ = jax.vmap(sums)(key + w, pairs.allowed)
    average = values / jnp.where(weights == 0, 1, weights)
    return jax.nn.sigmoid(query) * average, sums(key, pairs.reaches_final)


def pair_biases(position_bias, window, places, features):
    """The biases w, `(T, T, 1)` or `(T, T, D)`, of tokens at `places (T,)`."""
    distance = places[:, None] - places
    if position_bias is None:
        return jnp.zeros((*distance.shape, 1))
    if isinstance(position_bias, tuple | list):
        rows, columns = position_bias
        w = (rows[places] @ columns[places].T)[..., None]
    else:
        taps = jnp.repeat(position_bias, features // len(position_bias), 0).T
        w = taps[jnp.clip(distance + len(taps) - 1 - window, 0)]
    return w if window is None else jnp.where(jnp.abs(distance)[..., None] <= window, w, 0)


@with_naive(over_pairs(naive, heads=False, wide=True))
@sequence_parts.over_channels(("query", "key", "value"), {"position_bias": 0})
@jax.named_scope("attention_free")
@declared
def attention_free(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    position_bias: tuple[jax.Array, jax.Array] | jax.Array | None = None,
    local_window_size: int | None = None,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, Sums]:
    r"""Token mixing of AFT (Zhai et al. 2021, "An Attention Free Transformer").

    For each feature separately, over the keys s that token t may attend to,

        y_t = sigmoid(q_t) * (sum_s exp(k_s + w_ts) v_s) / (sum_s exp(k_s + w_ts))

    - AFT-simple: no `position_bias`, and w is 0. Time O(T D).
    - AFT-full: `position_bias` is two factors (u, c) with w_ts = u_t . c_s, as in the paper. Time
      O(T^2 D); no T x T array is stored. In packed documents, t and s count from the start of the
      document.
    - AFT-local: as AFT-full, with `local_window_size`. Outside the window w is 0: far tokens count,
      without a bias. Time O(T W D).
    - AFT-conv: `position_bias` is an array of taps with w_ts = taps_(t - s) within
      `local_window_size`, with one set of taps for each group of features. Time O(T W D).

    Memory is O(T D) for all variants, forward and backward. Sums are divided by exp of their
    largest exponent. AFT-full uses separate largest exponents for keys and for biases. A row
    therefore gives zeros if the largest key and the largest bias belong to different tokens, and
    both are more than 80 above all others.

    Args:
      query: `(B, T, D)`.
      key: `(B, T, D)`, in the dtype of the query.
      value: `(B, T, D)`, in the dtype of the query.
      position_bias: None; two factors `((T', R), (T', R))` with T' >= T; or taps `(G, 2 W + 1)`
        (causal: `(G, W + 1)`), where G divides D. Taps are in the order of t - s, from -W (causal:
        from 0) to W.
      local_window_size: W, number of tokens on each side with a bias.
      **options: direction, lengths, packing and state: see `effattn.options`. Only causal calls
        without `position_bias` have a state.

    Returns:
      `(B, T, D)` in the dtype of `value`; with `return_state`, `(y, state)`; the state is
      `Sums` of shape `(B, D)`, in at least float32.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
    """
    is_causal, return_state = options.get("is_causal", False), options.get("return_state", False)
    initial = options.get("initial_state")
    query, key, value, valid, starts = token_mixing.check(
        "attention_free", {"query": query, "key": key, "value": value}, **options
    )
    time, features = key.shape[1:]
    dtype, wide = value.dtype, dtypes.wide(value.dtype)
    key, values = key.astype(wide), value.astype(wide)
    bias = check_bias(position_bias, local_window_size, is_causal, time, features, wide)
    if (initial is not None or return_state) and not (is_causal and bias is None):
        raise ValueError(
            "initial_state and return_state need is_causal=True and position_bias=None, as any "
            f"other call needs all earlier keys and values, got is_causal={is_causal} "
            f"{'without' if bias is None else 'with'} position_bias; leave them out"
        )
    if valid is not None:
        key = jnp.where(valid[..., None], key, dtypes.lowest(wide))
    if bias is not None or not is_causal:
        sequence_parts.refuse("attention_free with position_bias or without is_causal=True")
    if bias is not None:
        ids = checks.segment_ids(options.get("segment_ids"), key.shape[:1], time, time)
        packed = None if ids is None else (ids[0], starts)
        average = biased_average(key, values, valid, bias, local_window_size, is_causal, packed)
    elif is_causal:
        decay = jnp.zeros(features, wide)
        initial, after = passed_sums("attention_free", key, values, decay, valid, starts, initial)
        sums = _running(key, values, valid, starts, initial)
        average = sums.average()
    else:
        average = _both_sides(key, values, valid, starts).average()
    y = jax.nn.sigmoid(query.astype(wide)) * average
    y = cleared(y, valid).astype(dtype)
    if not return_state:
        return y
    if after is None:
        after = jax.tree.map(lambda x: x[:, -1], with_initial(initial, sums))
    return y, after


def check_bias(
    bias: Any, window: Any, is_causal: bool, time: int, features: int, dtype: Any
) -> Any:
    """Returns the checked bias: None, two factors `(T, R)`, or taps `(2 W + 1 or W + 1, D)`."""
    if window is not None and (not checks.is_integer(window) or window < 0):
        raise ValueError(f"local_window_size must be an int, 0 or more tokens, got {window!r}")
    if bias is None:
        if window is not None:
            raise ValueError(
                f"local_window_size={window} needs position_bias, got None; give position_bias, or "
                "leave local_window_size out"
            )
        return None
    if isinstance(bias, tuple | list):
        if len(bias) != 2:
            raise ValueError(
                f"position_bias must be an array of taps or a pair of factors, got {len(bias)} "
                "arrays"
            )
        row, column = (jnp.asarray(factor) for factor in bias)
        if row.ndim != 2 or row.shape != column.shape or row.shape[0] < time:
            raise ValueError(
                "the factors of position_bias must both have shape (T', R) with T' at least the "
                f"{time} tokens, got {row.shape} and {column.shape}"
            )
        row, column = (checks.shaped("position_bias", x, row.shape) for x in (row, column))
        return row[:time].astype(dtype), column[:time].astype(dtype)
    if window is None:
        raise ValueError(
            "position_bias of taps needs local_window_size, the number of tokens that the taps "
            "reach, got None"
        )
    taps, width = jnp.asarray(bias), (1 if is_causal else 2) * window + 1
    groups = taps.shape[0] if taps.ndim else 0
    if taps.ndim != 2 or taps.shape[1] != width or groups == 0 or features % groups:
        raise ValueError(
            f"position_bias must have shape (G, {width}), with G a divisor of the {features} "
            f"features and {width} taps for local_window_size={window} in a "
            f"{'causal' if is_causal else 'bidirectional'} call, got {taps.shape}"
        )
    taps = checks.shaped("position_bias", taps, taps.shape).astype(dtype)
    return jnp.repeat(taps, features // groups, 0).T


def biased_average(
    key: jax.Array,
    value: jax.Array,
    valid: jax.Array | None,
    bias: Any,
    window: int | None,
    is_causal: bool,
    packed: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns the average before the query gate, `(B, T, D)`; `bias` comes from `check_bias`.

    `packed` are the segment ids `(B, T)` and the starts of documents, bool `(B, T)`.
    """
    if key.shape[1] == 0:
        return value
    if packed is not None and isinstance(bias, tuple):
        places = positions_from_segment_ids(packed[0])
        bias = tuple(jnp.take(factor, places, 0) for factor in bias)
    if window is not None:
        window = int(window)
        if isinstance(bias, tuple):  # no two tokens are more than T - 1 apart
            window = min(window, max(key.shape[1] - 1, 0))
        return _local(key, value, valid, bias, window, is_causal, *(packed or ()))
    if packed is None:
        bias = tuple(factor[None] for factor in bias)
    return _full(key, value, valid, bias, is_causal, *(packed or ()))


def _running(key, value, valid=None, starts=None, initial=None):
    decay = jnp.zeros(key.shape[-1], key.dtype)
    return running_sums(key, value, decay, valid, starts, initial)


def _both_sides(key, value, valid, starts):
    """Returns the sums over all tokens, or over all tokens of the document."""
    if starts is not None:
        ends = _ends(starts)
        after = _flipped(_beyond(_running(*_flipped((key, value, valid, ends))), 0))
        return _running(key, value, valid, starts).plus(after.emptied(ends[..., None]))
    largest = lax.stop_gradient(key.max(1, keepdims=True, initial=LOWEST))
    weight = jnp.exp(key - largest)
    return Sums((weight * value).sum(1, keepdims=True), weight.sum(1, keepdims=True), largest)


def _full(key, value, valid, factors, is_causal, ids=None, starts=None):
    """AFT-full: one tile of queries at a time, by matrix products of exponentials.

    Factors are `(#B, T, R)`.
    """
    time = key.shape[1]
    tile = min(_TILE, time)
    rest = -time % tile
    lowest = dtypes.lowest(key.dtype)
    of_documents = None
    if not is_causal:  # the largest keys, (B, #T, D)
        of_documents = lax.stop_gradient(_both_sides(key, value, valid, starts).largest)
    ids = jnp.ones((1, time), jnp.int32) if ids is None else ids

    def padded(x, fill=0):
        around = (0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, around, constant_values=fill)

    key, ids, value, row, column = padded(key, lowest), *map(padded, (ids, value, *factors))
    if starts is not None and not is_causal:
        of_documents = padded(of_documents)
    token = jnp.arange(time + rest)

    @jax.checkpoint
    def of_tile(first):
        """Returns the averages of one tile, `(B, C, D)`."""

        def part(x):
            """The tile of `(B, T, ...)`; an axis of 1 stays."""
            return lax.dynamic_slice_in_dim(x, first, tile, 1) if x.shape[1] > 1 else x

        def biases(column, allowed):
            return jnp.where(allowed, of_rows @ jnp.swapaxes(column, 1, 2), lowest)

        of_rows, own = part(row), part(ids)[..., None]
        seen = own == ids[:, None]  # (#B, C, S)
        if not is_causal:
            largest = of_documents, part(of_documents)
            return _product(biases(column, seen), key, value, *largest).average()
        # The earlier tokens of the document of the first query.
        seen &= (token < first)[None, None]
        earlier = jnp.where(seen.any(1)[..., None], key, lowest)
        of_earlier = earlier.max(1, keepdims=True)
        of_earlier = lax.stop_gradient(jnp.maximum(of_earlier, LOWEST))
        sums = _product(biases(column, seen), earlier, value, of_earlier, of_earlier)
        is_inside = jnp.tri(tile, dtype=bool)[None] & (own == part(ids)[:, None])
        bias = biases(part(column), is_inside)
        return sums.plus(_pairs(bias, part(key), part(value))).average()

    tiles = lax.map(of_tile, jnp.arange(0, time + rest, tile))
    return jnp.moveaxis(tiles, 0, 1).reshape(key.shape)[:, :time]


def _product(bias, key, value, of_keys, of_queries):
    """Returns sums over the keys; biases are `(#B, C, S)`, -inf at other keys.

    `of_keys (B, #S, D)` and `of_queries (B, #C, D)` are the largest keys of their documents.
    """
    of_rows = lax.stop_gradient(jnp.maximum(bias.max(-1, keepdims=True), LOWEST))
    share, weight = jnp.exp(bias - of_rows), jnp.exp(key - of_keys)
    values, weights = share @ (weight * value), share @ weight
    return Sums(values, weights, jnp.broadcast_to(of_rows + of_queries, values.shape))


def _pairs(bias, key, value):
    """Returns sums by pairs `(B, C, C, D)`, with one largest exponent for each row and feature."""
    exponent = bias[..., None] + key[:, None]
    largest = lax.stop_gradient(jnp.maximum(exponent.max(2), LOWEST))
    weight = jnp.exp(exponent - largest[:, :, None])
    return Sums((weight * value[:, None]).sum(2), weight.sum(2), largest)


def _local(key, value, valid, bias, window, is_causal, ids=None, starts=None):
    """AFT-local and AFT-conv: sums outside the window, then adds one distance at a time.

    Factors are `(T, R)`, or `(B, T, R)` in packed documents.
    """
    key, value, valid, bias = mesh_axes.vary_alike((key, value, valid, bias))
    time = key.shape[1]
    sums = _beyond(_running(key, value, valid, starts), window, ids)
    if not is_causal:
        flipped = _flipped((key, value, valid, None if starts is None else _ends(starts)))
        sums = sums.plus(_flipped(_beyond(_running(*flipped), window, _flipped(ids))))

    around = ((0, 0), (window, window), (0, 0))
    lowest = dtypes.lowest(key.dtype)
    padded_key = jnp.pad(key, around, constant_values=lowest)
    padded_value = jnp.pad(value, around)
    columns = None
    if isinstance(bias, tuple):
        columns = jnp.pad(bias[1], around[-bias[1].ndim :])
    padded_ids = None if ids is None else jnp.pad(ids, around[:2])

    @jax.checkpoint
    def add(sums, distance):
        """Adds the tokens at t - distance; a negative distance is a later token."""

        def there(array, axis):
            return lax.dynamic_slice_in_dim(array, window - distance, time, axis)

        if columns is None:
            of_pairs = bias[distance + (0 if is_causal else window)]
        else:
            of_pairs = (bias[0] * there(columns, columns.ndim - 2)).sum(-1, keepdims=True)
        key_there = there(padded_key, 1)
        is_there = key_there > lowest
        if ids is not None:
            is_there &= (there(padded_ids, 1) == ids)[..., None]
        exponent = jnp.where(is_there, key_there, 0) + lead(of_pairs, 3)
        one = one_token(jnp.maximum(exponent, LOWEST), there(padded_value, 1))
        values, weights = (jnp.where(is_there, x, 0) for x in one[:2])
        return sums.plus(Sums(values, weights, one.largest)), None

    distances = jnp.arange(0 if is_causal else -window, window + 1)
    return lax.scan(add, sums, distances)[0].average()


def _flipped(arrays):
    """Arrays `(B, T, ...)` with their tokens in reverse."""
    return jax.tree.map(lambda x: jnp.flip(x, 1), arrays)


def _ends(starts):
    """The last tokens of documents, from the first ones."""
    return jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], 1)


def _beyond(sums, window, ids=None):
    """Returns the running sums of `window + 1` tokens ago, if the document has so many."""
    behind = min(window + 1, sums.values.shape[1])
    batch, _, features = sums.values.shape
    none = empty_sums((batch, behind, features), sums.values.dtype)
    kept = sums.values.shape[1] - behind
    sums = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :kept]], 1), none, sums)
    if ids is None:
        return sums
    before = jnp.pad(ids[:, :kept], ((0, 0), (behind, 0)))
    return sums.emptied((before != ids)[..., None])


# Registry entry of one of the four kinds of biases, each in a file of its own.
entry: Any = functools.partial(
    registry.Mechanism,
    family="attention-free",
    paper="Zhai et al. 2021, An Attention Free Transformer",
    function=attention_free,
    takes_heads=False,
)
BOTH_WAYS = frozenset({"causal", "bidirectional", "lengths", "segments", "decode"})
