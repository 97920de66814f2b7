"""Decoding of sparse patterns: a full KV cache, from which a step gathers the reached keys."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import positions_from, within
from effattn.cores import attention
from effattn.decode import contiguous
from effattn.decode.contiguous import ContiguousState
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to
from effattn.patterns import Pattern
from effattn.xla import tiling

# Options passed to the core, and options that only the parallel form uses.
_SHARED = ("scale", "logits_soft_cap", "score_mod", "sink", "precision")
_OF_PARALLEL = ("tile", "implementation")


@dataclasses.dataclass(frozen=True)
class GatheredDecoder(Decoder):
    """Decodes causal attention in which a query attends to at most n keys: a step costs O(n).

    The KV cache holds all tokens, O(S) a row. A step stores one token, gathers the n keys that the
    pattern's `reach` lists for its position, and attends to these keys. T tokens take O(T n) time
    and O(T) memory: keys are gathered for a bounded number of tokens at a time.

    Attributes:
      function: the attention function; its signature has the defaults of the options.
      options: arguments of the function.
      pattern: function that returns the `effattn.patterns.Pattern` of causal calls, with K or N
        heads if heads differ. Its parameters are options of the mechanism, or `length` (the
        capacity of the cache), `heads` (N), `key_heads` (K) and `is_causal`. The default is the
        function that the registry has for the mechanism.
    """

    pattern: Callable[..., Pattern] | None = None

    _state = ContiguousState

    def _empty(self, sizes: Sizes):
        return contiguous.empty(sizes)

    def _extend(self, heads_of_tokens, state, lengths):
        query, key, value = heads_of_tokens
        (batch, time, heads, _), key_heads = query.shape, key.shape[-2]
        new = append_to(state, lengths, key=key, value=value)
        capacity = new.key.shape[1]
        if capacity == 0:
            return jnp.zeros((batch, time, heads, value.shape[-1]), value.dtype), new
        pattern = self._pattern_for(capacity, heads, key_heads)
        reach = functools.partial(pattern.reach, capacity=capacity)
        shared = {name: self.options.get(name) for name in _SHARED}

        def attend(query, position, present):
            """Attends from P queries `(B, P, N, H)` with positions and validity `(B, P)`."""
            reached = _split_heads(jax.vmap(jax.vmap(reach))(position), heads, key_heads)
            position, present = (x[:, :, None, None, None] for x in (position, present))
            seen = present & (reached >= 0) & (reached <= position) & (reached < capacity)
            keys, values = _gather((new.key, new.value), reached)
            keys, values = keys.astype(key.dtype), values.astype(value.dtype)
            return _attend(query, keys, values, (position, reached), present, seen, shared)

        tokens = (query, positions_from(state.length, time), within(lengths, time))
        *lists, each = jax.eval_shape(reach, jnp.int32(0)).shape
        of_a_token = max([key_heads, *lists]) * each * (key.shape[-1] + value.shape[-1])
        numbers = tiling.known_product(query.shape[:1]) * of_a_token
        name = self.function.__name__
        checks.known_length(f"decoding {name}", query)
        self._check_runs_in_xla()
        with jax.named_scope(name):
            out = _in_pieces(attend, tokens, _tokens_at_a_time(numbers, time))
        return out, new

    def _takes(self):
        known = inspect.signature(self.function).parameters.keys()
        return {*_SHARED, *_OF_PARALLEL, *(known & self._parameters())}

    def _parameters(self):
        """Names of the parameters of the function that returns the pattern."""
        return inspect.signature(self._registered()).parameters.keys()

    def _registered(self) -> Callable[..., Pattern]:
        entry = registry.entry_of(self.function)
        registered = None if entry is None else entry.pattern
        pattern = self.pattern or registered
        if pattern is None:
            raise ValueError(
                "function must be of a registered mechanism with a pattern, got "
                f"{self.function!r}; for any other function give its pattern to GatheredDecoder as "
                "pattern"
            )
        return pattern

    def _pattern_for(self, capacity: int, heads: int, key_heads: int) -> Pattern:
        known = {p.name: p.default for p in inspect.signature(self.function).parameters.values()}
        known |= {name: option for name, option in self.options.items() if option is not None}
        known |= {"length": capacity, "heads": heads, "key_heads": key_heads, "is_causal": True}
        return self._registered()(
            **{name: known[name] for name in known.keys() & self._parameters()}
        )


def _split_heads(reached, heads, key_heads):
    """Reshapes `(B, P, n)` or `(B, P, heads, n)` to `(B, P, #K, E, n)`.

    #K is K, or 1 if all heads are alike. E is N / K if query heads differ, else 1.
    """
    batch, tokens, *lists, each = reached.shape
    split = (key_heads, heads // key_heads) if lists == [heads] else (*(lists or [1]), 1)
    return reached.reshape(batch, tokens, *split, each)


def _gather(caches, at):
    """Gathers each cache `(B, S, K, H)` at slots `(B, P, #K, E, n)`: `(B, P, K, E, n, H)`."""

    def of_row(row, at):
        if at.shape[1] == 1:
            # All heads read the same slots: one gather of whole tokens.
            return jnp.moveaxis(row.at[at[:, 0]].get(mode="clip"), -2, 1)
        of_head = jax.vmap(lambda row, at: row.at[at].get(mode="clip"), in_axes=1, out_axes=1)
        return of_head(row, at)

    def of_all(caches, at):
        return tuple(jax.vmap(of_row)(cache, at) for cache in caches)

    rows, _, heads, size = mesh_axes.spec(caches[0])
    placed_as = PartitionSpec(rows, None, heads, None, None, size)
    return mesh_axes.placed(of_all, caches[0], placed_as, placed_as)(caches, at)


def _attend(query, key, value, positions, present, seen, shared):
    """Attends from queries `(B, P, N, H)` to gathered keys `(B, P, K, E, n, H)`, masked by `seen`.

    The core gets each list of n keys as one example, with one query of F = N / (K E) heads. The
    batch axes are not merged.
    """
    *batch, heads, _ = query.shape
    examples = key.shape[:-2]
    lists = math.prod(examples[2:])
    together = heads // lists
    score_mod, sink = shared["score_mod"], shared["sink"]
    if score_mod is not None:

        def of_example(logit, b, h, i, j):
            return score_mod(logit, b // lists // batch[1], b % lists * together + h, i, j)

        shared = {**shared, "score_mod": of_example}
    if sink is not None:
        sink = checks.shaped("sink", sink, (heads,)).reshape(*examples[2:], 1, together)
    query = query.reshape(*examples, 1, together, query.shape[-1])
    key, value = key[..., None, :], value[..., None, :]
    given = attention.check(
        "decoding",
        query,
        key,
        value,
        mask=seen[..., None, None, :],
        query_seq_lengths=jnp.broadcast_to(present[..., 0], examples).astype(jnp.int32),
        tile=(1, seen.shape[-1]),
        **{**shared, "sink": None},
    )
    positions = tuple(jnp.broadcast_to(at, (*examples, at.shape[-1])) for at in positions)
    given = dataclasses.replace(given, sink=sink, positions=positions)
    out, _ = attention.attend(query, key, value, given)
    return out.reshape(*batch, heads, out.shape[-1])


def _tokens_at_a_time(numbers: int, time: int) -> int:
    """Returns the tokens in one piece, if each token gathers `numbers` array elements."""
    most = 2**20 if jax.default_backend() == "cpu" else 2**26
    pieces = math.ceil(time / max(1, most // max(1, numbers)))
    return math.ceil(time / pieces)


def _in_pieces(function, arrays, size: int):
    """Applies `function` to arrays `(B, T, ...)`, `size` tokens at a time."""
    time = arrays[0].shape[1]
    if size >= time:
        return function(*arrays)

    def pieces(array):
        padding = [(0, 0), (0, -time % size), *[(0, 0)] * (array.ndim - 2)]
        array = jnp.pad(array, padding)
        array = array.reshape(array.shape[0], array.shape[1] // size, size, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    out = jax.lax.map(lambda piece: function(*piece), tuple(map(pieces, arrays)))
    out = jnp.moveaxis(out, 0, 1)
    return jax.lax.collapse(out, 1, 3)[:, :time]
