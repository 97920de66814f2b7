"""Decoding of hierarchical attention: the present segment and summaries of finished segments."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, within
from effattn.cores import attention
from effattn.cores.pooling import Runs, pool, tokens
from effattn.cores.score_mod import Score
from effattn.decode.segments import extend_by_segment
from effattn.decode.state import (
    bounded,
    check_bound,
    check_capacity,
    check_init,
    check_state,
    new_lengths,
)
from effattn.functional.hierarchical import Hierarchy

_OPTIONS = frozenset(
    "segment_size num_levels num_summaries summary_query scale logits_soft_cap sink precision tile "
    "implementation".split()
)


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
class HierarchicalDecoder:
    """Decodes `effattn.hierarchical_attention`.

    A step costs O(m + r (L + U)) time a row, and the state O(m + r (L + U)) memory, for U units of
    the last level in the whole sequence.

    Attributes:
      function: `effattn.hierarchical_attention`.
      options: arguments of the function; `segment_size` is required.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def hierarchy(self) -> Hierarchy:
        """The checked sizes of segments and levels, from the options."""
        unknown = self.options.keys() - _OPTIONS
        if unknown:
            raise ValueError(
                f"decoding hierarchical attention takes the options {', '.join(sorted(_OPTIONS))}; "
                f"got also {', '.join(sorted(unknown))}"
            )
        if "segment_size" not in self.options:
            raise ValueError(
                "decoding hierarchical attention needs segment_size among the options, "
                f"got {sorted(self.options)}"
            )
        names = {"num_levels": 1, "num_summaries": 1}
        numbers = (self.options.get(name, default) for name, default in names.items())
        return Hierarchy.of(self.options["segment_size"], *numbers)

    def init(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: Any,
    ) -> HierarchicalState:
        """Returns an empty state for `max_length` tokens a row, rounded up to whole units."""
        dtype = check_init(batch, max_length, dtype)
        hierarchy = self.hierarchy
        siblings = hierarchy.siblings(max_length)
        # Level L needs no slots if the lower levels hold the whole sequence.
        units = -(-max_length // hierarchy.unit(siblings + 1))
        wide = dtypes.wide(dtype)

        def arrays(slots, dtype):
            key = jnp.zeros((batch, slots, num_kv_heads, head_dim), dtype)
            return key, jnp.zeros((batch, slots, num_kv_heads, value_dim), dtype)

        def runs():
            logit = jnp.zeros((batch, hierarchy.pieces, num_kv_heads), wide)
            present = jnp.zeros((batch, hierarchy.pieces), jnp.int32)
            key, value = arrays(hierarchy.pieces, wide)
            return Runs(logit, key, value, present)

        slots, bound = bounded(hierarchy.segment, max_length)
        key, value = arrays(slots, dtype)
        summary_key, summary_value = arrays(max(units - 1, 0) * hierarchy.pieces, dtype)
        return HierarchicalState(
            key=key,
            value=value,
            siblings=tuple(runs() for _ in range(siblings)),
            summary_key=summary_key,
            summary_value=summary_value,
            length=jnp.zeros((batch,), jnp.int32),
            max_length=bound,
        )

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: HierarchicalState,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, HierarchicalState]:
        """Attends from T new tokens to all tokens so far, segment by segment.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.

        Raises:
          ValueError: a row outgrows the capacity and the lengths are concrete. With traced lengths,
            units past the capacity are not stored, and later outputs do not attend to these units.
            Earlier units are never overwritten.
        """
        batch, time = query.shape[:2]
        check_state(state, HierarchicalState, batch)
        lengths = new_lengths(lengths, batch, time)
        hierarchy = self.hierarchy
        level = len(state.siblings) + 1
        units = state.summary_key.shape[1] // hierarchy.pieces + 1
        check_bound(state, lengths, state.key.shape[1], hierarchy.segment)
        check_capacity(state.length, lengths, units * hierarchy.unit(level))
        out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), value.dtype)
        arrays = (query, key, value)
        return extend_by_segment(
            self._extend_inside, hierarchy.segment, arrays, out, state, lengths
        )

    def _extend_inside(self, arrays, state: HierarchicalState, lengths):
        """Extends by tokens that lie in one segment of each row."""
        query, key, value = arrays
        hierarchy, (batch, time) = self.hierarchy, query.shape[:2]
        fill = state.length % hierarchy.segment
        rows = jnp.arange(batch)[:, None]
        # Padding goes to a slot that does not exist, so `mode="drop"` drops it.
        slots = positions_from(fill, time)
        slots = jnp.where(within(lengths, time), slots, hierarchy.segment)
        state = dataclasses.replace(
            state,
            key=state.key.at[rows, slots].set(key.astype(state.key.dtype), mode="drop"),
            value=state.value.at[rows, slots].set(value.astype(state.value.dtype), mode="drop"),
        )
        out = self._attend(query, key.dtype, value.dtype, state, lengths)
        state = dataclasses.replace(state, length=state.length + lengths)
        is_finished = (lengths > 0) & (state.length % hierarchy.segment == 0)
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
            scale=self.options.get("scale"),
            is_causal=True,
            query_offset=units + levels.size + state.length % hierarchy.segment,
            query_seq_lengths=lengths,
            key_value_seq_lengths=None,
            segment_ids=None,
            local_window_size=None,
            logits_soft_cap=self.options.get("logits_soft_cap"),
            score_mod=weight,
            sink=self.options.get("sink"),
            dropout_rate=0.0,
            dropout_rng=None,
            precision=self.options.get("precision"),
            tile=self.options.get("tile"),
            implementation=self.options.get("implementation"),
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
            siblings.append(_where(is_finished & ~is_second, unit, kept))
            is_finished, number = is_finished & is_second, number // 2
            unit = pool(jax.tree.map(lambda *both: jnp.concatenate(both, 1), kept, unit), 2)
        slots = positions_from(number * pieces, pieces)
        slots = jnp.where(is_finished[:, None], slots, state.summary_key.shape[1])
        rows = jnp.arange(slots.shape[0])[:, None]

        def put(table, new):
            # JAX cannot differentiate a scatter into an empty array.
            if not table.shape[1]:
                return table
            return table.at[rows, slots].set(new.astype(table.dtype), mode="drop")

        return dataclasses.replace(
            state,
            siblings=tuple(siblings),
            summary_key=put(state.summary_key, unit.key),
            summary_value=put(state.summary_value, unit.value),
        )


def _where(rows, runs: Runs, other: Runs) -> Runs:
    """Selects `runs` where `rows (B,)` is True, else `other`."""

    def choose(a, b):
        return jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, runs, other)


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
