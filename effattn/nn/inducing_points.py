"""Attention through learned inducing points: the mixer of the Set Transformer, and pooling."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from effattn.arrays import checks, dtypes, mesh_axes, segments
from effattn.arrays.combine import combine
from effattn.cores import attention, sequence_parts
from effattn.decode.state import row_lengths
from effattn.functional.softmax import dot_product_attention
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.mixer import Mixer
from effattn.nn.module import Module
from effattn.nn.options import Dropout, Initializers, Parameters
from effattn.nn.tokens import tokens_of, zero_padding


class Options(Parameters, Initializers, total=False):
    """The shared options of `AttentionPooling`."""


class MixerOptions(Options, Dropout, total=False):
    """The shared options of `InducedSelfAttention`."""


class AttentionPooling(Module):
    """Attention of learned vectors to tokens: from any number of tokens to m vectors.

        a = norm(I + attention(I Wq, x Wk, x Wv) Wo);   h = norm(a + relu(a W1 + b1))

    The rows of I are the learned vectors, and `norm` is a layer norm. This is the pooling of the
    Set Transformer (Lee et al. 2019), `MAB(I, x)`. A Perceiver (Jaegle et al. 2021, "Perceiver:
    General Perception with Iterative Attention") is such a pooling and Transformer layers on its m
    latents. Time O(T m D), memory O((T + m) D).

    Args:
      in_features: D, number of features per token and of each vector.
      num_heads: N.
      num_points: m, number of learned vectors.
      head_dim: H, head dimension; default D / N.
      **options: see `effattn.nn.options.Parameters` and `effattn.nn.options.Initializers`.

    Raises:
      ValueError: sizes below 1, or that do not divide.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_points: int,
        head_dim: int | None = None,
        **options: Unpack[Options],
    ):
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.in_features = in_features
        self.num_points = checks.at_least("num_points", num_points, 1, "points")
        make, heads = Layers(**options), (num_heads, self.head_dim)
        self.query, self.key, self.value = (make.heads(in_features, heads) for _ in range(3))
        self.out = make.out(heads, in_features)
        self.points = make.drawn(nnx.initializers.normal(1.0), num_points, in_features)
        self.norm, self.last_norm = make.layer_norm(in_features), make.layer_norm(in_features)
        self.feed_forward = make.linear(in_features, in_features, use_bias=True)

    def __call__(self, x: jax.Array, *, lengths: jax.Array | None = None) -> jax.Array:
        """Pools tokens.

        Args:
          x: `(B, T, D)`.
          lengths: `(B,)` int, valid tokens of each right-padded row; default T.

        Returns:
          `(B, m, D)`. Without valid tokens, the vectors attend to nothing.
        """
        x = tokens_of("x", x, self.in_features)
        if lengths is not None:
            lengths = row_lengths(lengths, *x.shape[:2])

        def pool(module, x, lengths):
            x = zero_padding(x, segments.valid(lengths, None, x.shape[1]))
            return (module._pooled(x, lengths),)

        rows, *_ = mesh_axes.spec(x)
        (pooled,) = mesh_axes.placed(pool, x, PartitionSpec(rows, None, None))(self, x, lengths)
        return pooled

    def _pooled(self, x: jax.Array, lengths: jax.Array | None) -> jax.Array:
        """Pools tokens x, zeros in the padding; where devices hold parts, those of all devices."""
        parts = sequence_parts.parts_for("InducedSelfAttention", "share_keys")
        dtype = self.query.dtype or dtypes.common(x, self.points[...])
        points = self.points[...].astype(dtype)
        points = jnp.broadcast_to(points, (x.shape[0], *points.shape))
        points, x = mesh_axes.vary_alike((points, x))
        with sequence_parts.alone():
            heads = self.query(points), self.key(x), self.value(x)
            given = attention.check("attention pooling", *heads, key_value_seq_lengths=lengths)
            read, lse = attention.attend(*heads, given)
        if parts is not None:
            read, _ = combine(*(list(lax.all_gather(x, parts.axis_name)) for x in (read, lse)))
        pooled = self.norm(points + self.out(read))
        return self.last_norm(pooled + jax.nn.relu(self.feed_forward(pooled)))


class InducedSelfAttention(Mixer):
    """Bidirectional attention through inducing points, a bottleneck of m learned vectors.

    The induced set attention block of Lee et al. 2019, "Set Transformer": learned vectors I attend
    to all tokens, and each token attends to the m results:

        h = MAB(I, x);   y = attention(x Wq, h Wk, h Wv) Wo

    `MAB` is that of `AttentionPooling`. Tokens have no positions. Time is O(T m D), memory
    O((T + m) D).

    Args:
      in_features: D, number of features per token.
      num_points: m, number of inducing points.
      head_dim: H, head dimension; default D / N.
      is_causal: must be False.
      **options: see `effattn.nn.options.Projected`. There is no dropout.

    Raises:
      ValueError: sizes below 1, or the errors of `effattn.nn.options`.
    """

    _mechanism = "inducing_points"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_points: int = 32,
        head_dim: int | None = None,
        is_causal: bool = False,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(in_features, is_causal=is_causal, **options)
        of_points: Any = {n: x for n, x in options.items() if n in Options.__annotations__}
        self.induced = AttentionPooling(
            in_features, num_heads, num_points=num_points, head_dim=head_dim, **of_points
        )
        make, heads = Layers(**options), (num_heads, self.induced.head_dim)
        self.query, self.key, self.value = (make.heads(in_features, heads) for _ in range(3))
        self.out = make.out(heads, in_features)

    def _mix_all(self, x, lengths, segment_ids):
        points = self.induced._pooled(x, lengths)
        heads = self.query(x), self.key(points), self.value(points)
        with sequence_parts.alone():
            return self.out(dot_product_attention(*heads))
