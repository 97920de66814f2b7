"""Causal self-attention to the current block and to projections of complete blocks."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import SelfAttention

SHARING = ("none", "heads", "key_value")


class BlockLinformerSelfAttention(SelfAttention):
    """Causal variant of Linformer: attention to the current block and to projected earlier blocks.

        q, k, v = x Wq, x Wk, x Wv;   y = block_linformer_attention(q, k, v, E, F) Wo

    E and F, `(r, b)`, project each complete block of b = `block_size` tokens to r = `num_projected`
    slots. `sharing` selects how heads share these parameters:

        none          E and F for each key head
        heads         E and F for all heads
        key_value     E = F for all heads

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      block_size: b, tokens per block.
      num_projected: r, slots per block, at most b.
      sharing: see above.
      param_dtype: dtype of the parameters.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `rotary`, ...) and options
        of `effattn.block_linformer_attention`.

    Raises:
      ValueError: as `SelfAttention`; also for inconsistent sizes.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        block_size: int = 64,
        num_projected: int = 8,
        sharing: str = "heads",
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        given = sorted({"key_projection", "value_projection"} & options.keys())
        if given:
            raise ValueError(
                f"BlockLinformerSelfAttention has no option {', '.join(given)}; it makes them, as "
                "block_size, num_projected and sharing say"
            )
        super().__init__(
            in_features,
            num_heads,
            "block_linformer",
            param_dtype=param_dtype,
            rngs=rngs,
            **options,
        )
        self.block_size = checks.at_least("block_size", block_size, 1, "tokens")
        self.num_projected = checks.at_least("num_projected", num_projected, 1, "slots")
        if num_projected > block_size:
            raise ValueError(
                f"num_projected must be at most block_size {block_size}, got {num_projected}"
            )
        if sharing not in SHARING:
            raise ValueError(f"sharing must be one of {', '.join(SHARING)}, got {sharing!r}")
        heads = (self.num_kv_heads,) if sharing == "none" else ()
        # Initially a slot has the variance of a token.
        draw = nnx.initializers.normal(self.block_size**-0.5)

        def make() -> nnx.Param:
            shape = (*heads, self.num_projected, self.block_size)
            return nnx.Param(draw(rngs.params(), shape, param_dtype))

        self.key_projection = make()
        self.value_projection = None if sharing == "key_value" else make()

    def _options(self) -> dict[str, Any]:
        of_keys = of_values = self.key_projection[...]
        if self.value_projection is not None:
            of_values = self.value_projection[...]
        dtype = self.param_dtype if self.dtype is None else self.dtype
        return {
            **super()._options(),
            "key_projection": of_keys.astype(dtype),
            "value_projection": of_values.astype(dtype),
        }
