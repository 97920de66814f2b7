"""Mixer with locality-sensitive hashing (LSH) attention and its random rotations."""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.cores import sequence_parts
from effattn.functional import lsh
from effattn.nn.array_options import own_copy
from effattn.nn.cached import CachedMixer
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.parallel.heads import attend_in_parts


class LSHSelfAttention(CachedMixer):
    """Mixer with locality-sensitive hashing attention (Kitaev et al. 2020, "Reformer").

        y = lsh_attention(rotary(x Wqk), x Wv) Wo

    Queries and keys share one projection; see `effattn.lsh_attention`. The random rotations of each
    head are drawn at construction and are not trained: an `nnx.Variable`, not an `nnx.Param`. A
    sequence may have fewer tokens than buckets. The decode state caches the vectors and buckets of
    all S tokens; a step costs O(S).

    Args:
      head_dim: H, head dimension of queries, keys and values; default D / N.
      num_rounds: n, number of hash rounds.
      num_buckets: b, number of buckets per round, or a tuple of even factors of b.
      chunk_length: m, tokens per chunk.
      rotary: rotary embedding of the shared query-key vectors before hashing, by position in the
        document; called as `rotary(x, positions)`. With None, as in the paper, x must contain
        position embeddings if token order matters.
      **options: see `effattn.nn.options.Projected`. Rotations are drawn from the stream
        `rotations` of `rngs` if there is one, otherwise from the default stream.
    """

    _mechanism = "lsh"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_rounds: int = 4,
        num_buckets: int | tuple[int, ...] = 32,
        chunk_length: int = 64,
        rotary: Callable[..., jax.Array] | None = None,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads = num_heads
        self.num_rounds = checks.at_least("num_rounds", num_rounds, 1)
        self.rotary = own_copy(rotary)
        self.chunk_length = checks.at_least("chunk_length", chunk_length, 1, "tokens")
        self.factors = lsh.factors_of(num_buckets)
        make, heads = Layers(**options), (num_heads, self.head_dim)
        self.query_key = make.heads(in_features, heads)
        self.value = make.heads(in_features, heads)
        self.out = make.out(heads, in_features)
        self.rotations = nnx.Variable(
            lsh.lsh_rotations(
                make.rngs.rotations(),
                self.num_rounds,
                num_buckets,
                self.head_dim,
                num_heads=num_heads,
                dtype=dtypes.wide(make.param_dtype),
            )
        )

    def _prepare(self, x, positions):
        query_key, value = self.query_key(x), self.value(x)
        if self.rotary is not None:
            query_key = self.rotary(query_key, positions)
        buckets = lsh.hashed(query_key, self.rotations[...], self.factors)
        return (query_key, value, buckets), query_key

    def _attend(self, query_key, value, buckets, **padding):
        out, _ = lsh.attend(
            query_key,
            value,
            buckets,
            chunk_length=self.chunk_length,
            is_causal=self.is_causal,
            **padding,
        )
        return out

    def _mix_all(self, x, lengths, segment_ids):
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        positions = sequence_parts.positions(x.shape[1], ids)
        tokens, _ = self._prepare(x, jnp.broadcast_to(positions, x.shape[:2]))
        padding = {"lengths": lengths, "segment_ids": ids}
        return self.out(attend_in_parts(self._attend, tokens, padding))

    def _mix_at(self, tokens, own, positions):
        query_key, value, buckets = tokens
        size = self.chunk_length
        if query_key.shape[1] == 0:
            # A state of capacity zero has no keys.
            return self.out(jnp.zeros((*positions.shape, *value.shape[2:]), value.dtype))
        # Choose the form with fewer pairs; with a symbolic length, the form for whole sequences.
        few = isinstance(positions.shape[1], int)
        if few and positions.shape[1] <= 2 * self.num_rounds * size:
            out = lsh.attend_at(query_key, value, buckets, own, positions, chunk_length=size)
        else:
            at = jnp.minimum(positions, query_key.shape[1] - 1)
            whole = self._attend(query_key, value, buckets)
            out = jnp.take_along_axis(whole, at[..., None, None], 1)
        return self.out(out)
