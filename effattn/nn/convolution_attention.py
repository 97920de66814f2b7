"""Mixer with a convolution beside attention, over other features or over the same ones."""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.decode.state import new_lengths
from effattn.nn.build import Mechanism, mechanism, named
from effattn.nn.hybrid import HybridState
from effattn.nn.inducing_points import InducedSelfAttention
from effattn.nn.latent import LatentAttention
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected

# Mixers whose projection of values reads other vectors than the tokens x.
_VALUES_OF_OTHERS = InducedSelfAttention, LatentAttention


class ConvolutionAttention(CausalMixer):
    """Attention and a convolution of nearby tokens, side by side.

    With `combination="halves"` (Wu et al. 2020, "Lite Transformer", section 4), each takes one half
    of the features, and the halves mix in the following feed-forward layer:

        a, c = split(x, 2)
        y = [attention(a), convolution(glu(c W_in)) W_out]

    With `combination="sum"` (Zhao et al. 2019, "MUSE"), both take all features, and the convolution
    reads the values of the attention, x W_v:

        y = attention(x) + convolution(x W_v) W_out

    The convolution looks back if the mixer is causal, and to both sides if it is bidirectional.
    Attention covers long distances, and the convolution short ones. Time is that of the mechanism
    plus O(T D^2). The decode state is that of the mechanism plus the last W - 1 tokens.

    Args:
      in_features: D, number of features per token; even for `combination="halves"`.
      num_heads: N, number of attention heads.
      attention: the attention mechanism: a registered name, a callable, or a mapping of a `"name"`
        and options; see `effattn.nn.build`.
      width: W, width of the convolution, in tokens.
      combination: "halves" or "sum". A sum needs a mechanism whose mixer has a projection of
        values of the tokens, `value`, such as those of query, key and value.
      max_length: maximum number of tokens per row, for mechanisms with parameters per position.
      **options: those of `effattn.nn.options.Projected`, and options of the attention mixer, such
        as `rotary` and `num_kv_heads`.
    """

    _mechanism = "convolution_attention"
    project: Any  # None for a sum

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        attention: Mechanism = "softmax",
        width: int = 7,
        combination: str = "halves",
        max_length: int | None = None,
        **options: Annotated[Any, Projected],
    ):
        super().__init__(in_features, **options)
        if combination not in ("halves", "sum"):
            raise ValueError(f"combination must be 'halves' or 'sum', got {combination!r}")
        self.combination = combination
        if self._halves and in_features % 2:
            raise ValueError(f"in_features must be even, for two equal parts, got {in_features}")
        name, own = named("attention", attention)
        entry, make = mechanism(name), Layers(**options)
        common = {
            **options,
            "is_causal": self.is_causal,
            "max_length": max_length,
            "out_kernel_init": make.out_kernel_init,
        }
        common = {**entry.options_of_model(common), **own}
        part = in_features // 2 if self._halves else in_features
        self.attention = entry.build(part, num_heads, **common)
        self.project = make.linear(part, 2 * part) if self._halves else None
        convolved = part if self._halves else self._features_of_values(entry.name)
        self.convolution = make.convolution(
            convolved, width, activation=None, is_causal=self.is_causal
        )
        self.out = make.out(convolved, part)

    @property
    def _halves(self) -> bool:
        return self.combination == "halves"

    def _features_of_values(self, name: str) -> int:
        value = getattr(self.attention, "value", None)
        of_others = isinstance(self.attention, _VALUES_OF_OTHERS)
        if of_others or not isinstance(value, nnx.LinearGeneral):
            raise ValueError(
                "combination='sum' needs an attention mixer that projects tokens to values, got "
                f"attention={name!r}, whose {type(self.attention).__name__} does not; give "
                "another mechanism, such as 'softmax', or combination='halves'"
            )
        return math.prod(value.out_features)

    def parts(self, x: jax.Array) -> list[tuple[Any, jax.Array]]:
        """The attention mixer, with its input tokens."""
        return [(self.attention, jnp.split(x, 2, -1)[0] if self._halves else x)]

    def _inputs(self, x):
        """The tokens for the attention, and the input of the convolution."""
        if not self._halves:
            return x, jax.lax.collapse(self.attention.value(x), 2)
        far, near = jnp.split(x, 2, -1)
        return far, jax.nn.glu(self.project(near))

    def _combined(self, far, near):
        return jnp.concatenate([far, near], -1) if self._halves else far + near

    def _mix_all(self, x, lengths, segment_ids):
        given = {"lengths": lengths, "segment_ids": segment_ids}
        far, near = self._inputs(x)
        near = self.out(self.convolution(near, **given))
        return self._combined(self.attention(far, **given), near)

    def _empty(self, batch, max_length, dtype):
        groups = (
            self.attention.init_state(batch, max_length, dtype),
            self.convolution.init_state(batch, dtype),
        )
        return HybridState(groups, jnp.zeros((batch,), jnp.int32))

    def _extend(self, x, state, lengths):
        far, near = self._inputs(x)
        far, attended = self.attention.extend(far, state.groups[0], lengths=lengths)
        near, last = self.convolution.extend(near, state.groups[1], lengths)
        more = new_lengths(lengths, *x.shape[:2])
        y = self._combined(far, self.out(near))
        return y, HybridState((attended, last), state.length + more)
