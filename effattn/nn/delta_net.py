"""DeltaNet and Gated DeltaNet mixers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import check_state
from effattn.nn import initializers
from effattn.nn.attention import SelfAttention
from effattn.nn.heads import default_head_dim
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
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      convolution_width: width of the short convolutions, in tokens.
      use_bias: whether the projections to and from heads have biases; Wb has no bias.
      kernel_init: initializer of the projections.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `head_dim`, `value_dim`,
        ...) and options of `effattn.delta_rule_attention`. `rotary` and `qk_norm` (not in the
        paper) are applied after the convolutions and before queries and keys get unit length.

    Raises:
      ValueError: as `SelfAttention`.
    """

    _mechanism = "delta_net"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        convolution_width: int = 4,
        use_bias: bool = False,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        made = sorted({"beta", "log_decay"} & options.keys())
        if made:
            raise ValueError(
                f"{type(self).__name__} has no option {', '.join(made)}; it makes them of each "
                "token, as far as it has them"
            )
        super().__init__(
            in_features,
            num_heads,
            self._mechanism,
            use_bias=use_bias,
            kernel_init=kernel_init,
            rngs=rngs,
            **options,
        )
        common: dict[str, Any] = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "rngs": rngs,
        }

        width = checks.at_least("convolution_width", convolution_width, 1, "tokens")

        def convolution(features: int) -> ShortConvolution:
            return ShortConvolution(features, width, **common)

        self.query_convolution = convolution(num_heads * self.head_dim)
        self.key_convolution = convolution(self.num_kv_heads * self.head_dim)
        self.value_convolution = convolution(self.num_kv_heads * self.value_dim)
        self.strength = nnx.Linear(
            in_features, self.num_kv_heads, use_bias=False, kernel_init=kernel_init, **common
        )
        self.norm = nnx.RMSNorm(self.value_dim, epsilon=EPSILON, **common)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences; arguments as in `SelfAttention`. `rngs` is unused."""
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        convolved = [
            convolution(of_tokens, lengths=lengths, segment_ids=segment_ids)
            for convolution, of_tokens in self._inputs(x)
        ]
        heads = self._unit_heads(convolved, positions)
        return self._finish(self.attention(*heads, **keywords, **self._per_token(x)), x)

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> DeltaNetState:
        """Returns the empty decode state, of constant size; arguments as in `SelfAttention`."""
        empty = super().init_state(batch, max_length, dtype)
        query, key, value = (c.init_state(batch, dtype) for c in self._convolutions)
        return DeltaNetState((query, key, value), empty.state, empty.length)

    def _extend(self, x, state, lengths):
        check_state(state, DeltaNetState, x.shape[0])
        x, positions, lengths = self._new(x, state, lengths)
        convolved, inputs = zip(
            *(
                convolution.extend(of_tokens, before, lengths)
                for (convolution, of_tokens), before in zip(
                    self._inputs(x), state.inputs, strict=True
                )
            ),
            strict=True,
        )
        out, after = self._decoder().extend(
            *self._unit_heads(convolved, positions),
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
        if self.rotary is not None and positions is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        return unit(query), unit(key), value

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"beta": jax.nn.sigmoid(_wide(self.strength(x)))}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(self.norm(out))


class GatedDeltaNet(DeltaNet):
    """Mixer with the gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks").

    DeltaNet with decays as in Mamba-2, and an output gate:

        log alpha = -exp(log_rate) * softplus(x Wa + step_bias)
        y = (silu(x Wg) * norm(delta_rule_attention(q / |q|, k / |k|, v, beta, log alpha))) Wo

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      head_dim: H, head dimension of queries and keys; default D / N.
      value_dim: Hv, head dimension of values; default 2 H. With H = 0.75 D / N the layer has 6 D^2
        parameters, as in the paper.
      use_bias: whether the projections to and from heads and the gate projection have biases.
      kernel_init: initializer of the projections.
      rngs: random streams for parameter initialisation.
      **options: as in `DeltaNet`.

    Raises:
      ValueError: as `SelfAttention`.
    """

    _mechanism = "gated_delta_net"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        use_bias: bool = False,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if value_dim is None:
            size = default_head_dim(in_features, num_heads) if head_dim is None else head_dim
            value_dim = 2 * size
        super().__init__(
            in_features,
            num_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            use_bias=use_bias,
            kernel_init=kernel_init,
            rngs=rngs,
            **options,
        )
        common: dict[str, Any] = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "kernel_init": kernel_init,
            "rngs": rngs,
        }
        self.step_size = nnx.Linear(in_features, self.num_kv_heads, use_bias=False, **common)
        self.log_rate = nnx.Param(
            initializers.log_rate_init(rngs.params(), (self.num_kv_heads,), self.param_dtype)
        )
        self.step_bias = nnx.Param(
            initializers.step_bias_init(rngs.params(), (self.num_kv_heads,), self.param_dtype)
        )
        self.gate = nnx.LinearGeneral(
            in_features, (num_heads, self.value_dim), use_bias=use_bias, **common
        )

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        steps = jax.nn.softplus(_wide(self.step_size(x)) + lead(_wide(self.step_bias[...]), 3))
        log_decay = -jnp.exp(lead(_wide(self.log_rate[...]), 3)) * steps
        return {**super()._per_token(x), "log_decay": log_decay}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.silu(self.gate(x)) * self.norm(out))


def unit(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x divided by its Euclidean norm over the last axis, in at least float32; zero stays zero."""
    wide = _wide(x)
    square = jnp.sum(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + epsilon)).astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(dtypes.wide(x.dtype))
