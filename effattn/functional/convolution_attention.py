"""Convolution beside attention (Wu et al. 2020; Zhao et al. 2019)."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import over_examples


def naive(mixer, x):
    """Tokens x `(T, D)`; `mixer.attention` maps `(1, T, D)` to `(1, T, D)`, or halves of features.

    The inner mixer runs as it was made: in its naive form by `implementation="naive"`.
    """
    if mixer.combination == "halves":
        far, near = jnp.split(x, 2, -1)
        near = jax.nn.glu(near @ mixer.project.kernel[...])
    else:
        far, near = x, mixer.attention.value(x[None]).reshape(len(x), -1)
    taps, width = mixer.convolution.taps[...], mixer.convolution.width
    before = width - 1 if mixer.is_causal else width // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(near, ((before, width - 1 - before), (0, 0))).astype(wide)
    near = sum(taps[j].astype(wide) * padded[j : j + len(x)] for j in range(width))
    near = near.astype(x.dtype) @ mixer.out.kernel[...]
    far = mixer.attention(far[None])[0]
    return jnp.concatenate([far, near], -1) if mixer.combination == "halves" else far + near


registry.register(
    registry.Mechanism(
        name="convolution_attention",
        family="hybrid",
        paper="Wu et al. 2020, Lite Transformer with Long-Short Range Attention; sum: Zhao et al. "
        "2019, MUSE",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        builder="effattn.nn.convolution_attention:ConvolutionAttention",
        complexity="O(N^2 D), O(N D) a step",
        time_exponent=2.0,
    )
)
