"""Hybrids by their naive forms, and those of the mechanisms inside."""

from types import SimpleNamespace

import jax.numpy as jnp

import effattn
from tests.references.reference import MixerReference

WINDOW = 2


def plain(mixer, **options):
    """A mixer of softmax attention by its naive form."""

    def mix(x):
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", x, layer.kernel[...])
            for layer in (mixer.query, mixer.key, mixer.value)
        )
        y = effattn.naive.softmax(query, key, value, is_causal=mixer.is_causal, **options)
        return jnp.einsum("btnh,nhd->btd", y, mixer.out.kernel[...])

    return mix


def mixture(mixer, x):
    near, far = mixer.mixers
    mixers = plain(near, local_window_size=WINDOW), plain(far)
    inside = SimpleNamespace(mixers=mixers, choose=mixer.choose, gate=mixer.gate)
    return effattn.naive.mixture_of_mechanisms(inside, x)


LOCAL = {"name": "sliding_window", "local_window_size": WINDOW}
MIXTURE_OF_MECHANISMS = MixerReference(
    mix=mixture,
    variants={
        "": {"mechanisms": (LOCAL, {"name": "softmax"})},
        "top1": {"mechanisms": (LOCAL, {"name": "softmax"}), "gate": "top1"},
    },
)


def convolve_and_attend(mixer, x):
    parts = {name: getattr(mixer, name) for name in ("project", "convolution", "out")}
    inside = SimpleNamespace(attention=plain(mixer.attention), **parts)
    return effattn.naive.convolution_attention(inside, x)


CONVOLUTION_ATTENTION = MixerReference(mix=convolve_and_attend, variants={"": {"width": 3}})
