"""Base class of mixers with a recurrent cell, scanned over time.

The products of the tokens with the input matrices are computed before, for all tokens at once. A
step of the scan then reads the recurrent matrices alone.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.segments import within
from effattn.cores import passed_states, sequence_parts
from effattn.nn import initializers
from effattn.nn.activations import sigmoid, tanh
from effattn.nn.layers import Layers
from effattn.nn.options import Mixing
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
    """Base class of `LSTM`, `GRU`, `SLSTM`: carry, h_t = step(carry, x_t W), from a zero carry.

    With `is_causal=False` a second cell reads the tokens from the last to the first, and the output
    is `[h_t, h'_t] W_out`.
    """

    _cell: Callable[..., Any]

    def __init__(
        self,
        in_features: int,
        *,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[Mixing],
    ):
        super().__init__(in_features, **options)
        self.cell = self._make_cell(kernel_init, options)
        if not self.is_causal:
            self.backward = self._make_cell(kernel_init, options)
            size = self.in_features
            self.out = Layers(kernel_init=kernel_init, **options).out(2 * size, size)

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
        zeros = self._carry(batch, dtypes.wide(dtype, *own))
        start = zeros
        if state is not None:
            start = jax.tree.map(lambda c, z: c.astype(z.dtype), state, zeros)
        new = valid = None
        if segment_ids is not None:
            ids = jnp.asarray(segment_ids)
            around = sequence_parts.with_neighbours(ids, 1, 1)
            new = (ids != around[:, 2:] if reverse else ids != around[:, :-2]).T
        if lengths is not None:
            valid = within(jnp.asarray(lengths), time).T
        tokens = jnp.moveaxis(self._project(cell, x.astype(dtype)), 1, 0)
        by_time = tokens, new, valid

        def where(flags, these, those):
            return jax.tree.map(lambda a, b: jnp.where(flags[:, None], a, b), these, those)

        def run(inputs, start):
            cell, by_time = inputs
            one_step = self._step_of(cell, by_time[0].dtype)

            def step(carry, of_token):
                token, new, valid = of_token
                if new is not None:
                    carry = where(new, zeros, carry)
                after, y = one_step(carry, token)
                return (after if valid is None else where(valid, after, carry)), y

            carry, y = lax.scan(step, start, by_time, reverse=reverse)
            return jnp.moveaxis(y, 0, 1).astype(dtype), carry

        name = type(self).__name__
        return passed_states.in_turns(name, run, (cell, by_time), start, reverse=reverse)

    def _project(self, cell, x):
        """The products of tokens `(B, T, D)` with the input matrices, `(B, T, ...)`."""
        return cell.dense_i(x)

    def _step_of(self, cell, dtype):
        """The function `(carry, token) -> (carry, output (B, D))` of a token's part of `_project`.

        `dtype` is that of the tokens.
        """
        raise NotImplementedError

    def _carry(self, batch, dtype):
        """Zero carry before the first token; `dtype` is at least float32, as in all states."""
        raise NotImplementedError
