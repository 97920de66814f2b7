"""The Synthesizer's mixers by their naive forms."""

import jax
import jax.numpy as jnp

import effattn
from tests.references.reference import MixerReference


def mix(mixer, x):
    def heads(layer):
        y = jnp.einsum("td,dnh->tnh", x, layer.kernel[...])
        return (y if layer.bias is None else y + layer.bias[...])[None]

    def rows(table):
        return table[...][: len(x)]

    value, options = heads(mixer.value), {"is_causal": mixer.is_causal}
    if mixer.kind == "factorized":
        coarse, fine = heads(mixer.coarse), heads(mixer.fine)
        y = effattn.naive.synthesizer_factorized(coarse, fine, value, **options)
    elif mixer.kind == "factorized_random":
        hidden, table = rows(mixer.rows)[None], rows(mixer.table)
        y = effattn.naive.synthesizer_factorized_random(hidden, table, value, **options)
    elif mixer.kind == "dense":
        hidden, table = jax.nn.relu(heads(mixer.hidden)), rows(mixer.table)
        y = effattn.naive.synthesizer(hidden, table, value, **options)
    else:
        share = jax.nn.sigmoid(mixer.mixture[...])[:, None]
        hidden = share * jax.nn.relu(heads(mixer.hidden))
        query = (1 - share) * heads(mixer.query) * mixer.head_dim**-0.5
        hidden = jnp.concatenate([hidden, query], -1)
        table = jnp.concatenate([rows(mixer.table)[None], heads(mixer.key)], -1)
        y = effattn.naive.synthesizer_mixture(hidden, table, value, **options)
    return jnp.einsum("tnh,nhd->td", y[0], mixer.out.kernel[...])


def reference(mix=mix, **options):
    return MixerReference(
        mix=mix,
        variants={"": {"max_length": 16, **options}},
        cost=lambda length: {"max_length": length},
    )


DENSE = reference(hidden_features=3)
FACTORIZED = reference()
RANDOM_TABLE = reference(mix=effattn.naive.synthesizer_random)
FACTORIZED_RANDOM = reference(hidden_features=3)
MIXTURE = reference(hidden_features=3)
