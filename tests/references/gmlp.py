"""gMLP's mixer by its naive form."""

import jax
import jax.numpy as jnp

import effattn
from tests.references.reference import MixerReference


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = jax.nn.gelu(x @ mixer.project.kernel[...])
    gate, value = jnp.split(z.astype(wide), 2, -1)
    value = value - value.mean(-1, keepdims=True)
    value = value / jnp.sqrt(jnp.square(value).mean(-1, keepdims=True) + 1e-6)
    value = (value * mixer.norm.scale[...] + mixer.norm.bias[...]).astype(x.dtype)
    (y,) = effattn.naive.gmlp(
        gate[None].astype(x.dtype),
        value[None],
        mixer.weights[...],
        mixer.bias[...],
        is_causal=mixer.is_causal,
    )
    return y @ mixer.out.kernel[...]


GMLP = MixerReference(
    mix=mix,
    variants={"": {"max_length": 16}},
    cost=lambda length: {"max_length": length},
)
