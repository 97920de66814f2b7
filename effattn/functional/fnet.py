"""Fourier mixing of FNet: a Fourier transform in place of attention."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import sequence_parts
from effattn.naive import over_examples, with_naive


def naive(x, *, norm):
    """Tokens x `(T, D)`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def transform(size):
        """exp(-2 pi i n k / size), `(size, size)`."""
        turns = jnp.outer(jnp.arange(size), jnp.arange(size)) % size / size
        return jnp.exp(-2j * jnp.pi * turns.astype(wide.dtype))

    y = jnp.real(transform(len(x)) @ wide @ transform(x.shape[1]))
    return (y / x.size**0.5 if norm == "ortho" else y).astype(x.dtype)


@with_naive(over_examples(naive))
@jax.named_scope("fourier_mixing")
@checks.checked
def fourier_mixing(x: jax.Array, *, norm: str = "backward") -> jax.Array:
    r"""Token mixing of FNet (Lee-Thorp et al. 2022, "FNet: Mixing Tokens with Fourier Transforms").

        y_td = Re sum_(s, e) x_se exp(-2 pi i (t s / T + d e / D))

    The result is the real part of a discrete Fourier transform over tokens and features. The mixing
    has no parameters, and every output depends on every token. Time is O(T D log(T D)), memory
    O(T D). Padding and packing are not supported: the transform covers all T rows, so zeros in the
    padding and the length T change all outputs. Before JAX 0.12, the compiler gathers sharded
    batches for Fourier transforms; use `jax.shard_map` there.

    Args:
      x: `(*B, T, D)`, any number of batch dimensions.
      norm: "backward", as above and in the paper, for models with a layer norm after the residual
        sum; or "ortho", which divides by sqrt(T D), for models without this norm: outputs then have
        the magnitude of x.

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
    wide = dtypes.widen(x)
    if sequence_parts.current() is None:
        y = jnp.real(jnp.fft.fft2(wide, norm=norm))
    else:
        y = _over_tokens(jnp.fft.fft(wide, norm=norm), norm)
    return y.astype(x.dtype)


@sequence_parts.over_channels(("x",), name="fourier_mixing")
def _over_tokens(x: jax.Array, norm: str) -> jax.Array:
    """Real part of the Fourier transform over tokens of complex x `(*B, T, D)`."""
    return jnp.real(jnp.fft.fft(x, axis=-2, norm=norm))


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
            "lengths": "a Fourier transform mixes all tokens, padding too; batch sequences of one "
            "length together, or take a mechanism that masks",
            "segments": "a Fourier transform mixes all tokens, also those of other documents; pass "
            "one document a row, and documents of one length together",
        },
        builder="effattn.nn.fnet:FNet",
        complexity="O(N log N D)",
        time_exponent=1.0,
    )
)
