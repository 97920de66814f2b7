"""DeltaNet mixer."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.decode.recurrent import RecurrentState
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention
from effattn.nn.short_convolution import ShortConvolution

EPSILON = 1e-5  # epsilon of the RMS norm of head outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetState:
    """Decode state of `DeltaNet` and `GatedDeltaNet`.

    Attributes:
      inputs: last inputs of the query, key and value convolutions, heads concatenated:
        `(B, width - 1, N H)`, `(B, width - 1, K H)` and `(B, width - 1, K Hv)`.
      state: state of the delta rule, `(B, K, H, Hv)`, at least float32.
      length: `(B,)` int32, number of tokens read.
    """

    inputs: tuple[jax.Array, jax.Array, jax.Array]
    state: jax.Array
    length: jax.Array


class DeltaNet(SelfAttention):
    """Mixer with the delta rule (Yang et al. 2024, "Parallelizing Linear Transformers with ...").

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));   beta = sigmoid(x Wb)
        y = norm(delta_rule_attention(q / |q|, k / |k|, v, beta)) Wo

    `conv` is a short causal convolution of each feature. `norm` is an RMS norm of each head's
    output, with a learned scale.

    Args:
      convolution_width: width of the short convolutions, in tokens.
      allow_negative_eigenvalues: beta = 2 sigmoid(x Wb), up to 2 instead of 1. The transition
        I - beta k k^T then has eigenvalues down to -1, with which the mixer can track states such
        as parity (Grazzi et al. 2025, "Unlocking State-Tracking in Linear RNNs Through Negative
        Eigenvalues").
      **options: as in `SelfAttention` (Wb has no bias), and options of
        `effattn.delta_rule_attention`. `rotary` and `qk_norm` (not in the paper) are applied after
        the convolutions and before queries and keys get unit length.
    """

    _mechanism = "delta_net"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        convolution_width: int = 4,
        allow_negative_eigenvalues: bool = False,
        **options: SelfAttentionOptions,
    ):
        advice = "it computes the gates of its formula from the tokens"
        refuse(type(self), options, ("beta", "log_decay"), advice)
        super().__init__(in_features, num_heads, self._mechanism, **options)
        make, of_keys = Layers(**options), self.num_kv_heads
        width = checks.at_least("convolution_width", convolution_width, 1, "tokens")
        self.query_convolution = make.convolution(num_heads * self.head_dim, width)
        self.key_convolution = make.convolution(of_keys * self.head_dim, width)
        self.value_convolution = make.convolution(of_keys * self.value_dim, width)
        self.strength = make.linear(in_features, of_keys)
        self.max_strength = 2 if allow_negative_eigenvalues else 1
        self.norm = make.rms_norm(self.value_dim, epsilon=EPSILON)

    def _heads(self, x, positions, *, lengths=None, segment_ids=None):
        convolved = [
            convolution(of_tokens, lengths=lengths, segment_ids=segment_ids)
            for convolution, of_tokens in self._inputs(x)
        ]
        return self._unit_heads(convolved, positions)

    def _empty(self, batch, max_length, dtype):
        empty = super()._empty(batch, max_length, dtype)
        query, key, value = (c.init_state(batch, dtype) for c in self._convolutions)
        return DeltaNetState((query, key, value), empty.state, empty.length)

    def _extend(self, x, state, lengths):
        pairs = zip(self._inputs(x), state.inputs, strict=True)
        read = [convolution.extend(new, before, lengths) for (convolution, new), before in pairs]
        convolved, inputs = zip(*read, strict=True)
        out, after = self._decoder().extend(
            *self._unit_heads(convolved, self._positions(x, state)),
            RecurrentState(state.state, state.length),
            lengths,
            **self._per_token(x),
        )
        return self._finish(out, x), DeltaNetState(inputs, after.state, after.length)

    @property
    def _convolutions(self) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
        return self.query_convolution, self.key_convolution, self.value_convolution

    def _inputs(self, x: jax.Array) -> list[tuple[ShortConvolution, jax.Array]]:
        """The convolutions of queries, keys and values, each with its input."""
        projected = (layer(x) for layer in (self.query, self.key, self.value))
        flat = (heads.reshape(*x.shape[:2], math.prod(heads.shape[2:])) for heads in projected)
        return list(zip(self._convolutions, flat, strict=True))

    def _unit_heads(
        self, convolved: Sequence[jax.Array], positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query and key of unit length, and value."""
        numbers = self.num_heads, self.num_kv_heads, self.num_kv_heads
        query, key, value = (
            x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
            for x, heads in zip(convolved, numbers, strict=True)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self._rotated(query, key, positions)
        return unit(query), unit(key), value

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"beta": self.max_strength * jax.nn.sigmoid(wide(self.strength(x)))}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(self.norm(out))


def unit(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x divided by its Euclidean norm over the last axis, in at least float32; zero stays zero."""
    x_wide = wide(x)
    square = jnp.sum(x_wide * x_wide, -1, keepdims=True)
    return (x_wide * jax.lax.rsqrt(square + epsilon)).astype(x.dtype)


def wide(x: jax.Array) -> jax.Array:
    """x in at least float32."""
    return x.astype(dtypes.wide(x.dtype))
