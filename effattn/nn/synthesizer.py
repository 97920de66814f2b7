"""The layers of the Synthesizer: logits of tokens alone, of positions alone, or of neither alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import _checks
from effattn.functional.softmax import dot_product_attention
from effattn.functional.synthesizer import synthesizer_attention
from effattn.nn import initializers
from effattn.nn.attention import default_head_dim
from effattn.nn.cached import CachedMixer
from effattn.segments import positions_from_segment_ids


class _Synthesizer(CachedMixer):
    """What all have: y = softmax(logits) (x W_v) W_o, each head by itself.

    Args:
      in_features: D, the size of a token.
      num_heads: N.
      max_length: L, positions that there are parameters for, the most tokens of a row; packed
        documents count from their own start.
      head_dim: H, of the values; default D / N.
      is_causal: a token sees those up to itself.
      dropout_rate: only 0.
      dtype: of the computation; default that of the input and the parameters together.
      param_dtype: of the parameters.
      kernel_init: of the projections.
      out_kernel_init: of the output projection; default `kernel_init`.
      rngs: for the initial parameters.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        mechanism: str,
        *,
        max_length: int,
        head_dim: int | None = None,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            mechanism,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        if head_dim is None:
            head_dim = default_head_dim(in_features, num_heads)
        self.num_heads = _checks.at_least("num_heads", num_heads, 1, "heads")
        self.head_dim = _checks.at_least("head_dim", head_dim, 1, "features")
        self.max_length = _checks.at_least("max_length", max_length, 1, "tokens")
        self.kernel_init = kernel_init
        self.value = self._heads(self.head_dim, rngs)
        self.out = nnx.LinearGeneral(
            (num_heads, self.head_dim),
            in_features,
            axis=(-2, -1),
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            rngs=rngs,
        )

    def _heads(self, size: int, rngs: nnx.Rngs, use_bias: bool = False) -> nnx.LinearGeneral:
        return nnx.LinearGeneral(
            self.in_features,
            (self.num_heads, size),
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            rngs=rngs,
        )

    def _table(self, size: int, rngs: nnx.Rngs) -> nnx.Param:
        """A row of each head for every position, `(L, N, A)`."""
        shape = (self.max_length, self.num_heads, size)
        init = nnx.initializers.normal(size**-0.5)
        return nnx.Param(init(rngs.params(), shape, self.param_dtype))

    def _attend(
        self, value: jax.Array, tokens: Any, own: Any, places: tuple[Any, Any], options: Any
    ) -> jax.Array:
        """`(B, T, N, H)`, of values `(B, S, N, H)` and what tokens left for others and themselves.

        `places` are the positions of queries and of keys, `(T,)` or `(B, T)`, from the start of
        their document. `options` are those of attention.
        """
        raise NotImplementedError

    def _mix_all(self, x, lengths, segment_ids):
        time = x.shape[1]
        if time > self.max_length:
            raise ValueError(
                f"x has {time} tokens, and there are parameters for max_length={self.max_length}"
            )
        places = jnp.arange(time)
        if segment_ids is not None:
            places = positions_from_segment_ids(jnp.asarray(segment_ids))
        options = {
            "query_seq_lengths": lengths,
            "key_value_seq_lengths": lengths,
            "segment_ids": segment_ids,
        }
        (value, *tokens), own = self._prepare(x)
        return self.out(self._attend(value, tokens, own, (places, places), options))

    def _mix_at(self, tokens, own, positions):
        value, *tokens = tokens
        if value.shape[1] > self.max_length:
            raise ValueError(
                f"the state holds {value.shape[1]} tokens, and there are parameters for "
                f"max_length={self.max_length}"
            )
        places = positions, jnp.arange(value.shape[1])
        options = {"query_offset": positions[:, 0]}
        return self.out(self._attend(value, tokens, own, places, options))


def _rows(table: Any, places: jax.Array, dtype: Any) -> jax.Array:
    """The rows at some positions, `(T, N, A)` or `(B, T, N, A)`."""
    return jnp.take(table[...].astype(dtype), places, 0, mode="clip")


class DenseSynthesizer(_Synthesizer):
    __doc__ = f"""A dense Synthesizer (Tay et al. 2020, "Synthesizer", section 3.1).

        y_t = softmax_s(relu(x_t W_1 + b) . r_s) (x_s W_v) W_o

    Each token makes its logits by itself, by a layer of A hidden numbers a head; r_s is a learned
    row for each position, together the paper's W_2. See `effattn.synthesizer_attention`.
    {(_Synthesizer.__doc__ or "").partition("itself.")[2].rstrip()}
      hidden_features: A; default H.

    Raises:
      ValueError: sizes that do not fit, something asked of it that it cannot do, and in calls more
        tokens than `max_length`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        hidden_features: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(in_features, num_heads, "synthesizer", rngs=rngs, **options)
        size = self.head_dim if hidden_features is None else hidden_features
        size = _checks.at_least("hidden_features", size, 1, "features")
        self.hidden = self._heads(size, rngs, use_bias=True)
        self.table = self._table(size, rngs)

    def _prepare(self, x):
        return (self.value(x),), jax.nn.relu(self.hidden(x))

    def _attend(self, value, tokens, own, places, options):
        table = _rows(self.table, places[1], own.dtype)
        return synthesizer_attention(own, table, value, is_causal=self.is_causal, **options)
