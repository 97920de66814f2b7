"""sLSTM mixer of the xLSTM."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks
from effattn.nn import initializers
from effattn.nn.cell import CellMixer
from effattn.nn.layers import Layers
from effattn.nn.mlstm import FORGET_GATES
from effattn.nn.options import Mixing


class SLSTMCell(nnx.Module):
    """Cell of `SLSTM`: gates z, i, f and o, in this order, with a state (c, n, h, m).

    `input` is the matrix W `(D, 4 D)`, `recurrent` the blocks R `(4, N, H, H)`, `bias` is `(4, D)`.
    """

    def __init__(self, features: int, num_heads: int, forget_gate: str, make: Layers):
        self.num_heads, self.forget_gate = num_heads, forget_gate
        size, self.dtype = features // num_heads, make.numbers["dtype"]
        self.input = make.linear(features, 4 * features)
        self.recurrent = make.constant(np.zeros((4, num_heads, size, size)))
        bias = np.zeros((4, num_heads, size))
        bias[2] = np.linspace(3, 6, size)
        self.bias = make.constant(bias.reshape(4, features))

    def step_of(self, dtype: Any) -> Callable[..., Any]:
        """Returns the function from a carry and x_t W, `(B, 4 D)`, to the next carry and h."""
        R, bias = self.recurrent[...], self.bias[...]
        gates, heads, size = R.shape[:3]
        dtype = jnp.promote_types(dtype, R.dtype) if self.dtype is None else self.dtype
        # One product a head for all gates. The order of axes is changed before the loop.
        R = jnp.transpose(R.astype(dtype), (1, 2, 0, 3)).reshape(heads, size, gates * size)

        def step(carry, token):
            c, n, h, m = carry
            wide, rows = c.dtype, len(token)
            of_heads = h.astype(dtype).reshape(rows, heads, size)
            of_state = jnp.einsum("bnh,nhk->bnk", of_heads, R).reshape(rows, heads, gates, size)
            of_state = jnp.swapaxes(of_state, 1, 2).reshape(rows, *bias.shape)
            of_token = token.reshape(of_state.shape).astype(wide) + bias.astype(wide)[None]
            z, log_write, forget, o = jnp.moveaxis(of_token + of_state.astype(wide), 1, 0)
            log_forget = jax.nn.log_sigmoid(forget) if self.forget_gate == "sigmoid" else forget
            kept = log_forget + lax.stop_gradient(m)
            # Before the first token there is nothing to keep, whatever the gate.
            m = jnp.maximum(jnp.where(n > 0, kept, log_write), log_write)
            m = lax.stop_gradient(m)
            written = jnp.exp(log_write - m)
            kept = jnp.where(n > 0, jnp.exp(jnp.where(n > 0, kept - m, 0)), 0)
            c, n = kept * c + written * jnp.tanh(z), kept * n + written
            h = jax.nn.sigmoid(o) * c / n
            return (c, n, h, m), h

        return step


class SLSTM(CellMixer):
    """Scalar memory of the xLSTM (Beck et al. 2024, "xLSTM"), with exponential gates.

        z = tanh(x_t W + h_(t-1) R + b);   i = exp(x_t W + h_(t-1) R + b)
        f, o = sigmoid(x_t W + h_(t-1) R + b)
        c_t = f c_(t-1) + i z;   n_t = f n_(t-1) + i;   h_t = o c_t / n_t;   y_t = norm(h_t)

    Each of z, i, f and o has separate W, R and b. R is block-diagonal, one block for each head, and
    `norm` is a layer norm of each head with a learned scale. The sums are stored divided by
    exp(m_t), m_t = max(log f + m_(t-1), log i), and so do not overflow. Time is O(T D^2),
    sequential over tokens; the decode state has 4 D numbers per row.

    With `is_causal=False` a second recurrence reads each row, or each packed document, from its
    end, and the output is `[y_t, y'_t] W_out`.

    Args:
      num_heads: N, number of blocks of R, a divisor of D.
      forget_gate: activation of the forget gate, "sigmoid" or "exp".
      kernel_init: initializer of W and W_out. R starts at zero, and the biases of the forget gates
        between 3 and 6.
      **options: see `effattn.nn.options.Mixing`.
    """

    _mechanism = "slstm"

    def __init__(
        self,
        in_features: int,
        num_heads: int = 1,
        *,
        forget_gate: str = "sigmoid",
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[Mixing],
    ):
        if forget_gate not in FORGET_GATES:
            raise ValueError(
                f"forget_gate must be one of {', '.join(FORGET_GATES)}, got {forget_gate!r}"
            )
        checks.at_least("num_heads", num_heads, 1, "heads")
        if checks.at_least("in_features", in_features, 1, "features") % num_heads:
            raise ValueError(
                f"in_features ({in_features}) must be a multiple of num_heads ({num_heads})"
            )
        size = in_features // num_heads
        self.num_heads, self.forget_gate = num_heads, forget_gate
        super().__init__(in_features, kernel_init=kernel_init, **options)
        self.norm = Layers(**options).layer_norm(size, use_bias=False)

    def _make_cell(self, kernel_init, options):
        make = Layers(kernel_init=kernel_init, **options)
        return SLSTMCell(self.in_features, self.num_heads, self.forget_gate, make)

    def _scan(self, cell, x, state, lengths, segment_ids, *, reverse=False):
        h, state = super()._scan(cell, x, state, lengths, segment_ids, reverse=reverse)
        heads = h.reshape(*h.shape[:2], self.num_heads, h.shape[2] // self.num_heads)
        return self.norm(heads).reshape(h.shape), state

    def _project(self, cell, x):
        return cell.input(x)

    def _step_of(self, cell, dtype):
        return cell.step_of(dtype)

    def _carry(self, batch, dtype):
        return (jnp.zeros((batch, self.in_features), dtype),) * 4
