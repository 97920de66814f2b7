"""Base class of mixers with a delta rule."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from effattn.arrays import checks
from effattn.arrays.dtypes import widen
from effattn.decode.recurrent import RecurrentState
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention
from effattn.nn.short_convolution import ShortConvolution

EPSILON = 1e-5  # epsilon of the RMS norm of head outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaRuleState:
    """Decode state of mixers with a delta rule.

    Attributes:
      inputs: last inputs of the short convolutions, heads concatenated: those of queries
        `(B, width - 1, N H)`, keys `(B, width - 1, K H)` and values `(B, width - 1, K Hv)`, then
        those of later steps.
      state: state of the delta rule, `(B, K, H, Hv)`, at least float32.
      length: `(B,)` int32, number of tokens read.
      mechanism: static; name of the mechanism of the mixer that made the state.
    """

    inputs: tuple[jax.Array, ...]
    state: jax.Array
    length: jax.Array
    mechanism: str | None = dataclasses.field(default=None, metadata={"static": True})


class DeltaRule(SelfAttention):
    """Base of mixers with a delta rule: short convolutions, unit queries and keys, and a norm.

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))
        y = norm(delta_rule_attention(q / |q|, k / |k|, v, ...)) Wo

    Subclasses name the mechanism and its gates, and compute the gates in `_per_token`.
    """

    _mechanism: str
    _gates: ClassVar[tuple[str, ...]] = ("beta", "log_decay")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        convolution_width: int = 4,
        **options: SelfAttentionOptions,
    ):
        advice = "it computes the gates of its formula from the tokens"
        refuse(type(self), options, self._gates, advice)
        super().__init__(in_features, num_heads, self._mechanism, **options)
        make, of_keys = Layers(**options), self.num_kv_heads
        width = checks.at_least("convolution_width", convolution_width, 1, "tokens")
        self.query_convolution = make.convolution(num_heads * self.head_dim, width)
        self.key_convolution = make.convolution(of_keys * self.head_dim, width)
        self.value_convolution = make.convolution(of_keys * self.value_dim, width)
        self.norm = make.rms_norm(self.value_dim, epsilon=EPSILON)

    def _heads(self, x, positions, *, lengths=None, segment_ids=None):
        convolved = [
            convolution(of_tokens, lengths=lengths, segment_ids=segment_ids)
            for convolution, of_tokens in self._inputs(x)
        ]
        return self._unit_heads(convolved, positions)

    def _attend(self, heads, **keywords):
        heads, further = self._split(heads)
        return super()._attend(heads, **further, **keywords)

    def _empty(self, batch, max_length, dtype):
        empty = super()._empty(batch, max_length, dtype)
        inputs = tuple(convolution.init_state(batch, dtype) for _, convolution in self._paths())
        return DeltaRuleState(inputs, empty.state, empty.length)

    def _extend(self, x, state, lengths):
        pairs = zip(self._inputs(x), state.inputs, strict=True)
        read = [convolution.extend(new, before, lengths) for (convolution, new), before in pairs]
        convolved, inputs = zip(*read, strict=True)
        heads, further = self._split(self._unit_heads(convolved, self._positions(x, state)))
        before = RecurrentState(state.state, state.length)
        further.update(self._per_token(x))
        out, after = self._decoder().extend(*heads, before, lengths, **further)
        after = dataclasses.replace(state, inputs=inputs, state=after.state, length=after.length)
        return self._finish(out, x), after

    def _paths(self) -> list[tuple[Any, ShortConvolution]]:
        """The projections, each with its convolution: those of queries, keys and values first."""
        return [
            (self.query, self.query_convolution),
            (self.key, self.key_convolution),
            (self.value, self.value_convolution),
        ]

    def _inputs(self, x: jax.Array) -> list[tuple[ShortConvolution, jax.Array]]:
        """The convolutions, each with its input, heads concatenated."""
        projected = ((layer(x), convolution) for layer, convolution in self._paths())
        return [(c, y.reshape(*x.shape[:2], math.prod(y.shape[2:]))) for y, c in projected]

    def _unit_heads(
        self, convolved: Sequence[jax.Array], positions: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """Query and key of unit length, and value; subclasses may add further heads."""
        numbers = self.num_heads, self.num_kv_heads, self.num_kv_heads
        query, key, value = (
            x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
            for x, heads in zip(convolved, numbers, strict=True)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self._rotated(query, key, positions)
        return unit(query), unit(key), value

    def _split(self, heads: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """Query, key and value, and further heads as arguments of the function."""
        return heads, {}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(self.norm(out))


def unit(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x divided by its Euclidean norm over the last axis, in at least float32; zero stays zero."""
    x_wide = widen(x)
    square = jnp.sum(x_wide * x_wide, -1, keepdims=True)
    return (x_wide * jax.lax.rsqrt(square + epsilon)).astype(x.dtype)
