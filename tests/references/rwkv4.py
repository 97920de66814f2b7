"""RWKV-4's time mixing token by token."""

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
    averages = []
    for t in range(len(x)):
        age = (t - 1 - jnp.arange(t + 1))[:, None]
        exponent = jnp.where(age < 0, bonus, -age * decay) + key[: t + 1]
        averages.append((jax.nn.softmax(exponent, 0) * value[: t + 1]).sum(0))
    return (jax.nn.sigmoid(r) * jnp.stack(averages).astype(x.dtype)) @ mixer.out.kernel[...]


RWKV4 = MixerReference(mix=mix)
