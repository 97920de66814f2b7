"""Delta form by kernels: a plain recurrence of corrected values.

A token t writes the corrected value x_t, the difference between its value v_t and the value that
the key b_t recalls from the previous state:

    S_t = diag(exp w_t) S_(t-1) + k_t x_t^T        x_t = v_t - S_(t-1)^T b_t

The kernels of the plain recurrence then read x_t in place of v_t. For a chunk of C tokens (rows of
the matrices), with S the state at its start and S' the state at its end:

    (I + P) X = V - B S        S' = W S + K^T X

The rows of B have decayed since the start of the chunk, the rows of K decay until its end, and W is
the decay of the whole chunk. P holds the decayed products of b_i with k_j for j < i. With T the
inverse of I + P, X = T V - (T B) S. XLA computes T V, T B and K of all chunks at once
(`effattn.xla.recurrent_chunks`); the kernel walks over the chunks with two products per chunk.

Backward. Let G and G' be the full gradients of S and S', and dY the gradient of the output that Q
reads:

    dX = T^T (E + K G')        G = W G' + Q^T dY - B^T dX

E is the gradient of X from dY within the chunk. This is the same walk, from the last chunk to the
first. dV = dX, and the recalled values B S + P X have the gradient -dX. dX could also be computed
from the gradient of x in the plain recurrence. This is not done: that gradient includes reads by
later tokens as if nothing had been removed from the state, and subtracting these large reads again
would lose digits.

Memory is O(T (F + D + C)). Shapes are those of `effattn.pallas.recurrence`; C is a power of two. In
shapes, G is the number of heads of the output that read one value head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn.xla.recurrent_chunks import Reader, decayed_reader, unit_inverse


class Chunks(NamedTuple):
    """Operands of a kernel's walk over chunks.

    A chunk computes X = value - recalled S and S' = kept S + key^T X + sum_g query_g^T d_out_g.

    Attributes:
      recalled: `(B, V, n, C, F)`.
      key: `(B, V, n, C, F)`.
      value: `(B, V, n, C, D)`.
      kept: `(B, V, n, f, 1)`, the decay of a chunk; f = F, or f = 1 if all features decay equally.
      query: `(B, V, n, G, C, F)`, only in the backward walk.
      d_out: `(B, V, n, G, C, D)`, only in the backward walk.
    """

    recalled: jax.Array
    key: jax.Array
    value: jax.Array
    kept: jax.Array
    query: jax.Array | None = None
    d_out: jax.Array | None = None


class Keys(NamedTuple):
    """Keys and decays of the delta form.

    Attributes:
      recalled: `(B, T, K, F)`, the keys b that read the state.
      key: `(B, T, K, F)`, the keys k that write to the state.
      log_decay: `(B, T, V)`, `(B, T, K, F)` or None.
    """

    recalled: jax.Array
    key: jax.Array
    log_decay: jax.Array | None


Dot = Callable[[jax.Array, jax.Array], jax.Array]
Walk = Callable[[Chunks, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def corrected(
    walk: Walk, dot: Dot, chunk: int, keys: Keys, value: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the corrected values x `(B, T, V, D)`, and the saved and last states from `walk`.

    Args:
      walk: `(chunks, state (B, V, F, D)) -> (X (B, V, n, C, D), saved states, last state)`, from
        the first to the last chunk.
      dot: matrix product.
      chunk: C.
      keys: keys and decays of the tokens.
      value: `(B, T, V, D)`.
      state: state before the first token.
    """

    def of_head(keys, value):
        past = _before(dot, keys)
        inverse = unit_inverse(past.products(keys.recalled, keys.key), dot)
        recalled = _times(keys.recalled, past.since_start)
        key = _times(keys.key, past.until_end)
        return Chunks(dot(inverse, recalled), key, dot(inverse, value), _kept(past, key))

    heads = value.shape[2]
    chunks = over_heads(of_head)(_cut_keys(chunk, keys, heads), cut(chunk, value, heads))
    values, *states = walk(chunks, state)
    return _joined(values, value.shape[1]), *states


