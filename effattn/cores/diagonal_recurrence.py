"""The diagonal recurrence, in which every entry of the state has a decay of its own per token.

For one head, with queries and keys of F features, values and steps dt of D, and rates A `(D, F)`:

    S_t = exp(A^T * dt_t) * S_(t-1) + k_t (dt_t * v_t)^T        (F, D), * elementwise
    y_t = S_t^T q_t

This module chooses the implementation. Each implementation is a module with a differentiable
function `diagonal_recurrence`, and with what `effattn.dispatch.Implementations` needs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.interfaces.linear_recurrence import Config, Inputs, Tokens, clear

IMPLEMENTATIONS = dispatch.Implementations(
    "the diagonal recurrence",
    {
        "xla": "effattn.xla.diagonal_recurrence",
        "llvm": "effattn.llvm.diagonal_recurrence",
    },
)


def call(mechanism: str, config: Config, x: Inputs) -> dispatch.Call:
    """Description of the call for `dispatch.choose`."""
    length = x.queries.shape[x.state.ndim - 3]
    dtype = dtypes.common(config.dtype, x.queries)
    suited = dispatch.suited(dtype, length)
    return IMPLEMENTATIONS.call(mechanism, config, x, lengths=(length,), suited=suited)


def diagonal_recurrence(
    config: Config, parameters: Any, state: jax.Array, queries: Any, keys: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Causal diagonal recurrence: every query reads the keys and values up to its own token.

    Args:
      config: static configuration; `config.chunk` is the number of tokens in a chunk in XLA.
      parameters: the rates A, `(K, D, F)`.
      state: the state before the first token, `(*B, K, F, D)`. All sums have the dtype of the
        state.
      queries: `(*B, T, N, F)`.
      keys: keys `(*B, T, K, F)`, values `(*B, T, K, D)` and steps dt `(*B, T, K, D)`.
      tokens: padding masks and starts of packed documents.

    Returns:
      `(output (*B, T, N, D), state after the last token)`; the output has `config.dtype`.
    """
    operands = mesh_axes.vary_alike((parameters, state, queries, keys, tokens))
    return _compiled_recurrence(config, *operands)


@functools.partial(jax.jit, static_argnums=0)  # so that eager calls compile once
def _compiled_recurrence(config, *operands):
    def form(module):
        return functools.partial(module.diagonal_recurrence, config)

    return IMPLEMENTATIONS.run(config.implementations, form, *operands)


def diagonal_decay(x: Inputs) -> jax.Array:
    """Product of the decays of all tokens, exp(A^T * sum_t dt_t), `(*B, K, F, D)`."""
    dtype, mask = x.state.dtype, None if x.tokens is None else x.tokens.key_mask
    total = clear(x.keys, mask)[2].astype(dtype).sum(x.state.ndim - 3)
    A = jnp.swapaxes(x.parameters.astype(dtype), -1, -2)
    return jnp.exp(lead(A, x.state.ndim) * total[..., None, :])
