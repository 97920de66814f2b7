"""FNet by the definition of the discrete Fourier transform."""

import jax.numpy as jnp

from tests.references.reference import MixerReference


def mix(mixer, x):
    def angles(size):
        return 2 * jnp.pi / size * (jnp.outer(jnp.arange(size), jnp.arange(size)) % size)

    time, features = (angles(size) for size in x.shape)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    across, down = (jnp.exp(-1j * turn.astype(wide)) for turn in (features, time))
    size = x.size**0.5 if mixer.norm == "ortho" else 1
    return (jnp.real(down @ (x.astype(wide) @ across)) / size).astype(x.dtype)


FNET = MixerReference(mix=mix, variants={"": {}, "ortho": {"norm": "ortho"}}, transforms=True)
