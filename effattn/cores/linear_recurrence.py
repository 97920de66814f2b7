"""The linear recurrence: a matrix-valued state that sums outer products of keys and values.

For one head, with queries q_t and keys k_t of F features and values v_t of D:

    S_t = diag(exp w_t) S_(t-1) + k_t v_t^T                          (F, D)
    y_t = S_t^T q_t        or, with a bonus u,   (S_(t-1) + diag(u) k_t v_t^T)^T q_t

The log decay w_t <= 0 is absent, one number per head, one number per head and token, or F numbers
per head and token. In place of the rows of the state, its columns may decay, by D numbers per head
and token. The delta form also removes the state's content in one direction:

    S_t = (diag(exp w_t) - a_t b_t^T) S_(t-1) + k_t v_t^T

A normalised recurrence appends an entry of 1 to every value, so that the last column of the state
sums the keys. It then divides y_t by the last entry of y_t.

This module defines the derivatives and the choice of implementation. Each implementation is a
module with these functions, beside those that `effattn.dispatch.Implementations` names:

- `forward`: the output, the state after the last token, and the residuals.
- `backward`: the gradients. It computes the residuals again where they are None.
"""

import functools
import math
from typing import Any

import jax

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch import cache
from effattn.interfaces.linear_recurrence import Config, Inputs, Tokens, own_chunk

IMPLEMENTATIONS = dispatch.Implementations(
    "the linear recurrence",
    {
        "xla": "effattn.xla.linear_recurrence",
        "llvm": "effattn.llvm.linear_recurrence",
        "mosaic_gpu": "effattn.pallas.mosaic_gpu.linear_recurrence",
        "triton": "effattn.pallas.triton.linear_recurrence",
        "jax_triton": "effattn.triton.linear_recurrence",
        "mosaic_tpu": "effattn.pallas.mosaic_tpu.linear_recurrence",
    },
)


def call(mechanism: str, config: Config, x: Inputs) -> dispatch.Call:
    """Description of the call for `dispatch.choose`."""
    queries = jax.tree.leaves(x.queries)
    length, dtype = queries[0].shape[x.state.ndim - 3], dtypes.common(config.dtype, *queries)
    suited = dispatch.suited(dtype, length)
    if jax.eval_shape(config.terms, x.parameters, x.queries, x.keys).removed is not None:
        # With two writes for each token, kernels for GPUs are unmeasured.
        suited = tuple(platform for platform in suited if platform != "cuda")
    return IMPLEMENTATIONS.call(
        mechanism,
        config,
        x,
        lengths=(length,),
        signature=functools.partial(signature, config, x),
        suited=suited,
        # The kernels in Mosaic GPU have not run on a GPU yet.
        only_by_name=dispatch.ONLY_BY_NAME | {"mosaic_gpu"},
    )


def signature(config: Config, x: Inputs) -> str:
    """Key of the call in the tuning cache.

    The key names everything that the run time depends on. The length and the number of rows (batch
    times heads) are rounded up to powers of two.
    """
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    *batch, length, heads, features = terms.query.shape
    rows = math.prod(batch) * heads
    about = [f"rows {cache.rounded(rows)}", f"tokens {cache.rounded(length)}"]
    heads_of = f"heads {heads}, {terms.key.shape[-2]} and {terms.value.shape[-2]}"
    if terms.log_decay is not None:
        by = {1: "head", terms.value.ndim - 1: "token"}.get(terms.log_decay.ndim, "feature")
        about.append(f"decay by {by}")
    if terms.value_log_decay is not None:
        about.append("decay by value")
    optional = "bonus", "removed", "recalled"
    about += [name for name in optional if getattr(terms, name) is not None]
    about += [name for name in ("normalized", "precision") if getattr(config, name)]
    if config.chunk != own_chunk(terms):
        about.append(f"chunk {config.chunk}")
    if x.tokens is not None and x.tokens.starts is not None:
        about.append("packed")
    names = dict.fromkeys(str(array.dtype) for array in jax.tree.leaves((x.queries, x.keys)))
    sizes = f"sizes {features} and {terms.value.shape[-1]}"
    return f"linear recurrence, {' '.join(names)}, {heads_of}, {sizes}, {', '.join(about)}"


def linear_recurrence(
    config: Config,
    parameters: Any,
    state: jax.Array,
    queries: Any,
    keys: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Causal linear recurrence: every query reads the keys and values up to its own token.

    The arguments after `config` are the fields of `effattn.interfaces.linear_recurrence.Inputs`.

    Returns:
      `(output (*B, T, N or V, D), state after the last token)`; the output has `config.dtype`.
    """
    operands = mesh_axes.vary_alike((parameters, state, queries, keys, tokens))
    return _compiled_recurrence(config, *operands)


# Under `jax.jit` so that it is traced once: the primal function and the VJP both call it.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(config, *operands):
    """Returns `((output, state), saved)`."""
    # Residuals differ by implementation. With several candidate implementations none are saved,
    # and the backward pass computes its residuals again.
    alone = len(config.implementations.names) == 1

    def form(module):
        def run(*operands):
            results, saved = module.forward(config, Inputs(*operands))
            return results, saved if alone else None

        return run

    return IMPLEMENTATIONS.run(config.implementations, form, *operands)


def _with_residuals(config, *operands):
    results, saved = _forward(config, *operands)
    return results, (operands, saved)


def _backward(config, residuals, cotangents):
    operands, saved = residuals

    def form(module):
        def run(operands, saved, cotangents):
            return tuple(module.backward(config, Inputs(*operands), saved, *cotangents))

        return run

    return IMPLEMENTATIONS.run(config.implementations, form, operands, saved, cotangents)


def _in_xla(config, *operands):
    return IMPLEMENTATIONS.module("xla").forward(config, Inputs(*operands))[0]


_recurrence = with_derivatives(
    lambda *operands: _forward(*operands)[0], _with_residuals, _backward, _in_xla
)
_compiled_recurrence = jax.jit(_recurrence, static_argnums=0)  # so that eager calls compile once
