"""The mixers of S4D and S4 by their naive forms."""

import jax
import jax.numpy as jnp

import effattn
from tests.references.reference import MixerReference


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    output_real, output_imag = mixer.output[...].astype(wide)
    (y,) = effattn.naive.s4d(
        x[None],
        rate=-jnp.exp(mixer.log_rate[...].astype(wide)) + 1j * mixer.turn[...].astype(wide),
        output=output_real + 1j * output_imag,
        step_size=jnp.exp(mixer.log_step[...].astype(wide)),
        skip=mixer.skip[...],
    )
    return jax.nn.glu(jax.nn.gelu(y) @ mixer.out.kernel[...])


S4D = MixerReference(mix=mix, transforms=True, variants={"": {"state_size": 6}})
S4 = MixerReference(
    mix=effattn.naive.s4,
    transforms=True,
    # A state space goes on past the kernel that its parameters are those of.
    variants={
        "": {"state_size": 4, "max_length": 16},
        "longer": {"state_size": 4, "max_length": 12},
    },
    cost=lambda length: {"max_length": length},
)
