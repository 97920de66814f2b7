"""The attention-free transformer with a softmax over keys for every feature."""

import jax
import jax.numpy as jnp

from tests.references.reference import MixerReference


def of_biases(biases):
    """`biases(mixer, distance (T, T)) -> (T, T, D or 1)`."""

    def mix(mixer, x):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        q, k, v = (x @ layer.kernel[...] for layer in (mixer.query, mixer.key, mixer.value))
        token = jnp.arange(len(x))
        distance = token[:, None] - token
        exponent = k.astype(wide) + biases(mixer, distance)
        if mixer.is_causal:
            exponent = jnp.where((distance >= 0)[..., None], exponent, -jnp.inf)
        average = (jax.nn.softmax(exponent, 1) * v.astype(wide)).sum(1)
        y = jax.nn.sigmoid(q.astype(wide)) * average
        return y.astype(x.dtype) @ mixer.out.kernel[...]

    return mix


def full(mixer, distance):
    row, column = (p[...][: len(distance)] for p in (mixer.row_bias, mixer.column_bias))
    wide = jnp.promote_types(row.dtype, jnp.float32)
    return (row.astype(wide) @ column.astype(wide).T)[..., None]


def local(mixer, distance):
    return jnp.where((jnp.abs(distance) <= 3)[..., None], full(mixer, distance), 0)


def simple(mixer, distance):
    return jnp.zeros_like(distance)[..., None]


def conv(mixer, distance):
    first = 0 if mixer.is_causal else -3
    taps = mixer.taps[...].T[jnp.clip(distance - first, 0)]
    taps = jnp.repeat(taps, mixer.in_features // taps.shape[-1], -1)
    return jnp.where((jnp.abs(distance) <= 3)[..., None], taps, 0)


AFT_FULL = MixerReference(
    mix=of_biases(full),
    variants={"": {"max_length": 16, "rank": 3}},
    cost=lambda length: {"max_length": length},
)
AFT_SIMPLE = MixerReference(
    mix=of_biases(lambda mixer, distance: jnp.zeros_like(distance)[..., None])
)
AFT_LOCAL = MixerReference(
    mix=of_biases(local),
    variants={"": {"max_length": 16, "rank": 3, "local_window_size": 3}},
    cost=lambda length: {"max_length": length},
)
AFT_CONV = MixerReference(mix=of_biases(conv), variants={"": {"local_window_size": 3}})
