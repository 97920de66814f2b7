"""The linear equations of a Mesa layer on CPUs, in float32, by the kernel of `mesa_kernel`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays.axes import lead
from effattn.dispatch.places import HEADS
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, clear
from effattn.llvm import runtime
from effattn.llvm.primitive import kernel
from effattn.xla import linear_recurrence as by_xla
from effattn.xla.conjugate_gradients import conjugate_gradients

# A token is solved where its residual is 1e-8 of its query, below the rounding errors of float32.
# The number is the square of that share.
_SOLVED = 1e-16


def solve(
    query: jax.Array,
    key: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array,
    diagonal: jax.Array,
    state: jax.Array,
    tokens: Tokens,
    *,
    num_steps: int,
) -> jax.Array:
    """Solutions x `(*B, T, N, H)` of (G_t + diag(diagonal)) x_t = q_t, by conjugate gradients.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      beta: `(*B, T, K)`, weight of each token.
      log_decay: `(*B, T, K)`.
      diagonal: `(K, H)`, above 0.
      state: G before the first token, `(*B, K, H, H)`.
      tokens: padding masks and starts of packed documents.
      num_steps: conjugate-gradient steps.
    """
    key, beta, log_decay = clear((key, beta, log_decay[..., None]), tokens.key_mask)
    if tokens.starts is not None:
        log_decay = jnp.where(tokens.starts[..., None, None], -jnp.inf, log_decay)
    arrays = query, beta[..., None] * key, key, state, log_decay, lead(diagonal, state.ndim - 1)
    (solution,) = _kernel((num_steps, _SOLVED), *arrays)
    return solution


def _shapes(static, query, *_):
    return (query.shape,)


def _by_xla(static, query, key, value, state, log_decay, diagonal):
    config = Config(lambda _, query, keys: Terms(query, *keys), jnp.float32)
    keys = key, value, log_decay[..., 0]
    diagonal = jnp.repeat(diagonal, query.shape[-2] // key.shape[-2], -2)[..., None, :, :]

    def product(x):
        inputs = Inputs(None, state, x, keys, Tokens())
        return by_xla.forward(config, inputs)[0][0] + x * diagonal

    return (conjugate_gradients(product, query, static[0]),)


def _names(static, *_):
    of_tokens, of_state = (None, HEADS, None), (HEADS, None, None)
    return (*[of_tokens] * 3, of_state, of_tokens, (HEADS, None)), (of_tokens,)


def _by_kernel(static, shapes, *arrays: Any):
    num_steps, solved = static
    attributes = {"limits": np.array([num_steps]), "scale": np.float32(solved)}
    return runtime.call("effattn_mesa_forward", shapes, arrays, **attributes)


_kernel = kernel("effattn_mesa", _by_kernel, _by_xla, _shapes, _names)
