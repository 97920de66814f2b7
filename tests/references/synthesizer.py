"""The Synthesizer's kinds by tables of all logits."""

import jax
import jax.numpy as jnp

from tests.references.reference import MixerReference


def logits(mixer, x, wide):
    """`(N, T, T)`."""
    time = len(x)

    def heads(layer):
        y = jnp.einsum("td,dnh->tnh", x, layer.kernel[...])
        return (y if layer.bias is None else y + layer.bias[...]).astype(wide)

    def compared(a, b):
        return jnp.einsum("tna,sna->nts", a.astype(wide), b.astype(wide))

    if mixer.kind == "random":
        return mixer.table[...][:, :time, :time].astype(wide)
    if mixer.kind == "factorized":
        coarse, fine = heads(mixer.coarse), heads(mixer.fine)
        products = jnp.einsum("tna,tnb->ntab", coarse, fine)
        return products.reshape(*products.shape[:2], -1)[:, :, :time]
    rows = mixer.table[...][:time]
    if mixer.kind == "factorized_random":
        return compared(mixer.rows[...][:time], rows)
    dense = compared(jax.nn.relu(heads(mixer.hidden)), rows)
    if mixer.kind == "dense":
        return dense
    share = jax.nn.sigmoid(mixer.mixture[...].astype(wide))[:, None, None]
    dot_product = compared(heads(mixer.query), heads(mixer.key)) * mixer.head_dim**-0.5
    return share * dense + (1 - share) * dot_product


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    values = jnp.einsum("td,dnh->tnh", x, mixer.value.kernel[...]).astype(wide)
    scores = logits(mixer, x, wide)
    if mixer.is_causal:
        scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
    y = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, -1), values).astype(x.dtype)
    return jnp.einsum("tnh,nhd->td", y, mixer.out.kernel[...])


def reference(**options):
    return MixerReference(
        mix=mix,
        variants={"": {"max_length": 16, **options}},
        cost=lambda length: {"max_length": length},
    )


DENSE = reference(hidden_features=3)
FACTORIZED = reference()
RANDOM_TABLE = reference()
FACTORIZED_RANDOM = reference(hidden_features=3)
MIXTURE = reference(hidden_features=3)
