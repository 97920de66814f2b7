"""Mixer with attention over one half of the features and convolution over the other half."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn import registry
from effattn.decode.state import new_lengths
from effattn.nn import initializers
from effattn.nn.hybrid import HybridState, check_groups
from effattn.nn.mixer import CausalMixer
from effattn.nn.short_convolution import ShortConvolution


class ConvolutionAttention(CausalMixer):
    """Long-short range attention (Wu et al. 2020, "Lite Transformer", section 4).

        a, c = split(x, 2)
        y = [mixer(a), convolution(glu(c W_in)) W_out]

    Attention over one half of the features covers long distances, and the convolution over the
    other half covers short distances. The halves mix in the following feed-forward layer. Time is
    that of the mechanism with D / 2 features plus O(T D^2). The decode state is that of the
    mechanism plus the last W - 1 tokens.

    Args:
      in_features: D, number of features per token; even.
      num_heads: N, number of attention heads.
      attention: registered name of the attention mechanism, or a mapping of a `"name"` and
        options.
      width: W, width of the convolution, in tokens.
      max_length: maximum number of tokens per row, for mechanisms with parameters per position.
      is_causal: must be True.
      dropout_rate: must be 0.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projections; default `kernel_init`.
      rngs: random streams for parameter initialisation.
      **options: model options for all mixers, such as `rotary` and `num_kv_heads`.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    _state = HybridState

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        attention: str | Mapping[str, Any] = "softmax",
        width: int = 7,
        max_length: int | None = None,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(
            in_features,
            "convolution_attention",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        if in_features % 2:
            raise ValueError(f"in_features must be even, to be halved, got {in_features}")
        given = {"name": attention} if isinstance(attention, str) else attention
        if not isinstance(given, Mapping) or "name" not in given:
            raise ValueError(
                f'attention must be a name, or a mapping with a "name", got {attention!r}'
            )
        half, dtypes = in_features // 2, {"dtype": dtype, "param_dtype": param_dtype}
        out_init = kernel_init if out_kernel_init is None else out_kernel_init
        common = {
            **options,
            **dtypes,
            "is_causal": is_causal,
            "max_length": max_length,
            "kernel_init": kernel_init,
            "out_kernel_init": out_init,
        }
        own = {**given}
        entry = registry.get(own.pop("name"))
        common = {**entry.options_of_model(common), **own}
        self.attention = entry.build(half, num_heads, rngs=rngs, **common)
        self.project = nnx.Linear(
            half, 2 * half, use_bias=False, kernel_init=kernel_init, rngs=rngs, **dtypes
        )
        self.convolution = ShortConvolution(half, width, activation=None, rngs=rngs, **dtypes)
        self.out = nnx.Linear(half, half, use_bias=False, kernel_init=out_init, rngs=rngs, **dtypes)

    def parts(self, x: jax.Array) -> list[tuple[Any, jax.Array]]:
        """The attention mixer, with its input tokens."""
        return [(self.attention, jnp.split(x, 2, -1)[0])]

    def _mix_all(self, x, lengths, segment_ids):
        given = {"lengths": lengths, "segment_ids": segment_ids}
        far, near = jnp.split(x, 2, -1)
        near = self.convolution(jax.nn.glu(self.project(near)), **given)
        return jnp.concatenate([self.attention(far, **given), self.out(near)], -1)

    def _empty(self, batch, max_length, dtype):
        groups = (
            self.attention.init_state(batch, max_length, dtype),
            self.convolution.init_state(batch, dtype),
        )
        return HybridState(groups, jnp.zeros((batch,), jnp.int32))

    def _check_shapes(self, state, batch):
        check_groups(state, 2)

    def _extend(self, x, state, lengths):
        far, near = jnp.split(x, 2, -1)
        far, attended = self.attention.extend(far, state.groups[0], lengths=lengths)
        near, last = self.convolution.extend(
            jax.nn.glu(self.project(near)), state.groups[1], lengths
        )
        more = new_lengths(lengths, *x.shape[:2])
        y = jnp.concatenate([far, self.out(near)], -1)
        return y, HybridState((attended, last), state.length + more)
