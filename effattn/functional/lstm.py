"""LSTM baseline (Hochreiter and Schmidhuber 1997): a recurrent network with a gated cell."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.naive import over_examples
from effattn.naive.cells import in_directions


def naive(mixer, x):
    """Tokens x `(T, D)`."""
    return in_directions(mixer, x, recurrence)


def recurrence(cell, x):
    """Tokens x `(T, D)`; the weights of i, f, g and o stand side by side."""
    of_token, of_output = cell.dense_i, cell.dense_h

    def step(carry, token):
        c, h = carry
        y = token @ of_token.kernel[...] + h @ of_output.kernel[...] + of_output.bias[...]
        i, f, g, o = jnp.split(y, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    zeros = jnp.zeros(x.shape[1], jnp.promote_types(x.dtype, jnp.float32))
    return lax.scan(step, (zeros, zeros), x)[1].astype(x.dtype)


registry.register(
    registry.Mechanism(
        name="lstm",
        family="baseline",
        paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.lstm:LSTM",
        complexity="O(N D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
