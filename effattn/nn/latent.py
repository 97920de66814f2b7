"""Mixer with multi-head latent attention, which caches a latent and a rotary key per token."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.cores import sequence_parts
from effattn.functional.softmax import dot_product_attention
from effattn.nn.cached import CachedMixer
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.rotary import RotaryEmbedding, check_rotary
from effattn.nn.tokens import padding_of
from effattn.parallel.heads import attend_in_parts

_ROTARY = RotaryEmbedding()


class LatentAttention(CachedMixer):
    """Mixer with multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2").

        c = norm(x Wc);   s = rotary(x Ws)
        q = x Wq, or norm(x Wr) Wq;   q_n = [q'_n, rotary(q''_n)]
        k_n = [c Wk_n, s];   v_n = c Wv_n
        y = dot_product_attention(q, k, v) Wo

    The keys and values of all heads are computed from one latent c, r numbers per token. The heads
    share the rotary part s of their keys, R numbers per token. A call on whole sequences expands
    the latent to keys and values. The norms are RMS norms.

    The decode state caches c and s alone, r + R numbers per token. Decoding applies Wk_n to the
    queries and Wv_n to the outputs, so that all heads attend to the latents themselves, as in
    attention with one key head. A step costs O(S N (2 r + R)) for S tokens so far.

    Args:
      head_dim: H, features of a query or key head without the rotary part; default D / N.
      value_dim: Hv, features of a value head; default H.
      rotary_dim: R, an even number; default H / 2 as in the paper, rounded to an even number.
      kv_rank: r, at most D; default 4 H as in the paper, or D if that is less.
      query_rank: size of a latent of the queries, at most D; default None, no such latent.
      rotary: rotary position embedding of the parts of R features; default `RotaryEmbedding()`.
        With None, nothing is rotated.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: a rank above D, an odd `rotary_dim`, or the errors of `effattn.nn.options`.
    """

    _mechanism = "latent"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rotary_dim: int | None = None,
        kv_rank: int | None = None,
        query_rank: int | None = None,
        rotary: RotaryEmbedding | None = _ROTARY,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.num_heads = num_heads
        self.head_dim = head_size(in_features, num_heads, head_dim)
        value_dim = self.head_dim if value_dim is None else value_dim
        self.value_dim = checks.at_least("value_dim", value_dim, 1, "features")
        rotary_dim = 2 * max(self.head_dim // 4, 1) if rotary_dim is None else rotary_dim
        self.rotary_dim = checks.at_least("rotary_dim", rotary_dim, 2, "features")
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, for pairs of features, got {rotary_dim}")
        kv_rank = min(4 * self.head_dim, in_features) if kv_rank is None else kv_rank
        self.kv_rank = _rank("kv_rank", kv_rank, in_features)
        self.query_rank = (
            None if query_rank is None else _rank("query_rank", query_rank, in_features)
        )
        check_rotary(rotary, rotary_dim=self.rotary_dim)
        self.rotary = rotary
        make = Layers(**options)
        rank = self.query_rank
        self.query_latent = None if rank is None else make.linear(in_features, rank)
        self.query_norm = None if rank is None else make.rms_norm(rank)
        of_query = in_features if rank is None else rank
        self.query = make.heads(of_query, (num_heads, self.head_dim + self.rotary_dim))
        self.latent = make.linear(in_features, self.kv_rank)
        self.latent_norm = make.rms_norm(self.kv_rank)
        self.rotary_key = make.linear(in_features, self.rotary_dim)
        self.key = make.heads(self.kv_rank, (num_heads, self.head_dim))
        self.value = make.heads(self.kv_rank, (num_heads, self.value_dim))
        self.out = make.out((num_heads, self.value_dim), in_features)

    def _prepare(self, x, positions):
        latent = self.latent_norm(self.latent(x))
        shared = self._rotated(self.rotary_key(x)[..., None, :], positions)[..., 0, :]
        of_query = x
        if self.query_latent is not None and self.query_norm is not None:
            of_query = self.query_norm(self.query_latent(x))
        query, apart = jnp.split(self.query(of_query), [self.head_dim], -1)
        return (latent, shared), (query, self._rotated(apart, positions))

    def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return x if self.rotary is None else self.rotary(x, positions)

    @property
    def _scale(self) -> float:
        return (self.head_dim + self.rotary_dim) ** -0.5

    def _mix_all(self, x, lengths, segment_ids):
        batch, time = x.shape[:2]
        padding, _ = padding_of(self.binding, batch, time, lengths, segment_ids)
        positions = sequence_parts.positions(time, padding.get("segment_ids"))
        tokens, query = self._prepare(x, jnp.broadcast_to(positions, (batch, time)))
        latent, shared = tokens
        key = self.key(latent)
        shared = jnp.broadcast_to(shared[..., None, :], (*key.shape[:-1], self.rotary_dim))
        heads = (
            jnp.concatenate(query, -1),
            jnp.concatenate([key, shared], -1),
            self.value(latent),
        )
        options = {"is_causal": self.is_causal, "scale": self._scale, **padding}
        return self.out(attend_in_parts(dot_product_attention, heads, options))

    def _mix_at(self, tokens, own, positions):
        (latent, shared), (query, apart) = tokens, own
        query = self._through("btnh,rnh->btnr", query, self.key)
        out = dot_product_attention(
            jnp.concatenate([query, apart], -1),
            jnp.concatenate([latent, shared], -1)[..., None, :],
            latent[..., None, :],
            is_causal=True,
            query_offset=positions[:, 0],
            scale=self._scale,
        )
        return self.out(self._through("btnr,rnv->btnv", out, self.value))

    def _through(self, form: str, x: jax.Array, layer: Any) -> jax.Array:
        """The product of x and the kernel of a layer, in the computation dtype."""
        kernel = layer.kernel[...]
        dtype = self._computed_in(x, kernel)
        return jnp.einsum(form, x.astype(dtype), kernel.astype(dtype))


def _rank(name: str, rank: int, in_features: int) -> int:
    """Checks the size of a latent."""
    checks.at_least(name, rank, 1, "features")
    if rank > in_features:
        raise ValueError(
            f"{name} must be at most the {in_features} features of a token, got {rank}; a larger "
            "latent compresses nothing"
        )
    return rank
