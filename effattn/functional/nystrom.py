"""Nystrom attention: low-rank attention weights from a few landmarks."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import fold, lead, unfold
from effattn.arrays.combine import combine
from effattn.arrays.segments import valid, within
from effattn.cores import attention, document_blocks, sequence_parts
from effattn.cores.document_landmarks import landmarks_of
from effattn.cores.segment_means import clear_after, means_of_parts, segment_means
from effattn.naive import masked_softmax, over_pairs, with_naive
from effattn.options import Execution, Packing, Padding, Scale, Tile, declared
from effattn.xla.depthwise_convolution import convolve


class Options(Padding, Packing, Scale, Tile, Execution, total=False):
    """The shared options of `nystrom_attention`."""


def naive(query, key, value, pairs, *, scale, num_landmarks, num_iterations, skip_kernel=None):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, skip_kernel `(width,)`."""
    query = scale * query
    q, rows = _landmarks(query, pairs.query_ids, pairs.valid, num_landmarks)
    k, columns = _landmarks(key, pairs.key_ids, pairs.present, num_landmarks)
    is_same = pairs.query_ids[:, None] == pairs.key_ids
    of_keys = pairs.key_ids[:, None] == pairs.key_ids
    with jax.default_matmul_precision("highest"):  # the inverse amplifies rounding errors
        a = masked_softmax(q @ k.T, rows[:, None] & columns & is_same)
        column = jnp.where(of_keys, a.sum(0), 0).max(1, initial=0)  # of the document of a key
        row = jnp.where(is_same.T, a.sum(1), 0).max(1, initial=0)
        norm = (column * row)[:, None]
        one, z = jnp.eye(len(a), dtype=a.dtype), a.T / jnp.where(norm == 0, 1, norm)
        for _ in range(num_iterations):
            z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    read = masked_softmax(q @ key.T, pairs.present & is_same) @ value
    out = masked_softmax(query @ k.T, columns & is_same) @ (z @ read)
    if skip_kernel is not None:
        tap = pairs.j - pairs.i[:, None] + len(skip_kernel) // 2
        is_tap = (0 <= tap) & (tap < len(skip_kernel)) & is_same
        out = out + jnp.where(is_tap, skip_kernel[tap], 0) @ value
    return out


def _landmarks(x, ids, present, num_landmarks):
    """Means `(T, H)` of the segments of the valid tokens, and which segments hold a token.

    Segment n of a document stands at its token n, for n < m.
    """
    t, is_same = jnp.arange(len(x)), ids[:, None] == ids
    place = t - jnp.where(is_same, t, len(x)).min(1, initial=len(x))
    m = min(num_landmarks, len(x))
    size, longer = jnp.divmod((is_same & present).sum(1), m)
    first, last = (n * size + jnp.minimum(n, longer) for n in (place, place + 1))
    members = is_same & (first[:, None] <= place) & (place < last[:, None]) & (place < m)[:, None]
    return members @ x / jnp.maximum(members.sum(1, keepdims=True), 1), members.any(1)


