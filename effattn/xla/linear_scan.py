"""Elementwise scans: x_t = a_t x_(t-1) + b_t and x_t = max(a_t + x_(t-1), b_t).

A sequential loop runs over chunks of C tokens; within a chunk the scan is parallel (recursive
doubling). That is T / C steps of log C operations on C tokens each. The size of the compiled
program does not depend on the length.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.arrays.axes import fold
from effattn.arrays.linear_map import with_derivatives

_CHUNK = 64


class _Semiring(NamedTuple):
    """Semiring of a scan: x_t = plus(times(a_t, x_(t-1)), b_t), with neutral `zero` and `one`."""

    times: Callable[[jax.Array, jax.Array], jax.Array]
    plus: Callable[[jax.Array, jax.Array], jax.Array]
    zero: float
    one: float


_LINEAR = _Semiring(jnp.multiply, jnp.add, 0.0, 1.0)
_MAX_PLUS = _Semiring(jnp.add, jnp.maximum, -jnp.inf, 0.0)


def linear_scan(decay: jax.Array, added: jax.Array, initial: jax.Array) -> jax.Array:
    """All states of x_t = decay_t * x_(t-1) + added_t.

    Time is O(T F log C), memory O(T F). The states are saved for the backward pass, which is a scan
    in reverse. Later tokens do not change an output in any bit.

    Args:
      decay: `(B, T, *F)`, real or complex.
      added: `(B, T, *F)`, of the same dtype.
      initial: `(B, *F)`, the state before the first token.

    Returns:
      The states `(B, T, *F)`.
    """
    return _linear(_LINEAR, *mesh_axes.vary_alike((decay, added, initial)))


def max_plus_scan(change: jax.Array, floor: jax.Array, initial: jax.Array) -> jax.Array:
    """All states of x_t = max(change_t + x_(t-1), floor_t), without gradients.

    Shapes and cost as in `linear_scan`.
    """
    arrays = mesh_axes.vary_alike((change, floor, initial))
    return _states(_MAX_PLUS, *map(lax.stop_gradient, arrays))


def _forward(ring, decay, added, initial):
    states = _states(ring, decay, added, initial)
    return states, (decay, states, initial)


def _backward(ring, kept, cotangent):
    decay, states, initial = kept
    # g_t = cotangent_t + decay_(t+1) g_(t+1), the same recurrence from the end.
    after = jnp.concatenate([decay[:, 1:], jnp.ones_like(decay[:, :1])], 1)
    backwards = (jnp.flip(array, 1) for array in (after, cotangent))
    of_added = jnp.flip(_states(ring, *backwards, jnp.zeros_like(initial)), 1)
    before = jnp.concatenate([initial[:, None], states[:, :-1]], 1)
    of_initial = (decay[:, :1] * of_added[:, :1]).sum(1)
    return of_added * before, of_added, of_initial


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _states(ring, decay, added, initial):
    batch, time = added.shape[:2]
    chunk = max(1, min(_CHUNK, time))

    def chunks(array):
        return jnp.moveaxis(fold(array, chunk, 1), 1, 0)

    def step(before, of_chunk):
        decay, added = of_chunk
        states = _doubled(ring, decay, added, before)
        return states[:, -1], states

    # The padding comes after all tokens, so no state of a token depends on it.
    _, states = lax.scan(step, initial, (chunks(decay), chunks(added)))
    states = jnp.moveaxis(states, 0, 1)
    return lax.collapse(states, 1, 3)[:, :time]


_linear = with_derivatives(_states, _forward, _backward)


def chunk_states(decay: jax.Array, added: jax.Array, initial: jax.Array) -> jax.Array:
    """The states of `linear_scan` for one chunk, in parallel; JAX's own derivatives."""
    return _doubled(_LINEAR, decay, added, initial)


def _doubled(ring, decay, added, before):
    """Parallel scan of one chunk `(B, C, *F)` from the state before it, by recursive doubling.

    After each iteration, every entry combines twice as many tokens.
    """
    chunk, reach = added.shape[1], 1
    while reach < chunk:
        behind = ((0, 0), (reach, 0), *[(0, 0)] * (added.ndim - 2))
        earlier = jnp.pad(added[:, :-reach], behind, constant_values=ring.zero)
        added = ring.plus(added, ring.times(decay, earlier))
        decay = ring.times(decay, jnp.pad(decay[:, :-reach], behind, constant_values=ring.one))
        reach *= 2
    return ring.plus(added, ring.times(decay, before[:, None]))
