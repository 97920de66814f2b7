"""The baselines: recurrent networks token by token, and the convolution that XLA has."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.references.reference import MixerReference


def lstm(mixer, x):
    of_token, of_output = mixer.cell.dense_i, mixer.cell.dense_h

    def step(carry, token):
        cell, h = carry
        y = token @ of_token.kernel[...] + h @ of_output.kernel[...] + of_output.bias[...]
        i, f, g, o = jnp.split(y, 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (cell, h), h

    zeros = start(x)
    # Step by step as they round: unrolled, the compiler would round less often.
    return lax.scan(step, (zeros, zeros), x)[1]


def gru(mixer, x):
    def step(h, token):
        h = gated(mixer.cell, h, token)
        return h, h

    return lax.scan(step, start(x), x)[1]


def gated(cell, h, token):
    """The next state of a gated recurrent unit."""
    of_token = token @ cell.dense_i.kernel[...] + cell.dense_i.bias[...]
    of_state = h @ cell.dense_h.kernel[...]
    (r, z, n), (r_state, z_state, n_state) = (jnp.split(y, 3, -1) for y in (of_token, of_state))
    r, z = jax.nn.sigmoid(r + r_state), jax.nn.sigmoid(z + z_state)
    return (1 - z) * jnp.tanh(n + r * n_state) + z * h


def start(x):
    return jnp.zeros(x.shape[-1], jnp.promote_types(x.dtype, jnp.float32))


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


LSTM = MixerReference(mix=lstm)
GRU = MixerReference(mix=gru)
CONVOLUTION = MixerReference(
    mix=convolve, variants={"": {"width": 3, "dilation": 2}, "wide": {"width": 4, "dilation": 5}}
)
