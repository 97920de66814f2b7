"""Attention-free transformer: weighted averages of values for each feature, by keys and biases."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.rwkv4 import (
    Sums,
    check_tokens_by_feature,
    empty_sums,
    one_token,
    running_sums,
    with_initial,
)

# Queries in a tile of AFT-full. Pairs inside a causal tile are computed one by one.
_TILE = 64


@jax.named_scope("attention_free")
@checks.checked
def attention_free(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    position_bias: tuple[jax.Array, jax.Array] | jax.Array | None = None,
    local_window_size: int | None = None,
    is_causal: bool = False,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: Sums | None = None,
    return_state: bool = False,
) -> jax.Array | tuple[jax.Array, Sums]:
    r"""Token mixing of AFT (Zhai et al. 2021, "An Attention Free Transformer").

    For each feature separately, over the keys s that token t may attend to,

        y_t = sigmoid(q_t) * (sum_s exp(k_s + w_ts) v_s) / (sum_s exp(k_s + w_ts))

    - AFT-simple: no `position_bias`, and w is 0. Time O(T D).
    - AFT-full: `position_bias` is two factors (u, c) with w_ts = u_t . c_s, as in the paper. Time
      O(T^2 D); no T x T array is stored.
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
      is_causal: attend to tokens up to and including the token itself.
      lengths: `(B,)` int, valid tokens of each row; padding gives zeros.
      segment_ids: int `(B, T)`: each run of equal ids is a separate document; 0 is padding. Not
        allowed with `position_bias`.
      initial_state: the sums before the first token, from an earlier call; only for causal calls
        without `position_bias`.
      return_state: also return the sums after the last valid token; same restriction.

    Returns:
      `(B, T, D)` in the dtype of `value`; with `return_state`, `(y, state)`; the state is
      `Sums` of shape `(B, D)`, in at least float32.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
    """
    query, key, value, valid, starts = check_tokens_by_feature(
        {"query": query, "key": key, "value": value}, lengths, segment_ids, initial_state
    )
    time, features = key.shape[1:]
    dtype, wide = value.dtype, dtypes.wide(value.dtype)
    key, values = key.astype(wide), value.astype(wide)
    bias = check_bias(position_bias, local_window_size, is_causal, time, features, wide)
    if starts is not None and bias is not None:
        raise ValueError(
            "segment_ids are for calls without position_bias, which reaches across documents"
        )
    if (initial_state is not None or return_state) and not (is_causal and bias is None):
        raise ValueError(
            "initial_state and return_state are for causal calls without position_bias; others "
            "need all earlier keys and values"
        )
    if valid is not None:
        key = jnp.where(valid[..., None], key, dtypes.lowest(wide))
    if bias is not None:
        average = biased_average(key, values, valid, bias, local_window_size, is_causal)
    elif is_causal:
        sums = _running(key, values, valid, starts, initial_state)
        average = sums.average()
    else:
        average = _both_sides(key, values, valid, starts).average()
    y = jax.nn.sigmoid(query.astype(wide)) * average
    if valid is not None:
        y = jnp.where(valid[..., None], y, 0)
    y = y.astype(dtype)
    if not return_state:
        return y
    return y, jax.tree.map(lambda x: x[:, -1], with_initial(initial_state, sums))


def check_bias(
    bias: Any, window: Any, is_causal: bool, time: int, features: int, dtype: Any
) -> Any:
    """Returns the checked bias: None, two factors `(T, R)`, or taps `(2 W + 1 or W + 1, D)`."""
    if window is not None and (not checks.is_integer(window) or window < 0):
        raise ValueError(f"local_window_size must be an int, 0 or more tokens, got {window!r}")
    if bias is None:
        if window is not None:
            raise ValueError("local_window_size is where position_bias ends, and needs one")
        return None
    if isinstance(bias, tuple | list):
        if len(bias) != 2:
            raise ValueError(f"position_bias must be taps or two factors, got {len(bias)} of them")
        row, column = (jnp.asarray(factor) for factor in bias)
        if row.ndim != 2 or row.shape != column.shape or row.shape[0] < time:
            raise ValueError(
                "the factors of position_bias must both have shape (T', R) with T' at least the "
                f"{time} tokens, got {row.shape} and {column.shape}"
            )
        row, column = (checks.shaped("position_bias", x, row.shape) for x in (row, column))
        return row[:time].astype(dtype), column[:time].astype(dtype)
    if window is None:
        raise ValueError("position_bias of taps needs local_window_size, how many there are")
    taps, width = jnp.asarray(bias), (1 if is_causal else 2) * window + 1
    groups = taps.shape[0] if taps.ndim else 0
    if taps.ndim != 2 or taps.shape[1] != width or groups == 0 or features % groups:
        raise ValueError(
            f"position_bias must have shape (G, {width}), taps for local_window_size={window} in "
            f"a {'causal' if is_causal else 'bidirectional'} call and G a divisor of the "
            f"{features} features, got {taps.shape}"
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
) -> jax.Array:
    """Returns the average before the query gate, `(B, T, D)`; `bias` comes from `check_bias`."""
    if key.shape[1] == 0:
        return value
    if window is None:
        return _full(key, value, bias, is_causal)
    return _local(key, value, valid, bias, int(window), is_causal)


def _running(key, value, valid=None, starts=None, initial=None):
    decay = jnp.zeros(key.shape[-1], key.dtype)
    return running_sums(key, value, decay, valid, starts, initial)


def _both_sides(key, value, valid, starts):
    """Returns the sums over all tokens, or over all tokens of the document."""
    if starts is not None:
        ends = jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], 1)
        flipped = (jnp.flip(x, 1) for x in (key, value, valid, ends))
        after = jax.tree.map(lambda x: jnp.flip(x, 1), _beyond(_running(*flipped), 0))
        kept = ~ends[..., None]
        after = Sums(
            jnp.where(kept, after.values, 0), jnp.where(kept, after.weights, 0), after.largest
        )
        return _running(key, value, valid, starts).plus(after)
    largest = lax.stop_gradient(key.max(1, keepdims=True, initial=-1e30))
    weight = jnp.exp(key - largest)
    return Sums((weight * value).sum(1, keepdims=True), weight.sum(1, keepdims=True), largest)


def _full(key, value, factors, is_causal):
    """AFT-full: one tile of queries at a time, by matrix products of exponentials."""
    time = key.shape[1]
    tile = min(_TILE, time)
    rest = -time % tile
    row, column = (jnp.pad(factor, ((0, rest), (0, 0))) for factor in factors)
    lowest = dtypes.lowest(key.dtype)
    key = jnp.pad(key, ((0, 0), (0, rest), (0, 0)), constant_values=lowest)
    value = jnp.pad(value, ((0, 0), (0, rest), (0, 0)))
    token = jnp.arange(time + rest)

    @jax.checkpoint
    def of_tile(first):
        """Returns the averages of one tile, `(B, C, D)`."""
        of_rows = lax.dynamic_slice_in_dim(row, first, tile, 0)
        seen = token < (first if is_causal else time)
        sums = _product(jnp.where(seen[None], of_rows @ column.T, lowest), key, value, seen)
        if is_causal:
            parts = (lax.dynamic_slice_in_dim(x, first, tile, 1) for x in (key, value))
            of_columns = lax.dynamic_slice_in_dim(column, first, tile, 0)
            bias = jnp.where(jnp.tri(tile, dtype=bool), of_rows @ of_columns.T, lowest)
            sums = sums.plus(_pairs(bias, *parts))
        return sums.average()

    tiles = lax.map(of_tile, jnp.arange(0, time + rest, tile))
    return jnp.moveaxis(tiles, 0, 1).reshape(key.shape)[:, :time]


def _product(bias, key, value, seen):
    """Returns sums over the keys in `seen (S,)`; biases are `(C, S)`, -inf at other keys."""
    key = jnp.where(seen[None, :, None], key, dtypes.lowest(key.dtype))
    of_keys, of_rows = (
        lax.stop_gradient(jnp.maximum(x.max(axis, keepdims=True), -1e30))
        for x, axis in ((key, 1), (bias, 1))
    )
    share, weight = jnp.exp(bias - of_rows), jnp.exp(key - of_keys)
    values, weights = share @ (weight * value), share @ weight
    return Sums(values, weights, jnp.broadcast_to(of_rows[None] + of_keys, values.shape))


def _pairs(bias, key, value):
    """Returns sums by pairs `(B, C, C, D)`, with one largest exponent for each row and feature."""
    exponent = bias[None, ..., None] + key[:, None]
    largest = lax.stop_gradient(jnp.maximum(exponent.max(2), -1e30))
    weight = jnp.exp(exponent - largest[:, :, None])
    return Sums((weight * value[:, None]).sum(2), weight.sum(2), largest)


def _local(key, value, valid, bias, window, is_causal):
    """AFT-local and AFT-conv: sums outside the window, then adds one distance at a time."""
    time = key.shape[1]
    sums = _beyond(_running(key, value, valid), window)
    if not is_causal:
        flipped = (None if x is None else jnp.flip(x, 1) for x in (key, value, valid))
        after = jax.tree.map(lambda x: jnp.flip(x, 1), _beyond(_running(*flipped), window))
        sums = sums.plus(after)

    around = ((0, 0), (window, window), (0, 0))
    lowest = dtypes.lowest(key.dtype)
    padded_key = jnp.pad(key, around, constant_values=lowest)
    padded_value = jnp.pad(value, around)
    columns = jnp.pad(bias[1], around[1:]) if isinstance(bias, tuple) else None

    @jax.checkpoint
    def add(sums, distance):
        """Adds the tokens at t - distance; a negative distance is a later token."""

        def there(array, axis):
            return lax.dynamic_slice_in_dim(array, window - distance, time, axis)

        if columns is None:
            of_pairs = bias[distance + (0 if is_causal else window)]
        else:
            of_pairs = (bias[0] * there(columns, 0)).sum(-1, keepdims=True)
        key_there = there(padded_key, 1)
        is_there = key_there > lowest
        exponent = jnp.where(is_there, key_there, 0) + lead(of_pairs, 3)
        one = one_token(jnp.maximum(exponent, -1e30), there(padded_value, 1))
        values, weights = (jnp.where(is_there, x, 0) for x in one[:2])
        return sums.plus(Sums(values, weights, one.largest)), None

    distances = jnp.arange(0 if is_causal else -window, window + 1)
    return lax.scan(add, sums, distances)[0].average()


def _beyond(sums, window):
    """Returns the running sums of `window + 1` tokens ago."""
    behind = min(window + 1, sums.values.shape[1])
    batch, _, features = sums.values.shape
    none = empty_sums((batch, behind, features), sums.values.dtype)
    kept = sums.values.shape[1] - behind
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :kept]], 1), none, sums)


_register = functools.partial(
    registry.Mechanism,
    family="attention-free",
    paper="Zhai et al. 2021, An Attention Free Transformer",
    function=attention_free,
    takes_heads=False,
)
_BOTH_WAYS = frozenset({"causal", "bidirectional", "lengths", "decode"})
_REASONS = {"segments": "its biases reach across documents"}

registry.register(
    _register(
        name="aft_full",
        capabilities=_BOTH_WAYS,
        reasons=_REASONS,
        builder="effattn.nn.aft_full:AFTFull",
        complexity="O(N^2 D), O(N D) a step",
        time_exponent=2.0,
        knows_order=True,
    )
)
registry.register(
    _register(
        name="aft_simple",
        capabilities=_BOTH_WAYS | {"segments"},
        builder="effattn.nn.aft_simple:AFTSimple",
        complexity="O(N D)",
        time_exponent=1.0,
    )
)
registry.register(
    _register(
        name="aft_local",
        capabilities=_BOTH_WAYS,
        reasons=_REASONS,
        builder="effattn.nn.aft_local:AFTLocal",
        complexity="O(N W D), O(N D) a step",
        time_exponent=1.0,
        knows_order=True,
    )
)
registry.register(
    _register(
        name="aft_conv",
        capabilities=_BOTH_WAYS,
        reasons=_REASONS,
        builder="effattn.nn.aft_conv:AFTConv",
        complexity="O(N W D), O(N D) a step",
        time_exponent=1.0,
        knows_order=True,
    )
)
