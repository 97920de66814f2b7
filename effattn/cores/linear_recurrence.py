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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch, dtypes, tuned
from effattn.xla import mesh_axes, reverse_mode

# Tokens of one masked product. Where features decay of their own it is a product for each halving
# of the chunk, and shorter chunks have fewer.
CHUNK, CHUNK_BY_FEATURE = 64, 32

# Imported on use: most programs have no kernels.
MODULES = {
    "xla": "effattn.xla.linear_recurrence",
    "llvm": "effattn.llvm.linear_recurrence",
    "triton": "effattn.pallas.recurrence_triton",
    "mosaic_tpu": "effattn.pallas.recurrence_mosaic_tpu",
}


class Terms(NamedTuple):
    """What a recurrence sums, of tokens `(*B, L)`; None where absent.

    Query head n reads key head n // (N // K), and value head v writes at key head v // (V // K);
    one of N and V is K.

    Attributes:
      query: `(*B, L, N, F)`.
      key: `(*B, L, K, F)`.
      value: `(*B, L, V, D)`.
      log_decay: `(V,)`, `(*B, L, V)`, or where V is K also `(*B, L, K, F)`; 0 or less.
      bonus: `(K, F)`: a query reads the state before its token, and of the token this much.
      removed: `(*B, L, K, F)`, the a of the delta form; None, with `recalled`, is the key.
      recalled: `(*B, L, K, F)`, the b of the delta form; None is the plain one.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None = None
    bonus: jax.Array | None = None
    removed: jax.Array | None = None
    recalled: jax.Array | None = None


class Rule(NamedTuple):
    """What is fixed when the program is traced.

    Attributes:
      terms: `(parameters, queries, keys) -> Terms`, for a block of tokens: what a mechanism makes
        of its arguments. It treats tokens alike and may not close over arrays. It is run again in
        the backward pass, so nothing that it makes is kept.
      dtype: of the output.
      normalized: divide by the sum of the weights.
      precision: of the matrix products.
      chunk: tokens of one masked product, at most; kernels have chunks of their own.
      implementations: as `effattn.dispatch.choose` gives them.
    """

    terms: Callable[[Any, Any, Any], Terms]
    dtype: Any
    normalized: bool = False
    precision: Any = None
    chunk: int = CHUNK
    implementations: dispatch.Chosen = dispatch.XLA


class Tokens(NamedTuple):
    """What is known of each token; None where absent.

    Attributes:
      query_mask: bool `(*B, T)`, False for queries that read zeros.
      key_mask: bool `(*B, T)`, False for tokens that leave the state as it is, whatever is there.
      starts: bool `(*B, T)`, True where the state before the token is dropped.
    """

    query_mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    starts: jax.Array | None = None


class Operands(NamedTuple):
    """The arrays. Those marked * have gradients.

    Attributes:
      parameters: a pytree that all tokens share, for `Rule.terms` *.
      state: before the first token, `(*B, V, F, D)`, or `(*B, V, F, D + 1)` if normalised. Its
        dtype is that of all sums *.
      queries: a pytree of arrays `(*B, T, ...)` for `Rule.terms`, cleared by the query mask *.
      keys: a pytree of arrays `(*B, T, ...)` for `Rule.terms`, cleared by the key mask *.
      tokens: padding and packed documents.
    """

    parameters: Any
    state: jax.Array
    queries: Any
    keys: Any
    tokens: Tokens | None


def own_chunk(terms: Terms) -> int:
    """Tokens of one masked product, where nobody says how many."""
    decay = terms.log_decay
    by_feature = decay is not None and decay.ndim == terms.key.ndim
    return CHUNK_BY_FEATURE if by_feature else CHUNK


def packed(segment_ids: jax.Array, tokens: Tokens) -> Tokens:
    """The tokens of packed documents: a query reads its own, and the state is that of the last.

    Padding (id 0, and what is masked) belongs to the document before it, or to the first one at
    the start of the row, so that the state outlives it.
    """
    length = segment_ids.shape[-1]
    token = jnp.arange(length)
    in_document = segment_ids != 0
    first = jnp.min(jnp.where(in_document, token, length), -1, keepdims=True, initial=length)
    written = in_document if tokens.key_mask is None else in_document & tokens.key_mask
    last = lax.cummax(jnp.where(written, token, -1), axis=segment_ids.ndim - 1)
    source = jnp.where(last < 0, first, last)
    document = jnp.take_along_axis(segment_ids, source, -1, mode="clip")
    before = jnp.concatenate([document[..., :1], document[..., :-1]], -1)
    reads = in_document & (segment_ids == document)
    return Tokens(
        reads if tokens.query_mask is None else reads & tokens.query_mask,
        written,
        document != before,
    )


@jax.custom_jvp
def normalize(output: jax.Array) -> jax.Array:
    """Divides `(..., D + 1)` by its last entry, to `(..., D)`; zeros where that is zero.

    A subnormal number counts as zero: it has too few bits to divide by. Derivatives divide by the
    normaliser once, never by its square.
    """
    return output[..., :-1] * _reciprocal(output[..., -1:])


@normalize.defjvp
def _normalize_jvp(primals, tangents):
    (output,), (tangent,) = primals, tangents
    normalized = normalize(output)
    change = tangent[..., :-1] - normalized * tangent[..., -1:]
    return normalized, change * _reciprocal(output[..., -1:])


def _reciprocal(x: jax.Array) -> jax.Array:
    usable = jnp.abs(x) >= jnp.finfo(x.dtype).tiny
    return jnp.where(usable, 1 / jnp.where(usable, x, 1), 0)


def append_one(value: jax.Array) -> jax.Array:
    """Gives each value `(..., D)` a last entry of 1, which sums the weights."""
    return jnp.concatenate([value, jnp.ones_like(value, shape=(*value.shape[:-1], 1))], axis=-1)


def clear(tree, mask):
    """Arrays `(*B, L, ...)` with zeros where `mask (*B, L)` is False; None hides nothing."""
    if mask is None:
        return tree
    return jax.tree.map(
        lambda x: jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0), tree
    )


def masked_terms(
    rule: Rule,
    parameters: Any,
    queries: Any,
    keys: Any,
    tokens: Tokens,
    dtype: Any,
    alike: bool = False,
) -> Terms:
    """What is summed, in the dtype of the sums; of masked tokens, nothing.

    `alike` leaves a decay of each head at that: all tokens decay.
    """
    arguments = parameters, clear(queries, tokens.query_mask), clear(keys, tokens.key_mask)
    terms = rule.terms(*jax.tree.map(lambda x: x.astype(dtype), arguments))
    if rule.normalized:
        terms = terms._replace(value=append_one(terms.value))
    if terms.log_decay is not None:
        log_decay = terms.log_decay
        if log_decay.ndim == 1 and not alike:
            log_decay = jnp.broadcast_to(log_decay, terms.value.shape[:-1])
        if log_decay.ndim > 1:
            log_decay = clear(log_decay, tokens.key_mask)
        terms = terms._replace(log_decay=log_decay)
    return terms._replace(
        key=clear(terms.key, tokens.key_mask), removed=clear(terms.removed, tokens.key_mask)
    )


def call(mechanism: str, rule: Rule, x: Operands) -> dispatch.Call:
    """What `dispatch.choose` takes."""

    def refusal(name):
        unknown = dispatch.open_length(length)
        if unknown and name != "xla":
            return unknown
        return importlib.import_module(MODULES[name]).refusal(rule, x)

    queries = jax.tree.leaves(x.queries)
    length, dtype = queries[0].shape[x.state.ndim - 3], dtypes.common(rule.dtype, *queries)
    return dispatch.Call(
        mechanism,
        {name: functools.partial(refusal, name) for name in MODULES},
        functools.partial(signature, rule, x),
        suited=dispatch.suited(dtype, length),
        limits=lambda name: importlib.import_module(MODULES[name]).LIMITS,
    )


def signature(rule: Rule, x: Operands) -> str:
    """What the time depends on; numbers of tokens and rows are rounded up to powers of two."""
    terms = jax.eval_shape(rule.terms, x.parameters, x.queries, x.keys)
    *batch, length, heads, features = terms.query.shape
    rows = math.prod(batch) * heads
    about = [f"rows {tuned.rounded(rows)}", f"tokens {tuned.rounded(length)}"]
    heads_of = f"heads {heads}, {terms.key.shape[-2]} and {terms.value.shape[-2]}"
    if terms.log_decay is not None:
        by = {1: "head", terms.value.ndim - 1: "token"}.get(terms.log_decay.ndim, "feature")
        about.append(f"decay by {by}")
    delta = "bonus", "removed", "recalled"
    about += [name for name in delta if getattr(terms, name) is not None]
    about += [name for name in ("normalized", "precision") if getattr(rule, name)]
    if rule.chunk != own_chunk(terms):
        about.append(f"chunk {rule.chunk}")
    if x.tokens is not None and x.tokens.starts is not None:
        about.append("packed")
    dtypes = dict.fromkeys(str(array.dtype) for array in jax.tree.leaves((x.queries, x.keys)))
    sizes = f"sizes {features} and {terms.value.shape[-1]}"
    return f"linear recurrence, {' '.join(dtypes)}, {heads_of}, {sizes}, {', '.join(about)}"


def linear_recurrence(
    rule: Rule,
    parameters: Any,
    state: jax.Array,
    queries: Any,
    keys: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Every query reads the keys and values up to its own token.

    Takes what `Operands` holds.

    Returns:
      `(output (*B, T, N or V, D), state after the last token)`; the output has `rule.dtype`.

    Raises:
      TypeError: in forward-mode differentiation.
    """
    operands = mesh_axes.vary_alike((parameters, state, queries, keys, tokens))
    with reverse_mode.only("the chunked linear recurrence", "a step-by-step jax.lax.scan of it"):
        return _compiled_recurrence(rule, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(rule, *operands):
    return _forward(rule, *operands)[0]


# Traced once, where the rules of differentiation call for it twice.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(rule, *operands):
    """`((output, state), residuals)`."""
    # What the backward would compute again is kept where it is known who runs it.
    alone = len(rule.implementations.names) == 1

    def form(module):
        def run(*operands):
            results, saved = module.forward(rule, Operands(*operands))
            return results, saved if alone else None

        return run

    results, saved = _run(rule, form, *operands)
    return results, (operands, saved)


def _backward(rule, residuals, cotangents):
    operands, saved = residuals

    def form(module):
        def run(operands, saved, cotangents):
            return tuple(module.backward(rule, Operands(*operands), saved, *cotangents))

        return run

    return _run(rule, form, operands, saved, cotangents)


def _run(rule, form, *operands):
    names = rule.implementations.names
    forms = {name: form(importlib.import_module(MODULES[name])) for name in names}
    return dispatch.on_platform(rule.implementations, "the linear recurrence", forms, *operands)


_recurrence.defvjp(_forward, _backward)
_compiled_recurrence = jax.jit(_recurrence, static_argnums=0)  # so that eager calls compile once