@with_naive(over_pairs(naive, per_head={"skip_kernel": 1}, is_causal=False, wide=True))
@declared
def nystrom_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    num_landmarks: int,
    num_iterations: int = 6,
    skip_kernel: jax.Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Nystrom attention (Xiong et al. 2021, "Nystromformer").

    With m landmarks Q~ and K~, the means of m segments of the queries and of the keys, for each
    head

        out = softmax(s Q K~^T) A^+ [softmax(s Q~ K^T) V],    A = softmax(s Q~ K~^T),    s = scale,

    where the pseudo-inverse A^+ is approximated by Z_J of the iteration

        Z_(j+1) = Z_j (13 I - A Z_j (15 I - A Z_j (7 I - A Z_j))) / 4,
        Z_0 = A^T / (|A|_1 |A|_inf),

    for each head of each example separately. With as many landmarks as tokens and a converged A^+,
    the result is `effattn.dot_product_attention`. Weights may be negative. Every output depends on
    every token, so there is no causal form.

    Segments split the valid tokens as `numpy.array_split` does: sizes differ by at most one, longer
    segments first. If an example has fewer than m tokens, each token is a landmark. In packed rows,
    each document has up to m landmarks and an inverse of its own. `skip_kernel` adds the paper's
    depthwise convolution of the values, at token t

        sum_w kernel_w v_(t + w - (width - 1) / 2),

    with zeros past the ends and in padding.

    Time O((T + S) m (H + Hv) + J m^3), and O(T width Hv) for the convolution; memory
    O(T + S + J m^2), forward and backward. In packed rows, time O(T m (H + Hv + J m)) and memory
    O(T J m), plus one boolean for each pair of tiles, which have 64 tokens or more. Computed in at
    least float32: A^+ has large entries of both signs, which would amplify rounding errors of lower
    precision.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      num_landmarks: m, from 1 to max(T, S). If the shorter sequence has fewer than m tokens, each
        of its tokens is a landmark.
      num_iterations: J, 1 or more.
      skip_kernel: `(N, width)` or `(K, width)`, of odd width; needs T == S.
      **options: padding, packing, scale, tiles and execution: see `effattn.options`. `segment_ids`
        are one array `(*B, T)`, with T == S. Padded queries and keys are in no landmark.
        `precision` applies to products with queries, keys and values; products of landmarks alone
        always have the highest precision.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: more landmarks than tokens; and the errors of `effattn.options`.
    """
    num_landmarks = checks.at_least("num_landmarks", num_landmarks, 1)
    num_iterations = checks.at_least("num_iterations", num_iterations, 1)
    if options.get("segment_ids") is not None:
        checks.self_attention("nystrom_attention with segment_ids", query, key)
        document_blocks.one_array(options["segment_ids"], query.shape[:-2])
    given = attention.check("nystrom_attention", query, key, value, **options)
    checks.known_length("nystrom_attention", query, key)
    longest = sequence_parts.all_tokens(max(query.shape[-3], key.shape[-3]))
    if 0 < longest < num_landmarks:
        raise ValueError(
            f"num_landmarks must be at most {longest}, the number of tokens, got {num_landmarks}; "
            "pass fewer, or pad the tokens and pass their lengths"
        )
    if skip_kernel is not None:
        checks.self_attention("nystrom_attention with skip_kernel", query, key)
        skip_kernel = _skip_kernel(skip_kernel, query.shape[-2], key.shape[-2])
    attend = _attend if given.segments is None else _attend_packed
    run = functools.partial(attend, num_landmarks, num_iterations, given)
    with jax.named_scope("nystrom_attention"):
        out = run(query, key, value, skip_kernel)
    return checkpoint_name(out, "nystrom_attention")


def _skip_kernel(kernel: Any, heads: int, key_heads: int) -> jax.Array:
    """Returns the checked convolution kernel, `(N, width)`."""
    kernel = jnp.asarray(kernel)
    if (
        kernel.ndim != 2
        or kernel.shape[0] not in (heads, key_heads)
        or kernel.shape[1] % 2 == 0
        or not jnp.issubdtype(kernel.dtype, jnp.floating)
    ):
        shapes = " or ".join(f"({n}, width)" for n in dict.fromkeys((heads, key_heads)))
        raise ValueError(
            f"skip_kernel must be floating point of shape {shapes}, of odd width, got "
            f"{kernel.dtype} of shape {kernel.shape}"
        )
    return jnp.repeat(kernel, heads // kernel.shape[0], 0)


def _attend(
    num_landmarks, num_iterations, given: attention.Arguments, query, key, value, skip_kernel
):
    """Multiplies the three factors and adds the skip convolution."""
    batch, queries, keys = query.shape[:-3], query.shape[-3], key.shape[-3]
    if queries == 0 or keys == 0:
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    groups, is_padded = query.shape[-2] // key.shape[-2], given.key_lengths is not None
    plain = dataclasses.replace(given, scale=1.0, query_lengths=None, key_lengths=None)
    dtype = dtypes.wide(query, key, value)
    parts = sequence_parts.parts_for("nystrom_attention", "share_keys")
    means = segment_means if parts is None else functools.partial(means_of_parts, parts)

    def attend(query, key, value, scale, skip_kernel, query_lengths, key_lengths):
        query, key, value, scale, skip_kernel, query_lengths, key_lengths = mesh_axes.vary_alike(
            (query, key, value, scale, skip_kernel, query_lengths, key_lengths)
        )
        query = scale * clear_after(query, query_lengths).astype(dtype)
        key, value = (clear_after(x, key_lengths).astype(dtype) for x in (key, value))
        of_queries, landmarks = means(query, query_lengths, num_landmarks)
        of_keys, key_landmarks = means(key, key_lengths, num_landmarks)
        of_keys = jnp.repeat(of_keys, groups, -2)
        # An empty example gets one zero landmark, which keeps the inverse finite.
        weights = _softmax(
            of_queries, of_keys, jnp.maximum(landmarks, 1), jnp.maximum(key_landmarks, 1)
        )
        inverse = pseudo_inverse(weights, num_iterations)

        of_all = dataclasses.replace(plain, key_lengths=key_lengths if is_padded else None)
        with sequence_parts.alone():
            read, lse = attention.attend(of_queries, key, value, of_all)
        if parts is not None:
            read, _ = combine(*(list(lax.all_gather(x, parts.axis_name)) for x in (read, lse)))
        read = jnp.einsum("...nji,...inh->...jnh", inverse, read, precision="highest")
        to_all = dataclasses.replace(plain, key_lengths=key_landmarks if is_padded else None)
        with sequence_parts.alone():
            out, _ = attention.attend(query, of_keys, read, to_all)
        if skip_kernel is not None:
            of_heads = jnp.repeat(value, groups, -2)
            out = out + _convolved(of_heads, skip_kernel.astype(dtype), parts)
        return (clear_after(out, query_lengths),)

    def lengths(of, size):
        of = jnp.full(batch, size) if of is None else of
        return jnp.clip(of.astype(jnp.int32), 0, size)

    *axes, _ = mesh_axes.spec(query)
    (out,) = mesh_axes.placed(attend, query, PartitionSpec(*axes, None))(
        query,
        key,
        value,
        jnp.asarray(given.scale, dtype),
        skip_kernel,
        lengths(given.query_lengths, queries),
        lengths(given.key_lengths, keys),
    )
    return out.astype(value.dtype)


def _attend_packed(
    num_landmarks, num_iterations, given: attention.Arguments, query, key, value, skip_kernel
):
    """Multiplies the three factors of each document and adds the skip convolution."""
    sequence_parts.check_whole_rows("landmarks")
    assert given.segments is not None
    length, ids = query.shape[-3], given.segments[0]
    if length == 0:
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    groups, dtype = query.shape[-2] // key.shape[-2], dtypes.wide(query, key, value)
    plain = dataclasses.replace(given, scale=1.0, query_lengths=None, key_lengths=None, tile=None)
    lengths = given.query_lengths, given.key_lengths

    def attend(query, key, value, scale, skip_kernel, ids, lengths):
        arrays = query, key, value, scale, skip_kernel, ids, lengths
        query, key, value, scale, skip_kernel, ids, lengths = mesh_axes.vary_alike(arrays)
        valid_queries: Any
        valid_keys: Any
        valid_queries, valid_keys = (valid(of, ids, length) for of in lengths)

        def clear(x, present):
            return jnp.where(present[..., None, None], x, 0).astype(dtype)

        query = scale * clear(query, valid_queries)
        key, value = clear(key, valid_keys), clear(value, valid_keys)
        landmarks = landmarks_of(ids, min(num_landmarks, length))
        of_queries, query_ids = landmarks.of(query, valid_queries)
        of_keys, key_ids = landmarks.of(key, valid_keys)
        of_keys = jnp.repeat(of_keys, groups, -2)
        by_landmarks, by_tokens = landmarks.layouts()
        in_blocks = functools.partial(fold, size=landmarks.size, axis=query.ndim - 3)

        row, column = (
            in_blocks(query_ids)[..., None, :, None],
            in_blocks(key_ids)[..., None, None, :],
        )
        logits = jnp.einsum(
            "...inh,...jnh->...nij", in_blocks(of_queries), in_blocks(of_keys), precision="highest"
        )
        allowed = (row == column) & (row != 0)
        weights = jax.nn.softmax(jnp.where(allowed, logits, dtypes.lowest(dtype)))
        weights = jnp.where(allowed, weights, 0)
        of_document = in_blocks(key_ids)[..., None, :, None] == column
        columns = jnp.where(of_document, weights.sum(-2)[..., None, :], 0).max(-1)
        inverse = pseudo_inverse(weights, num_iterations, jnp.where(columns == 0, 1, columns))

        of_all = dataclasses.replace(
            plain, segments=(query_ids, jnp.where(valid_keys, ids, 0)), layout=by_landmarks
        )
        read = in_blocks(attention.attend(of_queries, key, value, of_all)[0])
        read = jnp.einsum("...nji,...inh->...jnh", inverse, read, precision="highest")
        read = unfold(read, key_ids.shape[-1], query.ndim - 3)
        to_all = dataclasses.replace(
            plain, segments=(jnp.where(valid_queries, ids, 0), key_ids), layout=by_tokens
        )
        out, _ = attention.attend(query, of_keys, read, to_all)
        if skip_kernel is not None:
            of_heads = jnp.repeat(value, groups, -2)
            out = out + _convolved_documents(of_heads, skip_kernel.astype(dtype), ids)
        return (clear(out, valid_queries),)

    *axes, _ = mesh_axes.spec(query)
    run = mesh_axes.placed(attend, query, PartitionSpec(*axes, None))
    scale = jnp.asarray(given.scale, dtype)
    (out,) = run(query, key, value, scale, skip_kernel, ids, lengths)
    return out.astype(value.dtype)


def _convolved_documents(value, kernel, ids):
    """Convolution of the values of each document, zero padded; one tap after the other."""
    width, axis, length = kernel.shape[-1], value.ndim - 3, value.shape[-3]

    def around(x):
        """A function of w: the entries of x at tokens t + w - (width - 1) / 2."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (width // 2, width // 2)
        padded = jnp.pad(x, padding)
        return lambda w: lax.dynamic_slice_in_dim(padded, w, length, axis)

    @jax.checkpoint
    def term(w, tap, value):
        is_same = around(ids)(w) == ids
        return jnp.where(is_same[..., None, None], around(value)(w), 0) * lead(tap, value.ndim)

    def add(out, x):
        return out + term(*x, value), None

    taps = jnp.arange(width), kernel.T[..., None]
    return lax.scan(add, mesh_axes.vary_like(value, jnp.zeros_like(value)), taps)[0]


