"""Attention of segments to themselves and to tokens before them, with relative positions.

A logit is the sum of two products, as in Transformer-XL: of a query with a bias u and a key, and of
the query with a bias v and the key of the distance. Slots hold the keys of compressed tokens before
the memory, as in the Compressive Transformer: each slot is one step of distance.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.axes import lead


class Places(NamedTuple):
    """Positions and documents of tokens.

    Attributes:
      position: int `(B, L)`, from the start of the document.
      document: int `(B, L)`, ids of documents; 0 if there is no token.
    """

    position: jax.Array
    document: jax.Array


class Keys(NamedTuple):
    """Keys and values of tokens.

    Attributes:
      key: `(B, L, N, H)`.
      value: `(B, L, N, H)`.
      places: places of the tokens.
    """

    key: jax.Array
    value: jax.Array
    places: Places


class Sizes(NamedTuple):
    """Static sizes.

    Attributes:
      segment: L, tokens in a segment, counted from the start of the document.
      memory: M, tokens before the segment that a query reads one by one.
      slots: number of slots that a query reads, those before the memory; 0 without slots.
      rate: c, tokens in a slot, a divisor of L and M.
    """

    segment: int
    memory: int
    slots: int = 0
    rate: int = 1


class Terms(NamedTuple):
    """Parameters of the logits.

    Attributes:
      of_distance: `(distances (C,)) -> (C, N, H)`, the keys of distances.
      content_bias: u, `(N, H)`.
      position_bias: v, `(N, H)`.
      scale: factor of the logits.
    """

    of_distance: Callable[[jax.Array], jax.Array]
    content_bias: jax.Array
    position_bias: jax.Array
    scale: float


def attend(
    query: jax.Array,
    own: Keys,
    memory: Keys,
    terms: Terms,
    sizes: Sizes,
    *,
    aligned: bool,
    slots: Keys | None = None,
) -> jax.Array:
    """Attends causally to the query's segment, to the memory before it, and to slots before those.

    Queries run in tiles of a segment. A tile costs O(L (L + M + slots)) time and memory, and the
    backward pass computes it again.

    Args:
      query: `(B, T, N, H)`.
      own: keys of R tokens before the queries and of the T tokens of the queries, as queries of
        the same segment read them.
      memory: keys of the same R + T tokens, as queries of later segments read them.
      terms: parameters of the logits.
      sizes: static sizes.
      aligned: whether the first query is at the start of a segment, and all tokens are of one
        document. Tiles are then segments.
      slots: keys of slots, or None. The last ceil(T / c) entries are for runs of c tokens from the
        first query on: an entry is the slot whose last token is in the run, and of document 0 if
        there is none. The entries before them are for the runs before the first query. A position
        is the number of a slot in its document.

    Returns:
      `(B, T, N, H)` in the dtype of the values.
    """
    tiles = _Tiles(query, own, sizes, aligned)
    distance_key = terms.of_distance(jnp.arange(tiles.columns - 1, -1, -1))
    slot_key = None
    if slots is not None:
        slot_key = terms.of_distance(sizes.memory + 1 + jnp.arange(sizes.segment + sizes.slots - 1))

    def of_tile(query, places, own, memory, slots):
        product = functools.partial(jnp.einsum, preferred_element_type=dtypes.wide(query.dtype))
        of_content, of_position = (
            query + lead(bias.astype(query.dtype), 4)
            for bias in (terms.content_bias, terms.position_bias)
        )
        by_distance = relative_shift(product("btnh,cnh->bntc", of_position, distance_key))
        seen = _seen(places, memory.places, own.places, sizes)
        by_part = [by_distance[..., part] for part in (tiles.of_memory, tiles.of_own)]
        parts = [memory, own]
        if slots is not None:
            steps, in_slots = _steps(places, slots.places, sizes)
            by_step = product("btnh,cnh->bntc", of_position, slot_key)
            steps = jnp.where(in_slots, steps, 0)[:, None]
            steps = jnp.broadcast_to(steps, (*by_step.shape[:3], steps.shape[-1]))
            by_part.append(jnp.take_along_axis(by_step, steps, -1))
            seen, parts = [*seen, in_slots], [*parts, slots]
        key, value = (jnp.concatenate([part[n] for part in parts], 1) for n in range(2))
        by_content = product("btnh,bcnh->bntc", of_content, key)
        logits = (by_content + jnp.concatenate(by_part, -1)) * terms.scale
        weights = jax.nn.softmax(masked(logits, jnp.concatenate(seen, -1)), -1)
        return jnp.einsum("bntc,bcnh->btnh", weights.astype(value.dtype), value)

    return tiles.run(of_tile, query, own, memory, slots)


def reconstruction_errors(
    query: jax.Array, memory: Keys, slots: Keys, scale: float, sizes: Sizes, *, aligned: bool
) -> tuple[jax.Array, jax.Array]:
    """Errors of slots that stand for the tokens that leave the memory after the query's segment.

    These are the first L tokens of the memory. The error of a query is the mean squared difference
    between its attention to the tokens and its attention to their slots, without positions.

    Args:
      query: `(B, T, N, H)`.
      memory: as in `attend`.
      slots: as in `attend`.
      scale: factor of the logits.
      sizes: static sizes.
      aligned: as in `attend`.

    Returns:
      Errors `(B, T)`, 0 where no token leaves the memory, and bool `(B, T)`, where some do.
    """

    def of_tile(query, places, own, memory, slots):
        product = functools.partial(jnp.einsum, preferred_element_type=dtypes.wide(query.dtype))
        start = places.position // sizes.segment * sizes.segment
        first = (start - sizes.memory)[..., None]
        last = jnp.minimum(first + sizes.segment, start[..., None])

        def attended(keys, rate):
            at = keys.places.position[:, None]
            leaves = _same(places, keys.places) & (at >= first // rate) & (at < last // rate)
            logits = masked(scale * product("btnh,bcnh->bntc", query, keys.key), leaves)
            weights = jax.nn.softmax(logits, -1).astype(keys.value.dtype)
            return product("bntc,bcnh->btnh", weights, keys.value), leaves.any(-1)

        (of_tokens, some), (of_slots, _) = attended(memory, 1), attended(slots, sizes.rate)
        return jnp.where(some, jnp.square(of_tokens - of_slots).mean((2, 3)), 0), some

    return _Tiles(query, memory, sizes, aligned).run(of_tile, query, memory, memory, slots)


def masked(logits: jax.Array, seen: jax.Array) -> jax.Array:
    """Logits `(B, N, T, S)` that give a weight of zero where `seen (B, T, S)` is False."""
    return jnp.where(seen[:, None], logits, dtypes.lowest(logits.dtype))


class _Tiles:
    """Tiles of queries, and the columns of keys that a tile reads.

    Attributes:
      columns: number of keys from R tokens before the first query of a tile to its last query.
      of_own, of_memory: the columns of the keys that tiles read in their segment and in the memory.
    """

    def __init__(self, query, own, sizes, aligned):
        self.time, self.rate = query.shape[1], sizes.rate
        self.reach = own.key.shape[1] - self.time
        self.tile = max(min(sizes.segment, self.time), 1)
        self.number, self.columns = -(-self.time // self.tile), self.reach + self.tile
        first = self.reach if aligned else max(self.reach - sizes.segment + 1, 0)
        self.of_own = slice(first, self.columns)
        self.of_memory = slice(0, self.reach if aligned else self.columns)

    def run(self, of_tile, query, own, memory, slots):
        """The results `(B, T, ...)` of `of_tile(query, its places, own, memory, slots)`."""

        def cut(arrays, part):
            width = part.stop - part.start
            return jax.tree.map(
                lambda x: windows(x[:, part.start :], self.number, self.tile, width), arrays
            )

        def of_slots(x):
            before = x.shape[1] - -(-self.time // self.rate)
            step = max(self.tile // self.rate, 1)
            return windows(x, self.number, step, before + -(-self.tile // self.rate))

        of_queries = query, jax.tree.map(lambda x: x[:, self.reach :], own.places)
        tiles = (
            *cut(of_queries, slice(0, self.tile)),
            cut(own, self.of_own),
            cut(memory, self.of_memory),
            jax.tree.map(of_slots, slots),
        )
        _, out = lax.scan(lambda _, x: (None, jax.checkpoint(of_tile)(*x)), None, tiles)

        def joined(x):
            x = jnp.moveaxis(x, 0, 1)
            x = x.reshape(x.shape[0], self.number * self.tile, *x.shape[3:])
            return x[:, : self.time]

        return jax.tree.map(joined, out)


def _same(query: Places, key: Places) -> jax.Array:
    """Mask `(B, T, S)` of the keys in the query's document."""
    document = key.document[:, None]
    return (query.document[..., None] == document) & (document != 0)


