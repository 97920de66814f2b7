"""Mixer with attention over one half of the features and convolution over the other half."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from effattn.decode.state import new_lengths
from effattn.nn.build import Mechanism, mechanism, named
from effattn.nn.hybrid import HybridState
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected


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
      attention: the attention mechanism: a registered name, a callable, or a mapping of a `"name"`
        and options; see `effattn.nn.build`.
      width: W, width of the convolution, in tokens.
      max_length: maximum number of tokens per row, for mechanisms with parameters per position.
      **options: those of `effattn.nn.options.Projected`, and options of the attention mixer, such
        as `rotary` and `num_kv_heads`.
    """

    _mechanism = "convolution_attention"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        attention: Mechanism = "softmax",
        width: int = 7,
        max_length: int | None = None,
        **options: Annotated[Any, Projected],
    ):
        super().__init__(in_features, **options)
        if in_features % 2:
            raise ValueError(f"in_features must be even, for two equal parts, got {in_features}")
        name, own = named("attention", attention)
        entry, half, make = mechanism(name), in_features // 2, Layers(**options)
        common = {
            **options,
            "is_causal": self.is_causal,
            "max_length": max_length,
            "out_kernel_init": make.out_kernel_init,
        }
        common = {**entry.options_of_model(common), **own}
        self.attention = entry.build(half, num_heads, **common)
        self.project = make.linear(half, 2 * half)
        self.convolution = make.convolution(half, width, activation=None)
        self.out = make.out(half, half)

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

    def _extend(self, x, state, lengths):
        far, near = jnp.split(x, 2, -1)
        far, attended = self.attention.extend(far, state.groups[0], lengths=lengths)
        near, last = self.convolution.extend(
            jax.nn.glu(self.project(near)), state.groups[1], lengths
        )
        more = new_lengths(lengths, *x.shape[:2])
        y = jnp.concatenate([far, self.out(near)], -1)
        return y, HybridState((attended, last), state.length + more)
