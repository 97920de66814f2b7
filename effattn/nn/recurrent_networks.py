"""LSTM and GRU mixers: Flax cells, scanned over time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import within
from effattn.nn import initializers
from effattn.nn.activations import sigmoid, tanh
from effattn.nn.recurrent import RecurrentMixer


class _CellMixer(RecurrentMixer):
    """Base class of LSTM and GRU: carry, h_t = cell(carry, x_t), with a zero initial carry."""

    _name: str
    _cell: Callable[..., Any]

    def __init__(
        self,
        in_features: int,
        *,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            self._name,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        size = checks.at_least("in_features", in_features, 1, "features")
        self.cell = type(self)._cell(
            size,
            size,
            gate_fn=sigmoid,
            activation_fn=tanh,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            recurrent_kernel_init=initializers.orthogonal_init,
            rngs=rngs,
        )

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        dtype = self._computed_in(x)
        # The cell computes in the dtype of its parameters, which the user may have cast.
        own = jax.tree.leaves(self.cell) if self.dtype is None else ()
        zeros = self._carry(batch, dtypes.wide(dtype, *own))
        start = zeros
        if state is not None:
            start = jax.tree.map(lambda c, z: c.astype(z.dtype), state, zeros)
        new = valid = None
        if segment_ids is not None:
            ids = jnp.asarray(segment_ids)
            begins = jnp.ones_like(ids[:, :1], bool)
            new = jnp.concatenate([begins, ids[:, 1:] != ids[:, :-1]], 1).T
        if lengths is not None:
            valid = within(jnp.asarray(lengths), time).T

        def where(flags, these, those):
            return jax.tree.map(lambda a, b: jnp.where(flags[:, None], a, b), these, those)

        def step(carry, of_token):
            token, new, valid = of_token
            if new is not None:
                carry = where(new, zeros, carry)
            after, y = self.cell(carry, token)
            return (after if valid is None else where(valid, after, carry)), y

        by_time = jnp.moveaxis(x.astype(dtype), 1, 0), new, valid
        carry, y = lax.scan(step, start, by_time)
        return jnp.moveaxis(y, 0, 1).astype(dtype), carry

    def _carry(self, batch, dtype):
        """Zero carry before the first token; `dtype` is at least float32, as in all states."""
        raise NotImplementedError


class LSTM(_CellMixer):
    """One layer of long short-term memory (Hochreiter and Schmidhuber 1997).

        i, f, o = sigmoid(x_t W + h_(t-1) R + b);   g = tanh(x_t W + h_(t-1) R + b)
        c_t = f c_(t-1) + i g;   h_t = o tanh(c_t)

    Each of i, f, o and g has separate W, R and b. The cell is `flax.nnx.OptimizedLSTMCell`, and the
    output equals that of `flax.nnx.RNN`. Time is O(T D^2), sequential over tokens.

    Args:
      in_features: D, number of features per token.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the input matrices W; the recurrent matrices R start orthogonal.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    _name, _cell = "lstm", nnx.OptimizedLSTMCell

    def _carry(self, batch, dtype):
        zeros = jnp.zeros((batch, self.in_features), dtype)
        return zeros, zeros


class GRU(_CellMixer):
    """One layer of gated recurrent units (Cho et al. 2014).

        r, z = sigmoid(x_t W + h_(t-1) R + b)
        n = tanh(x_t W + b + r (h_(t-1) R + b'));   h_t = (1 - z) n + z h_(t-1)

    Each of r, z and n has separate W, R and b. The cell is `flax.nnx.GRUCell`, and the output
    equals that of `flax.nnx.RNN`. Time is O(T D^2), sequential over tokens.

    Args:
      in_features: D, number of features per token.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the input matrices W; the recurrent matrices R start orthogonal.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    _name, _cell = "gru", nnx.GRUCell

    def _carry(self, batch, dtype):
        return jnp.zeros((batch, self.in_features), dtype)