def _seen(query: Places, memory: Places, own: Places, sizes: Sizes):
    """Masks `(B, T, S)` of the keys of the memory, and of those of the segment."""
    here = query.position[..., None]
    start = here // sizes.segment * sizes.segment
    far, near = memory.position[:, None], own.position[:, None]
    in_memory = _same(query, memory) & (far < start) & (far >= start - sizes.memory)
    return [in_memory, _same(query, own) & (near >= start) & (near <= here)]


def _steps(query: Places, slot: Places, sizes: Sizes):
    """Steps of distance `(B, T, S)` from the end of the memory to slots, and the slots in reach."""
    here = query.position[..., None]
    start = here // sizes.segment * sizes.segment
    after = (start - sizes.memory) // sizes.rate - slot.position[:, None]
    in_reach = _same(query, slot) & (after > 0) & (after <= sizes.slots)
    return here - start + after - 1, in_reach


def windows(x: jax.Array, number: int, step: int, width: int) -> jax.Array:
    """Windows `(number, B, width, ...)` of x `(B, L, ...)`, which start every `step` tokens.

    Zeros follow the L tokens. Gradients are sums of slices, without a scatter.
    """
    pieces = max(-(-width // step), 1)
    length = (number + pieces - 1) * step
    x = x[:, :length]
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    folded = x.reshape(x.shape[0], number + pieces - 1, step, *x.shape[2:])
    each = [folded[:, first : first + number] for first in range(pieces)]
    return jnp.moveaxis(jnp.concatenate(each, 2)[:, :, :width], 1, 0)


def relative_shift(logits: jax.Array) -> jax.Array:
    """Moves row r of `(..., Q, C)` to the left by Q - 1 - r columns; its end is then undefined.

    This is the shift of Transformer-XL: one more column, and a new reading in rows of C columns.
    """
    *batch, rows, columns = logits.shape
    logits = jnp.pad(logits, (*[(0, 0)] * (len(batch) + 1), (1, 0)))
    logits = logits.reshape(*batch, columns + 1, rows)[..., 1:, :]
    return logits.reshape(*batch, rows, columns)
