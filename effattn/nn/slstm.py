"""sLSTM mixer of the xLSTM."""

from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.nn import initializers
from effattn.nn.cell import CellMixer
from effattn.nn.layers import Layers
from effattn.nn.mlstm import FORGET_GATES
from effattn.nn.options import WithCell


class SLSTMCell(nnx.Module):
    """Cell of `SLSTM`: gates z, i, f and o, in this order, with a state (c, n, h, m).

    `input` is the matrix W `(D, 4 D)`, `recurrent` the blocks R `(4, N, H, H)`, `bias` is `(4, D)`.
    """

    def __init__(self, features: int, num_heads: int, make: Layers):
        size = features // num_heads
        self.input = make.linear(features, 4 * features)
        self.recurrent = make.constant(np.zeros((4, num_heads, size, size)))
        bias = np.zeros((4, num_heads, size))
        bias[2] = np.linspace(3, 6, size)
        self.bias = make.constant(bias.reshape(4, features))


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
      **options: see `effattn.nn.options.WithCell`.
    """

    _mechanism = "slstm"

    def __init__(
        self,
        in_features: int,
        num_heads: int = 1,
        *,
        forget_gate: str = "sigmoid",
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[WithCell],
    ):
        checks.one_of("forget_gate", forget_gate, FORGET_GATES)
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
        return SLSTMCell(self.in_features, self.num_heads, make)

    def _scan(self, cell, x, state, lengths, segment_ids, *, reverse=False):
        h, state = super()._scan(cell, x, state, lengths, segment_ids, reverse=reverse)
        heads = h.reshape(*h.shape[:2], self.num_heads, h.shape[2] // self.num_heads)
        return self.norm(heads).reshape(h.shape), state

    @property
    def cell_name(self) -> str:
        """Name of the cell, by the forget gate."""
        return "slstm" if self.forget_gate == "sigmoid" else "slstm_exp"

    def _operands(self, cell, x):
        recurrent = jnp.transpose(cell.recurrent[...], (1, 2, 0, 3))
        return cell.input(x), recurrent, cell.bias[...].reshape(*cell.recurrent.shape[:2], -1)
