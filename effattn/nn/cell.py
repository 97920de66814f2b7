"""Base class of mixers with a recurrent cell, of `effattn.cores.cell_recurrence`.

The products of the tokens with the input matrices are computed before the loop over the tokens.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.segments import within
from effattn.cores import passed_states, sequence_parts
from effattn.cores.cell_recurrence import cell_recurrence
from effattn.interfaces.cell_recurrence import GATES, STATES, Config, Inputs
from effattn.nn import initializers
from effattn.nn.activations import sigmoid, tanh
from effattn.nn.layers import Layers
from effattn.nn.options import WithCell
from effattn.nn.recurrent import RecurrentMixer


def cell(make: Callable[..., Any], features: int, **options: Any) -> Any:
    """A Flax cell with as many inputs as features and orthogonal recurrent matrices."""
    return make(
        features,
        features,
        gate_fn=sigmoid,
        activation_fn=tanh,
        recurrent_kernel_init=initializers.orthogonal_init,
        **options,
    )


class CellMixer(RecurrentMixer):
    """Base class of `LSTM`, `GRU`, `SLSTM`.

    With `is_causal=False` a second cell reads the tokens from the last to the first, and the output
    is `[h_t, h'_t] W_out`.
    """

    _cell: Callable[..., Any]
    _mechanism: str

    def __init__(
        self,
        in_features: int,
        *,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[WithCell],
    ):
        self.implementation = options.pop("implementation", None)
        super().__init__(in_features, **options)
        self.cell = self._make_cell(kernel_init, options)
        if not self.is_causal:
            self.backward = self._make_cell(kernel_init, options)
            size = self.in_features
            self.out = Layers(kernel_init=kernel_init, **options).out(2 * size, size)

    @property
    def cell_name(self) -> str:
        """Name of the cell, a key of `GATES`."""
        return self._mechanism

    def _make_cell(self, kernel_init, options):
        numbers = Layers(**options).numbers
        return cell(type(self)._cell, self.in_features, kernel_init=kernel_init, **numbers)

    def _mix_all(self, x, lengths, segment_ids):
        forward = super()._mix_all(x, lengths, segment_ids)
        if self.is_causal:
            return forward
        backward, _ = self._scan(self.backward, x, None, lengths, segment_ids, reverse=True)
        return self.out(jnp.concatenate([forward, backward], -1))

    def _mix(self, x, state, lengths, segment_ids):
        return self._scan(self.cell, x, state, lengths, segment_ids)

    def _scan(self, cell, x, state, lengths, segment_ids, *, reverse=False):
        """Runs a cell over time; padding leaves its carry as it is."""
        batch, time = x.shape[:2]
        dtype = self._computed_in(x)
        # The cell computes in the dtype of its parameters, which the user may have cast.
        own = jax.tree.leaves(cell) if self.dtype is None else ()
        tokens, recurrent, bias = self._operands(cell, x.astype(dtype))
        heads, size, gates, _ = recurrent.shape
        tokens = tokens.reshape(batch, time, gates, heads, size)
        count = STATES[self.cell_name]
        carry = jnp.zeros((batch, count, heads, size), dtypes.wide(dtype, *own))
        if state is not None:
            leaves = [each.astype(carry.dtype) for each in jax.tree.leaves(state)]
            carry = jnp.stack(leaves, 1).reshape(carry.shape)
        starts = valid = None
        if segment_ids is not None:
            ids = jnp.asarray(segment_ids)
            around = sequence_parts.with_neighbours(ids, 1, 1)
            starts = ids != (around[:, 2:] if reverse else around[:, :-2])
        if lengths is not None:
            valid = within(jnp.asarray(lengths), time)
        computed = self.dtype or jnp.promote_types(dtype, recurrent.dtype)
        config = Config(self.cell_name, jnp.dtype(computed), reverse)

        def run(inputs, carry):
            tokens, recurrent, bias, starts, valid = inputs
            x = Inputs(tokens, recurrent, bias, carry, starts, valid)
            return cell_recurrence(name, config, x, implementation=self.implementation)

        name, inputs = type(self).__name__, (tokens, recurrent, bias, starts, valid)
        h, last = passed_states.in_turns(name, run, inputs, carry, reverse=reverse)
        h = h.reshape(x.shape).astype(dtype)
        return h, None if last is None else self._state_of(last.reshape(batch, count, heads * size))

    def _operands(self, cell: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The tokens' parts of the pre-activations, the recurrent matrices and the biases.

        For tokens `(B, T, D)`: `(B, T, G D)`, `(N, H, G, H)` and `(G, N, H)`.
        """
        kernel, size, gates = cell.dense_h.kernel[...], self.in_features, GATES[self.cell_name]
        bias = jnp.zeros(gates * size) if cell.dense_h.bias is None else cell.dense_h.bias[...]
        recurrent = kernel.reshape(1, size, gates, size)
        return cell.dense_i(x), recurrent, bias.reshape(gates, 1, size)

    def _state_of(self, carry):
        """The carry `(B, S, D)` as the mixer's state, of arrays `(B, D)`."""
        return tuple(carry[:, number] for number in range(carry.shape[1]))
