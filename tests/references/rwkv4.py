"""RWKV-4's mixer by its naive form."""

import jax
import jax.numpy as jnp

import effattn
from tests.references.reference import MixerReference


def mix(mixer, x):
    before = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
    r, k, v = (
        (amount * x + (1 - amount) * before) @ layer.kernel[...]
        for amount, layer in zip(
            mixer.shifts[...], (mixer.receptance, mixer.key, mixer.value), strict=True
        )
    )
    decay = jnp.exp(mixer.log_decay[...].astype(jnp.promote_types(x.dtype, jnp.float32)))
    (average,) = effattn.naive.rwkv4(k[None], v[None], decay=decay, bonus=mixer.bonus[...])
    return (jax.nn.sigmoid(r) * average) @ mixer.out.kernel[...]


RWKV4 = MixerReference(mix=mix)
