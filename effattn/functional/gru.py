"""GRU baseline (Cho et al. 2014): a recurrent network with a gated state."""

import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.naive import over_examples
from effattn.naive.cells import gated_unit, in_directions


def naive(mixer, x):
    """Tokens x `(T, D)`."""
    return in_directions(mixer, x, recurrence)


def recurrence(cell, x):
    """Tokens x `(T, D)`."""

    def step(h, token):
        h = gated_unit(cell, h, token)
        return h, h

    zeros = jnp.zeros(x.shape[1], jnp.promote_types(x.dtype, jnp.float32))
    return lax.scan(step, zeros, x)[1].astype(x.dtype)


registry.register(
    registry.Mechanism(
        name="gru",
        family="baseline",
        paper="Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.gru:GRU",
        complexity="O(N D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
