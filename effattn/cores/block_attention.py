"""Block attention: softmax attention over the pairs that a rule leaves, by any implementation.

Here are what it is told and its rule of differentiation, which all implementations share. Each is a
module with a `refusal`, which says what it does not take; a `forward`, which gives the output, the
log-sum-exp L, and what rounding took from L; a `backward`, which recomputes the weights as
exp(logits - L); and `tilings`, the tiles that `effattn.tune` tries. The maths is written out in
`effattn.xla.block_attention`.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K, queries T, keys S, head sizes
H and Hv.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.dispatch import cache
from effattn.interfaces.block_attention import Config, Inputs, softmax_dtype

# Imported on use: most programs have no kernels.
MODULES = {
    "xla": "effattn.xla.block_attention",
    "llvm": "effattn.llvm.block_attention",
    "mosaic_gpu": "effattn.pallas.mosaic_gpu.block_attention",
    "triton": "effattn.pallas.triton.block_attention",
    "mosaic_tpu": "effattn.pallas.mosaic_tpu.block_attention",
}


def call(mechanism: str, config: Config, x: Inputs) -> dispatch.Call:
    """What `dispatch.choose` takes."""

    def module(name):
        return importlib.import_module(MODULES[name])

    def refusal(name):
        unknown = dispatch.open_length(x.query.shape[-3], x.key.shape[-3])
        return unknown if unknown and name != "xla" else module(name).refusal(config, x)

    def tilings(name):
        # What the caller, or the layout, says is not to be tuned.
        return module(name).tilings(config, x) if config.tile is None and x.layout is None else {}

    return dispatch.Call(
        mechanism,
        {name: functools.partial(refusal, name) for name in MODULES},
        functools.partial(signature, config, x),
        tilings,
        suited=dispatch.suited(x.query.dtype, x.query.shape[-3]),
        limits=lambda name: module(name).LIMITS,
    )


def signature(config: Config, x: Inputs) -> str:
    """What the time depends on; numbers of tokens and rows are rounded up to powers of two."""
    *batch, queries, heads, size = x.query.shape
    keys, key_heads, value_size = x.key.shape[-3], x.key.shape[-2], x.value.shape[-1]
    rows = math.prod(batch) * heads
    sizes = {
        "rows": rows,
        "queries": queries,
        "keys": keys,
        "left": config.left,
        "right": config.right,
    }
    about = [f"{name} {cache.rounded(n)}" for name, n in sizes.items() if n is not None]
    operands = ("additive", "bias", "mask", "key_mask", "segments", "offset", "positions")
    about += [name for name in operands if getattr(x, name) is not None]
    if x.layout is not None:
        counts = x.layout.partial_indices.shape[-1], x.layout.full_indices.shape[-1]
        about.append(f"layout of {config.tile} with {counts}")
    elif config.tile is not None:
        about.append(f"tile {config.tile}")
    about += [
        name
        for name in ("soft_cap", "score_mod", "dropout_rate", "pattern", "precision", "origin")
        if getattr(config, name)
    ]
    about += [config.activation] if config.activation else []
    dtypes = dict.fromkeys(str(array.dtype) for array in (x.query, x.key, x.value))
    heads_of = f"group {heads // max(key_heads, 1)}, sizes {size} and {value_size}"
    return f"block attention, {' '.join(dtypes)}, {heads_of}, {', '.join(about)}"


@functools.partial(jax.jit, static_argnums=0)
def block_attention(config: Config, x: Inputs) -> tuple[jax.Array, jax.Array]:
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
    return _attend(config, arrays._replace(constants=x.constants))


def _finite(lse):
    """Without -inf: programs that are watched for infinities may return it, and save it."""
    return jnp.where(lse == -jnp.inf, dtypes.lowest(lse.dtype), lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: Config, x: Inputs):
    out, lse, _ = _forward(config, x, x.value.dtype)
    return out, _finite(lse)


# Traced once, where the rules of differentiation call for it twice.
@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _forward(config: Config, x: Inputs, dtype):
    def form(module):
        return lambda x: module.forward(config, x, dtype)

    return _run(config, form, x)


def _run(config, form, *operands):
    names = config.implementations.names
    forms = {name: form(importlib.import_module(MODULES[name])) for name in names}
    return dispatch.on_platform(config.implementations, "block attention", forms, *operands)


def _attend_fwd(config: Config, x: Inputs):
    # Saved unrounded: the backward takes dO . O from all d logits of a row, where the error of a
    # rounded O would add up.
    out, lse, lost = _forward(config, x, softmax_dtype(x))
    lse = _finite(lse)
    # Named, so that a remat policy can save what is dear to compute again.
    out = checkpoint_name(out, "attention_out")
    lse, lost = checkpoint_name((lse, lost), "attention_lse")
    return (out.astype(x.value.dtype), lse), (x, out, lse, lost)


def _attend_bwd(config: Config, saved, cotangents):
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
        return lambda *operands: module.backward(config, *operands)

    return (_run(config, form, x, lse, d_out, shared),)


_attend.defvjp(_attend_fwd, _attend_bwd)
