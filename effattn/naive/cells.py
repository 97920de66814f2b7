"""Recurrent networks in the naive forms of several mechanisms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def gated_unit(cell: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    """The next state of a gated recurrent unit (Cho et al. 2014); `cell` has its parameters.

    h' = (1 - z) n + z h,  r, z = sigmoid(x W + b + h R),  n = tanh(x W_n + b_n + r (h R_n))

    Args:
      cell: the layers `dense_i` and `dense_h`, with the weights of r, z and n side by side.
      h: state `(..., D)`.
      x: input `(..., D)`.
    """
    of_input = x @ cell.dense_i.kernel[...] + cell.dense_i.bias[...]
    of_state = h @ cell.dense_h.kernel[...]
    (r, z, n), (r_state, z_state, n_state) = (jnp.split(y, 3, -1) for y in (of_input, of_state))
    r, z = jax.nn.sigmoid(r + r_state), jax.nn.sigmoid(z + z_state)
    return (1 - z) * jnp.tanh(n + r * n_state) + z * h


def in_directions(mixer: Any, x: jax.Array, recurrence: Callable[..., Any]) -> jax.Array:
    """Returns the outputs of a recurrent mixer, causal or bidirectional, on tokens x `(T, D)`.

    Args:
      mixer: has `cell`; if it is bidirectional also the cell `backward` and the projection `out`.
      x: tokens.
      recurrence: `(cell, x) -> (T, D)`, the states of a cell that reads x from the start.
    """
    forward = recurrence(mixer.cell, x)
    if mixer.is_causal:
        return forward
    backward = recurrence(mixer.backward, x[::-1])[::-1]
    return jnp.concatenate([forward, backward], -1) @ mixer.out.kernel[...]
