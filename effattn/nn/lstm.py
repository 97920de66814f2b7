"""LSTM mixer."""

from flax import nnx

from effattn.nn.cell import CellMixer


class LSTM(CellMixer):
    """One layer of long short-term memory (Hochreiter and Schmidhuber 1997).

        i, f, o = sigmoid(x_t W + h_(t-1) R + b);   g = tanh(x_t W + h_(t-1) R + b)
        c_t = f c_(t-1) + i g;   h_t = o tanh(c_t)

    Each of i, f, o and g has separate W, R and b. The parameters are a
    `flax.nnx.OptimizedLSTMCell`, and the output equals that of `flax.nnx.RNN`. Time is O(T D^2),
    sequential over tokens.

    With `is_causal=False` a second recurrence reads each row, or each packed document, from its end
    (Schuster and Paliwal 1997), and the output is `[h_t, h'_t] W_out`.

    Args:
      kernel_init: initializer of W and W_out; the recurrent matrices R start orthogonal.
      **options: see `effattn.nn.options.WithCell`.
    """

    _mechanism, _cell = "lstm", nnx.OptimizedLSTMCell
