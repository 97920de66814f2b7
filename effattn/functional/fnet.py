"""Fourier mixing, that of FNet: a transform in the place of attention."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes


@jax.named_scope("fourier_mixing")
@checks.checked
def fourier_mixing(x: jax.Array, *, norm: str = "backward") -> jax.Array:
    r"""The mixing of FNet (Lee-Thorp et al. 2022, "FNet: Mixing Tokens with Fourier Transforms").

        y_td = Re sum_(s, e) x_se exp(-2 pi i (t s / T + d e / D))

    A discrete Fourier transform over the features, one over the tokens, and the real part of both.
    It has no parameters and mixes all tokens with all. Time is O(T D log(T D)), memory O(T D).
    The transforms are of all T rows, so there can be neither padding nor packing: zeros do not
    leave the other outputs as they were, and outputs depend on T itself. Before JAX 0.12 the
    compiler gathers sharded batches for transforms; there, shard by `jax.shard_map`.

    Args:
      x: `(*B, T, D)`, any number of batch dimensions.
      norm: "backward", as above and in the paper, where a layer norm follows the sum with x; or
        "ortho", divided by sqrt(T D), for models in which none does: outputs as large as x, where
        else they would drown it.

    Returns:
      `(*B, T, D)` in the dtype of `x`; transformed in float32 or float64.

    Raises:
      ValueError: fewer than two axes, a dtype that is not real floating point, or another norm.
    """
    if norm not in ("backward", "ortho"):
        raise ValueError(f'norm must be "backward" or "ortho", got {norm!r}')
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "x must be floating point of shape (*B, T, D), got "
            f"{x.dtype} of shape {x.shape}; cast it, or add the axis of the features"
        )
    checks.known_length("fourier_mixing", x, axis=-2)
    if 0 in x.shape:
        return x
    wide = x.astype(dtypes.wide(x.dtype))
    return jnp.real(jnp.fft.fft2(wide, norm=norm)).astype(x.dtype)


registry.register(
    registry.Mechanism(
        name="fnet",
        family="attention-free",
        paper="Lee-Thorp et al. 2022, FNet: Mixing Tokens with Fourier Transforms",
        function=fourier_mixing,
        takes_heads=False,
        capabilities=frozenset({"bidirectional"}),
        reasons={
            "causal": "every output of a Fourier transform depends on every token",
            "lengths": "a Fourier transform mixes all rows, padding too; batch sequences of one "
            "length together, or take a mechanism that masks",
            "segments": "a Fourier transform mixes all rows, those of other documents too",
        },
        builder="effattn.nn.fnet:FNet",
        complexity="O(N log N D)",
        time_exponent=1.0,
    )
)
