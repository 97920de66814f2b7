"""The delta form by kernels: a plain recurrence of values that are corrected first.

A token writes x_t, what its value differs by from what the state before it recalls,

    S_t = diag(exp w_t) S_(t-1) + k_t x_t^T        x_t = v_t - S_(t-1)^T b_t

which the kernels of the plain recurrence read like any values. Of a chunk of C tokens, in rows,
with S the state at its start and S' that at its end,

    (I + P) X = V - B S        S' = W S + K^T X

where B has decayed since the start, K decays until the end, W is the decay of the chunk, and P
holds the decayed products of b_i with the k_j before it. With T the inverse of I + P, X is
T V - (T B) S. XLA makes T V, T B and K of all chunks at once (`effattn.xla.recurrent_chunks`), and
what is left for a kernel is a walk over chunks with two products each.

With G and G' the gradients of S and S', from all that reads them, and dY that of what Q reads,

    dX = T^T (E + K G')        G = W G' + Q^T dY - B^T dX

where E is what dY gives to X within the chunk: the same walk from the last chunk to the first. dV
is dX, and what b reads, B S + P X, has the gradient -dX. The gradient that x has in the plain
recurrence, from which dX could also be had, is not used: it counts what later tokens would have
read had nothing been removed, and digits are lost where that is much more.

Memory is O(T (F + D + C)). Shapes are those of `effattn.pallas.recurrence`; C is a power of two,
and G the number of heads of the output that read one value head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn.xla.recurrent_chunks import Reader, decayed_reader, unit_inverse


class Chunks(NamedTuple):
    """X = value - recalled S and S' = kept S + key^T X + sum_g query_g^T d_out_g, for a kernel.

    Attributes:
      recalled: `(B, V, n, C, F)`.
      key: `(B, V, n, C, F)`.
      value: `(B, V, n, C, D)`.
      kept: `(B, V, n, f, 1)`, f = F, or 1 where all features decay alike.
      query: `(B, V, n, G, C, F)`; with `d_out`, in the walk back alone.
      d_out: `(B, V, n, G, C, D)`.
    """

    recalled: jax.Array
    key: jax.Array
    value: jax.Array
    kept: jax.Array
    query: jax.Array | None = None
    d_out: jax.Array | None = None


class Keys(NamedTuple):
    """What a delta form recalls and writes with.

    Attributes:
      recalled: `(B, T, K, F)`.
      key: `(B, T, K, F)`.
      log_decay: `(B, T, V)`, `(B, T, K, F)` or None.
    """

    recalled: jax.Array
    key: jax.Array
    log_decay: jax.Array | None


Dot = Callable[[jax.Array, jax.Array], jax.Array]
Walk = Callable[[Chunks, jax.Array], tuple[jax.Array, jax.Array]]


def corrected(
    walk: Walk, dot: Dot, chunk: int, keys: Keys, value: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`x (B, T, V, D)`, and the states as `walk` gives them.

    Args:
      walk: `(chunks, state (B, V, F, D)) -> (X (B, V, n, C, D), states)`, in order.
      dot: the matrix product.
      chunk: C.
      keys: of the tokens.
      value: `(B, T, V, D)`.
      state: before the first token.
    """

    def of_head(keys, value):
        past = _before(dot, keys)
        inverse = unit_inverse(past.products(keys.recalled, keys.key), dot)
        recalled = _times(keys.recalled, past.since_start)
        key = _times(keys.key, past.until_end)
        return Chunks(dot(inverse, recalled), key, dot(inverse, value), _kept(past, key))

    heads = value.shape[2]
    chunks = _over_heads(of_head)(_cut_keys(chunk, keys, heads), _cut(chunk, value, heads))
    values, states = walk(chunks, state)
    return _joined(values, value.shape[1]), states


class Gradients(NamedTuple):
    """As `gradients` gives them.

    Attributes:
      states: as the walk gives them.
      value: `(B, T, V, D)`.
      keys: from what recalls within its chunk and of the state at its start.
    """

    states: jax.Array
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
    """From those of the output `(B, T, heads, D)` and of the state after the last token.

    Args:
      walk: as in `corrected`, from the last chunk to the first.
      dot: the matrix product.
      chunk: C.
      keys: of the tokens.
      query: `(B, T, N, F)`.
      value: `(B, T, V, D)`, corrected.
      states: `(B, V, n, F, D)`, at the start of each chunk.
      d_out: of the output.
      d_state: of the state.
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
        """What is taken from each value, `(B, V, n, C, D)`."""

        def of_head(keys, value, states):
            past = _before(dot, keys)
            within = dot(past.products(keys.recalled, keys.key), value)
            return within + dot(_times(keys.recalled, past.since_start), states)

        cut = _cut_keys(chunk, keys, heads), _cut(chunk, value, heads)
        return _over_heads(of_head)(*cut, states)

    def by_value_head(x):
        x = _cut(chunk, x, d_out.shape[2])
        return jnp.moveaxis(x.reshape(x.shape[0], heads, -1, *x.shape[2:]), 2, 3)

    reads = by_value_head(query), by_value_head(d_out)
    d_value, d_states = walk(_over_heads(of_head)(_cut_keys(chunk, keys, heads), *reads), d_state)
    _, to_keys = jax.vjp(recalled, keys)
    return Gradients(d_states, _joined(d_value, value.shape[1]), *to_keys(-d_value))


def _before(dot, keys) -> Reader:
    """Of the state before each token of the chunks of one head."""
    return decayed_reader(keys.log_decay, None, keys.key.shape[1], False, dot)


def _kept(reader, key):
    return jnp.ones_like(key, shape=(len(key), 1, 1)) if reader.whole is None else reader.whole


def _times(x, decay):
    return x if decay is None else x * decay


def _over_heads(function: Callable[..., Any]):
    """Of all rows and heads, `(B, V, ...)`."""
    return jax.vmap(jax.vmap(function))


def _cut_keys(chunk, keys, heads) -> Keys:
    """`(B, V, n, C, F)`, and log decays of F or 1 for all."""
    log_decay = keys.log_decay
    if log_decay is not None and log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    cut = functools.partial(_cut, chunk, heads=heads)
    return jax.tree.map(cut, keys._replace(log_decay=log_decay))


def _cut(chunk, x, heads):
    """`(B, T, shared heads, size)` as `(B, heads, n, C, size)`, with zeros after the last token."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)])
    x = jnp.repeat(jnp.moveaxis(x, 2, 1), heads // x.shape[2], 1)
    return x.reshape(*x.shape[:2], -1, chunk, x.shape[-1])


def _joined(x, length):
    """`(B, T, heads, size)` of what was cut."""
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return jnp.moveaxis(x[:, :, :length], 1, 2)
