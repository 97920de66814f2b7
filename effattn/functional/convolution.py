"""Convolution baseline (Dauphin et al. 2017): a gated dilated causal convolution."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import over_examples


def naive(mixer, x):
    """a_t, g_t = sum_j x_(t - j d) K_j + b;  y_t = (a_t sigmoid(g_t)) W_out:  x `(T, D)`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = mixer.bias[...].astype(wide)
    for j, kernel in enumerate(mixer.kernel[...].astype(wide)):
        before = jnp.pad(x.astype(wide), ((j * mixer.dilation, 0), (0, 0)))[: len(x)]
        y = y + before @ kernel
    a, g = jnp.split(y.astype(x.dtype), 2, -1)
    return (a * jax.nn.sigmoid(g)) @ mixer.out.kernel[...]


registry.register(
    registry.Mechanism(
        name="convolution",
        family="baseline",
        paper="Dauphin et al. 2017, Language Modeling with Gated Convolutional Networks",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.convolution:DilatedConvolution",
        by_layer=lambda layer, _: {"dilation": 2 ** (layer % 4)},
        complexity="O(N W D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
