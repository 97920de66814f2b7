"""Naive forms over all pairs of a query and a key."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import dropout
from effattn.naive import lifting


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product `a @ b` in the dtype of b, summed in at least float32."""
    wide = jnp.promote_types(b.dtype, jnp.float32)
    return jnp.matmul(a.astype(b.dtype), b, preferred_element_type=wide)


def normalized(sums: jax.Array) -> jax.Array:
    """Divides `(..., D + 1)` by its last entry: `(..., D)`, zeros if it is zero or subnormal."""
    total = sums[..., -1:]
    is_zero = jnp.abs(total) < jnp.finfo(total.dtype).tiny
    # The derivative of a quotient divides by the square of the total, which may be 0: make it 1.
    sums = sums / jax.lax.stop_gradient(jnp.where(is_zero, 1, total))
    return jnp.where(is_zero, 0, sums[..., :-1] / jnp.where(is_zero, 1, sums[..., -1:]))


def projected(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product `x @ kernel` in the promoted dtype, summed in at least float32."""
    dtype = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def masked_softmax(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Softmax over the allowed entries of the last axis; zeros if no entry is allowed."""
    logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)
    return jnp.where(allowed, jax.nn.softmax(logits), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of one head that may attend, and the options that change their logits and weights.

    Attributes:
      allowed: bool `(T, S)`, by direction, window, mask, padding and packing.
      i: int `(T,)`, positions of the queries.
      j: int `(S,)`, positions of the keys.
      valid: bool `(T,)`, the queries that are not padding.
      present: bool `(S,)`, the keys that are not padding.
      query_ids: int `(T,)`, segment ids of the queries; ones if nothing is packed.
      key_ids: int `(S,)`, those of the keys.
      is_causal: whether attention is causal; a bool, or a traced one.
      change: `(logits, i, j) -> logits`: the bias, the soft cap and `score_mod`.
      keep: `(weights, i, j) -> weights`: dropout.
      sink: logit of the sink, or None.
    """

    allowed: jax.Array
    i: jax.Array
    j: jax.Array
    valid: jax.Array
    present: jax.Array
    query_ids: jax.Array
    key_ids: jax.Array
    is_causal: bool | jax.Array
    change: Callable[..., jax.Array]
    keep: Callable[..., jax.Array]
    sink: jax.Array | None = None

    def where(self, allowed: jax.Array) -> "Pairs":
        """The pairs that are also `allowed`, bool `(T, S)`."""
        return dataclasses.replace(self, allowed=self.allowed & allowed)

    def with_keys(self, allowed: jax.Array, j: jax.Array) -> "Pairs":
        """Pairs with other keys: bool `(T, M)`, and positions `(M,)` for dropout alone."""
        return dataclasses.replace(self, allowed=allowed, j=j)

    def logits(self, products: jax.Array) -> jax.Array:
        """Logits `(T, S)` from scaled products: with bias, soft cap and `score_mod`."""
        return self.change(products, self.i[:, None], self.j)

    def weights(self, weights: jax.Array) -> jax.Array:
        """Weights `(T, S)` after dropout, with zeros where a pair may not attend."""
        return self.keep(jnp.where(self.allowed, weights, 0), self.i[:, None], self.j)

    def softmax(
        self, products: jax.Array, log_counts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Softmax over the keys of the logits of scaled products; the sink is one more key.

        Args:
          products: `(T, S)`, scaled.
          log_counts: logarithms of how often each key counts, which broadcast to `(T, S)`; added
            after the bias, the soft cap and `score_mod`.

        Returns:
          Weights `(T, S)` after dropout, zeros for a query without keys; the log-sum-exp `(T,)`.
        """
        logits = self.logits(products)
        if log_counts is not None:
            logits = logits + log_counts.astype(logits.dtype)
        logits = jnp.where(self.allowed, logits, -jnp.inf)
        if self.sink is not None:
            sink = jnp.where(self.valid, self.sink.astype(logits.dtype), -jnp.inf)
            logits = jnp.concatenate([logits, sink[:, None]], 1)
        largest = jax.lax.stop_gradient(logits.max(1, initial=-jnp.inf))
        largest = jnp.where(largest == -jnp.inf, 0, largest)
        weights = jnp.exp(logits - largest[:, None])
        total = weights.sum(1)
        is_empty, total = total == 0, jnp.where(total == 0, 1, total)
        lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + largest)
        weights = (weights / total[:, None])[:, : self.allowed.shape[1]]
        return self.keep(weights, self.i[:, None], self.j), lse

    def linear(self, query, key, value, state=None, *, normalize=True):
        """Attention with weights `query @ key.T` of features, and with a state.

        Args:
          query: features `(T, F)`.
          key: features `(S, F)`.
          value: `(S, Hv)`.
          state: sums before the first key, `(F, Hv)`; `(F, Hv + 1)` if normalised, with the sum of
            the weights last. None is zero.
          normalize: divide the output by the sum of the weights.

        Returns:
          The output `(T, Hv)` and the sums after the last key.
        """
        if normalize:
            value = jnp.concatenate([value, jnp.ones_like(value, shape=(len(value), 1))], 1)
        value = value.astype(key.dtype)
        out = self.weights(query @ key.T) @ value
        sums = jnp.where(self.reaches_final[:, None], key, 0).T @ value
        if state is not None:
            state = state.astype(out.dtype)
            out = out + jnp.where(self.reads_initial[:, None], query, 0) @ state
            sums = sums + jnp.where(self.keeps_initial, state, 0)
        return normalized(out) if normalize else out, sums

    @property
    def places(self) -> jax.Array:
        """Int `(S,)`, the index of each key in its document."""
        token, size = jnp.arange(self.key_ids.size), self.key_ids.size
        is_same = self.key_ids[:, None] == self.key_ids
        return token - jnp.where(is_same, token, size).min(1, initial=size)

    @property
    def first_id(self) -> jax.Array:
        """The id of the first document."""
        ids = jnp.append(self.key_ids, 0)
        return ids[jnp.argmax(ids != 0)]

    @property
    def last_id(self) -> jax.Array:
        """The id of the last document; that of the first if all keys are padding."""
        last = jnp.where(self.present, jnp.arange(self.present.size), -1).max(initial=-1)
        return jnp.append(self.key_ids, self.first_id)[last]

    @property
    def reads_initial(self) -> jax.Array:
        """Bool `(T,)`, the queries that read the initial state: those of the first document."""
        return self.valid & (self.query_ids == self.first_id)

    @property
    def reaches_final(self) -> jax.Array:
        """Bool `(S,)`, the keys that the final state holds: those of the last document."""
        return self.present & (self.key_ids == self.last_id)

    @property
    def keeps_initial(self) -> jax.Array:
        """Bool `()`, whether the final state holds the initial one."""
        return self.first_id == self.last_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """Shared options that are neither of an example nor of a head."""

    is_causal: bool | jax.Array
    window: Any = None
    soft_cap: Any = None
    score_mod: Any = None
    dropout_rate: float = 0.0
    seed: Any = None

    def pairs(self, query_ids, key_ids, b, h, *, offset, lengths, bias, mask, sink) -> Pairs:
        """The pairs of head h of example b."""
        i, j = jnp.arange(query_ids.size) + offset, jnp.arange(key_ids.size)
        ahead = j - i[:, None]
        valid, present = map(lifting.present_tokens, (query_ids, key_ids), lengths)
        allowed = valid[:, None] & present & (query_ids[:, None] == key_ids)
        allowed = allowed & (jnp.logical_not(self.is_causal) | (ahead <= 0))
        if self.window is not None:
            pair = self.window if isinstance(self.window, tuple | list) else (self.window,) * 2
            left, right = (min(side, 2**30) for side in pair)
            allowed = allowed & (-left <= ahead) & (ahead <= right)
        if mask is not None:
            allowed = allowed & mask

        def change(logits, i, j):
            if bias is not None:
                logits = logits + bias
            if self.soft_cap is not None:
                logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
            if self.score_mod is not None:
                logits = self.score_mod(logits, b, h, i, j).astype(logits.dtype)
            return logits

        def keep(weights, i, j):
            if self.seed is None:
                return weights
            kept = dropout.keep(self.seed, self.dropout_rate, b, h, i, j)
            return jnp.where(kept, weights / (1 - self.dropout_rate), 0)

        return Pairs(
            allowed=allowed,
            i=i,
            j=j,
            valid=valid,
            present=present,
            query_ids=query_ids,
            key_ids=key_ids,
            is_causal=self.is_causal,
            change=change,
            keep=keep,
            sink=sink,
        )


