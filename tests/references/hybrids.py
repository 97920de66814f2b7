"""Hybrids, by tables of all weights."""

import jax
import jax.numpy as jnp

from tests.references.reference import MixerReference

WINDOW = 2


def attend(mixer, x, seen, wide):
    q, k, v = (
        jnp.einsum("td,dnh->nth", x, layer.kernel[...]).astype(wide)
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    logits = jnp.where(seen, q @ jnp.swapaxes(k, 1, 2) * q.shape[-1] ** -0.5, -jnp.inf)
    y = (jax.nn.softmax(logits, -1) @ v).astype(x.dtype)
    return jnp.einsum("nth,nhd->td", y, mixer.out.kernel[...])


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    distance = jnp.arange(len(x))[:, None] - jnp.arange(len(x))
    seen = distance >= 0 if mixer.is_causal else distance == distance
    near = seen & (jnp.abs(distance) <= WINDOW)
    logits = x @ mixer.choose.kernel[...] + mixer.choose.bias[...]
    gates = jax.nn.softmax(logits.astype(wide), -1).astype(x.dtype)
    outputs = [attend(m, x, s, wide) for m, s in zip(mixer.mixers, (near, seen), strict=True)]
    return sum(gates[:, m, None] * y for m, y in enumerate(outputs))


LOCAL = {"name": "sliding_window", "local_window_size": WINDOW}
MIXTURE_OF_MECHANISMS = MixerReference(
    mix=mix, variants={"": {"mechanisms": (LOCAL, {"name": "softmax"})}}
)


def convolve_and_attend(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    far, near = jnp.split(x, 2, -1)
    near = jax.nn.glu(near @ mixer.project.kernel[...]).astype(wide)
    taps, width = mixer.convolution.taps[...].astype(wide), mixer.convolution.width
    padded = jnp.concatenate([jnp.zeros((width - 1, near.shape[1]), wide), near])
    near = sum(taps[j] * padded[j : j + len(x)] for j in range(width)).astype(x.dtype)
    far = attend(mixer.attention, far, jnp.tri(len(x), dtype=bool), wide)
    return jnp.concatenate([far, near @ mixer.out.kernel[...]], -1)


CONVOLUTION_ATTENTION = MixerReference(mix=convolve_and_attend, variants={"": {"width": 3}})