class Gradients(NamedTuple):
    """Results of `gradients`.

    Attributes:
      states: saved gradients of the states, as `walk` returns them.
      state: gradient of the state before the first token, likewise.
      value: gradient of the values, `(B, T, V, D)`.
      keys: gradients of keys and decays through the recalled values B S + P X.
    """

    states: jax.Array
    state: jax.Array
    value: jax.Array
    keys: Keys


def gradients(
    walk: Walk,
    dot: Dot,
    chunk: int,
    keys: Keys,
    query: jax.Array,
    value: jax.Array,
    states: jax.Array,
    d_out: jax.Array,
    d_state: jax.Array,
) -> Gradients:
    """Returns the gradients of states, of values, and of keys through the recalled values.

    Args:
      walk: as in `corrected`, but from the last chunk to the first.
      dot: matrix product.
      chunk: C.
      keys: keys and decays of the tokens.
      query: `(B, T, N, F)`.
      value: corrected values, `(B, T, V, D)`.
      states: states at the start of each chunk, `(B, V, n, F, D)`.
      d_out: gradient of the output, `(B, T, heads, D)`.
      d_state: gradient of the state after the last token.
    """
    heads = value.shape[2]

    def of_head(keys, query, d_out):
        past = _before(dot, keys)
        present = decayed_reader(keys.log_decay, None, chunk, True, dot)
        weights = jax.vmap(present.products, (1, None), 1)(query, keys.key)
        inverse = unit_inverse(past.products(keys.recalled, keys.key), dot).swapaxes(-1, -2)
        return Chunks(
            -dot(inverse, _times(keys.key, past.until_end)),
            -_times(keys.recalled, past.since_start),
            dot(inverse, dot(weights.swapaxes(-1, -2), d_out).sum(1)),
            _kept(past, keys.key),
            query if present.since_start is None else query * present.since_start[:, None],
            d_out,
        )

    def recalled(keys):
        """Recalled values B S + P X, `(B, V, n, C, D)`."""

        def of_head(keys, value, states):
            past = _before(dot, keys)
            within = dot(past.products(keys.recalled, keys.key), value)
            return within + dot(_times(keys.recalled, past.since_start), states)

        chunks = _cut_keys(chunk, keys, heads), cut(chunk, value, heads)
        return over_heads(of_head)(*chunks, states)

    def by_value_head(x):
        x = cut(chunk, x, d_out.shape[2])
        return jnp.moveaxis(x.reshape(x.shape[0], heads, -1, *x.shape[2:]), 2, 3)

    reads = by_value_head(query), by_value_head(d_out)
    d_value, d_states, d_first = walk(
        over_heads(of_head)(_cut_keys(chunk, keys, heads), *reads), d_state
    )
    _, to_keys = jax.vjp(recalled, keys)
    return Gradients(d_states, d_first, _joined(d_value, value.shape[1]), *to_keys(-d_value))


def _before(dot, keys) -> Reader:
    """Returns the reader of the state before each token, for the chunks of one head."""
    return decayed_reader(keys.log_decay, None, keys.key.shape[1], False, dot)


def _kept(reader, key):
    return jnp.ones_like(key, shape=(len(key), 1, 1)) if reader.whole is None else reader.whole


def _times(x, decay):
    return x if decay is None else x * decay


def over_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function of one head over `(B, V, ...)`."""
    return jax.vmap(jax.vmap(function))


def _cut_keys(chunk, keys, heads) -> Keys:
    """Cuts keys into chunks `(B, V, n, C, F)`; log decays have F features, or 1 for all."""
    log_decay = keys.log_decay
    if log_decay is not None and log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    of_heads = functools.partial(cut, chunk, heads=heads)
    return jax.tree.map(of_heads, keys._replace(log_decay=log_decay))


def cut(chunk: int, x: jax.Array, heads: int) -> jax.Array:
    """Cuts `(B, T, shared heads, size)` into `(B, heads, n, C, size)`, padded with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)])
    x = jnp.repeat(jnp.moveaxis(x, 2, 1), heads // x.shape[2], 1)
    return x.reshape(*x.shape[:2], -1, chunk, x.shape[-1])


def _joined(x, length):
    """Joins chunks `(B, heads, n, C, size)` to `(B, T, heads, size)`; the inverse of `cut`."""
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return jnp.moveaxis(x[:, :, :length], 1, 2)
