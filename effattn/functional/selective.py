"""Selective attention: a token can mask an earlier token for all later ones."""

import dataclasses
import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import fold, lead
from effattn.arrays.combine import combine_one_by_one, exponentials
from effattn.arrays.segments import positions_from_segment_ids
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Packing, Padding, Precision, Residual, Scale, declared
from effattn.xla import tiling

# Minimum keys in a tile: a tile adds the outputs of all queries to those of earlier tiles.
_KEYS = 64


class Options(Padding, Packing, Scale, Residual, Precision, total=False):
    """The shared options of `selective_attention`."""


def naive(query, key, value, pairs, *, selection_query, selection_key, scale):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp."""
    selects = pairs.allowed & (pairs.j != pairs.i[:, None]) & (pairs.places != 0)
    scores = jax.nn.relu(scale * dot(selection_query, selection_key.T))
    scores = jnp.where(selects, scores, 0)
    before = jnp.concatenate([jnp.zeros_like(scores[:1]), scores[:-1]])
    weights, lse = pairs.softmax(scale * dot(query, key.T), -jnp.cumsum(before, 0))
    return dot(weights, value), lse


@with_naive(
    over_pairs(naive, per_query=("selection_query",), per_token=("selection_key",), wide=True)
)
@declared
def selective_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    selection_query: jax.Array,
    selection_key: jax.Array,
    key_tile: int | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Selective attention (Leviathan et al. 2024, "Selective Attention Improves Transformer").

    Softmax attention in which token m lowers the weight of token j < m for all tokens after m:

        out_i = sum_(j <= i) softmax_j(scale * q_i . k_j - F_ij) v_j
        F_ij = sum_(m < i) S_mj,   S_mj = max(scale * p_m . r_j, 0) for 0 < j < m, else 0

    with queries p and keys r of the selection, in the paper those of one of the heads. All heads
    have the same F. A token does not mask itself, and no token masks the first token of its
    document, where j = 0. Always causal.

    A column of F depends on one key alone. So the pairs are computed for a tile of keys and all
    queries at a time, and tiles are combined by their log-sum-exps; the backward pass computes each
    tile again. Time O(T^2 (N (H + Hv) + Hs)), without the half that causality would save, and
    memory O(T N t) for a tile of t keys.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      selection_query: p, `(*B, T, 1, Hs)`.
      selection_key: r, `(*B, T, 1, Hs)`.
      key_tile: t, keys in a tile; tuning only.
      **options: padding, packing, scale, log-sum-exp and precision: see `effattn.options`. The
        scale is that of both products, by default H**-0.5. Padding selects nothing.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also the log-sum-exp of the
      logits with F, `(*B, T, N)`, at least float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes of the selection; and the errors of `effattn.options`.
    """
    name = "selective_attention"
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    shape = (*query.shape[:-2], 1, max((1, *jnp.shape(selection_query)[-1:])))
    selection_query = checks.shaped("selection_query", selection_query, shape)
    selection_key = checks.shaped("selection_key", selection_key, shape)
    if key_tile is not None:
        key_tile = checks.at_least("key_tile", key_tile, 1, "keys, or None")
    *batch, length = query.shape[:-2]

    def run(arrays, ids, scale):
        positions = lead(jnp.arange(length, dtype=jnp.int32), len(batch) + 1)
        pairs = Pairs(ids[0], ids[1], jnp.broadcast_to(positions, (*batch, length)), ids[2])
        return attend(Heads(*arrays), pairs, scale, given.precision, key_tile)

    query, key, value = attention.without_padding(query, key, value, given)
    selection = attention.without_padding(selection_query, selection_key, value, given)[:2]
    with jax.named_scope(name):
        *axes, _ = mesh_axes.spec(query)
        run = mesh_axes.placed(run, query, PartitionSpec(*axes, None), PartitionSpec(*axes))
        scale = jnp.asarray(given.scale, dtypes.wide(query, key, value))
        arrays = query, key, value, *(x[..., 0, :] for x in selection)
        query_ids, key_ids = attention.ids_of_valid(given, batch, length)
        ids = query_ids, key_ids, positions_from_segment_ids(key_ids) == 0
        out, lse = run(arrays, ids, scale)
    return attention.results(checkpoint_name(out, name), lse, given)


