"""Block attention: softmax attention over the pairs that a rule leaves, by any implementation.

Here are what it is told and its rule of differentiation, which all implementations share. Each is a
module with a `refusal`, which says what it does not take; a `forward`, which gives the output, the
log-sum-exp L, and what rounding took from L; a `backward`, which recomputes the weights as
exp(logits - L); and `tilings`, the tiles that `effattn.tune` tries. The maths is written out in
`effattn.xla.block_attention`.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K, queries T, keys S, head sizes
H and Hv.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from effattn import dispatch, dtypes, tuned
from effattn.layouts import BlockLayout
from effattn.xla import mesh_axes

# Imported on use: most programs have no kernels.
MODULES = {
    "xla": "effattn.xla.block_attention",
    "llvm": "effattn.llvm.block_attention",
    "mosaic_gpu": "effattn.pallas.block_mosaic_gpu",
    "triton": "effattn.pallas.block_triton",
    "mosaic_tpu": "effattn.pallas.block_mosaic_tpu",
}

NO_KEY = np.iinfo(np.int32).min  # the id of a key that nobody may attend to

Origin = Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is fixed when the program is traced.

    Attributes:
      tile: queries and keys in a tile; with a layout it is the layout's. None is what the
        implementation chooses.
      scale: multiplies the products of queries and keys; None if it is the operand `scale`.
      left, right: how far back and ahead of its position a query sees; None is without limit.
        Causality is right = 0.
      offset: position of the first query; None if it is traced, as the operand `offset`.
      soft_cap: c, for c * tanh(logits / c) after the bias.
      score_mod: `(constants, logit, b, h, i, j) -> logit` on scalars, the last step.
      dropout_rate: share of the weights that are dropped.
      precision: of the matrix products.
      pattern: `pattern.allows(i, j, h)` says which pairs may attend; in a layout, of partial tiles.
      key_tiles: how many of the layout's tiles are read in a step.
      origin: `(b, h, i, j) -> (b, h, i, j)`, from the example, head and positions here to those
        that `score_mod` and dropout are told, where a mechanism has rearranged its tokens or heads.
      activation: "sigmoid" or "squared_relu", of each logit, in place of a softmax; the log-sum-exp
        then says nothing.
      implementations: as `effattn.dispatch.choose` gives them.
    """

    tile: tuple[int, int] | None
    scale: float | None
    left: int | None = None
    right: int | None = None
    offset: int | None = 0
    soft_cap: float | None = None
    score_mod: Callable[..., jax.Array] | None = None
    dropout_rate: float = 0.0
    precision: Any = None
    pattern: Any = None
    key_tiles: int = 1
    origin: Origin | None = None
    activation: str | None = None
    implementations: dispatch.Chosen = dispatch.XLA


