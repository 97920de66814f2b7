"""Linformer attention: keys and values are projected to a few rows along the sequence."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from_segment_ids, starts_of_runs, valid, within
from effattn.cores import attention, document_blocks, document_slots, sequence_parts
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Packing, Sink, Softmax, Tile, declared

NOT_CAUSAL = (
    "each projected row is a sum over the whole sequence, so that every query sees later tokens"
)


class Options(Direction, Packing, Sink, Tile, Softmax, total=False):
    """The shared options of `linformer_attention`."""


def naive(query, key, value, pairs, *, scale, key_projection, value_projection):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`; E and F `(r, L)` for L >= S.

    Returns output and log-sum-exp. In packed rows, tokens count from the start of the document.
    """
    in_document = (pairs.query_ids[:, None] == pairs.key_ids) & pairs.present

    def projected(projection, x):
        """The rows of each query's document, `(T, r, H)`."""
        terms = projection.T[pairs.places][:, :, None] * x[:, None]  # (S, r, H)
        rows = jnp.einsum("ts,srh->trh", in_document.astype(terms.dtype), terms)
        return rows.astype(x.dtype)

    keys, values = projected(key_projection, key), projected(value_projection, value)
    wide = jnp.promote_types(key.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    logits = scale * product("th,trh->tr", query.astype(key.dtype), keys)
    rows = jnp.arange(len(key_projection))
    allowed = (pairs.valid & in_document.any(1))[:, None] & (rows >= 0)
    weights, lse = pairs.with_keys(allowed, rows).softmax(logits)
    return product("tr,trh->th", weights.astype(value.dtype), values), lse


@with_naive(over_pairs(naive, per_head={"key_projection": 2, "value_projection": 2}))
@declared
def linformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_projection: jax.Array,
    value_projection: jax.Array,
    **options: Unpack[Options],
) -> Any:
    r"""Linformer (Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity").

    Keys and values are projected along the sequence to r rows each; queries attend to these rows:

        K' = E K,   V' = F V,   y = softmax(scale Q K'^T) V'

    for E = key_projection and F = value_projection. All rows count: rows that only cover padding
    or tokens after a short input have logit 0 and value 0. With r = S and identity projections, the
    result is `effattn.dot_product_attention`. There is no causal form. In packed rows, a document
    has r rows of its own, and s counts from its start.

    Time O((T + S) r (H + Hv)), memory O(T + S + r), forward and backward, beside the projections
    themselves; memory O(T r) in packed rows.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, S, K, H)`, N a multiple of K.
      value: `(*B, S, K, Hv)`.
      key_projection: E, `(r, L)`, or `(K, r, L)` with one matrix for each key head. L is the
        maximum key length; token s uses column s.
      value_projection: F, as key_projection, with the same r.
      **options: direction, padding, packing, scale, soft cap, sink, dropout, log-sum-exp, tiles
        and execution: see `effattn.options`. `is_causal` must be False. `segment_ids` are one array
        `(*B, T)`, with T == S. Padded keys are in no projected row, and an example without keys
        gives zeros. Dropout, log-sum-exp and tiles are over projected rows.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values; more than L keys; `is_causal=True`.
      NotImplementedError: a named implementation does not take these arguments.
    """
    if options.get("is_causal"):
        raise ValueError(
            f"linformer_attention needs is_causal=False, got True: {NOT_CAUSAL}; "
            "block_linformer_attention is causal"
        )
    if options.get("segment_ids") is not None:
        checks.self_attention("linformer_attention with segment_ids", query, key)
        document_blocks.one_array(options["segment_ids"], query.shape[:-2])
    given = attention.check("linformer_attention", query, key, value, **options)
    checks.known_length("linformer_attention", query, key)
    of_keys = _check_projection("key_projection", key_projection, key)
    of_values = _check_projection("value_projection", value_projection, key)
    if of_keys.shape[-2] != of_values.shape[-2]:
        raise ValueError(
            "key_projection and value_projection must have the same number of rows, got "
            f"{of_keys.shape[-2]} and {of_values.shape[-2]}"
        )

    attend = _attend if given.segments is None or not key.shape[-3] else _attend_packed
    with jax.named_scope("linformer_attention"):
        out, lse = attend(query, key, value, of_keys, of_values, given)
    return attention.results(out, lse, given)


def _attend(query, key, value, key_projection, value_projection, given: attention.Arguments):
    parts = sequence_parts.parts_for("linformer_attention", "share_keys")
    lengths, length, sum_parts = given.key_lengths, key.shape[-3], None
    if parts is not None:
        sum_parts = parts.sum
        key_projection, value_projection = (
            parts.own(x, length, x.ndim - 1) for x in (key_projection, value_projection)
        )
    keys = project(key_projection, key, lengths, given.precision, sum_parts)
    values = project(value_projection, value, lengths, given.precision, sum_parts)
    if lengths is not None:
        lengths = lengths if parts is None else parts.sum(lengths)
        rows = jnp.where(lengths > 0, keys.shape[-3], 0)
        given = dataclasses.replace(given, key_lengths=rows)
    given = dataclasses.replace(given, segments=None)  # a packed row here has no tokens
    with sequence_parts.alone():
        return attention.attend(query, keys, values, given)


