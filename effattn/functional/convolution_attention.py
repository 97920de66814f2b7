"""Convolution beside attention (Wu et al. 2020): each takes one half of the features."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import over_examples


def naive(mixer, x):
    """Tokens x `(T, D)`; `mixer.attention` maps `(1, T, D / 2)` to `(1, T, D / 2)`.

    The inner mixer runs as it was made: in its naive form by `implementation="naive"`.
    """
    far, near = jnp.split(x, 2, -1)
    near = jax.nn.glu(near @ mixer.project.kernel[...])
    taps, width = mixer.convolution.taps[...], mixer.convolution.width
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(near, ((width - 1, 0), (0, 0))).astype(wide)
    near = sum(taps[j].astype(wide) * padded[j : j + len(x)] for j in range(width))
    near = near.astype(x.dtype) @ mixer.out.kernel[...]
    return jnp.concatenate([mixer.attention(far[None])[0], near], -1)


registry.register(
    registry.Mechanism(
        name="convolution_attention",
        family="hybrid",
        paper="Wu et al. 2020, Lite Transformer with Long-Short Range Attention",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        reasons={"bidirectional": "its convolution looks back only"},
        builder="effattn.nn.convolution_attention:ConvolutionAttention",
        complexity="O(N^2 D), O(N D) a step",
        time_exponent=2.0,
    )
)
