"""The linear equations of a Mesa layer, (G_t + diag(r)) x_t = q_t for each token t.

G_t sums outer products of keys with decays, so its products with vectors are a linear recurrence.
Conjugate gradients solve the equations with any implementation of this recurrence. For CPUs there
is a kernel that takes all steps itself (`effattn.llvm.mesa`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.cores import sequence_parts
from effattn.cores.linear_recurrence import call
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens
from effattn.xla.conjugate_gradients import conjugate_gradients


class Equations(NamedTuple):
    """Arrays of the equations.

    Attributes:
      key: `(*B, T, K, H)`, in the dtype of the state.
      beta: `(*B, T, K)`, the weight of each token.
      log_decay: `(*B, T, K)`.
      diagonal: r, `(K, H)`, above 0.
      state: G before the first token, `(*B, K, H, H)`.
      tokens: padding masks and starts of packed documents.
    """

    key: jax.Array
    beta: jax.Array
    log_decay: jax.Array
    diagonal: jax.Array
    state: jax.Array
    tokens: Tokens


def solve(
    mechanism: str,
    terms: Callable[[Any, Any, Any], Terms],
    product: Callable[[jax.Array], jax.Array],
    query: jax.Array,
    equations: Equations,
    *,
    num_steps: int,
    implementation: Any = None,
) -> jax.Array:
    """Solutions x `(*B, T, N, H)`, by `num_steps` steps of conjugate gradients from zero.

    Args:
      mechanism: name of the mechanism, for messages.
      terms: the terms of the recurrence of `product`, for keys (key, value, beta, log_decay).
      product: the left sides of the equations, for vectors `(*B, T, N, H)`.
      query: the right sides, `(*B, T, N, H)`.
      equations: the terms of the equations, and their state.
      num_steps: the most steps of a token.
      implementation: as in `effattn.options`.
    """
    keys = equations.key, equations.key, equations.beta, equations.log_decay
    inputs = Inputs(None, equations.state, query, keys, equations.tokens)
    chosen = dispatch.choose(implementation, call(mechanism, Config(terms, query.dtype), inputs))
    # The kernel knows one device's tokens and heads; elsewhere the recurrence of `product` does.
    has_kernel = sequence_parts.current() is None and not mesh_axes.explicit(query)

    def by_steps(product, query):
        def by_products(query):
            return conjugate_gradients(product, query, num_steps)

        def by_kernel(query):
            from effattn.llvm import mesa  # imported on first use, as it imports llvmlite

            return mesa.solve(query, *equations, num_steps=num_steps)

        forms = dict.fromkeys(chosen.names, by_products)
        if has_kernel and "llvm" in forms:
            forms["llvm"] = by_kernel
        return dispatch.on_platform(chosen, mechanism, forms, query)

    return lax.custom_linear_solve(product, query, by_steps, symmetric=True)
