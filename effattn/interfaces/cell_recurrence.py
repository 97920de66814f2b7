"""Static configuration and operands of the recurrence of a cell.

`effattn.cores.cell_recurrence` gives the formulas of the cells.
"""

from typing import Any, NamedTuple

import jax

# For each cell: number of gates, number of arrays in the carry, and index of h in the carry.
GATES = {"lstm": 4, "gru": 3, "slstm": 4, "slstm_exp": 4}
STATES = {"lstm": 2, "gru": 1, "slstm": 4, "slstm_exp": 4}
OUTPUT = {"lstm": 1, "gru": 0, "slstm": 2, "slstm_exp": 2}


class Config(NamedTuple):
    """Static configuration of the recurrence of a cell.

    Attributes:
      cell: a key of `GATES`.
      dtype: dtype of the products of h and the recurrent matrices.
      is_reversed: whether tokens are read from the last to the first.
    """

    cell: str
    dtype: Any
    is_reversed: bool = False


class Inputs(NamedTuple):
    """Operands, for G gates, N heads of H features, and a carry of S arrays.

    Attributes:
      tokens: `(*B, T, G, N, H)`, the tokens' parts of the gates' pre-activations.
      recurrent: `(N, H, G, H)`, the matrices R; the second axis is that of h.
      bias: `(G, N, H)`, added to h R.
      carry: `(*B, S, N, H)`, the carry before the first token that is read.
      starts: bool `(*B, T)`, the tokens before which the carry is set to zero; None for none.
      valid: bool `(*B, T)`, False for tokens that leave the carry as it is; None for all tokens.
    """

    tokens: jax.Array
    recurrent: jax.Array
    bias: jax.Array
    carry: jax.Array
    starts: jax.Array | None
    valid: jax.Array | None
