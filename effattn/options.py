"""Options that several mechanisms share, declared and documented once, in groups.

A mechanism names the groups that it honours. Its function takes its own arguments by name, and the
arguments of the groups as `**options: Unpack[...]`; `declared` makes that a plain signature, which
`help`, editors and adapters read. Any other argument is Python's TypeError.

    class Options(Padding, Packing, Execution, total=False):
        ...

    @declared
    def my_attention(query, key, value, *, rate, **options: Unpack[Options]): ...

Shapes: `query (*B, T, N, H)`, `key (*B, S, K, H)` and `value (*B, S, K, Hv)`, with any number of
batch dimensions `*B`, also none. T is the query length, S the key length, N the number of query
heads, and K the number of key heads. N is a multiple of K, and query head n reads key head
n // (N // K).

Errors that mechanisms share: `ValueError` for wrong shapes, dtypes or values; `NotImplementedError`
if a named implementation does not take the call; `TypeError` in reverse-mode differentiation of a
derivative of softmax attention in tiles.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, get_args, is_typeddict

import jax

from effattn.arrays import checks

Function = TypeVar("Function", bound=Callable[..., Any])

ScoreMod = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


class Direction(TypedDict, total=False):
    """Causal or bidirectional attention.

    Attributes:
      is_causal: query i attends to keys at positions up to its own; top-left aligned. Default
        False.
    """

    is_causal: bool


class Offset(TypedDict, total=False):
    """Queries that stand elsewhere in the key sequence: decoding, chunked prefill, rings.

    Attributes:
      query_offset: query t stands at position t + offset; an int, or an int array `()` or `(*B)`.
        Default 0. Only causality, windows, patterns, `score_mod` and dropout depend on positions.
        With an offset for each example, tiles outside all windows are skipped; causality without a
        window then skips no tiles.
    """

    query_offset: int | jax.Array


class Window(TypedDict, total=False):
    """A window of positions.

    Attributes:
      local_window_size: w or (left, right): how many positions on each side of its own a query
        sees. A causal window of 256 keys is (255, 0). Default None, all positions.
    """

    local_window_size: int | tuple[int, int] | None


class Padding(TypedDict, total=False):
    """Right-padded rows. Values in the padding, even NaN, reach no valid output or gradient.

    Attributes:
      query_seq_lengths: int `(*B)`, valid queries of each row; the others give zeros.
      key_value_seq_lengths: int `(*B)`, valid keys of each row; the others are not attended to, and
        leave the state of a recurrence as it is.
    """

    query_seq_lengths: jax.Array | None
    key_value_seq_lengths: jax.Array | None


class Packing(TypedDict, total=False):
    """Several documents in a row.

    Attributes:
      segment_ids: int `(*B, T)`; tokens attend within equal ids, which are one contiguous run, and
        id 0 is padding. Where queries and keys are different tokens, a pair `((*B, T), (*B, S))`;
        causal recurrences take one array.
    """

    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None


class Scale(TypedDict, total=False):
    """The scale of the logits.

    Attributes:
      scale: multiplies q . k; default H**-0.5. May be an array `()`, with a gradient.
    """

    scale: float | jax.Array | None


class SoftCap(TypedDict, total=False):
    """A soft cap on the logits.

    Attributes:
      logits_soft_cap: c > 0; logits become c * tanh(logits / c).
    """

    logits_soft_cap: float | None


class Score(TypedDict, total=False):
    """A function of each logit.

    Attributes:
      score_mod: `(logit, b, h, i, j) -> logit` on scalars, after the cap: example (counted over
        all batch dimensions), query head, query position, key position. Gradients flow to the
        arrays it closes over, and memory stays linear. It is also called at pairs that may not
        attend: let it be finite there, or its gradient is not. Call it under `jax.jit`: outside,
        every call compiles anew.
    """

    score_mod: ScoreMod | None


class Sink(TypedDict, total=False):
    """An attention sink.

    Attributes:
      sink: `(N,)`, a logit a head that takes part in the softmax and has no value. Has a gradient.
    """

    sink: jax.Array | None


class Dropout(TypedDict, total=False):
    """Dropout of the attention weights.

    Attributes:
      dropout_rate: share of the weights dropped, in [0, 1); the others are scaled up. Default 0.
      dropout_rng: a `jax.random` key; needed where the rate is above 0. The choice
        of kept weights depends only on `dropout_rng`, the example, the head and the two positions.
    """

    dropout_rate: float
    dropout_rng: jax.Array | None


class Residual(TypedDict, total=False):
    """The log-sum-exp of the logits.

    Attributes:
      return_residual: also return the log-sum-exp `(*B, T, N)`, the sink's logit included, at least
        float32, -inf for a row that attends to nothing. It has a gradient. Default False.
    """

    return_residual: bool


class State(TypedDict, total=False):
    """The state of a recurrence, at least float32; initial and returned state have gradients.

    Attributes:
      initial_state: the state before the first token, as returned by an earlier call; zeros by
        default. With `segment_ids` it belongs to the first document. Functions of tokens
        `(B, T, D)` take `initial_state` or `segment_ids`, not both.
      return_state: return `(out, state)`, the state after the last valid token; with `segment_ids`
        that of the last document. Default False.
    """

    initial_state: Any
    return_state: bool


class Precision(TypedDict, total=False):
    """Precision of the matrix products.

    Attributes:
      precision: as in `jax.lax.dot`.
    """

    precision: jax.lax.PrecisionLike


class Implementation(TypedDict, total=False):
    """The implementation that runs.

    Attributes:
      implementation: None, a name, or a tuple of names tried in order. `effattn.support(name)`
        lists the names that a mechanism has, the device that each runs on and what it takes;
        "pallas" is the first of "mosaic_gpu" (not for recurrences), "triton" and "mosaic_tpu" that
        takes the call where it runs, and "naive" is the formula of the mechanism, with all pairs or
        token by token (see `effattn.naive`). None is the result of `effattn.tune`. Untuned, None is
        a kernel, if one takes the call, for 16-bit inputs of 128 or more tokens on GPUs (block
        attention from compute capability 8.0 on, recurrences on Hopper) and for float32 inputs of
        16 or more tokens on x86-64 CPUs, and "xla" otherwise. On several devices each runs the
        kernel for its examples and heads. A named implementation that does not take the call is a
        NotImplementedError.
    """

    implementation: str | tuple[str, ...] | None


class Execution(Precision, Implementation, total=False):
    """How the result is computed: precision and implementation."""


class Tile(TypedDict, total=False):
    """Tiles of block attention.

    Attributes:
      tile: queries and keys in a tile; tuning only.
    """

    tile: tuple[int, int] | None


class QueryTile(TypedDict, total=False):
    """Tiles of queries, each with all keys.

    Attributes:
      query_tile: queries in a tile; tuning only.
    """

    query_tile: int | None


class Chunk(TypedDict, total=False):
    """Chunks of a recurrence.

    Attributes:
      chunk_size: tokens of one masked product; tuning only.
    """

    chunk_size: int | None


class Softmax(Padding, Scale, SoftCap, Dropout, Residual, Execution, total=False):
    """Options of softmax mechanisms: padding, scale, soft cap, dropout, residual and execution."""


class Elementwise(
    Direction, Offset, Window, Padding, Packing, Scale, SoftCap, Score, Dropout, Tile, Execution,
    total=False,
):  # fmt: skip
    """Options of attention whose weights are functions of one logit each, without a softmax."""


class ByRows(
    Offset, Window, Padding, Packing, Scale, SoftCap, Score, Dropout, QueryTile, Precision,
    total=False,
):  # fmt: skip
    """Options of attention whose weights depend on all logits of a query."""


class Recurrent(Padding, Packing, State, Chunk, Execution, total=False):
    """Options of every causal recurrence: padding, packing, state, chunks and execution."""


class Lengths(TypedDict, total=False):
    """Right-padded rows of one sequence, `(B, T, D)`.

    Attributes:
      lengths: int `(B,)`, valid tokens of each row. Padding gives zeros, is not read, and leaves a
        state as it is.
    """

    lengths: jax.Array | None


class TokenMixing(Lengths, Packing, State, total=False):
    """Options of recurrences without heads, over `(B, T, D)`: lengths, packing and state.

    `segment_ids` are one array `(B, T)`. A packed call takes no `initial_state`.
    """


class FeatureMapped(Direction, Recurrent, total=False):
    """Options of attention by a feature map: direction, and those of `Recurrent`.

    A causal call needs T == S; in a bidirectional call `segment_ids` may be a pair. `initial_state`
    and `return_state` with `segment_ids` need a causal call.
    """


# Default values other than None.
DEFAULTS: dict[str, Any] = {
    "is_causal": False,
    "query_offset": 0,
    "dropout_rate": 0.0,
    "return_residual": False,
    "return_state": False,
}


def declared(function: Function) -> Function:
    """The function with the signature that its groups of options give it, and checked arguments.

    Arguments annotated `bool` must be True or False, and arguments annotated `jax.Array` become
    arrays (see `effattn.arrays.checks.checked`).
    """
    own = inspect.signature(function)
    parameters = []
    for parameter in own.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        group, *_ = (*get_args(parameter.annotation), None)
        if not is_typeddict(group):
            raise TypeError(
                f"{function.__name__} must annotate **{parameter.name} as Unpack[a TypedDict], "
                f"got {parameter.annotation!r}"
            )
        for name, annotation in group.__annotations__.items():
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=DEFAULTS.get(name),
                    annotation=annotation,
                )
            )
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return checks.checked(function)
