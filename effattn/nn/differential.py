"""Differential self-attention module: lambda and the norm of the heads."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.rotary import check_rotary
from effattn.nn.self_attention import SelfAttention


class DifferentialSelfAttention(SelfAttention):
    """Mixer with differential attention (Ye et al. 2024).

        q, k, v = x Wq, x Wk, x Wv
        lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init
        y = ((1 - lambda_init) norm(differential_attention(q, k, v, lambda))) Wo

    The vectors lq1, lk1, lq2 and lk2 `(H / 2,)` are shared by all heads. `norm` is an RMS norm of
    each head, with a learned scale that the heads share. A rotary embedding rotates each half of
    a head by itself, and `qk_norm` normalises both halves together.

    Args:
      lambda_init: initial value of lambda, 0 or more and below 1. Models pass the paper's value for
        each layer l from 0, 0.8 - 0.6 exp(-0.3 l).
      **options: as in `SelfAttention`, with an even `head_dim`, and options of
        `effattn.differential_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        lambda_init: float = 0.8,
        **options: SelfAttentionOptions,
    ):
        refuse(type(self), options, ("lambda_",), "it learns lambda, from lambda_init")
        lambda_init = checks.share("lambda_init", lambda_init)
        super().__init__(in_features, num_heads, "differential", **options)
        parts = 2 if self.rotary is None else 4
        if self.head_dim % parts:
            raise ValueError(
                f"head_dim must be a multiple of {parts} in {type(self).__name__}, two halves"
                f"{'' if self.rotary is None else ' of an even size for rotary'}, got "
                f"{self.head_dim}; give another head_dim or num_heads"
            )
        half = self.head_dim // 2
        check_rotary(self.rotary, **{"head_dim / 2": half})
        self.lambda_init = lambda_init
        make, init = Layers(**options), nnx.initializers.normal(0.1)
        self.lambda_q1, self.lambda_k1 = make.drawn(init, half), make.drawn(init, half)
        self.lambda_q2, self.lambda_k2 = make.drawn(init, half), make.drawn(init, half)
        self.norm = make.rms_norm(self.value_dim)

    def _options(self) -> dict[str, Any]:
        def exponential(query, key):
            query, key = query[...], key[...]
            wide = dtypes.wide(query, key)
            return jnp.exp(query.astype(wide) @ key.astype(wide))

        first = exponential(self.lambda_q1, self.lambda_k1)
        second = exponential(self.lambda_q2, self.lambda_k2)
        return {**super()._options(), "lambda_": first - second + self.lambda_init}

    def _rotated(
        self, query: jax.Array, key: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        rotate = super()._rotated
        halves = zip(jnp.split(query, 2, -1), jnp.split(key, 2, -1), strict=True)
        (q1, k1), (q2, k2) = (rotate(*half, positions) for half in halves)
        return jnp.concatenate([q1, q2], -1), jnp.concatenate([k1, k2], -1)

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out((1 - self.lambda_init) * self.norm(out))
