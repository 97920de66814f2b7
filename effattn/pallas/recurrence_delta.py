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
(`effattn.xla.recurrent_chunks`); a kernel walks over the chunks with two products per chunk. Other
kernels compute the output and the gradients of all blocks from the states that walks have saved.
This file is for GPUs. On TPUs, `mosaic_tpu.recurrence_kernels` has the kernels of both forms.

Backward. Let G and G' be the full gradients of S and S', and dY the gradient of the output that Q
reads:

    dX = T^T (E + K G')        G = W G' + Q^T dY - B^T dX

E is the gradient of X from dY within the chunk. This is the same walk, from the last chunk to the
first. dV = dX, and the recalled values B S + P X have the gradient -dX. dX could also be computed
from the gradient of x in the plain recurrence. This is not done: that gradient includes reads by
later tokens as if nothing had been removed from the state, and subtracting these large reads again
would lose digits.

On GPUs, memory is O(T (F + D + C)). Shapes are those of `effattn.pallas.recurrence`; C is a power
of two. In shapes, G is the number of heads of the output that read one value head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn.pallas.recurrence import BLOCK, Arrays, Gradients, How, Kernels
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


class DeltaKernels(NamedTuple):
    """Kernels of one device for the delta form; the first argument of each is `How`.

    Saved states are arrays `(B, V, m, F', D')` with m >= n: the first n are the states before the
    blocks of `BLOCK` tokens. F' and D' include padding with zeros for the device. Saved gradients
    of states are those from reads in later blocks. They may be in any order, as only `gradients` of
    the same device reads them. `arrays` has the corrected values in `read` and `gradients`.

    Attributes:
      read: `(arrays, saved states) -> (B, T, heads, D)`, the output, in the dtype of `How`.
      gradients: `(arrays, saved states, saved gradients of states, d_out) ->` the gradients of
        queries, keys and log decays, as in `Gradients`.
      correct: `(arrays, chunks of BLOCK tokens, state (B, V, F, D)) -> X (B, V, n, BLOCK, D)`,
        saved states, and the state after the last chunk.
      correct_back: the same for gradients, from the last chunk to the first:
        `(arrays, chunks, d_state (B, V, F, D)) -> dX (B, V, n, BLOCK, D)`, saved gradients of
        states, and the gradient of the first state.
    """

    read: Callable[..., jax.Array]
    gradients: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]
    correct: Callable[[How, Arrays, Chunks, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    correct_back: Callable[[How, Arrays, Chunks, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def with_delta(plain: Kernels, delta: DeltaKernels) -> Kernels:
    """Kernels of both forms, from those of the plain form and those for corrected values."""

    def forward(how, arrays, state):
        if arrays.recalled is None:
            return plain.forward(how, arrays, state)
        arrays, states, last = _corrected(delta, how, arrays, state)
        return delta.read(how, arrays, states), last

    def backward(how, arrays, state, d_out, d_state):
        if arrays.recalled is None:
            return plain.backward(how, arrays, state, d_out, d_state)
        how = how._replace(dtype=jnp.float32)  # two parts of the gradients are added below
        keys = _Keys.of(arrays)
        arrays, states, _ = _corrected(delta, how, arrays, state)
        co_states, d_first, d_value = _corrected_back(delta, how, keys, arrays, d_out, d_state)
        query, key, log_decay = delta.gradients(how, arrays, states, co_states, d_out)
        more = _through_recalled_values(how, keys, arrays.value, states, d_value)
        if log_decay is not None and more.log_decay is not None:
            log_decay += more.log_decay.reshape(log_decay.shape)
        return Gradients(query, key + more.key, d_value, log_decay, d_first, more.recalled)

    return Kernels(forward, backward)


class _Keys(NamedTuple):
    """Keys and decays of the delta form.

    Attributes:
      recalled: `(B, T, V, F)`, the keys b that read the state.
      key: `(B, T, V, F)`, the keys k that write to the state.
      log_decay: `(B, T, V, F)`, or `(B, T, V, 1)` for all features, or None.
    """

    recalled: jax.Array
    key: jax.Array
    log_decay: jax.Array | None

    @classmethod
    def of(cls, arrays: Arrays) -> "_Keys":
        """Keys in float32, for each value head."""
        heads, log_decay = arrays.value.shape[2], arrays.log_decay
        assert arrays.recalled is not None
        if log_decay is not None and log_decay.ndim == 3:
            log_decay = log_decay[..., None]

        def of_heads(x):
            return jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], 2)

        return jax.tree.map(of_heads, cls(arrays.recalled, arrays.key, log_decay))

    def cut(self) -> "_Keys":
        """In chunks `(B, V, n, C, F)`."""
        return jax.tree.map(lambda x: cut(BLOCK, x, x.shape[2]), self)


def _corrected(delta, how, arrays, state):
    """Returns arrays with the corrected values, the saved states, and the last state."""

    def of_head(keys, value):
        past = _before(how, keys)
        inverse = unit_inverse(past.products(keys.recalled, keys.key), how.dot)
        recalled = _times(keys.recalled, past.since_start)
        key = _times(keys.key, past.until_end)
        return Chunks(how.dot(inverse, recalled), key, how.dot(inverse, value), _kept(past, key))

    value = arrays.value.astype(jnp.float32)
    chunks = over_heads(of_head)(_Keys.of(arrays).cut(), cut(BLOCK, value, value.shape[2]))
    plain = arrays._replace(recalled=None)
    values, *states = delta.correct(how, plain, chunks, state)
    return plain._replace(value=_joined(values, value.shape[1])), *states


def _corrected_back(delta, how, keys, arrays, d_out, d_state):
    """Returns saved gradients of states, and the gradients of the first state and the values."""
    wide, heads = arrays.widened(), arrays.value.shape[2]

    def of_head(keys, query, d_out):
        past, dot = _before(how, keys), how.dot
        present = decayed_reader(keys.log_decay, None, BLOCK, True, dot)
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

    def by_value_head(x):
        x = cut(BLOCK, x, d_out.shape[2])
        return jnp.moveaxis(x.reshape(x.shape[0], heads, -1, *x.shape[2:]), 2, 3)

    reads = by_value_head(wide.query), by_value_head(d_out.astype(jnp.float32))
    chunks = over_heads(of_head)(keys.cut(), *reads)
    d_value, co_states, d_first = delta.correct_back(how, arrays, chunks, d_state)
    return co_states, d_first, _joined(d_value, d_out.shape[1])


def _through_recalled_values(how, keys, values, states, d_value) -> _Keys:
    """Returns the gradients of keys and decays through the recalled values B S + P X.

    Args:
      how: execution options.
      keys: keys and decays of the tokens.
      values: corrected values X, `(B, T, V, D)`.
      states: saved states, as in `DeltaKernels`.
      d_value: gradient of X, `(B, T, V, D)`; the recalled values have the gradient `-d_value`.
    """

    def of_head(keys, value, states):
        past = _before(how, keys)
        within = how.dot(past.products(keys.recalled, keys.key), value)
        return within + how.dot(_times(keys.recalled, past.since_start), states)

    _, length, heads, size = values.shape
    states = states[:, :, : -(-length // BLOCK), : keys.key.shape[3], :size]

    def recalled(keys):
        chunks = keys.cut(), cut(BLOCK, values, heads)
        return _joined(over_heads(of_head)(*chunks, states), length)

    _, to_keys = jax.vjp(recalled, keys)
    return to_keys(-d_value)[0]


def _before(how, keys) -> Reader:
    """Returns the reader of the state before each token, for the chunks of one head."""
    return decayed_reader(keys.log_decay, None, keys.key.shape[1], False, how.dot)


def _kept(reader, key):
    return jnp.ones_like(key, shape=(len(key), 1, 1)) if reader.whole is None else reader.whole


def _times(x, decay):
    return x if decay is None else x * decay


def over_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function of one head over `(B, V, ...)`."""
    return jax.vmap(jax.vmap(function))


def cut(chunk: int, x: jax.Array, heads: int) -> jax.Array:
    """Cuts `(B, T, shared heads, size)` into `(B, heads, n, C, size)`, padded with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)])
    x = jnp.repeat(jnp.moveaxis(x, 2, 1), heads // x.shape[2], 1)
    return x.reshape(*x.shape[:2], -1, chunk, x.shape[-1])


def _joined(x, length):
    """Joins chunks `(B, heads, n, C, size)` to `(B, T, heads, size)`; the inverse of `cut`."""
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return jnp.moveaxis(x[:, :, :length], 1, 2)
