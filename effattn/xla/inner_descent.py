"""Gradient descent of a linear memory on its tokens, in mini-batches, for one head.

    e_t = error(k_t (W_0 + M_b))                 M_b is M before the first token of the mini-batch
    S_t = momentum_t S_(t-1) - rate_t k_t e_t^T
    M_t = decay_t M_(t-1) + S_t;    y_t = q_t (W_0 + M_t)

All errors of a mini-batch are known before its first step, so its steps are products of matrices.
Tokens are cut into chunks of C, no larger than a mini-batch. Mini-batches count from the start of a
document, and documents start anywhere, so the tokens of a chunk may be in two mini-batches of the
document that comes from the chunk before, and in the first mini-batch of each other document.

Shapes: M chunks of C tokens, G query heads, A features of keys, D of values.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.xla.recurrent_chunks import sums_of_log_decays


class Memory(NamedTuple):
    """State of the descent.

    Attributes:
      now: M, `(A, D)`.
      start: M before the first token of the mini-batch of the last token, `(A, D)`.
      velocity: S, `(A, D)`; None without momentum.
    """

    now: jax.Array
    start: jax.Array
    velocity: Any


class Steps(NamedTuple):
    """Tokens in chunks; zero in the padding.

    Attributes:
      query: `(M, C, G, A)`.
      key: `(M, C, A)`.
      value: `(M, C, D)`, for `error`.
      rate: `(M, C)`.
      log_decay: `(M, C)`; None without decays.
      momentum: `(M, C)`; None without momentum.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rate: jax.Array
    log_decay: jax.Array | None
    momentum: jax.Array | None


def descend(
    error: Callable[[jax.Array, jax.Array], jax.Array],
    mini_batch: int,
    is_aligned: bool,
    precision: Any,
    steps: Steps,
    marks: Any,
    initial: jax.Array | None,
    memory: Memory,
    first: jax.Array,
) -> tuple[jax.Array, Memory]:
    """The outputs `(M, C, G, D)`, and the memory after the last token.

    Args:
      error: `(predictions (C, D), values (C, D)) -> (C, D)`, gradients by the predictions.
      mini_batch: tokens in a mini-batch.
      is_aligned: whether each chunk is a mini-batch of one document, or the last part of it.
      precision: precision of the matrix products.
      steps: the tokens.
      marks: `present`, `document` and `position`, each `(M, C)` (`effattn.cores.by_head`).
      initial: W_0, `(A, D)`; None is zero.
      memory: the memory before the first token, for document 0.
      first: int32 `()`, position of the first token of document 0.
    """
    dot = functools.partial(jnp.einsum, precision=precision)

    def product(x, base):
        """x (W_0 + base)."""
        base = base if initial is None else initial + base
        return dot("...a,ad->...d", x, base)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, chunk):
        (now, start, velocity), place, carried = carry
        x, (present, document, position) = chunk
        position = position + jnp.where(document == 0, first, 0)
        last, end = document[-1], position[-1] + present[-1].astype(position.dtype)
        is_carried, goes_on, stays = document == carried, last == carried, end == place
        to_memory, to_velocity = _weights(dot, x, present, document)
        key = -x.rate[:, None] * x.key

        def after(t, weights, errors):
            """Two terms of M or S after token t: from before the chunk, and by its steps."""
            old = now * weights.now[t]
            if velocity is not None:
                old += velocity * weights.velocity[t]
            return old, dot("s,sa,sd->ad", weights.steps[t], key, errors)

        number = place // mini_batch
        base = jnp.where(place % mini_batch == 0, now, start)
        empty = product(x.key, jnp.zeros_like(base))
        errors = error(jnp.where(is_carried[:, None], product(x.key, base), empty), x.value)
        if not is_aligned:
            is_second = is_carried & (position // mini_batch > number)
            t = jnp.maximum(jnp.sum(is_carried & ~is_second) - 1, 0)
            second = sum(after(t, to_memory, errors))
            of_second = error(product(x.key, second), x.value)
            errors = jnp.where(is_second[:, None], of_second, errors)
            base = jnp.where((end - 1) // mini_batch == number, base, second)

        def read(memory, weights):
            weights = jnp.where(is_carried, weights, 0)[:, None, None]
            return weights * dot("cga,ad->cgd", x.query, memory)

        out = product(x.query, jnp.zeros_like(base)) + read(now, to_memory.now)
        if velocity is not None:
            out += read(velocity, to_memory.velocity)
        of_steps = dot("cga,sa->gcs", x.query, key) * to_memory.steps[None]
        out += dot("gcs,sd->cgd", of_steps, errors)

        def at_end(weights):
            old, written = after(-1, weights, errors)
            return jnp.where(goes_on, old, 0) + written

        base = jnp.where(goes_on, jnp.where(stays, start, base), 0)
        memory = Memory(at_end(to_memory), base, None if velocity is None else at_end(to_velocity))
        return (memory, end, last), out

    carry = memory, first, jnp.zeros_like(first)
    (memory, _, _), out = lax.scan(step, carry, (steps, marks))
    return out, memory


class _Weights(NamedTuple):
    """Weights in M or in S after each token of a chunk.

    Attributes:
      steps: `(C, C)`, of the steps of the chunk.
      now: `(C,)`, of M before the chunk.
      velocity: `(C,)`, of S before the chunk; None without momentum.
    """

    steps: jax.Array
    now: jax.Array
    velocity: Any


def _weights(dot, x: Steps, present, document) -> tuple[_Weights, _Weights | None]:
    """The weights in M, and those in S, or None without momentum."""
    size = len(present)
    visible = jnp.tril(jnp.ones((size, size), bool))
    together = visible & (document[:, None] == document[None])
    ones = jnp.ones(size, x.key.dtype)
    if x.log_decay is None:
        decay, kept = visible.astype(ones.dtype), ones
    else:
        sums, since_start = sums_of_log_decays(x.log_decay)
        decay, kept = jnp.where(visible, jnp.exp(sums), 0), jnp.exp(since_start)
    added = jnp.where(present[None], decay, 0)
    if x.momentum is None:
        return _Weights(jnp.where(together, added, 0), kept, None), None
    momentum = jnp.where(present, x.momentum, 1)
    through = jnp.cumprod(jnp.where(jnp.tril(visible, -1), momentum[:, None], 1), 0)
    through, speed = jnp.where(visible, through, 0), jnp.cumprod(momentum)
    weights = dot("tr,rs->ts", added, through)
    of_memory = _Weights(jnp.where(together, weights, 0), kept, dot("tr,r->t", added, speed))
    return of_memory, _Weights(jnp.where(together, through, 0), jnp.zeros_like(ones), speed)
