"""Common parts of the block-attention kernels: operands, plan, and maths of a tile.

`effattn.pallas.visited_tiles` says which tiles a program visits.

Shapes: batch B (all batch dimensions together), query heads N, key heads K, queries T in nq tiles
of t, keys S in nk tiles of s, head sizes H and Hv.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.arrays import dropout
from effattn.interfaces import block_attention
from effattn.interfaces.block_attention import Config, Inputs
from effattn.pallas.elements import Program, Unsupported

_MOST_ENTRIES = 4096  # largest number of entries of a table


class Arrays(NamedTuple):
    """Operands in the form that kernels read; an absent operand is None.

    Attributes:
      query: `(B, T, N, H)`.
      key: `(B, S, K, H)`.
      value: `(B, S, K, Hv)`.
      bias: `(#B, #N, #T, #S)`.
      mask: int8 `(#B, #N, #T, #S)`.
      scale: `(1,)`.
      offset: int32 `(B or 1,)`, position of the first query.
      query_positions, key_positions: int32 `(B, T)` and `(B, S)`; present if tokens were gathered.
      query_ids, key_ids: int32 `(B, T)` and `(B, S)`. A query may attend to keys with the same id;
        without `query_ids` all queries have id 1.
      tables: flattened tables that the programs of the plan read, in the order of the programs.
      walk: int32 arrays that list the visited tiles, from `visited_tiles.walk_arrays`.
      order: the order in which tiles start, from `visited_tiles.walk_and_order`; None if they start
        by index.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    scale: Any
    offset: Any
    query_positions: Any
    key_positions: Any
    query_ids: Any
    key_ids: Any
    tables: tuple[Any, ...] = ()
    walk: tuple[Any, ...] = ()
    order: Any = None


