"""The Routing Transformer's self-attention: local heads beside heads that route by k-means."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import within
from effattn.decode.ring import RingDecoder
from effattn.decode.routing import RoutingDecoder
from effattn.decode.state import check_state, new_lengths
from effattn.functional.routing import Tokens, routing_attention, summed_by_cluster
from effattn.functional.sliding_window import sliding_window_attention
from effattn.nn.attention import SelfAttention
from effattn.nn.hybrid import HybridState


class Centroids(nnx.Variable):
    """Of clusters: no parameter that is trained, but what `update_centroids` moves."""


class RoutingSelfAttention(SelfAttention):
    """A mixer of local heads and routed ones (Roy et al. 2020, "... with Routing Transformers").

        q, k, v = x Wq, x Wk, x Wv
        y = [sliding_window_attention(q_l, k_l, v_l), routing_attention(q_r, k_r, v_r)] Wo

    for the first heads l and the others r. Half of the heads are local, as in the paper.

    Each routed head has C centroids, drawn when it is made. They are `Centroids`, which are no
    `nnx.Param`, and attention has no gradient for them: `update_centroids` moves them, between
    steps of training, and that of `Transformer` moves those of all layers. Unlike in the paper,
    causal heads too have keys of their own.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      num_clusters: C of each routed head; if not causal, at most the tokens of an input.
      cluster_size: w, tokens of a cluster. Of shorter inputs a cluster may hold all.
      num_local_heads: how many heads are local, a multiple of those that share a key head; default
        half of them, rounded down to such.
      local_window_size: tokens that local heads see before their own, and, if not causal, after it.
      rngs: random streams for parameter initialisation. The centroids are drawn from the stream
        `centroids` if there is one, otherwise from the default stream.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `rotary`, `is_causal`, ...)
        and options of `effattn.routing_attention`: `scale`, `precision`, `tile`, `implementation`.

    Raises:
      ValueError: as `SelfAttention`; local heads that do not fit; and in calls that are not causal,
        fewer tokens than clusters.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_clusters: int = 16,
        cluster_size: int = 64,
        num_local_heads: int | None = None,
        local_window_size: int = 64,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if "centroids" in options:
            raise ValueError(
                "RoutingSelfAttention has no option centroids; it draws num_clusters a head, and "
                "update_centroids moves them"
            )
        super().__init__(in_features, num_heads, "routing", rngs=rngs, **options)
        group = self.num_heads // self.num_kv_heads
        if num_local_heads is None:
            num_local_heads = self.num_heads // 2 // group * group
        self.num_local_heads = checks.at_least("num_local_heads", num_local_heads, 0, "heads")
        if num_local_heads % group or num_local_heads >= num_heads:
            raise ValueError(
                f"num_local_heads must be less than num_heads {num_heads}, and a multiple of the "
                f"{group} that share a key head, got {num_local_heads}"
            )
        self.num_clusters = checks.at_least("num_clusters", num_clusters, 1, "clusters")
        self.cluster_size = checks.at_least("cluster_size", cluster_size, 1, "tokens")
        self.local_window_size = checks.at_least("local_window_size", local_window_size, 0)
        shape = (num_heads - num_local_heads, num_clusters, self.head_dim)
        dtype = dtypes.wide(self.param_dtype)
        self.centroids = Centroids(_on_sphere(jax.random.normal(rngs.centroids(), shape, dtype)))

    def update_centroids(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        decay: float = 0.999,
        axis_name: Any = None,
    ) -> None:
        """Moves each centroid towards the mean of what is nearest to it, a step of online k-means.

            m_c <- sphere(decay m_c + (1 - decay) mean_{t in c} u_t)

        where u are the normalised queries and keys, of all tokens of all examples; in a causal
        module, the means of a token's two, as its cluster is that of both. Centroids that nothing
        is nearest to stay where they are. Decode states of the old ones are void.

        Call it between steps of training, on what the mixer is called with; under `jax.jit` by
        `nnx.jit`, or by hand with `nnx.split` and `nnx.merge`, as with any change of a Variable.

        Args:
          x: `(B, T, D)`.
          lengths: as in a call; what is padding does not count.
          segment_ids: as in a call.
          decay: of the moving average, in [0, 1].
          axis_name: of a `jax.shard_map` or `jax.vmap`, one or several, over which the examples are
            divided: the means are those over all of them, and so are the centroids.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number in [0, 1], got {decay!r}")
        x, positions, given = self._whole(x, lengths, segment_ids)
        query, key, value = self._heads(x, positions)
        query, key, value = self._sides(query, key, value)[1]
        tokens = Tokens.of(query, key, value)
        present = jnp.ones(x.shape[:2], bool)
        if lengths is not None:
            present = within(given["query_seq_lengths"], x.shape[1])
        if segment_ids is not None:
            present = present & (given["segment_ids"] != 0)
        centroids = self.centroids[...]
        vectors = [tokens.query_route, tokens.key_route]
        if self.is_causal:
            vectors = [(vectors[0] + vectors[1]) / 2]
        sums, counts = (
            sum(parts)
            for parts in zip(
                *(summed_by_cluster(u, centroids, present) for u in vectors), strict=True
            )
        )
        if axis_name is not None:
            sums, counts = lax.psum((sums, counts), axis_name)
        mean = sums / jnp.maximum(counts, 1)[..., None]
        moved = _on_sphere(decay * centroids + (1 - decay) * mean)
        self.centroids[...] = jnp.where(counts[..., None] > 0, moved, centroids)

    def _options(self) -> dict[str, Any]:
        own = {"centroids": self.centroids[...], "cluster_size": self.cluster_size}
        return {**super()._options(), **own}

    @property
    def num_local_kv_heads(self) -> int:
        """How many key heads are local."""
        return self.num_local_heads * self.num_kv_heads // self.num_heads

    def _sides(self, query, key, value) -> tuple[Any, Any]:
        """The heads that are local, and those that are routed."""
        keys = self.num_local_kv_heads
        parts = (query, self.num_local_heads), (key, keys), (value, keys)
        return tuple(x[:, :, :n] for x, n in parts), tuple(x[:, :, n:] for x, n in parts)

    def _attend(self, heads, **keywords):
        local, routed = self._sides(*heads)
        checks.known_length("routing attention", routed[0])
        size = min(self.cluster_size, max(routed[0].shape[1], 1))
        out = routing_attention(*routed, **{**keywords, "cluster_size": size})
        if not self.num_local_heads:
            return out
        keywords = {k: x for k, x in keywords.items() if k not in ("centroids", "cluster_size")}
        near = sliding_window_attention(*local, local_window_size=self._window(), **keywords)
        return jnp.concatenate([near, out], -2)

    def _window(self) -> tuple[int, int]:
        return self.local_window_size, 0 if self.is_causal else self.local_window_size

    def _decoder(self):
        routed = super()._decoder()
        if not self.num_local_heads:
            return routed
        own = ("tile", "centroids", "cluster_size")
        shared = {k: x for k, x in self._options().items() if k not in own}
        window = {**shared, "local_window_size": self._window()}
        return _SideBySide(self, RingDecoder(sliding_window_attention, window), routed)


@dataclasses.dataclass(frozen=True)
class _SideBySide:
    """Decodes the local heads of a mixer, and the routed ones."""

    mixer: RoutingSelfAttention
    local: RingDecoder
    routed: RoutingDecoder

    def init(self, batch, max_length, num_kv_heads, *of_heads) -> HybridState:
        """The empty states of both."""
        near = self.mixer.num_local_kv_heads
        groups = (
            self.local.init(batch, max_length, near, *of_heads),
            self.routed.init(batch, max_length, num_kv_heads - near, *of_heads),
        )
        return HybridState(groups, jnp.zeros((batch,), jnp.int32))

    def extend(self, query, key, value, state: HybridState, lengths=None):
        """Both, and their heads side by side."""
        check_state(state, HybridState, query.shape[0])
        lengths = new_lengths(lengths, *query.shape[:2])
        (q, k, v), (query, key, value) = self.mixer._sides(query, key, value)
        of_local, of_routed = state.groups
        near, of_local = self.local.extend(q, k, v, of_local, lengths)
        far, of_routed = self.routed.extend(query, key, value, of_routed, lengths)
        out = jnp.concatenate([near, far], -2)
        return out, HybridState((of_local, of_routed), state.length + lengths)


def routing_mixers(mixer: Any, x: jax.Array) -> Iterator[tuple[RoutingSelfAttention, jax.Array]]:
    """The mixer if it routes, or those that it is made of and that do, each with what it reads."""
    if isinstance(mixer, RoutingSelfAttention):
        yield mixer, x
    elif hasattr(mixer, "parts"):
        for part, read in mixer.parts(x):
            yield from routing_mixers(part, read)


def _on_sphere(x: jax.Array) -> jax.Array:
    """Of the norm of a normalised token, sqrt(H)."""
    norm = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))
    return x / jnp.maximum(norm, 1e-6)
