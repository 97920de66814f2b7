"""gMLP with its weights as a masked matrix."""

import jax
import jax.numpy as jnp

from tests.references.reference import MixerReference


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = jax.nn.gelu(x @ mixer.project.kernel[...])
    gate, value = jnp.split(z.astype(wide), 2, -1)
    value = value - value.mean(-1, keepdims=True)
    value = value / jnp.sqrt(jnp.square(value).mean(-1, keepdims=True) + 1e-6)
    value = (value * mixer.norm.scale[...] + mixer.norm.bias[...]).astype(x.dtype).astype(wide)
    weights = mixer.weights[...][: len(x), : len(x)].astype(wide)
    weights = jnp.where(jnp.tri(len(x), dtype=bool), weights, 0) if mixer.is_causal else weights
    y = gate * (weights @ value + mixer.bias[...][: len(x), None])
    return y.astype(x.dtype) @ mixer.out.kernel[...]


GMLP = MixerReference(
    mix=mix,
    variants={"": {"max_length": 16}},
    cost=lambda length: {"max_length": length},
)