class Heads(NamedTuple):
    """Arrays with gradients.

    Attributes:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      selection_query: `(*B, T, Hs)`.
      selection_key: `(*B, S, Hs)`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    selection_query: jax.Array
    selection_key: jax.Array


class Pairs(NamedTuple):
    """The pairs of a query and a key that may attend and select.

    Attributes:
      query_ids: int `(*B, T)`, 0 for queries that are padding; a query sees keys with its id.
      key_ids: int `(*B, S)`, 0 for keys that are padding.
      positions: int32 `(*B, T)`, positions of the queries among the keys.
      is_first: bool `(*B, S)`, the keys that nothing masks.
      selected: F before the first query, `(*B, S)`; None for zeros.
    """

    query_ids: jax.Array
    key_ids: jax.Array
    positions: jax.Array
    is_first: jax.Array
    selected: jax.Array | None = None


def attend(
    heads: Heads, pairs: Pairs, scale: float | jax.Array, precision: Any, key_tile: int | None
) -> tuple[jax.Array, jax.Array]:
    """Output `(*B, T, N, Hv)` and log-sum-exp `(*B, T, N)`; `dtypes.lowest` for an empty row."""
    query, key, value, _, _ = heads
    *batch, length, count, _ = query.shape
    wide = dtypes.wide(*heads)
    if 0 in (*batch, length, key.shape[-3]):
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
        return out, jnp.full(query.shape[:-1], dtypes.lowest(wide), wide)
    tile, folded, fixed = _folded(heads, pairs, key_tile)
    tiles = jnp.arange(folded.key.shape[len(batch)], dtype=jnp.int32)
    learnt = folded, jnp.asarray(scale, wide)
    out, lse = combine_one_by_one(_Tile(tile, precision), learnt, fixed, tiles)
    return out.astype(value.dtype), lse


def total(
    heads: Heads, pairs: Pairs, scale: float | jax.Array, precision: Any, key_tile: int | None
) -> jax.Array:
    """F after the last query, `(*B, S)`, at least float32."""
    axis, keys = heads.key.ndim - 3, heads.key.shape[-3]
    if keys == 0:
        return jnp.zeros(heads.key.shape[:-2], dtypes.wide(*heads))
    tile, folded, fixed = _folded(heads, pairs, key_tile)
    one = _Tile(tile, precision)
    scale = jnp.asarray(scale, dtypes.wide(*heads))

    def of_tile(number):
        part, allowed = one.part(folded, fixed, number)
        return one.selected(part, scale, allowed, fixed, number)[1]

    tiles = jnp.arange(folded.key.shape[axis], dtype=jnp.int32)
    sums = jnp.moveaxis(lax.map(of_tile, tiles), 0, -2)  # (*B, tiles, t)
    return lax.collapse(sums, axis, axis + 2)[..., :keys]


def _folded(heads, pairs, key_tile):
    """Keys in a tile, and the arrays of keys in tiles `(*B, tiles, t, ...)`."""
    *batch, length, count, _ = heads.query.shape
    keys, axis = heads.key.shape[-3], len(batch)
    if key_tile is None:
        rows = tiling.known_product(batch) * count
        key_tile = max(tiling.choose_rows((keys, length), rows), _KEYS)
    tile = min(key_tile, keys)

    def of_keys(x):
        return fold(x, tile, axis)

    selected = pairs.selected
    heads = Heads(
        heads.query,
        of_keys(heads.key),
        of_keys(heads.value),
        heads.selection_query,
        of_keys(heads.selection_key),
    )
    pairs = pairs._replace(
        key_ids=of_keys(pairs.key_ids),
        is_first=of_keys(pairs.is_first),
        selected=None if selected is None else of_keys(selected),
    )
    return tile, heads, pairs


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Attention of all queries to one tile of keys.

    Attributes:
      size: t, keys in a tile.
      precision: precision of the matrix products.
    """

    size: int
    precision: Any

    def __call__(self, learnt, fixed, number):
        """Output and log-sum-exp of a tile, both of at least float32."""
        heads, scale = learnt
        part, allowed = self.part(heads, fixed, number)
        product = functools.partial(jnp.einsum, precision=self.precision)
        wide = scale.dtype
        query, key, value = (x.astype(wide) for x in part[:3])
        selected, _ = self.selected(part, scale, allowed, fixed, number)
        *batch, length, count, size = query.shape
        query = query.reshape(*batch, length, key.shape[-2], count // key.shape[-2], size)
        logits = scale * product("...tkgh,...skh->...tkgs", query, key)
        logits = logits - selected[..., None, None, :]
        weights, total, lse = exponentials(logits, allowed[..., None, None, :])
        out = product("...tkgs,...skv->...tkgv", weights, value) / total
        return out.reshape(*batch, length, count, -1), lse.reshape(*batch, length, count)

    def part(self, heads: Heads, fixed: Pairs, number: jax.Array) -> tuple[Heads, jax.Array]:
        """The arrays of a tile, and the pairs that may attend, bool `(*B, T, t)`."""
        axis = fixed.positions.ndim - 1

        def pick(x):
            return lax.dynamic_index_in_dim(x, number, axis, keepdims=False)

        own = heads._replace(
            key=pick(heads.key),
            value=pick(heads.value),
            selection_key=pick(heads.selection_key),
        )
        key_ids = pick(fixed.key_ids)[..., None, :]
        at = self._at(number, fixed)
        allowed = (fixed.query_ids[..., None] == key_ids) & (key_ids != 0)
        return own, allowed & (at <= fixed.positions[..., None])

    def selected(self, part, scale, allowed, fixed, number):
        """F of the queries, `(*B, T, t)`, and F after the last query, `(*B, t)`."""
        axis = fixed.positions.ndim - 1
        query, key = (x.astype(scale.dtype) for x in part[3:])
        scores = jnp.einsum("...th,...sh->...ts", query, key, precision=self.precision)
        is_first = lax.dynamic_index_in_dim(fixed.is_first, number, axis, keepdims=False)
        masks = allowed & (self._at(number, fixed) != fixed.positions[..., None])
        scores = jnp.where(masks & ~is_first[..., None, :], jax.nn.relu(scale * scores), 0)
        before = jnp.zeros_like(scores[..., :1, :])
        if fixed.selected is not None:
            selected = lax.dynamic_index_in_dim(fixed.selected, number, axis, keepdims=False)
            before = selected.astype(before.dtype)[..., None, :]
        sums = before + jnp.cumsum(scores, axis)
        return jnp.concatenate([before, sums[..., :-1, :]], axis), sums[..., -1, :]

    def _at(self, number, fixed):
        at = number * self.size + jnp.arange(self.size, dtype=jnp.int32)
        return lead(at, fixed.positions.ndim + 1)


registry.register(
    registry.Mechanism(
        name="selective",
        family="exact",
        paper="Leviathan et al. 2024, Selective Attention Improves Transformer",
        function=selective_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.selective:SelectiveSelfAttention",
        decoder="effattn.decode.selective:SelectiveDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
