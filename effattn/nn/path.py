"""Mixer with PaTH attention."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.arrays.dtypes import widen
from effattn.decode.path import PathState
from effattn.nn.attention import refuse
from effattn.nn.delta_rule import unit
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PathMixerState:
    """Decode state of `PathAttention`.

    Attributes:
      inputs: `(B, width - 1, K H)`, last inputs of the short convolution.
      key, value: as in `effattn.decode.path.PathState`.
      length: `(B,)` int32, tokens seen.
    """

    inputs: jax.Array
    key: jax.Array
    value: jax.Array
    length: jax.Array


class PathAttention(SelfAttention):
    """Mixer with PaTH attention (Yang et al. 2025, "PaTH Attention").

        q, k, v = x Wq, x Wk, x Wv;   w = silu(conv((x W1) W2));   beta = 2 sigmoid(x Wb + b)
        y = path_attention(q, k, v, w / |w|, beta) Wo

    `conv` is a short causal convolution of each feature. The transformations give the order of
    tokens, so the paper uses no position embeddings.

    Args:
      rank: features between W1 and W2.
      convolution_width: width of the short convolution, in tokens.
      **options: as in `SelfAttention`, and options of `effattn.path_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        rank: int = 32,
        convolution_width: int = 3,
        **options: SelfAttentionOptions,
    ):
        advice = "it computes the transformations from the tokens"
        refuse(type(self), options, ("reflection", "beta"), advice)
        super().__init__(in_features, num_heads, "path", **options)
        make, of_keys = Layers(**options), (self.num_kv_heads, self.head_dim)
        rank = checks.at_least("rank", rank, 1, "features")
        self.reflection = nnx.Sequential(make.linear(in_features, rank), make.heads(rank, of_keys))
        width = checks.at_least("convolution_width", convolution_width, 1, "tokens")
        self.convolution = make.convolution(of_keys[0] * of_keys[1], width)
        self.strength = make.linear(in_features, self.num_kv_heads, use_bias=True)

    def _heads(self, x, positions, *, lengths=None, segment_ids=None):
        heads = super()._heads(x, positions, lengths=lengths, segment_ids=segment_ids)
        convolved = self.convolution(self._inputs(x), lengths=lengths, segment_ids=segment_ids)
        return *heads, self._unit(convolved)

    def _attend(self, heads, **keywords):
        *heads, reflection = heads
        return super()._attend(tuple(heads), reflection=reflection, **keywords)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"beta": 2 * jax.nn.sigmoid(widen(self.strength(x)))}

    def _arguments_of_token(self, batch: int, dtype: Any) -> dict[str, Any]:
        shape = batch, 1, self.num_kv_heads, self.head_dim
        reflection = jax.ShapeDtypeStruct(shape, dtype)
        return {**super()._arguments_of_token(batch, dtype), "reflection": reflection}

    def _empty(self, batch, max_length, dtype):
        cache = super()._empty(batch, max_length, dtype)
        inputs = self.convolution.init_state(batch, dtype)
        return PathMixerState(inputs, cache.key, cache.value, cache.length)

    def _extend(self, x, state, lengths):
        convolved, inputs = self.convolution.extend(self._inputs(x), state.inputs, lengths)
        heads = super()._heads(x, self._positions(x, state))
        cache = PathState(state.key, state.value, state.length)
        further = {"reflection": self._unit(convolved), **self._per_token(x)}
        out, cache = self._decoder().extend(*heads, cache, lengths, **further)
        return self._finish(out, x), PathMixerState(inputs, cache.key, cache.value, cache.length)

    def _inputs(self, x: jax.Array) -> jax.Array:
        """Inputs of the convolution, heads concatenated."""
        return jax.lax.collapse(self.reflection(x), 2)

    def _unit(self, convolved: jax.Array) -> jax.Array:
        shape = *convolved.shape[:2], self.num_kv_heads, self.head_dim
        return unit(convolved.reshape(shape))