def over_pairs(
    naive: Callable[..., Any],
    *,
    per_token: Sequence[str] = (),
    per_head: Mapping[str, int] | None = None,
    per_example: Sequence[str] = (),
    per_query: Sequence[str] = (),
    made_by_head: Callable[..., Mapping[str, Any]] | None = None,
    derived: Callable[..., Mapping[str, Any]] | None = None,
    queries: int = 1,
    heads: bool = True,
    together: bool = False,
    is_causal: bool = True,
    wide: bool = False,
    state_axes: Any = 0,
) -> Callable[..., Any]:
    """The naive form of all heads and examples, with the arguments of the fast function.

    Args:
      naive: `naive(query, key, value, pairs, **own)` of one head: query `(T, H)`, key `(S, H)`,
        value `(S, Hv)` and the `Pairs`. Returns the output `(T, Hv)`, or the output and a second
        result: the log-sum-exp `(T,)`, or the state. The inputs before `pairs` may have other
        names. Among the shared options, `naive` receives `scale`, `local_window_size`, `bias` and
        `initial_state` if it names them; it then applies the window and the bias itself.
      per_token: names of own arguments `(*B, S, K, ...)`, or `(S, K, ...)` for all examples.
      per_head: own arguments `(K, ...)` or `(N, ...)`, with the number of axes of one head; an
        array of that many axes is for all heads.
      per_example: names of own arguments `(*B, ...)`.
      per_query: names of own arguments `(*B, T, N, ...)` with a row for each query.
      made_by_head: `(**given) -> arguments by name`: the arrays of `per_head`, for all heads, that
        the function makes if the caller gives none. It reads shapes and dtypes of the inputs alone.
      derived: `(**given) -> arguments by name`, in place of those that the caller gives in another
        form.
      queries: number of inputs, from the first, that have a row for each query; the others have a
        row for each key.
      heads: False if the inputs have no axis of heads.
      together: give `naive` all heads of an example in one call: inputs `(T, N, H)`, and `Pairs`
        that are the same for all heads. Options may not differ by head.
      is_causal: direction, for a mechanism without an argument `is_causal`.
      wide: give `naive` its arrays in at least float32.
      state_axes: the axes of heads in the state without batch dimensions, as in `jax.vmap`; None
        for an array that all heads share.
    """
    parameters = list(inspect.signature(naive).parameters)
    inputs = parameters[: parameters.index("pairs")]
    own = parameters[len(inputs) + 1 :]
    ranks = dict(per_head or {})
    of_queries = {*inputs[:queries], *per_query}
    causal = is_causal

    @functools.partial(lifting.named, like=naive)
    def call(**given: Any) -> Any:
        for make in filter(None, (made_by_head, derived)):
            given |= make(**given)
        arrays = [jnp.asarray(given[name]) for name in inputs]
        first, last = arrays[0], arrays[-1]
        axis, by_head = -3 if heads else -2, heads and not together
        shape, time, keys = last.shape[:axis], first.shape[axis], last.shape[axis]
        counts = [x.shape[-2] for x in arrays]
        num_heads = max(counts) if by_head else None
        arrays = [jnp.broadcast_to(x, (*shape, *x.shape[axis:])) for x in arrays]

        def of_pairs(array):
            full = (*shape, num_heads or 1, time, keys)
            return None if array is None else jnp.broadcast_to(jnp.asarray(array), full)

        rate = given.get("dropout_rate", 0.0)
        shared = _Shared(
            is_causal=given.get("is_causal", causal),
            window=None if "local_window_size" in own else given.get("local_window_size"),
            soft_cap=given.get("logits_soft_cap"),
            score_mod=given.get("score_mod"),
            dropout_rate=rate,
            seed=dropout.seed_from_rng(given["dropout_rng"]) if rate else None,
        )
        static = {name: given[name] for name in own if name in given}
        if "scale" in own and static.get("scale") is None:
            static["scale"] = first.shape[-1] ** -0.5
        state = static.pop("initial_state", None)
        own_tokens = {
            name: lifting.per_example_tokens(static.pop(name, None), shape, keys)
            for name in (*per_token, *per_query)
        }
        own_heads = {n: lifting.per_head_array(static.pop(n, None), r) for n, r in ranks.items()}
        own_examples = {
            name: jax.tree.map(jnp.asarray, static.pop(name, None)) for name in per_example
        }
        second = next((n for n in ("state", "residual") if given.get(f"return_{n}")), None)

        def one(query_ids, key_ids, b, h=0, offset=0, bias=None, mask=None, sink=None, **mapped):
            pairs = shared.pairs(
                query_ids,
                key_ids,
                jnp.asarray(b),
                jnp.asarray(h),
                offset=offset,
                lengths=(mapped.pop("query_lengths", None), mapped.pop("key_lengths", None)),
                bias=bias,
                mask=mask,
                sink=sink,
            )
            for name in (*inputs, *per_token, *per_query):
                if name in mapped:
                    present = pairs.valid if name in of_queries else pairs.present
                    mapped[name] = lifting.without_padding(mapped[name], present)
            own_arrays = {**static, **mapped}
            if wide:
                own_arrays = lifting.widened(own_arrays, *arrays)
            rows = [own_arrays.pop(name) for name in inputs]
            result = naive(*rows, pairs, **own_arrays)
            out, *others = result if isinstance(result, tuple) else (result,)
            out = lifting.without_padding(out, pairs.valid).astype(last.dtype)
            if second == "residual":
                others = [lifting.widened(lse, *arrays) for lse in others]
            return out if second is None else (out, *others)

        with lifting.precision(given.get("precision")):
            result = lifting.over_heads(
                one,
                len(shape),
                num_heads,
                tokens={**dict(zip(inputs, arrays, strict=True)), **own_tokens},
                heads={
                    **own_heads,
                    "h": None if num_heads is None else jnp.arange(num_heads),
                    "sink": given.get("sink"),
                },
                examples={
                    **own_examples,
                    **lifting.example_arguments(given, shape, time, keys),
                    "b": jnp.arange(math.prod(shape)).reshape(shape),
                },
                both={
                    "bias": of_pairs(None if "bias" in own else given.get("bias")),
                    "mask": of_pairs(given.get("mask")),
                    "initial_state": state,
                },
                out_axes=1 if second is None else (1, state_axes if second == "state" else 1),
                state_axes=state_axes,
            )
        if second != "state" or not by_head:
            return result
        state = lifting.first_of_groups(result[1], len(shape), counts[-1], state_axes)
        return result[0], state

    of_call: Any = call
    of_call.per_token, of_call.per_head = (*per_token, *per_query), ranks
    of_call.per_query, of_call.made_by_head = tuple(per_query), made_by_head
    return call
