"""Self-attention of the Routing Transformer: local heads, and heads that route by k-means."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes, segments
from effattn.cores import sequence_parts
from effattn.cores.clusters import summed_by_cluster
from effattn.decode.ring import RingDecoder
from effattn.decode.routing import RoutingDecoder
from effattn.decode.state import check_state, new_lengths
from effattn.functional.routing import Tokens, routing_attention
from effattn.functional.sliding_window import sliding_window_attention
from effattn.nn.attention import refuse
from effattn.nn.hybrid import HybridState
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention
from effattn.parallel.heads import attend_in_parts


class Centroids(nnx.Variable):
    """Variable type of cluster centroids, which `update_centroids` updates without gradients."""


class RoutingSelfAttention(SelfAttention):
    """Mixer of local heads and routed heads (Roy et al. 2020, "... with Routing Transformers").

        q, k, v = x Wq, x Wk, x Wv
        y = [sliding_window_attention(q_l, k_l, v_l), routing_attention(q_r, k_r, v_r)] Wo

    The first heads l are local, and the other heads r are routed. By default half of the heads are
    local, as in the paper.

    Each routed head has C centroids, drawn at construction. Centroids have the variable type
    `Centroids`, not `nnx.Param`, and get no gradient from attention: call `update_centroids`
    between training steps, or `Transformer.update_centroids` for all layers of a model. Unlike in
    the paper, causal heads have separate queries and keys.

    Args:
      num_clusters: C, clusters per routed head; in a bidirectional mixer at most the input length.
      cluster_size: w, tokens per cluster; limited to the input length.
      num_local_heads: number of local query heads, a multiple of N / K; default N / 2, rounded
        down to a multiple of N / K.
      local_window_size: number of earlier tokens that local heads attend to; in a bidirectional
        mixer the same number of later tokens too.
      rngs: random streams for parameter initialisation. The centroids are drawn from the stream
        `centroids` if there is one, otherwise from the default stream.
      **options: as in `SelfAttention`, and options of `effattn.routing_attention`: `scale`,
        `precision`, `tile`, `implementation`.

    Raises:
      ValueError: as `SelfAttention`; also for an unsuitable `num_local_heads`; in calls of a
        bidirectional mixer, for fewer tokens than clusters.
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
        **options: SelfAttentionOptions,
    ):
        advice = "it draws num_clusters centroids a head, and update_centroids moves them"
        refuse(type(self), options, ("centroids",), advice)
        super().__init__(in_features, num_heads, "routing", rngs=rngs, **options)
        group = self.num_heads // self.num_kv_heads
        if num_local_heads is None:
            num_local_heads = self.num_heads // 2 // group * group
        self.num_local_heads = checks.at_least("num_local_heads", num_local_heads, 0, "heads")
        if num_local_heads % group or num_local_heads >= num_heads:
            raise ValueError(
                f"num_local_heads must be less than num_heads {num_heads}, and a multiple of "
                f"{group}, the number of query heads of a key head, got {num_local_heads}"
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
        """Moves each centroid towards the mean of its nearest vectors: a step of online k-means.

            m_c <- sphere(decay m_c + (1 - decay) mean_{t in c} u_t)

        The vectors u are the normalised queries and keys of all tokens in the batch. In a causal
        module, u is the mean of a token's query and key, which share a cluster. A centroid without
        nearest vectors does not change. Earlier decode states become invalid.

        Call this method between training steps, with the mixer's input. Under compilation use
        `nnx.jit`, or `nnx.split` and `nnx.merge`, as for any update of a Variable.

        Args:
          x: `(B, T, D)`.
          lengths: as in `__call__`; padding does not contribute.
          segment_ids: as in `__call__`.
          decay: decay of the moving average, in [0, 1].
          axis_name: one or several axis names of `jax.shard_map` or `jax.vmap` that divide the
            batch; means are then taken over these axes, so that all shards get equal centroids.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number in [0, 1], got {decay!r}")
        x, positions, given = self._whole(x, lengths, segment_ids)
        query, key, value = self._heads(x, positions)
        query, key, value = self._sides(query, key, value)[1]
        tokens = Tokens.of(query, key, value)
        present = segments.valid(
            given.get("query_seq_lengths"), given.get("segment_ids"), x.shape[1]
        )
        present = jnp.ones(x.shape[:2], bool) if present is None else present
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
        """Number of local key heads."""
        return self.num_local_heads * self.num_kv_heads // self.num_heads

    def _sides(self, query, key, value) -> tuple[Any, Any]:
        """(query, key, value) of the local heads, and of the routed heads."""
        keys = self.num_local_kv_heads
        parts = (query, self.num_local_heads), (key, keys), (value, keys)
        return tuple(x[:, :, :n] for x, n in parts), tuple(x[:, :, n:] for x, n in parts)

    def _attend(self, heads, **keywords):
        local, routed = self._sides(*heads)
        checks.known_length("routing attention", routed[0])
        most = sequence_parts.all_tokens(routed[0].shape[1])
        size = min(self.cluster_size, max(most, 1))
        out = attend_in_parts(routing_attention, routed, {**keywords, "cluster_size": size})
        if not self.num_local_heads:
            return out
        keywords = {k: x for k, x in keywords.items() if k not in ("centroids", "cluster_size")}
        window = {"local_window_size": self._window()}
        near = attend_in_parts(sliding_window_attention, local, {**keywords, **window})
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
    """Decoder of a mixer with local and routed heads."""

    mixer: RoutingSelfAttention
    local: RingDecoder
    routed: RoutingDecoder

    def init(self, batch, max_length, num_kv_heads, *of_heads) -> HybridState:
        """Returns the empty decode state of local and routed heads."""
        near = self.mixer.num_local_kv_heads
        groups = (
            self.local.init(batch, max_length, near, *of_heads),
            self.routed.init(batch, max_length, num_kv_heads - near, *of_heads),
        )
        return HybridState(groups, jnp.zeros((batch,), jnp.int32))

    def extend(self, query, key, value, state: HybridState, lengths=None):
        """Extends local and routed heads, and concatenates the outputs along the head axis."""
        check_state(state, HybridState, query.shape[0])
        lengths = new_lengths(lengths, *query.shape[:2])
        (q, k, v), (query, key, value) = self.mixer._sides(query, key, value)
        of_local, of_routed = state.groups
        near, of_local = self.local.extend(q, k, v, of_local, lengths)
        far, of_routed = self.routed.extend(query, key, value, of_routed, lengths)
        out = jnp.concatenate([near, far], -2)
        return out, HybridState((of_local, of_routed), state.length + lengths)


def routing_mixers(mixer: Any, x: jax.Array) -> Iterator[tuple[RoutingSelfAttention, jax.Array]]:
    """Yields every `RoutingSelfAttention` in a mixer, with its input tokens."""
    if isinstance(mixer, RoutingSelfAttention):
        yield mixer, x
    elif hasattr(mixer, "parts"):
        for part, read in mixer.parts(x):
            yield from routing_mixers(part, read)


def _on_sphere(x: jax.Array) -> jax.Array:
    """Scales vectors to the norm sqrt(H), the norm of a normalised token."""
    norm = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))
    return x / jnp.maximum(norm, 1e-6)
