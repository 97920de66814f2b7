"""Synthesizers: attention with logits that do not compare two tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from, within
from effattn.functional.softmax import dot_product_attention


@checks.checked
def synthesizer_attention(
    hidden: jax.Array,
    table: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    r"""Dense synthetic attention (Tay et al. 2020, "Synthesizer: Rethinking Self-Attention").

        y_t = sum_s softmax_s(h_t . r_s) v_s

    The logits are a learned function of the token of the query and the position of the key: h_t
    depends only on token t, and r_s is a learned row for position s. This is dot-product attention
    with learned keys: time O(T S A), memory O((T + S) A). If h is also a learned row for each
    position, this is the factorised random Synthesizer.

    Args:
      hidden: h, `(*B, T, N, A)`; relu(x W_1 + b) in the paper.
      table: r, `(S, N, A)` or `(*B, S, N, A)`; the columns of W_2 in the paper.
      value: `(*B, S, N, Hv)`.
      is_causal: see `effattn.options`, for this and the following arguments.
      query_offset: the position of the first query.
      query_seq_lengths: `(*B)` int.
      key_value_seq_lengths: `(*B)` int.
      segment_ids: int `(*B, T)`.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("synthesizer")` lists the names and what
        they take.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
      NotImplementedError: an implementation that does not take this call.
    """
    hidden, table, value = map(jnp.asarray, (hidden, table, value))
    heads = (value.shape[-3], *hidden.shape[-2:]) if value.ndim >= 3 <= hidden.ndim else None
    if heads is None or table.ndim < 3 or table.shape[-3:] != heads:
        raise ValueError(
            "table must have shape (S, N, A) for hidden (*B, T, N, A) and value (*B, S, N, Hv), "
            f"got {table.shape} for {hidden.shape} and {value.shape}"
        )
    shape = (*value.shape[:-3], *heads)
    checks.shaped("table", table, heads if table.ndim == 3 else shape)
    keys = jnp.broadcast_to(table, shape).astype(hidden.dtype)
    return dot_product_attention(
        hidden,
        keys,
        value,
        scale=1.0,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        implementation=implementation,
    )


# Queries in a tile.
_TILE = 128


@jax.named_scope("factorized_synthesizer_attention")
@checks.checked
def factorized_synthesizer_attention(
    coarse: jax.Array,
    fine: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    lengths: jax.Array | None = None,
) -> jax.Array:
    r"""Factorised dense synthetic attention (Tay et al. 2020, "Synthesizer", section 3.1.1).

        y_t = sum_s softmax_s(a_t[s // m] b_t[s % m]) v_s

    The l m logits of a token are products of l + m factors, computed for one block of m keys at a
    time. Time is O(T S Hv), memory O(T (l + m + Hv)), forward and backward.

    Args:
      coarse: a, `(B, T, N, l)`.
      fine: b, `(B, T, N, m)`, with l m at least S.
      value: `(B, S, N, Hv)`.
      is_causal: query t attends to keys up to position t + offset.
      query_offset: an int, or ints `(B,)`.
      lengths: `(B,)` int, valid tokens of each row; padding keys are ignored, and padding queries
        give zeros if T is S.

    Returns:
      `(B, T, N, Hv)` in the dtype of `value`; logits and sums are in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    coarse, fine, value = map(jnp.asarray, (coarse, fine, value))
    if not coarse.ndim == fine.ndim == value.ndim == 4:
        raise ValueError(
            "coarse must have shape (B, T, N, l), fine (B, T, N, m) and value (B, S, N, Hv), got "
            f"{coarse.shape}, {fine.shape} and {value.shape}"
        )
    checks.known_length("factorized_synthesizer_attention", coarse, value)
    batch, time, heads, blocks = coarse.shape
    checks.shaped("coarse", coarse, coarse.shape)
    size, keys = fine.shape[-1], value.shape[1]
    checks.shaped("fine", fine, (batch, time, heads, size))
    checks.shaped("value", value, (batch, keys, heads, value.shape[-1]))
    if blocks * size < keys:
        raise ValueError(
            f"coarse and fine must make a logit for each of the {keys} keys, got "
            f"{blocks} x {size} of them"
        )
    lengths = checks.lengths("lengths", lengths, (batch,))
    offset = jnp.broadcast_to(jnp.asarray(checks.offset(query_offset, (batch,))), (batch,))
    if lengths is not None:
        value = jnp.where(within(lengths, keys)[..., None, None], value, 0)
        if time == keys:
            valid = within(lengths, time)[..., None, None]
            coarse, fine = jnp.where(valid, coarse, 0), jnp.where(valid, fine, 0)
    wide = dtypes.wide(value.dtype)
    blocks = -(-keys // size)
    padded = jnp.pad(value, ((0, 0), (0, blocks * size - keys), (0, 0), (0, 0)))
    values = jnp.moveaxis(padded.reshape(batch, blocks, size, *value.shape[2:]), 1, 0)
    seen_keys = jnp.full((batch,), keys) if lengths is None else lengths

    @jax.checkpoint
    def of_tile(first, a, b):
        """Returns the output of the queries from `first` on, `(B, C, N, Hv)`."""
        positions = positions_from(offset + first, a.shape[1])

        def add(sums, of_block):
            out, total, largest = sums
            block, value, coarse = of_block
            key = lead(block * size + jnp.arange(size), 3)
            seen = jnp.broadcast_to(key < seen_keys[:, None, None], (batch, a.shape[1], size))
            if is_causal:
                seen = seen & (key <= positions[..., None])
            logit = coarse[..., None].astype(wide) * b.astype(wide)
            logit = jnp.where(seen[:, :, None], logit, dtypes.lowest(wide))
            # At least the initial value, so that differences are finite.
            new = jax.lax.stop_gradient(jnp.maximum(largest, logit.max(-1)))
            share, weight = jnp.exp(largest - new), jnp.exp(logit - new[..., None])
            added = jnp.einsum("bcnm,bmnh->bcnh", weight, value.astype(wide))
            return (out * share[..., None] + added, total * share + weight.sum(-1), new), None

        empty = jnp.zeros(a.shape[:3], wide)
        start = jnp.zeros((*a.shape[:3], value.shape[-1]), wide), empty, empty - 1e30
        per_block = jnp.arange(blocks), values, jnp.moveaxis(a, -1, 0)[:blocks]
        (out, total, _), _ = jax.lax.scan(add, start, per_block)
        return out / jnp.where(total > 0, total, 1)[..., None]

    tile = max(1, min(_TILE, time))
    firsts = jnp.arange(0, time, tile)

    def tiles(array):
        array = jnp.pad(array, ((0, 0), (0, -time % tile), (0, 0), (0, 0)))
        array = array.reshape(batch, firsts.size, tile, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    out = jax.lax.map(lambda of: of_tile(*of), (firsts, tiles(coarse), tiles(fine)))
    out = jax.lax.collapse(jnp.moveaxis(out, 0, 1), 1, 3)[:, :time]
    if lengths is not None and time == keys:
        out = jnp.where(valid, out, 0)
    return out.astype(value.dtype)


_register: Any = functools.partial(
    registry.Mechanism,
    family="synthetic",
    paper="Tay et al. 2020, Synthesizer: Rethinking Self-Attention in Transformer Models",
    takes_heads=False,
    builder="effattn.nn.synthesizer:Synthesizer",
    time_exponent=2.0,
)
_CAPABILITIES = frozenset({"causal", "bidirectional", "lengths", "segments", "decode"})

registry.register(
    _register(
        name="synthesizer",
        function=synthesizer_attention,
        capabilities=_CAPABILITIES,
        options={"kind": "dense"},
        complexity="O(N^2 A), O(N A) a step",
    )
)
registry.register(
    _register(
        name="synthesizer_factorized",
        function=factorized_synthesizer_attention,
        capabilities=_CAPABILITIES - {"segments"},
        reasons={"segments": "its logits are of blocks of positions in a row"},
        options={"kind": "factorized"},
        complexity="O(N^2 H), O(N H) a step",
        memory_exponent=1.5,
    )
)
registry.register(
    _register(
        name="synthesizer_random",
        function=None,
        capabilities=_CAPABILITIES - {"segments"},
        reasons={"segments": "its table is of positions in a row, not in a document"},
        options={"kind": "random"},
        knows_order=True,
        complexity="O(N^2 H), O(N H) a step; a table of N^2",
        memory_exponent=2.0,
    )
)
registry.register(
    _register(
        name="synthesizer_factorized_random",
        function=synthesizer_attention,
        capabilities=_CAPABILITIES,
        options={"kind": "factorized_random"},
        knows_order=True,
        complexity="O(N^2 A), O(N A) a step",
    )
)
registry.register(
    _register(
        name="synthesizer_mixture",
        function=synthesizer_attention,
        capabilities=_CAPABILITIES,
        options={"kind": "mixture"},
        complexity="O(N^2 (A + H)), O(N (A + H)) a step",
    )
)
