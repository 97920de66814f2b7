"""GRU mixer."""

import jax.numpy as jnp
from flax import nnx

from effattn.nn.activations import sigmoid, tanh
from effattn.nn.cell import CellMixer


class GRU(CellMixer):
    """One layer of gated recurrent units (Cho et al. 2014).

        r, z = sigmoid(x_t W + h_(t-1) R + b)
        n = tanh(x_t W + b + r (h_(t-1) R));   h_t = (1 - z) n + z h_(t-1)

    Each of r, z and n has separate W, R and b. The parameters are a `flax.nnx.GRUCell`, and the
    output equals that of `flax.nnx.RNN`. Time is O(T D^2), sequential over tokens.

    With `is_causal=False` a second recurrence reads each row, or each packed document, from its end
    (Schuster and Paliwal 1997), and the output is `[h_t, h'_t] W_out`.

    Args:
      kernel_init: initializer of W and W_out; the recurrent matrices R start orthogonal.
      **options: see `effattn.nn.options.Mixing`.
    """

    _mechanism, _cell = "gru", nnx.GRUCell

    def _step_of(self, cell, dtype):
        def step(h, token):
            r, z, n = jnp.split(token, 3, -1)
            r_of_state, z_of_state, n_of_state = jnp.split(cell.dense_h(h), 3, -1)
            z = sigmoid(z + z_of_state)
            n = tanh(n + sigmoid(r + r_of_state) * n_of_state)
            h = (1 - z) * n + z * h
            return h, h

        return step

    def _carry(self, batch, dtype):
        return jnp.zeros((batch, self.in_features), dtype)
