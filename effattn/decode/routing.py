"""Decoding of routing attention: a KV cache of the last tokens of each cluster."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks
from effattn.arrays.axes import lead
from effattn.arrays.segments import within
from effattn.cores import attention
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.state import bounded, check_bound
from effattn.functional.routing import Tokens, check_centroids, nearest

_SHARED = ("scale", "precision", "implementation")


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
class RoutingDecoder(Decoder):
    """Decodes causal `effattn.routing_attention`; `centroids` and `cluster_size` are required.

    A new token attends to the last tokens of its cluster, itself included. A step reads one cluster
    and costs O(C H + w (H + Hv)) time for each row and head. T tokens at once cost
    O((T + C w) w (H + Hv)). The state takes O(C w (H + Hv)) for any prefix length. If `max_length`
    is less than `cluster_size`, rows may not outgrow it.
    """

    _state = RoutingState

    def _needs(self):
        return ("centroids", "cluster_size")

    def _takes(self):
        return (*_SHARED, "tile", *self._needs())

    def _empty(self, sizes: Sizes):
        heads, clusters = self.options["centroids"].shape[:2]
        size, bound = bounded(self.options["cluster_size"], sizes.max_length)
        shape = (sizes.batch, heads, clusters)
        return RoutingState(
            key=jnp.zeros((*shape, size, sizes.head_dim), sizes.dtype),
            value=jnp.zeros((*shape, size, sizes.value_dim), sizes.dtype),
            count=jnp.zeros(shape, jnp.int32),
            length=sizes.length(),
            max_length=bound,
        )

    def _extend(self, heads, state, lengths):
        query = heads[0]
        checks.known_length("decoding routing attention", query)
        check_bound(state, lengths, state.key.shape[3], self.options["cluster_size"])
        centroids = check_centroids(self.options["centroids"], query)
        present = within(lengths, query.shape[1])
        tokens = Tokens.of(*(jnp.where(present[..., None, None], x, 0) for x in heads))
        cluster = nearest(tokens.query_route + tokens.key_route, centroids)
        with jax.named_scope("routing_attention"):
            extend = self._step if query.shape[1] == 1 else self._add
            out, new = extend(tokens, cluster, present, state)
        out = jnp.where(present[..., None, None], jnp.swapaxes(out, 1, 2), 0)
        return out, dataclasses.replace(new, length=state.length + lengths)

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

    def _add(self, tokens: Tokens, cluster, present, state: RoutingState):
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
        shared = self._given(_SHARED)
        given = attention.check("routing_attention", query, key, value, **shared, **within)
        return attention.attend(query, key, value, given)[0][..., 0, :]


def _take(x, at):
    """Gathers `(B, N, L, ...)` at indices `(B, N, M)`."""
    return jax.vmap(jax.vmap(lambda x, at: x.at[at].get(mode="clip")))(x, at)
