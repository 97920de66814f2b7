"""Mixer with native sparse attention, its compression networks and gates."""

from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.cores.native_sparse import Settings
from effattn.nn import activations
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class NativeSparseSelfAttention(SelfAttention):
    """Mixer with native sparse attention (Yuan et al. 2025, "Native Sparse Attention").

        q, k, v = x Wq, x Wk, x Wv;   g = sigmoid(x Wg + bg)
        y = native_sparse_attention(q, k, v, gates=g, compress=phi) Wo
        phi(block) = gelu_tanh(vec(block + P) W1 + b1) W2 + b2

    phi compresses the l tokens of a block of one key head to one vector. P, `(l, H)`, is learned
    for the places in the block. There is one phi for keys and one for values, shared by all key
    heads. g has three gates for each token and head; bg starts at 0. The paper projects keys and
    values for each branch; here, all branches read the same k and v.

    Args:
      compression_size: l, tokens in a compressed block.
      compression_features: features of the hidden layer of phi; default 2 H.
      **options: as in `SelfAttention`, and options of `effattn.native_sparse_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        compression_size: int = 32,
        compression_features: int | None = None,
        **options: SelfAttentionOptions,
    ):
        advice = "it learns the gates and the compression"
        refuse(type(self), options, ("gates", "compress"), advice)
        options = {**options, "compression_size": compression_size}
        super().__init__(in_features, num_heads, "native_sparse", **options)
        Settings.among(options)
        hidden = 2 * self.head_dim if compression_features is None else compression_features
        hidden = checks.at_least("compression_features", hidden, 1, "features")
        make = Layers(**options)
        self.gates = make.heads(in_features, (num_heads, 3), use_bias=True)

        def network(size: int) -> nnx.Dict:
            return nnx.Dict(
                {
                    "places": make.drawn(nnx.initializers.normal(0.02), compression_size, size),
                    "up": make.linear(compression_size * size, hidden, use_bias=True),
                    "down": make.linear(hidden, size, use_bias=True),
                }
            )

        self.key_compression = network(self.head_dim)
        self.value_compression = network(self.value_dim)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"gates": jax.nn.sigmoid(self.gates(x))}

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "compress": self._compress}

    def _compress(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _applied(self.key_compression, keys), _applied(self.value_compression, values)


def _applied(network: nnx.Dict, blocks: jax.Array) -> jax.Array:
    """phi of blocks `(..., l, H)`: `(..., H)`."""
    places = network["places"][...]
    placed = blocks + places.reshape(*(1,) * (blocks.ndim - 2), *places.shape).astype(blocks.dtype)
    flat = placed.reshape(*blocks.shape[:-2], places.size)
    return network["down"](activations.gelu_tanh(network["up"](flat)))