def _convolved(value, kernel, parts):
    """Convolution of the values, with those of the neighbours where devices hold parts."""
    if parts is None:
        return convolve(value, kernel)
    axis, size, reach = value.ndim - 3, value.shape[-3], kernel.shape[-1] // 2
    around = convolve(sequence_parts.with_neighbours(value, reach, axis), kernel)
    return lax.slice_in_dim(around, reach, reach + size, axis=axis)


def _softmax(query, key, queries, keys):
    """Returns softmax weights of landmarks, `(*B, N, i, j)`; zeros for padding landmarks."""
    logits = jnp.einsum("...inh,...jnh->...nij", query, key, precision="highest")
    exists, seen = (
        within(count[..., None], x.shape[-3]) for x, count in ((query, queries), (key, keys))
    )
    weights = jax.nn.softmax(jnp.where(seen[..., None, :], logits, dtypes.lowest(logits.dtype)))
    return jnp.where(exists[..., None], weights, 0)


def pseudo_inverse(weights: jax.Array, iterations: int, norm: jax.Array | None = None) -> jax.Array:
    """Returns pseudo-inverses `(*B, j, i)` of stochastic matrices `(*B, i, j)` by iteration.

    Zero rows and columns give zero columns and rows of the inverse and do not affect other entries.
    `norm (*B, j)` divides the rows of the first iterate, for matrices that are diagonal in blocks;
    default: the largest sum of a column.
    """
    multiply = functools.partial(jnp.matmul, precision="highest")
    one = lead(jnp.eye(weights.shape[-2], dtype=weights.dtype), weights.ndim)

    def improve(_, inverse):
        product = multiply(weights, inverse)
        inner = 15 * one - multiply(product, 7 * one - product)
        return multiply(inverse, 13 * one - multiply(product, inner)) / 4

    # Rows sum to one, so |A|_inf, the largest row sum, is 1.
    norm = weights.sum(-2).max(-1, keepdims=True) if norm is None else norm
    return lax.fori_loop(0, iterations, improve, jnp.swapaxes(weights, -1, -2) / norm[..., None])


registry.register(
    registry.Mechanism(
        name="nystrom",
        family="low rank",
        paper="Xiong et al. 2021, Nystromformer: A Nystrom-Based Algorithm for Approximating "
        "Self-Attention",
        function=nystrom_attention,
        capabilities=frozenset({"bidirectional", "cross"}),
        options={"num_landmarks": 32},
        complexity="O(N m) for m landmarks",
        time_exponent=1.0,
    )
)
