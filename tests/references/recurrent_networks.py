"""The baselines: Flax's cells token by token, and the convolution that XLA has."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.references.reference import MixerReference


def mix(mixer, x):
    # Step by step as they round: unrolled, the compiler would round less often.
    return lax.scan(lambda carry, token: mixer.cell(carry, token), mixer._carry(x[0]), x)[1]


def convolve(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    reach = (mixer.width - 1) * mixer.dilation
    y = lax.conv_general_dilated(
        x.astype(wide)[None],
        mixer.kernel[...][::-1].astype(wide),
        window_strides=(1,),
        padding=[(reach, 0)],
        rhs_dilation=(mixer.dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0]
    value, gate = jnp.split((y + mixer.bias[...].astype(wide)).astype(x.dtype), 2, -1)
    return (value * jax.nn.sigmoid(gate)) @ mixer.out.kernel[...]


LSTM = MixerReference(mix=mix)
GRU = MixerReference(mix=mix)
CONVOLUTION = MixerReference(
    mix=convolve, variants={"": {"width": 3, "dilation": 2}, "wide": {"width": 4, "dilation": 5}}
)
