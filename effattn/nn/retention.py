"""Multi-scale retention of RetNet."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.nn import initializers
from effattn.nn.attention import SelfAttention
from effattn.nn.heads import default_head_dim
from effattn.nn.rotary import RotaryEmbedding

_TURN = RotaryEmbedding()


class RetNet(SelfAttention):
    """Mixer with gated multi-scale retention (Sun et al. 2023, "Retentive Network").

        q, k, v = x Wq, x Wk, x Wv;   o = norm(retention(rotary(q), rotary(k), v))
        y = (silu(x Wg) * o) Wo

    Values have twice the head dimension of queries and keys. `norm` is an RMS norm of each head:
    the group norm of the paper without the subtraction of the mean.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of heads; head h has the decay 1 - 2^(-5 - h).
      value_dim: Hv, head dimension of values; default 2 H.
      rotary: rotary position embedding; default `RotaryEmbedding()` for an even head dimension,
        None (no rotation) for an odd head dimension.
      use_bias: whether the five projections have biases.
      kernel_init: initializer of the projections.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `head_dim`, `dtype`, ...)
        and options of `effattn.retention`.

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
        rotary: RotaryEmbedding | None = _TURN,
        use_bias: bool = False,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        size = default_head_dim(in_features, num_heads) if head_dim is None else head_dim
        if value_dim is None:
            value_dim = 2 * checks.at_least("head_dim", size, 1, "features")
        if rotary is _TURN and checks.is_integer(size) and size % 2:
            rotary = None
        super().__init__(
            in_features,
            num_heads,
            "retention",
            head_dim=head_dim,
            value_dim=value_dim,
            rotary=rotary,
            use_bias=use_bias,
            kernel_init=kernel_init,
            rngs=rngs,
            **options,
        )
        self.gate = nnx.LinearGeneral(
            in_features,
            (num_heads, self.value_dim),
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.norm = nnx.RMSNorm(
            self.value_dim,
            use_scale=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.silu(self.gate(x)) * self.norm(out))
