"""Decoding of routing attention: a KV cache of the last tokens of each cluster."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks
from effattn.arrays.axes import lead
from effattn.arrays.segments import within
from effattn.cores import attention
from effattn.decode.state import bounded, check_bound, check_init, check_state, new_lengths
from effattn.functional.routing import Tokens, check_centroids, nearest

_SHARED = ("scale", "precision", "implementation")
_OPTIONS = frozenset((*_SHARED, "tile", "centroids", "cluster_size"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingState:
    """KV cache of the last w tokens of each cluster; token n of a cluster is at slot n % w.

    w is the size of a cluster or the maximum number of tokens of a row, whichever is less.

    Attributes:
      key: `(B, N, C, w, H)`, normalised.
      value: `(B, N, C, w, Hv)`.
      count: `(B, N, C)` int32, tokens that each cluster has seen.
      length: `(B,)` int32, tokens seen.
      max_length: static; maximum tokens of a row if that is less than a cluster, else None.
    """

    key: jax.Array
    value: jax.Array
    count: jax.Array
    length: jax.Array
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class RoutingDecoder:
    """Decodes causal `effattn.routing_attention`.

    A step reads one cluster and costs O(C H + w (H + Hv)) time for each row and head. T tokens at
    once cost O((T + C w) w (H + Hv)). The state takes O(C w (H + Hv)) for any prefix length.

    Attributes:
      function: `effattn.routing_attention`.
      options: arguments of the function; `centroids` and `cluster_size` are required.
    """

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
    ) -> RoutingState:
        """Returns an empty state. Rows may outgrow a `max_length` of at least `cluster_size`."""
        dtype = check_init(batch, max_length, dtype)
        centroids, size = self._own()
        heads, clusters = centroids.shape[:2]
        size, bound = bounded(size, max_length)

        def zeros(features):
            return jnp.zeros((batch, heads, clusters, size, features), dtype)

        return RoutingState(
            key=zeros(head_dim),
            value=zeros(value_dim),
            count=jnp.zeros((batch, heads, clusters), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            max_length=bound,
        )

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: RoutingState,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, RoutingState]:
        """Attends from T new tokens to the last tokens of their clusters, including themselves.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.

        Raises:
          ValueError: options that are missing or not taken; a state of other options; or
            `state.max_length` is set, a row outgrows it, and the lengths are concrete. With traced
            lengths, clusters then keep the last `max_length` tokens.
        """
        batch, time = query.shape[:2]
        check_state(state, RoutingState, batch)
        checks.known_length("decoding routing attention", query)
        lengths = new_lengths(lengths, batch, time)
        centroids, size = self._own()
        check_bound(state, lengths, state.key.shape[3], size)
        centroids = check_centroids(centroids, query)
        present = within(lengths, time)
        query, key, value = (jnp.where(present[..., None, None], x, 0) for x in (query, key, value))
        tokens = Tokens.of(query, key, value)
        cluster = nearest(tokens.query_route + tokens.key_route, centroids)
        with jax.named_scope("routing_attention"):
            extend = self._step if time == 1 else self._extend
            out, new = extend(tokens, cluster, present, state)
        out = jnp.where(present[..., None, None], jnp.swapaxes(out, 1, 2), 0)
        return out, dataclasses.replace(new, length=state.length + lengths)

    def _own(self) -> tuple[Any, int]:
        unknown = self.options.keys() - _OPTIONS
        if unknown:
            raise ValueError(
                f"decoding routing attention takes the options {', '.join(sorted(_OPTIONS))}; got "
                f"also {', '.join(sorted(unknown))}"
            )
        missing = [name for name in ("centroids", "cluster_size") if name not in self.options]
        if missing:
            raise ValueError(
                f"decoding routing attention needs {' and '.join(missing)} among the options, got "
                f"{sorted(self.options)}"
            )
        return self.options["centroids"], self.options["cluster_size"]

    def _step(self, tokens: Tokens, cluster, present, state: RoutingState):
        """Stores one token and attends to its cluster."""
        size = state.key.shape[3]
        batch, heads = (jnp.arange(n) for n in cluster.shape[:2])
        mine = batch[:, None], heads[None], cluster[..., 0]
        count = state.count[mine]
        # Padding goes to a slot that does not exist, so `mode="drop"` drops it.
        slot = jnp.where(present, count % size, size)

        def stored(old, new):
            return old.at[*mine, slot].set(new[:, :, 0].astype(old.dtype), mode="drop")

        key, value = stored(state.key, tokens.key), stored(state.value, tokens.value)
        count = count + present.astype(count.dtype)
        seen = within(count, size)
        out = self._attend(
            tokens.query,
            key[mine].astype(tokens.key.dtype),
            value[mine].astype(tokens.value.dtype),
            mask=seen[..., None, None, :],
        )
        return out, dataclasses.replace(
            state, key=key, value=value, count=state.count.at[mine].set(count)
        )

    def _extend(self, tokens: Tokens, cluster, present, state: RoutingState):
        """Sorts cached and new tokens by cluster, oldest first, and attends in causal windows."""
        batch, heads, clusters, size, _ = state.key.shape
        kept, time = clusters * size, cluster.shape[-1]
        slots = lead(jnp.arange(size, dtype=jnp.int32), 4)
        count = state.count[..., None]
        age = jnp.where(count > size, (slots - count) % size, slots)
        # Padding and unfilled slots get a cluster id after all others.
        none = jnp.int32(clusters)
        clusters_of = jnp.arange(clusters, dtype=jnp.int32)[None, None, :, None]
        of_kept = jnp.where(slots < count, clusters_of, none)
        later = jnp.broadcast_to(size + jnp.arange(time, dtype=jnp.int32), (batch, heads, time))

        def joined(of_clusters, new):
            flat = of_clusters.reshape(batch, heads, kept, *of_clusters.shape[4:])
            return jnp.concatenate([flat.astype(new.dtype), new], 2)

        cluster = joined(of_kept, jnp.where(present[:, None], cluster, none))
        places = jnp.broadcast_to(jnp.arange(kept + time, dtype=jnp.int32), cluster.shape)
        ids, _, order = lax.sort((cluster, joined(age, later), places), num_keys=2)
        _, inverse = lax.sort((order, places), num_keys=1)
        keys, values = (
            _take(joined(old, new), order)
            for old, new in ((state.key, tokens.key), (state.value, tokens.value))
        )
        queries = joined(jnp.zeros_like(state.key), tokens.query)
        runs = jnp.where(ids < clusters, ids + 1, 0)
        out = self._attend(
            _take(queries, order),
            keys,
            values,
            is_causal=True,
            local_window_size=(size - 1, 0),
            segment_ids=(runs, runs),
        )

        border = functools.partial(jnp.searchsorted, v=jnp.arange(clusters + 1))
        borders = jax.vmap(jax.vmap(border))(ids).astype(jnp.int32)
        start, end = borders[..., :-1], borders[..., 1:]
        new_count = state.count + (end - start) - jnp.minimum(state.count, size)
        back = (new_count[..., None] - 1 - slots) % size
        at = (end[..., None] - 1 - back).reshape(batch, heads, kept)
        held = (back < new_count[..., None])[..., None]

        def kept_of(x, old):
            return jnp.where(held, _take(x, at).reshape(old.shape), 0).astype(old.dtype)

        state = dataclasses.replace(
            state,
            key=kept_of(keys, state.key),
            value=kept_of(values, state.value),
            count=new_count,
        )
        return _take(out, inverse[..., kept:]), state

    def _attend(self, query, key, value, **within):
        """Attends for `(B, N, T, H)`; the core gets each head as an example."""
        query, key, value = (x[..., None, :] for x in (query, key, value))
        shared = {name: self.options[name] for name in _SHARED if name in self.options}
        given = attention.check("routing_attention", query, key, value, **shared, **within)
        return attention.attend(query, key, value, given)[0][..., 0, :]


def _take(x, at):
    """Gathers `(B, N, L, ...)` at indices `(B, N, M)`."""
    return jax.vmap(jax.vmap(lambda x, at: x.at[at].get(mode="clip")))(x, at)
