"""RWKV-4's time mixing over all pairs of tokens."""

import jax
import jax.numpy as jnp

from tests.references.reference import MixerReference


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    before = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
    r, k, v = (
        (amount * x + (1 - amount) * before) @ layer.kernel[...]
        for amount, layer in zip(
            mixer.shifts[...], (mixer.receptance, mixer.key, mixer.value), strict=True
        )
    )
    key, value = k.astype(wide), v.astype(wide)
    decay, bonus = jnp.exp(mixer.log_decay[...].astype(wide)), mixer.bonus[...].astype(wide)
    token = jnp.arange(len(x))[:, None, None]
    age = token - 1 - token.swapaxes(0, 1)  # (T, T, 1)
    exponent = jnp.where(age < 0, bonus, -age * decay) + key
    weights = jax.nn.softmax(jnp.where(age >= -1, exponent, -jnp.inf), 1)
    average = (weights * value).sum(1).astype(x.dtype)
    return (jax.nn.sigmoid(r) * average) @ mixer.out.kernel[...]


RWKV4 = MixerReference(mix=mix)
