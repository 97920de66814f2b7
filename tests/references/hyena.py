"""Hyena's mixer by its naive form."""

import jax.numpy as jnp
import numpy as np

import effattn
from tests.references.reference import MixerReference


def filters(mixer, dtype):
    length, order = mixer.max_length, mixer.order
    t = jnp.arange(length, dtype=dtype)[:, None] / length
    k = jnp.arange(1, mixer.num_harmonics + 1)
    hidden = jnp.concatenate([t, jnp.cos(2 * np.pi * k * t), -jnp.sin(2 * np.pi * k * t)], 1)
    for layer, frequency in zip(mixer.filter_layers, mixer.frequency[...], strict=True):
        hidden = jnp.sin(frequency * (hidden @ layer.kernel[...] + layer.bias[...]))
    taps = (hidden @ mixer.filter_out.kernel[...]).reshape(length, order, -1)
    slow, fast = np.log(100) / 1.5, np.log(100) / 0.3
    rates = fast + (slow - fast) * jnp.arange(taps.shape[-1]) / (taps.shape[-1] - 1)
    return taps * (jnp.exp(-t * rates) + mixer.window_shift)[:, None]


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    projected = (x @ mixer.project.kernel[...]).astype(wide)
    short, width = mixer.convolution.taps[...].astype(wide), mixer.convolution.width
    padded = jnp.pad(projected, ((width - 1, 0), (0, 0)))
    streams = sum(short[j] * padded[j : j + len(x)] for j in range(width))
    streams = (streams + mixer.convolution.bias[...].astype(wide)).astype(x.dtype)
    *gates, value = jnp.split(streams, mixer.order + 1, -1)
    taps = jnp.moveaxis(filters(mixer, wide), 1, 0)
    gates = jnp.stack(gates)[:, None]
    (z,) = effattn.naive.hyena(gates, value[None], taps, skip=mixer.skip[...])
    return z @ mixer.out.kernel[...]


SMALL = {"max_length": 16, "filter_features": 5, "frequency": 1.0}
HYENA = MixerReference(
    mix=mix,
    variants={"": SMALL, "order 3": {**SMALL, "order": 3, "num_harmonics": 1}},
    cost=lambda length: {"max_length": length},
    transforms=True,
    # The gates multiply one another.
    bounded=1e-3,
)
