"""Block attention: derivatives and choice of implementation for masked softmax attention.

Each implementation is a module with these functions, beside those that
`effattn.dispatch.Implementations` names:

- `forward`: the output, its rounding error if `exact`, and the log-sum-exp L (`Attended`).
- `backward`: the gradients; it recomputes the weights as exp(logits - L).
- `tilings`: the tile sizes that `effattn.tune` tries.

`effattn.xla.block_attention` gives the formulas.

Shapes: batch dimensions `*B`, query heads N, key heads K, query length T, key length S, head
dimensions H and Hv.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch import cache
from effattn.interfaces.block_attention import Attended, Config, Inputs, softmax_dtype

IMPLEMENTATIONS = dispatch.Implementations(
    "block attention",
    {
        "xla": "effattn.xla.block_attention",
        "llvm": "effattn.llvm.block_attention",
        "mosaic_gpu": "effattn.pallas.mosaic_gpu.block_attention",
        "triton": "effattn.pallas.triton.block_attention",
        "jax_triton": "effattn.triton.block_attention",
        "mosaic_tpu": "effattn.pallas.mosaic_tpu.block_attention",
    },
)


def call(mechanism: str, config: Config, x: Inputs) -> dispatch.Call:
    """Description of the call for `dispatch.choose`."""

    def tilings(name):
        # Tiles that the caller or a layout fixes are not tuned.
        tuned = config.tile is None and x.layout is None
        return IMPLEMENTATIONS.module(name).tilings(config, x) if tuned else {}

    lengths = x.query.shape[-3], x.key.shape[-3]
    return IMPLEMENTATIONS.call(
        mechanism,
        config,
        x,
        lengths=lengths,
        signature=functools.partial(signature, config, x),
        tilings=tilings,
        suited=dispatch.suited(x.query.dtype, lengths[0]),
        capabilities=dispatch.FROM_AMPERE,
    )


def signature(config: Config, x: Inputs) -> str:
    """Key of the call in the tuning cache.

    The key names everything that the run time depends on. Lengths and the number of rows (batch
    times heads) are rounded up to powers of two.
    """
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
    operands = ("scale", "additive", "mask", "key_mask", "segments", "offset", "positions")
    about += [name for name in operands if getattr(x, name) is not None]
    if x.bias is not None:
        shared = " x ".join("1" if size == 1 else "n" for size in x.bias.shape[-4:])
        about.append(f"bias of {x.bias.dtype}, {shared}")
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
    names = dict.fromkeys(str(array.dtype) for array in (x.query, x.key, x.value))
    heads_of = f"group {heads // max(key_heads, 1)}, sizes {size} and {value_size}"
    return f"block attention, {' '.join(names)}, {heads_of}, {', '.join(about)}"


@functools.partial(jax.jit, static_argnums=0)
def block_attention(config: Config, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """Attention of every query over the keys that the query may see.

    Time is O(H + Hv) for each pair in the visited tiles, memory O(T + S).

    Returns:
      The output `(*B, T, N, Hv)` in the dtype of `value`, and the log-sum-exp of the logits
      `(*B, T, N)`, at least float32. Rows without keys have a zero output and a log-sum-exp of
      `dtypes.lowest`. Both results are differentiable.
    """
    if 0 in (*x.query.shape, x.key.shape[-3]):
        out = jnp.zeros((*x.query.shape[:-1], x.value.shape[-1]), x.value.dtype)
        dtype = softmax_dtype(x)
        return out, jnp.full(x.query.shape[:-1], dtypes.lowest(dtype), dtype)
    arrays = mesh_axes.vary_alike(x._replace(constants=()))
    return _attend(config, arrays._replace(constants=x.constants))


def _finite(lse):
    """Replaces -inf by `dtypes.lowest`, so that `jax_debug_infs` accepts the log-sum-exp."""
    return jnp.where(lse == -jnp.inf, dtypes.lowest(lse.dtype), lse)


# Under `jax.jit` so that it is traced once: the primal function and the VJP both call it.
@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _forward(config: Config, x: Inputs, exact: bool) -> Attended:
    def form(module):
        return lambda x: module.forward(config, x, exact)

    return IMPLEMENTATIONS.run(config.implementations, form, x)


def _attend_fwd(config: Config, x: Inputs):
    # The rounding error of the output is saved, too: delta is subtracted from every d logits of a
    # row, so its rounding error would add up.
    found = _forward(config, x, True)
    return found._replace(lse=_finite(found.lse))


def _residuals(config: Config, operands, found: Attended):
    # Named, so that a remat policy can save these residuals.
    out, out_error = checkpoint_name((found.out, found.out_error), "attention_out")
    lse, lse_error = checkpoint_name((found.lse, found.lse_error), "attention_lse")
    return (out, lse), (*operands, Attended(out, out_error, lse, lse_error))


def _attend_bwd(config: Config, saved, cotangents):
    x, (out, out_error, lse, lse_error) = saved
    if out_error is not None:
        out, out_error = (each.astype(softmax_dtype(x)) for each in (out, out_error))
        out += out_error
    lse, (d_out, d_lse) = dtypes.logarithms(lse), cotangents
    # The factor corrects the recomputed weights exp(logits - L) of a row for the rounding of L: in
    # float32, beside a bias of -1e9, L loses the logarithm of the number of keys (log 64 for 64
    # equal logits). As the gradients are linear in dO and delta, it multiplies these two.
    factor = jnp.exp(-lse_error)
    wide_d_out = d_out.astype(out.dtype)
    delta = ((wide_d_out * out).sum(-1) - d_lse) * factor
    d_out = (wide_d_out * factor[..., None]).astype(d_out.dtype)

    def form(module):
        return lambda *operands: module.backward(config, *operands)

    return (IMPLEMENTATIONS.run(config.implementations, form, x, lse, d_out, delta),)


def _run(config: Config, x: Inputs):
    found = _forward(config, x, False)
    return found.out, _finite(found.lse)


def _run_in_xla(config: Config, x: Inputs):
    found = IMPLEMENTATIONS.module("xla").forward(config, x, False)
    return found.out, _finite(found.lse)


_attend = with_derivatives(_run, _attend_fwd, _attend_bwd, _run_in_xla, _residuals)


@functools.partial(jax.jit, static_argnums=0)
def known_attention(
    config: Config, x: Inputs, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The given results of attention over all keys, with the gradients of the keys in `x` alone.

    For keys that come in parts: the gradients of a part need the output and the log-sum-exp over
    all keys, and not those over the part.

    Args:
      config: configuration of `block_attention`.
      x: the queries, and the keys of one part.
      out: output over all keys, at least float32; its gradient is zero.
      lse: log-sum-exp over all keys; its gradient is zero.

    Returns:
      `out` in the dtype of `value`, and `lse`.
    """
    arrays, out, lse = mesh_axes.vary_alike((x._replace(constants=()), out, lse))
    return _known(config, arrays._replace(constants=x.constants), out, _finite(lse))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _known(config: Config, x: Inputs, out, lse):
    return out.astype(x.value.dtype), lse


def _known_fwd(config: Config, x: Inputs, out, lse):
    return _known(config, x, out, lse), (x, Attended(out, None, lse, jnp.zeros_like(lse)))


def _known_bwd(config: Config, saved, cotangents):
    _, found = saved
    zeros = jnp.zeros_like(found.out), jnp.zeros_like(found.lse)
    return *_attend_bwd(config, saved, cotangents), *zeros


_known.defvjp(_known_fwd, _known_bwd)
