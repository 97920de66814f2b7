"""The linear recurrence: a matrix-valued state that sums outer products of keys and values.

For one head, with queries q_t and keys k_t of F features and values v_t of D:

    S_t = diag(exp w_t) S_(t-1) + k_t v_t^T                          (F, D)
    y_t = S_t^T q_t        or, with a bonus u,   (S_(t-1) + diag(u) k_t v_t^T)^T q_t

The log decays w_t <= 0 are none, one number a head, one a token, or F numbers a token. The delta
form also takes away what the state holds in some direction:

    S_t = (diag(exp w_t) - a_t b_t^T) S_(t-1) + k_t v_t^T

A normalised recurrence gives every value a last entry of 1, so that the last column of the state
sums the keys, and divides y_t by its own last entry.

Here are what it is told and its rule of differentiation, which all implementations share. Each is a
module with a `refusal`, which says what it does not take; a `forward`, which gives the output, the
state after and what its backward would have to compute again; and a `backward`.
"""

import functools
import importlib
import math
from typing import Any

import jax

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes, reverse_mode
from effattn.dispatch import cache
from effattn.interfaces.linear_recurrence import Config, Inputs, Tokens, own_chunk

# Imported on use: most programs have no kernels.
MODULES = {
    "xla": "effattn.xla.linear_recurrence",
    "llvm": "effattn.llvm.linear_recurrence",
    "triton": "effattn.pallas.triton.linear_recurrence",
    "mosaic_tpu": "effattn.pallas.mosaic_tpu.linear_recurrence",
}


def call(mechanism: str, config: Config, x: Inputs) -> dispatch.Call:
    """What `dispatch.choose` takes."""

    def refusal(name):
        unknown = dispatch.open_length(length)
        if unknown and name != "xla":
            return unknown
        return importlib.import_module(MODULES[name]).refusal(config, x)

    queries = jax.tree.leaves(x.queries)
    length, dtype = queries[0].shape[x.state.ndim - 3], dtypes.common(config.dtype, *queries)
    return dispatch.Call(
        mechanism,
        {name: functools.partial(refusal, name) for name in MODULES},
        functools.partial(signature, config, x),
        suited=dispatch.suited(dtype, length),
        limits=lambda name: importlib.import_module(MODULES[name]).LIMITS,
    )


def signature(config: Config, x: Inputs) -> str:
    """What the time depends on; numbers of tokens and rows are rounded up to powers of two."""
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    *batch, length, heads, features = terms.query.shape
    rows = math.prod(batch) * heads
    about = [f"rows {cache.rounded(rows)}", f"tokens {cache.rounded(length)}"]
    heads_of = f"heads {heads}, {terms.key.shape[-2]} and {terms.value.shape[-2]}"
    if terms.log_decay is not None:
        by = {1: "head", terms.value.ndim - 1: "token"}.get(terms.log_decay.ndim, "feature")
        about.append(f"decay by {by}")
    delta = "bonus", "removed", "recalled"
    about += [name for name in delta if getattr(terms, name) is not None]
    about += [name for name in ("normalized", "precision") if getattr(config, name)]
    if config.chunk != own_chunk(terms):
        about.append(f"chunk {config.chunk}")
    if x.tokens is not None and x.tokens.starts is not None:
        about.append("packed")
    dtypes = dict.fromkeys(str(array.dtype) for array in jax.tree.leaves((x.queries, x.keys)))
    sizes = f"sizes {features} and {terms.value.shape[-1]}"
    return f"linear recurrence, {' '.join(dtypes)}, {heads_of}, {sizes}, {', '.join(about)}"


def linear_recurrence(
    config: Config,
    parameters: Any,
    state: jax.Array,
    queries: Any,
    keys: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the keys and values up to its own token.

    Takes what `Inputs` holds.

    Returns:
      `(output (*B, T, N or V, D), state after the last token)`; the output has `config.dtype`.

    Raises:
      TypeError: in forward-mode differentiation.
    """
    operands = mesh_axes.vary_alike((parameters, state, queries, keys, tokens))
    with reverse_mode.only("the chunked linear recurrence", "a step-by-step jax.lax.scan of it"):
        return _compiled_recurrence(config, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(config, *operands):
    return _forward(config, *operands)[0]


# Traced once, where the rules of differentiation call for it twice.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(config, *operands):
    """`((output, state), residuals)`."""
    # What the backward would compute again is kept where it is known who runs it.
    alone = len(config.implementations.names) == 1

    def form(module):
        def run(*operands):
            results, saved = module.forward(config, Inputs(*operands))
            return results, saved if alone else None

        return run

    results, saved = _run(config, form, *operands)
    return results, (operands, saved)


def _backward(config, residuals, cotangents):
    operands, saved = residuals

    def form(module):
        def run(operands, saved, cotangents):
            return tuple(module.backward(config, Inputs(*operands), saved, *cotangents))

        return run

    return _run(config, form, operands, saved, cotangents)


def _run(config, form, *operands):
    names = config.implementations.names
    forms = {name: form(importlib.import_module(MODULES[name])) for name in names}
    return dispatch.on_platform(config.implementations, "the linear recurrence", forms, *operands)


_recurrence.defvjp(_forward, _backward)
_compiled_recurrence = jax.jit(_recurrence, static_argnums=0)  # so that eager calls compile once
