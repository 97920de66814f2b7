"""Decoding a sparse pattern: a cache of all keys, of which a token reads those that it reaches."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn import _checks
from effattn.decode import contiguous
from effattn.decode.contiguous import ContiguousState
from effattn.decode.state import check_state, new_lengths
from effattn.functional import block

# Options that any mechanism may have, and those that only say how its parallel form is computed.
_SHARED = ("scale", "logits_soft_cap", "score_mod", "sink", "precision")
_OF_PARALLEL = ("tile", "implementation")


@dataclasses.dataclass(frozen=True)
class GatheredDecoder:
    """Decodes causal attention in which a token reaches n keys: a step costs O(n).

    All keys and values are kept, O(S) a row. A step stores one, and gathers and attends to the n
    that its position reaches. T tokens take O(T n) time and O(T) memory: keys are gathered for a
    bounded number of tokens at a time.

    A mechanism says beside itself what it reaches, `decoder = partial(GatheredDecoder, reach)`.

    Attributes:
      reach: `(i, capacity, **options) -> int (n,)`, the positions of the keys that a query at
        position i, a traced scalar, may attend to, each once. Those below 0 or after i are none.
      function: of the mechanism; its parameters have the defaults of the options.
      options: the function's own arguments; `reach` gets those that it names.
    """

    reach: Callable[..., jax.Array]
    function: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def init(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: Any,
    ) -> ContiguousState:
        """An empty cache for `max_length` tokens a row."""
        return contiguous.empty(batch, max_length, num_kv_heads, head_dim, value_dim, dtype)

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: ContiguousState,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, ContiguousState]:
        """Appends T tokens, and attends from each to the keys that it reaches.

        A `score_mod` sees the positions in the whole sequence.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, how many of the T tokens each row has, right padded; default all.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.

        Raises:
          ValueError: an option that decoding does not take, or a row outgrows the capacity and the
            lengths are concrete. Under a trace tokens past the capacity are not stored, and later
            outputs do not see them.
        """
        batch, time = query.shape[:2]
        check_state(state, ContiguousState, batch)
        lengths = new_lengths(lengths, batch, time)
        reach, shared = self._split_options()
        new = contiguous.append(state, key, value, lengths)
        capacity = new.key.shape[1]
        reached_from = functools.partial(reach, capacity=capacity)

        def attend(query, position, present):
            """From `(B, P, N, H)`, of positions and presences `(B, P)`."""
            reached = jax.vmap(jax.vmap(reached_from))(position)
            seen = (reached >= 0) & (reached <= position[..., None]) & (reached < capacity)
            keys = _gather(new.key, reached).astype(key.dtype)
            values = _gather(new.value, reached).astype(value.dtype)
            positions = (position[..., None], reached)
            return _attend(query, keys, values, present, seen, positions, shared)

        steps = jnp.arange(time, dtype=jnp.int32)
        tokens = (query, state.length[:, None] + steps, steps < lengths[:, None])
        reaches = jax.eval_shape(reached_from, jnp.int32(0)).size
        size = _tokens_at_a_time(reaches * (key[:, 0].size + value[:, 0].size), time)
        name = self.function.__name__
        with jax.named_scope(name):
            out = _checks.dispatch(
                self.options.get("implementation"),
                f"decoding {name}",
                {"xla": lambda: _in_pieces(attend, tokens, size)},
            )
        return out, new

    def _split_options(self) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
        """`reach` of i and the capacity alone, and what the core is given."""
        parameters = inspect.signature(self.function).parameters
        defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
        named = [*inspect.signature(self.reach).parameters][2:]
        given = {name: option for name, option in self.options.items() if option is not None}
        left_over = sorted(given.keys() - {*named, *_SHARED, *_OF_PARALLEL})
        if left_over:
            raise ValueError(
                f"decoding {self.function.__name__} does not take {', '.join(left_over)}"
            )
        given = {**defaults, **given}
        reach = functools.partial(self.reach, **{name: given[name] for name in named})
        return reach, {name: given.get(name) for name in _SHARED}


def _gather(cache, at):
    """Of `(B, S, K, H)` those at `(B, P, n)`: `(B, P, n, K, H)`."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(cache, at)


def _attend(query, key, value, present, seen, positions, shared):
    """Each of the tokens `(B, P, N, H)` to its own keys `(B, P, n, K, H)`, as far as `seen`."""
    tokens, score_mod = query.shape[1], shared["score_mod"]
    # To the core each token with its keys is an example, of one query.
    if score_mod is not None:

        def of_token(logit, b, h, i, j):
            return score_mod(logit, b // tokens, h, i, j)

        shared = {**shared, "score_mod": of_token}
    query = query[:, :, None]
    given = block.check(
        query,
        key,
        value,
        mask=seen[..., None, None, :],
        is_causal=False,
        query_offset=0,
        query_seq_lengths=present.astype(jnp.int32),
        key_value_seq_lengths=None,
        segment_ids=None,
        local_window_size=None,
        dropout_rate=0.0,
        dropout_rng=None,
        tile=(1, seen.shape[-1]),
        **shared,
    )
    out, _ = block.attend(query, key, value, dataclasses.replace(given, positions=positions))
    return out[:, :, 0]


def _tokens_at_a_time(numbers: int, time: int) -> int:
    """How many of `time` tokens, for each of which so many numbers are gathered."""
    most = 2**20 if jax.default_backend() == "cpu" else 2**26
    pieces = math.ceil(time / max(1, most // max(1, numbers)))
    return math.ceil(time / pieces)


def _in_pieces(function, arrays, size: int):
    """`function` of arrays `(B, T, ...)`, on `size` of the T at a time."""
    time = arrays[0].shape[1]
    if size >= time:
        return function(*arrays)

    def pieces(array):
        padding = [(0, 0), (0, -time % size), *[(0, 0)] * (array.ndim - 2)]
        array = jnp.pad(array, padding)
        array = array.reshape(array.shape[0], -1, size, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    out = jax.lax.map(lambda piece: function(*piece), tuple(map(pieces, arrays)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :time]