def _attend_packed(query, key, value, key_projection, value_projection, given: attention.Arguments):
    """Attends to the projected rows of the document of each token."""
    sequence_parts.check_whole_rows("projected tokens")
    assert given.segments is not None
    ids, length = given.segments[0], key.shape[-3]
    present: Any = valid(given.key_lengths, ids, length)
    query, key, value = attention.without_padding(query, key, value, given)
    place, begin = positions_from_segment_ids(ids), starts_of_runs(ids)

    def weights(projection):
        """The weights of each token in the rows, `(*B, T, #K, r)`."""
        of_tokens = jnp.moveaxis(projection, -1, 0)  # (L, r) or (L, K, r)
        of_tokens = of_tokens[:, None] if projection.ndim == 2 else of_tokens
        found = jnp.take(of_tokens, place, 0, mode="clip")
        return jnp.where(present[..., None, None], found, 0)

    projections = weights(key_projection), weights(value_projection)
    out, lse = document_slots.attend(
        projections, begin, present, query, key, value, given, jnp.zeros_like(begin)
    )
    if given.sink is not None:
        out, lse = attention.with_sink(out, lse, given.sink)
    return attention.clear_rows(out, lse, valid(given.query_lengths, ids, length))


def project(projection, array, lengths, precision, sum_parts=None):
    """Projects `(*B, S, K, H)` to `(*B, r, K, H)`, with sums in at least float32.

    `sum_parts` sums over the devices that hold parts of the tokens.
    """
    length = array.shape[-3]
    if lengths is not None:
        present = within(lengths, length)
        array = jnp.where(present[..., None, None], array, 0)
    projected = jnp.einsum(
        "...skh,rs->...rkh" if projection.ndim == 2 else "...skh,krs->...rkh",
        array,
        projection[..., :length],
        precision=precision,
        preferred_element_type=dtypes.wide(projection, array),
    )
    projected = projected if sum_parts is None else sum_parts(projected)
    return projected.astype(array.dtype)


def _check_projection(name: str, given: Any, key: jax.Array) -> jax.Array:
    """Returns the checked projection, `(r, L)` or `(K, r, L)`, with L at least the key length."""
    array = jnp.asarray(given)
    length, heads = sequence_parts.all_tokens(key.shape[-3]), key.shape[-2]
    if (
        not jnp.issubdtype(array.dtype, jnp.floating)
        or array.ndim not in (2, 3)
        or array.shape[:-2] not in ((), (heads,))
        or not 1 <= array.shape[-2] <= array.shape[-1]
    ):
        raise ValueError(
            f"{name} must be floating point of shape (rows, max length) or ({heads}, rows, max "
            f"length), for {heads} key heads and no more rows than the max length, got "
            f"{array.dtype} of shape {array.shape}"
        )
    if array.shape[-1] < length:
        raise ValueError(
            f"{name} of shape {array.shape} is for at most {array.shape[-1]} tokens, got {length} "
            "in key; make it for more, or shorten the input"
        )
    return array


def window_projection(weights: Any, num_projected: int) -> jax.Array:
    """Returns a projection to sums of consecutive windows, with equal weights `(*, w)` in each.

    The result is `(*, r, r w)` for r = num_projected: row m has the weights at tokens m w to
    (m + 1) w. Weights of 1 / w are the mean pooling of the paper; learned weights are its
    convolution of stride w, with the same taps for all features.
    """
    weights = jnp.asarray(weights)
    *before, width = weights.shape
    of_windows = (
        jnp.eye(num_projected, dtype=weights.dtype)[:, :, None] * weights[..., None, None, :]
    )
    return of_windows.reshape(*before, num_projected, num_projected * width)


def mean_pooling(length: int, num_projected: int = 16) -> Mapping[str, Any]:
    """Returns both projections as means of `length / num_projected` consecutive tokens."""
    width = length // num_projected
    pooled = np.kron(np.eye(num_projected, dtype=np.float32), np.full(width, 1 / width, np.float32))
    return {"key_projection": pooled, "value_projection": pooled}


registry.register(
    registry.Mechanism(
        name="linformer",
        family="low rank",
        paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity",
        function=linformer_attention,
        capabilities=frozenset({"cross"}),
        reasons={"causal": NOT_CAUSAL},
        options_at=mean_pooling,
        builder="effattn.nn.linformer:LinformerSelfAttention",
        complexity="O(N r)",
        time_exponent=1.0,
    )
)