class Operands(NamedTuple):
    """The arrays; None where absent. Those marked * have gradients.

    Attributes:
      query: `(*B, T, N, H)` *.
      key: `(*B, S, K, H)` *.
      value: `(*B, S, K, Hv)` *.
      bias: `(*#B, #K, #G, #T, #S)`, added to the logits *.
      scale: `()`, multiplies the products *.
      additive: v `(N, H)` of additive scores, sum_h v_h tanh(q_h + k_h), in place of products of
        queries and keys; K is N *.
      constants: arrays that `score_mod` closes over *.
      mask: bool `(*#B, #K, #G, #T, #S)`, the pairs that may attend.
      key_mask: bool `(*B, S)`, the keys that anyone may attend to.
      segments: int ids of the queries `(*B, T)` and of the keys `(*B, S)`; equal ids may attend.
      offset: int `()` or `(*B)`, position of the first query.
      positions: int, of the queries `(*B, T)` and of the keys `(*B, S)`, where tokens have been
        gathered; in place of their order, for the window, `score_mod` and dropout.
      seed: uint32 `(2,)` of the dropout.
      layout: the tiles to visit.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    scale: jax.Array | None = None
    additive: jax.Array | None = None
    constants: tuple[jax.Array, ...] = ()
    mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    segments: tuple[jax.Array, jax.Array] | None = None
    offset: jax.Array | None = None
    positions: tuple[jax.Array, jax.Array] | None = None
    seed: jax.Array | None = None
    layout: BlockLayout | None = None


def ids(x: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """int32 of the queries `(*B, T)` and of the keys `(*B, S)`, of which equal ones may attend.

    They are what segments and the mask of keys say together. None of queries is 1 of all of them,
    and None of keys is no restriction.
    """
    query_ids: Any = None
    key_ids: Any = None
    if x.segments is not None:
        query_ids, key_ids = (ids.astype(jnp.int32) for ids in x.segments)
        key_ids = jnp.where(key_ids == 0, jnp.int32(NO_KEY), key_ids)
    if x.key_mask is not None:
        present = jnp.int32(1) if key_ids is None else key_ids
        key_ids = jnp.where(x.key_mask, present, jnp.int32(NO_KEY))
    return query_ids, key_ids


def call(mechanism: str, rule: Rule, x: Operands) -> dispatch.Call:
    """What `dispatch.choose` takes."""

    def module(name):
        return importlib.import_module(MODULES[name])

    def refusal(name):
        unknown = dispatch.open_length(x.query.shape[-3], x.key.shape[-3])
        return unknown if unknown and name != "xla" else module(name).refusal(rule, x)

    def tilings(name):
        # What the caller, or the layout, says is not to be tuned.
        return module(name).tilings(rule, x) if rule.tile is None and x.layout is None else {}

    return dispatch.Call(
        mechanism,
        {name: functools.partial(refusal, name) for name in MODULES},
        functools.partial(signature, rule, x),
        tilings,
        suited=dispatch.suited(x.query.dtype, x.query.shape[-3]),
        limits=lambda name: module(name).LIMITS,
    )


def signature(rule: Rule, x: Operands) -> str:
    """What the time depends on; numbers of tokens and rows are rounded up to powers of two."""
    *batch, queries, heads, size = x.query.shape
    keys, key_heads, value_size = x.key.shape[-3], x.key.shape[-2], x.value.shape[-1]
    rows = math.prod(batch) * heads
    sizes = {"rows": rows, "queries": queries, "keys": keys, "left": rule.left, "right": rule.right}
    about = [f"{name} {tuned.rounded(n)}" for name, n in sizes.items() if n is not None]
    operands = ("additive", "bias", "mask", "key_mask", "segments", "offset", "positions")
    about += [name for name in operands if getattr(x, name) is not None]
    if x.layout is not None:
        counts = x.layout.partial_indices.shape[-1], x.layout.full_indices.shape[-1]
        about.append(f"layout of {rule.tile} with {counts}")
    elif rule.tile is not None:
        about.append(f"tile {rule.tile}")
    about += [
        name
        for name in ("soft_cap", "score_mod", "dropout_rate", "pattern", "precision", "origin")
        if getattr(rule, name)
    ]
    about += [rule.activation] if rule.activation else []
    dtypes = dict.fromkeys(str(array.dtype) for array in (x.query, x.key, x.value))
    heads_of = f"group {heads // max(key_heads, 1)}, sizes {size} and {value_size}"
    return f"block attention, {' '.join(dtypes)}, {heads_of}, {', '.join(about)}"


@functools.partial(jax.jit, static_argnums=0)
def block_attention(rule: Rule, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention of every query over the keys that it may see.

    Returns the output `(*B, T, N, Hv)` in the dtype of `value`, zeros for a row that sees nothing,
    and the log-sum-exp of the logits `(*B, T, N)`, at least float32, `dtypes.lowest` for such a
    row. Both are differentiable, in reverse mode. Time is O(H + Hv) a pair over the tiles visited,
    memory O(T + S).
    """
    if 0 in (*x.query.shape, x.key.shape[-3]):
        out = jnp.zeros((*x.query.shape[:-1], x.value.shape[-1]), x.value.dtype)
        dtype = softmax_dtype(x)
        return out, jnp.full(x.query.shape[:-1], dtypes.lowest(dtype), dtype)
    arrays = mesh_axes.vary_alike(x._replace(constants=()))
    return _attend(rule, arrays._replace(constants=x.constants))


def _finite(lse):
    """Without -inf: programs that are watched for infinities may return it, and save it."""
    return jnp.where(lse == -jnp.inf, dtypes.lowest(lse.dtype), lse)


def softmax_dtype(x: Operands) -> jnp.dtype:
    """Of logits, weights and sums."""
    return dtypes.wide(x.query, x.key, x.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: Rule, x: Operands):
    out, lse, _ = _forward(rule, x, x.value.dtype)
    return out, _finite(lse)


# Traced once, where the rules of differentiation call for it twice.
@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _forward(rule: Rule, x: Operands, dtype):
    def form(module):
        return lambda x: module.forward(rule, x, dtype)

    return _run(rule, form, x)


def _run(rule, form, *operands):
    names = rule.implementations.names
    forms = {name: form(importlib.import_module(MODULES[name])) for name in names}
    return dispatch.on_platform(rule.implementations, "block attention", forms, *operands)


def _attend_fwd(rule: Rule, x: Operands):
    # Saved unrounded: the backward takes dO . O from all d logits of a row, where the error of a
    # rounded O would add up.
    out, lse, lost = _forward(rule, x, softmax_dtype(x))
    lse = _finite(lse)
    # Named, so that a remat policy can save what is dear to compute again.
    out = checkpoint_name(out, "attention_out")
    lse, lost = checkpoint_name((lse, lost), "attention_lse")
    return (out.astype(x.value.dtype), lse), (x, out, lse, lost)


def _attend_bwd(rule: Rule, saved, cotangents):
    x, out, lse, lost = saved
    lse, (d_out, d_lse) = dtypes.logarithms(lse), cotangents
    # Beside a bias of -1e9 rounding takes log 64 from L. The weights then lack a factor of their
    # row; as gradients are linear in what comes down to the row, that gets it instead.
    factor = jnp.exp(-lost)
    # dO . O - dL, what all d logits of a row share
    wide_d_out = d_out.astype(out.dtype)
    shared = ((wide_d_out * out).sum(-1) - d_lse) * factor
    d_out = (wide_d_out * factor[..., None]).astype(d_out.dtype)

    def form(module):
        return lambda *operands: module.backward(rule, *operands)

    return (_run(rule, form, x, lse, d_out, shared),)


_attend.defvjp(_attend_fwd, _attend_bwd)