class At(NamedTuple):
    """Indices and positions of the entries of a tile.

    b and h are scalars. Arrays of queries are `(t, 1)` and arrays of keys `(1, s)`; in a transposed
    tile they are `(1, t)` and `(s, 1)`.

    Attributes:
      b: index of the example.
      h: index of the query head.
      i, j: positions of queries and of keys.
      column: indices of the keys in their array.
    """

    b: Any
    h: Any
    i: Any
    j: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static configuration of a block-attention kernel, known when the kernel is traced.

    Attributes:
      config: configuration of the block-attention call.
      tile: `(t, s)`, the numbers of queries and keys of a tile.
      lengths: `(T, S)`.
      heads: `(N, K)`.
      sizes: `(H, Hv)`.
      layout_tile: tile of the block-sparse layout, a multiple of `tile`; None without a layout.
      score: program of the `score_mod`, a function of `(logit, b, h, i, j)`.
      pattern: program of the pattern's element rule, a function of `(i, j, h)`.
      keep: program of dropout, a function of `(b, h, i, j)`.
    """

    config: Config
    tile: tuple[int, int]
    lengths: tuple[int, int]
    heads: tuple[int, int]
    sizes: tuple[int, int]
    layout_tile: tuple[int, int] | None
    score: Program | None
    pattern: Program | None
    keep: Program | None

    @property
    def group(self) -> int:
        """G, the number of query heads for each key head."""
        return self.heads[0] // self.heads[1]

    @property
    def grid(self) -> tuple[int, int]:
        """`(nq, nk)`, the numbers of query tiles and key tiles."""
        return -(-self.lengths[0] // self.tile[0]), -(-self.lengths[1] // self.tile[1])

    @property
    def programs(self) -> dict[str, Program]:
        """Programs that are present, by name."""
        all_three = {"score": self.score, "pattern": self.pattern, "keep": self.keep}
        return {name: program for name, program in all_three.items() if program is not None}

    def table_of_constant(self, number: int) -> int:
        """Index in `Arrays.tables` of the `number`-th array that the score_mod closes over."""
        assert self.score is not None
        own = len(self.score.tables) - self.score.arguments
        return self.first_table["score"] + own + number

    @property
    def summed(self) -> tuple[int, ...]:
        """Indices in `Arrays.tables` of the tables that have gradients."""
        if self.score is None:
            return ()
        constants = self.score.tables[len(self.score.tables) - self.score.arguments :]
        return tuple(
            self.table_of_constant(number)
            for number, table in enumerate(constants)
            if jnp.issubdtype(table.dtype, jnp.floating)
        )

    @property
    def first_table(self) -> dict[str, int]:
        """Index in `Arrays.tables` of the first table of each program."""
        counts = [len(program.tables) for program in self.programs.values()]
        return dict(zip(self.programs, np.cumsum([0, *counts]).tolist(), strict=False))


def programs_of(config: Config, x: Inputs, dtype: Any) -> dict[str, Program | None]:
    """Traces the elementwise functions `score`, `pattern` and `keep`; None for an absent function.

    Raises:
      Unsupported: a kernel cannot evaluate one of the functions.
    """
    number, index = jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), jnp.int32)
    origin = config.origin or (lambda *at: at)
    score_mod, pattern, rate, seed = config.score_mod, config.pattern, config.dropout_rate, x.seed
    found: dict[str, Program | None] = dict.fromkeys(("score", "pattern", "keep"))
    if score_mod is not None:

        def score(constants, logit, *at):
            return score_mod(constants, logit, *origin(*at)).astype(dtype)

        found["score"] = Program.of(score, x.constants, number, *[index] * 4)
    if pattern is not None:

        def allows(_, i, j, h):
            return pattern.allows(i, j, h)

        found["pattern"] = Program.of(allows, (), *[index] * 3)
    if rate and seed is not None:

        def keep(tables, *at):
            return dropout.keep(tables[0], rate, *origin(*at))

        found["keep"] = Program.of(keep, (seed,), *[index] * 4)
    return found


def entries_by_token(config: Config, x: Inputs) -> int:
    """Returns the size of the largest table that a program reads by token, not only by head."""
    by_token = {"score": (0, 3, 4), "pattern": (0, 1), "keep": (2, 3)}  # arguments of `run`
    sizes = [0]
    for name, program in programs_of(config, x, jnp.float32).items():
        if program is None:
            continue

        def lookup(number, at, program=program):
            table = program.tables[number]
            if at.ndim:
                sizes.append(table.size)
            return jnp.zeros(at.shape, table.dtype)

        scalars = [
            jax.ShapeDtypeStruct((2,) if place in by_token[name] else (), a.dtype)
            for place, a in enumerate(program.scalars)
        ]
        jax.eval_shape(functools.partial(program.run, lookup), *scalars)
    return max(sizes)


def refusal(
    limits: dispatch.Limits, config: Config, x: Inputs, *, any_pattern: bool = False
) -> str | None:
    """Returns the reason why a kernel with these limits cannot take these operands, or None.

    `any_pattern` says whether patterns may read tables of any size, which have no gradients.
    """
    if x.additive is not None:
        return "takes products of queries and keys, not additive scores"
    if config.activation is not None:
        return f"takes a softmax of the logits, not {config.activation}"
    dtypes = {a.dtype for a in (x.query, x.key, x.value)}
    if len(dtypes) > 1:
        return f"takes query, key and value of one dtype, got {', '.join(sorted(map(str, dtypes)))}"
    if reason := limits.refusal(x.query.dtype, x.query.shape[-1], x.value.shape[-1]):
        return reason
    cannot = "cannot evaluate the score_mod or the pattern, which"
    try:
        programs = programs_of(config, x, jnp.float32)
    except Unsupported as reason:
        return f"{cannot} {reason}"
    limited = [p for name, p in programs.items() if p and not (any_pattern and name == "pattern")]
    if (entries := max((program.entries for program in limited), default=0)) > _MOST_ENTRIES:
        return f"{cannot} reads an array of {entries} entries, more than {_MOST_ENTRIES}"
    return None


def fitted(sides: Sequence[int], config: Config, x: Inputs, least: int) -> tuple[int, int]:
    """Returns the tile `(t, s)`: each side is halved, down to `least`, until it divides its length.

    The length is that of the given tile, or else the number of tokens rounded up to a power of two.
    """
    given = config.tile if x.layout is None else x.layout.tile
    lengths = given or [1 << (n - 1).bit_length() for n in (x.query.shape[-3], x.key.shape[-3])]
    tile = []
    for side, length in zip(sides, lengths, strict=True):
        while side > least and length % side:
            side //= 2
        tile.append(side)
    return tile[0], tile[1]


def arrange(config: Config, x: Inputs, tile: tuple[int, int]) -> tuple[Plan, Arrays]:
    """Returns the plan and the arrays of a kernel, with an empty `Arrays.walk`."""
    queries, heads, size = x.query.shape[-3:]
    keys, key_heads = x.key.shape[-3:-1]
    plan = Plan(
        config=config,
        tile=tile,
        lengths=(queries, keys),
        heads=(heads, key_heads),
        sizes=(size, x.value.shape[-1]),
        layout_tile=None if x.layout is None else x.layout.tile,
        **programs_of(config, x, jnp.float32),
    )
    offset = x.offset if config.offset is None else jnp.int32(config.offset)
    query_ids, key_ids = block_attention.ids(x)
    of_query, of_key = x.positions or (None, None)
    mask = None if x.mask is None else x.mask.astype(jnp.int8)
    tables = [table for program in plan.programs.values() for table in program.tables]
    arrays = Arrays(
        query=_one_batch(x.query, 3),
        key=_one_batch(x.key, 3),
        value=_one_batch(x.value, 3),
        bias=_pairs(x.bias, x.query.shape[:-3]),
        mask=_pairs(mask, x.query.shape[:-3]),
        scale=None if x.scale is None else x.scale.reshape(1).astype(jnp.float32),
        offset=jnp.asarray(offset, jnp.int32).reshape(-1),
        query_positions=_one_batch(of_query, 1),
        key_positions=_one_batch(of_key, 1),
        query_ids=_one_batch(query_ids, 1),
        key_ids=_one_batch(key_ids, 1),
        tables=tuple(
            t.reshape(-1).astype(jnp.int32 if t.dtype == jnp.bool_ else t.dtype) for t in tables
        ),
    )
    return plan, arrays


def _one_batch(array, rest):
    """Reshapes `(*B, ...)`, with `rest` axes after the batch, to `(B, ...)`."""
    if array is None:
        return None
    return array.reshape(math.prod(array.shape[: array.ndim - rest]), *array.shape[-rest:])


def _pairs(array, batch):
    """Reshapes `(*#B, #K, #G, #T, #S)` to `(#B, #N, #T, #S)`."""
    if array is None:
        return None
    *lead, key_heads, group, queries, keys = array.shape
    if math.prod(lead) not in (1, math.prod(batch)):
        array = jnp.broadcast_to(array, (*batch, key_heads, group, queries, keys))
    return array.reshape(-1, key_heads * group, queries, keys)


def of_bias(gradient: jax.Array, x: Inputs) -> jax.Array:
    """Returns a gradient `(#B, #N, #T, #S)` in the shape and dtype of the bias.

    It is summed over axes of the batch for which `arrange` had to repeat the bias.
    """
    assert x.bias is not None
    *lead, _, _, _, _ = x.bias.shape
    if gradient.size != x.bias.size:
        batch = x.query.shape[:-3]
        gradient = gradient.reshape(*batch, *x.bias.shape[-4:])
        axes = [axis for axis, size in enumerate(lead) if size < batch[axis]]
        gradient = gradient.sum(axes, keepdims=True)
    return gradient.reshape(x.bias.shape).astype(x.bias.dtype)


# Maths of a tile


def lookups(plan: Plan, name: str, load: Callable, *scalars: Any) -> list[tuple]:
    """Returns the table reads of a program on a tile, each as `(table, indices, values)`."""
    found: list[tuple] = []
    first = plan.first_table[name]

    def lookup(number, at):
        value = load(first + number, at)
        found.append((number, at, value))
        return value

    plan.programs[name].run(lookup, *scalars)
    return found


def run(plan: Plan, name: str, load: Callable, *scalars: Any) -> Any:
    """Runs a program on a tile; `load(table, at)` reads entries `at` of `Arrays.tables[table]`."""
    first = plan.first_table[name]
    return plan.programs[name].run(lambda number, at: load(first + number, at), *scalars)[0]


def scores(plan: Plan, at: At, products, bias, scale, read: list) -> jax.Array:
    """Returns the logits of a tile before any mask; `read` are the values from `lookups`."""
    config = plan.config
    logits = products * (config.scale if scale is None else scale)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if config.soft_cap is not None:
        logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
    if plan.score is not None:
        values = iter(read)
        (logits,) = plan.score.run(lambda *_: next(values), logits, at.b, at.h, at.i, at.j)
    return logits


def allowed(plan: Plan, at: At, query_ids, key_ids, mask, load: Callable, *, whole: bool) -> Any:
    """Returns the boolean mask of a tile's pairs that may attend; None if all pairs may attend.

    In a `whole` tile of a layout, causality, window, ids, mask and key length still apply; only the
    element rule of the pattern is skipped.
    """
    config, conditions = plan.config, []
    everywhere = plan.layout_tile is not None
    if everywhere or not whole:
        if config.right is not None:
            conditions.append(at.j <= at.i + config.right)
        if config.left is not None:
            conditions.append(at.j >= at.i - config.left)
        if key_ids is not None:
            conditions.append(key_ids == (1 if query_ids is None else query_ids))
        if mask is not None:
            conditions.append(mask != 0)
        # The last tile of a layout may have whole tiles of the kernel past the last key.
        if plan.lengths[1] % (plan.layout_tile or plan.tile)[1]:
            conditions.append(at.column < plan.lengths[1])
    if not whole and plan.pattern is not None:
        conditions.append(run(plan, "pattern", load, at.i, at.j, at.h))
    return functools.reduce(lambda a, b: a & b, conditions) if conditions else None


def masked(logits, allowed) -> jax.Array:
    """Returns the logits, with -inf for pairs that may not attend."""
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def dropped(plan: Plan, at: At, weights, load: Callable) -> jax.Array:
    """Returns the weights after dropout. Dropout is linear: its pull-back is the same function."""
    if plan.keep is None:
        return weights
    keep = run(plan, "keep", load, at.b, at.h, at.i, at.j)
    return jnp.where(keep, weights / (1 - plan.config.dropout_rate), 0.0)


def gradients(plan: Plan, at: At, logits, rows, d_weights, load: Callable) -> tuple:
    """Returns the weights after dropout and the gradient of the logits.

    With P = exp(logits - lse) and dL the gradient of the log-sum-exp, the gradient of the logits is
    P * (dropout(dO V^T) - delta), delta = rowsum(dO * O) - dL.

    Args:
      plan: configuration of the kernel.
      at: indices and positions of the tile.
      logits: masked logits.
      rows: log-sum-exp (finite) and delta, each broadcast along the keys.
      d_weights: dO V^T.
      load: function that reads a table, as for `run`.
    """
    lse, delta = rows
    weights = jnp.exp(logits - lse)
    d_logits = weights * (dropped(plan, at, d_weights, load) - delta)
    return dropped(plan, at, weights, load), d_logits


class Softmax(NamedTuple):
    """State of the online softmax of the rows of a tile.

    Attributes:
      largest: largest logit so far, `(t)`, or `(t, 1)` where a compiler keeps both axes.
      total: sum of weights relative to `largest`, in the shape of `largest`.
      mixed: weighted sum of values, `(t, Hv)`.
    """

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array

    @classmethod
    def start(cls, rows: int, size: int, *, keepdims: bool = False) -> "Softmax":
        """Returns the state before any tile; `largest` is finite to avoid inf - inf."""
        shape = (rows, 1) if keepdims else (rows,)
        lowest = jnp.full(shape, np.finfo(np.float32).min, jnp.float32)
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(lowest, zeros, jnp.zeros((rows, size), jnp.float32))

    @property
    def axis(self) -> int:
        """The axis of the keys in an array of logits."""
        return 1

    def spread(self, rows: jax.Array) -> jax.Array:
        """Returns numbers of queries in a form that broadcasts over the keys."""
        return _column(rows)

    def seeing(self, logits: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> "Softmax":
        """Returns the state after one more tile; `mix(weights)` gives that tile's `mixed`."""
        along: Any = {"axis": self.axis, "keepdims": self.largest.ndim == 2}
        largest = jnp.maximum(self.largest, jnp.max(logits, **along))
        weights = jnp.exp(logits - self.spread(largest))
        decay = jnp.exp(self.largest - largest)
        total = self.total * decay + jnp.sum(weights, **along)
        mixed = self.mixed * self.spread(decay) + mix(weights)
        return self._replace(largest=largest, total=total, mixed=mixed)

    def finish(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the output, the log-sum-exp (lse) and the rounding error of the lse.

        `lse + lse_error` is more exact than `lse` alone. A row without keys gets output 0, lse -inf
        and lse_error 0.
        """
        total = jnp.where(self.total == 0, 1.0, self.total)
        lse = self.largest + jnp.log(total)
        lse_error = jnp.log(total) - (lse - self.largest)
        lse = jnp.where(self.total == 0, -jnp.inf, lse)
        return self.mixed / self.spread(total), lse, lse_error


class SoftmaxOfColumns(Softmax):
    """State of the online softmax of a transposed tile `(s, t)`, whose columns are queries.

    `largest` and `total` are `(1, t)`, and `mixed` is `(Hv, t)`.
    """

    @classmethod
    def of_tile(cls, queries: int, size: int) -> "SoftmaxOfColumns":
        """Returns the state before any tile."""
        lowest = jnp.full((1, queries), np.finfo(np.float32).min, jnp.float32)
        return cls(lowest, jnp.zeros_like(lowest), jnp.zeros((size, queries), jnp.float32))

    @property
    def axis(self) -> int:
        """The axis of the keys in an array of logits."""
        return 0

    def spread(self, rows: jax.Array) -> jax.Array:
        """Returns numbers of queries in a form that broadcasts over the keys."""
        return rows


def _column(rows):
    """Returns a column `(t, 1)` from `(t)`, or from a matrix whose columns are equal."""
    return rows[:, None] if rows.ndim == 1 else rows[:, :1]
