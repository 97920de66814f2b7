"""GRU mixer."""

from flax import nnx

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
      **options: see `effattn.nn.options.WithCell`.
    """

    _mechanism, _cell = "gru", nnx.GRUCell

    def _state_of(self, carry):
        return carry[:, 0]
