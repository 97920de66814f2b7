"""Compressive attention (Rae et al. 2019): Transformer-XL with slots of compressed tokens."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.functional import transformer_xl
from effattn.naive import over_examples


def naive(mixer, x):
    """Tokens x `(T, D)`; slot n compresses the tokens from c n to c n + c - 1."""
    rate = mixer.compression_rate
    runs = [x[first : first + rate] for first in range(0, len(x) - rate + 1, rate)]
    compress = {
        "mean": lambda run: run.mean(0),
        "max": lambda run: run.max(0),
        "convolution": lambda run: jnp.einsum("cd,cde->e", run, mixer.kernel[...]),
    }[mixer.compression]
    # No query reads the last slot.
    slots = jnp.stack([*map(compress, runs), jnp.zeros_like(x[0])])
    slots = jax.lax.stop_gradient(slots) if mixer.stop_gradient else slots
    return transformer_xl.naive(mixer, x, slots)


registry.register(
    registry.Mechanism(
        name="compressive",
        family="hybrid",
        paper="Rae et al. 2019, Compressive Transformers for Long-Range Sequence Modelling",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        reasons={"bidirectional": "its memory holds tokens before the segment"},
        builder="effattn.nn.compressive:CompressiveAttention",
        complexity="O(N (L + M + C) D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
