"""Decoding of hierarchical attention: the present segment and summaries of finished segments."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.cores import attention
from effattn.cores.hierarchy import Hierarchy
from effattn.cores.pooling import Runs, pool, tokens
from effattn.cores.score_mod import Score
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.segments import extend_by_segment
from effattn.decode.state import bounded, check_bound, check_capacity
from effattn.decode.tokens import choose_rows, stored

_SHARED = ("scale", "logits_soft_cap", "sink", "precision", "tile", "implementation")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HierarchicalState:
    """Decode state: the present segment and summaries of finished segments.

    A segment has m tokens. Level l of L levels has units of m 2^(l-1) tokens, and a unit has r
    summaries. Levels below L keep only the unit that was finished last: later tokens attend to this
    unit, or it becomes one half of a unit of the next level.

    Attributes:
      key: `(B, m, K, H)`, the present segment, at slots `[0, length % m)`; `max_length` slots if
        that is less than m.
      value: `(B, m, K, Hv)`.
      siblings: one `Runs` of `(B, r, ...)` for each level below L, at least float32.
      summary_key: `(B, U r, K, H)`, up to U finished units of level L.
      summary_value: `(B, U r, K, Hv)`.
      length: `(B,)` int32, tokens seen.
      max_length: static; maximum tokens of a row if that is less than m, else None.
    """

    key: jax.Array
    value: jax.Array
    siblings: tuple[Runs, ...]
    summary_key: jax.Array
    summary_value: jax.Array
    length: jax.Array
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class HierarchicalDecoder(Decoder):
    """Decodes `effattn.hierarchical_attention`; its `segment_size` is required.

    A step costs O(m + r (L + U)) time a row, and the state O(m + r (L + U)) memory, for U units of
    the last level in the whole sequence. The state has room for `max_length` tokens a row, rounded
    up to whole units.
    """

    _state = HierarchicalState

    def _needs(self):
        return ("segment_size",)

    def _takes(self):
        return (*_SHARED, "segment_size", "num_levels", "num_summaries", "summary_query")

    @property
    def hierarchy(self) -> Hierarchy:
        """The checked sizes of segments and levels, from the options."""
        numbers = (self.options.get(name, 1) for name in ("num_levels", "num_summaries"))
        return Hierarchy.of(self.options["segment_size"], *numbers)

    def _empty(self, sizes: Sizes):
        hierarchy = self.hierarchy
        siblings = hierarchy.siblings(sizes.max_length)
        # Level L needs no slots if the lower levels hold the whole sequence.
        units = max(-(-sizes.max_length // hierarchy.unit(siblings + 1)) - 1, 0)
        wide = dtypes.wide(sizes.dtype)

        def runs():
            logit = jnp.zeros((sizes.batch, hierarchy.pieces, sizes.key_heads), wide)
            present = jnp.zeros((sizes.batch, hierarchy.pieces), jnp.int32)
            return Runs(logit, *sizes.heads(hierarchy.pieces, wide), present)

        slots, bound = bounded(hierarchy.segment, sizes.max_length)
        return HierarchicalState(
            *sizes.heads(slots),
            tuple(runs() for _ in range(siblings)),
            *sizes.heads(units * hierarchy.pieces),
            sizes.length(),
            max_length=bound,
        )

    def _extend(self, heads, state, lengths):
        hierarchy = self.hierarchy
        units = state.summary_key.shape[1] // hierarchy.pieces + 1
        check_bound(state, lengths, state.key.shape[1], hierarchy.segment)
        capacity = units * hierarchy.unit(len(state.siblings) + 1)
        check_capacity(state.length, lengths, capacity)
        return extend_by_segment(self._extend_inside, hierarchy.segment, heads, state, lengths)

    def _extend_inside(self, heads, state: HierarchicalState, lengths):
        """Extends by tokens that lie in one segment of each row."""
        query, key, value = heads
        size = self.hierarchy.segment
        state = dataclasses.replace(
            state,
            key=stored(state.key, key, state.length % size, lengths),
            value=stored(state.value, value, state.length % size, lengths),
        )
        out = self._attend(query, key.dtype, value.dtype, state, lengths)
        state = dataclasses.replace(state, length=state.length + lengths)
        is_finished = (lengths > 0) & (state.length % size == 0)
        return out, self._summarise(state, is_finished)

    def _attend(self, query, key_dtype, value_dtype, state: HierarchicalState, lengths):
        """Attends to the summaries and, causally, to the present segment."""
        hierarchy, batch = self.hierarchy, query.shape[0]
        segment = (state.length // hierarchy.segment)[:, None]
        units, siblings = state.summary_key.shape[1], len(state.siblings)
        finished = jnp.arange(units, dtype=jnp.int32)[None] // hierarchy.pieces
        levels = jnp.repeat(jnp.arange(siblings, dtype=jnp.int32), hierarchy.pieces)[None]
        seen = (
            finished < segment >> siblings,
            (segment >> levels) % 2 == 1,
            jnp.ones((batch, state.key.shape[1]), bool),
        )
        keys = (state.summary_key, *(runs.key for runs in state.siblings), state.key)
        values = (state.summary_value, *(runs.value for runs in state.siblings), state.value)
        key = jnp.concatenate([x.astype(key_dtype) for x in keys], 1)
        value = jnp.concatenate([x.astype(value_dtype) for x in values], 1)
        weight = _LogTokens(hierarchy, siblings + 1, units, levels.size)
        given = attention.check(
            "hierarchical_attention",
            query,
            key,
            value,
            mask=jnp.concatenate(seen, 1)[:, None, None, :],
            is_causal=True,
            query_offset=units + levels.size + state.length % hierarchy.segment,
            query_seq_lengths=lengths,
            score_mod=weight,
            **self._given(_SHARED),
        )
        out, _ = attention.attend(query, key, value, given)
        return out

    def _summarise(self, state: HierarchicalState, is_finished) -> HierarchicalState:
        """Summarises full segments; a segment may complete units of several levels."""
        if state.max_length is not None:
            # The row is shorter than a segment, so no segment is ever full.
            return state
        hierarchy, pieces = self.hierarchy, self.hierarchy.pieces
        query = self.options.get("summary_query")
        scale = checks.scale(self.options.get("scale"), state.key.shape[-1])
        present = jnp.ones(state.key.shape[:2], bool)
        unit = pool(tokens(state.key, state.value, present, query, scale), hierarchy.piece(1))
        number, siblings = state.length // hierarchy.segment - 1, []
        for kept in state.siblings:
            is_second = number % 2 == 1
            siblings.append(choose_rows(is_finished & ~is_second, unit, kept))
            is_finished, number = is_finished & is_second, number // 2
            unit = pool(jax.tree.map(lambda *both: jnp.concatenate(both, 1), kept, unit), 2)
        at, lengths = number * pieces, jnp.where(is_finished, pieces, 0)
        return dataclasses.replace(
            state,
            siblings=tuple(siblings),
            summary_key=stored(state.summary_key, unit.key, at, lengths),
            summary_value=stored(state.summary_value, unit.value, at, lengths),
        )


@dataclasses.dataclass(frozen=True)
class _LogTokens(Score):
    """Score function that adds log n to the logit of slot j, for a summary of n tokens.

    Slots hold units of level L, then siblings of the levels below L, then tokens.
    """

    hierarchy: Hierarchy
    level: int
    units: int
    siblings: int

    def __call__(self, logit, b, h, i, j):
        of_sibling = jnp.maximum(j - self.units, 0) // self.hierarchy.pieces
        count = jnp.where(
            j < self.units,
            self.hierarchy.piece(self.level),
            jnp.where(
                j < self.units + self.siblings,
                self.hierarchy.piece(1) << jnp.minimum(of_sibling, self.level),
                1,
            ),
        )
        return logit + jnp.log(count.astype(logit.dtype))
