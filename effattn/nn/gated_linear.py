"""Mixer with gated linear attention."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.nn import initializers
from effattn.nn.attention import SelfAttention
from effattn.nn.heads import default_head_dim


class GatedLinearAttention(SelfAttention):
    """Mixer with gated linear attention (Yang et al. 2023).

        q, k, v = x Wq, x Wk, x Wv;   log alpha = log sigmoid((x W1) W2 + b) / temperature
        y = (silu(x Wr + br) * norm(gated_linear_attention(q, k, v, log alpha))) Wo

    The decay projection has rank `gate_rank`. `norm` is an RMS norm of each head with a learned
    scale, as in the authors' code; the paper uses a layer norm.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of heads.
      head_dim: H, head dimension of queries and keys; default D / (2 N), as in the paper.
      value_dim: Hv, head dimension of values; default `head_dim` if given, otherwise D / N.
      gate_rank: rank of the decay projection, the size between W1 and W2.
      temperature: a larger temperature gives slower initial decay.
      kernel_init: initializer of the projections.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `dtype`, ...) and options
        of `effattn.gated_linear_attention`.

    Raises:
      ValueError: as `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        temperature: float = 16.0,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if "log_decay" in options:
            raise ValueError(
                "GatedLinearAttention has no option log_decay; it makes the decays of each token"
            )
        rank = checks.at_least("gate_rank", gate_rank, 1, "features")
        temperature = checks.positive("temperature", temperature)
        if head_dim is None:
            share = default_head_dim(in_features, num_heads)
            head_dim, value_dim = max(share // 2, 1), share if value_dim is None else value_dim
        super().__init__(
            in_features,
            num_heads,
            "gated_linear",
            head_dim=head_dim,
            value_dim=value_dim,
            kernel_init=kernel_init,
            rngs=rngs,
            **options,
        )
        self.temperature = float(temperature)
        common = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "kernel_init": kernel_init,
            "rngs": rngs,
        }
        self.decay_in = nnx.Linear(in_features, rank, use_bias=False, **common)
        self.decay_out = nnx.LinearGeneral(rank, (self.num_kv_heads, self.head_dim), **common)
        self.gate = nnx.LinearGeneral(in_features, (num_heads, self.value_dim), **common)
        self.norm = nnx.RMSNorm(
            self.value_dim, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs
        )

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        logits = self.decay_out(self.decay_in(x))
        # At least float32, since log decays are summed over many tokens.
        logits = logits.astype(dtypes.wide(logits.dtype))
        return {"log_decay": jax.nn.log_sigmoid(logits) / self.temperature}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.silu(self.gate(x)) * self.norm(out))
