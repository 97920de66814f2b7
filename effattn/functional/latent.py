"""Multi-head latent attention: keys and values of all heads from one small latent per token."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import masked_softmax, over_examples


def naive(mixer, x):
    """The equations of the paper in float32 at least: x `(T, D)`, n counts heads."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    place = jnp.arange(len(x))

    def normalised(x, norm):
        x = x.astype(wide)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon) * norm.scale[...]

    def rotated(x):  # (T, n, R)
        return x if mixer.rotary is None else mixer.rotary(x, place)

    latent = normalised(x @ mixer.latent.kernel[...], mixer.latent_norm)
    shared = rotated((x @ mixer.rotary_key.kernel[...])[:, None])[:, 0]
    of_query = x
    if mixer.query_rank is not None:
        of_query = normalised(x @ mixer.query_latent.kernel[...], mixer.query_norm)
    query = jnp.einsum("tr,rnh->tnh", of_query, mixer.query.kernel[...])
    query, apart = jnp.split(query, [mixer.head_dim], -1)
    key = jnp.einsum("sr,rnh->snh", latent, mixer.key.kernel[...])
    value = jnp.einsum("sr,rnv->snv", latent, mixer.value.kernel[...])
    logits = jnp.einsum("tnh,snh->nts", query, key)
    logits = logits + jnp.einsum("tnr,sr->nts", rotated(apart), shared)
    allowed = jnp.logical_not(mixer.is_causal) | (place <= place[:, None])
    logits = logits / (mixer.head_dim + mixer.rotary_dim) ** 0.5
    weights = jax.vmap(masked_softmax, (0, None))(logits.astype(wide), allowed)
    out = jnp.einsum("nts,snv->tnv", weights, value).astype(x.dtype)
    return jnp.einsum("tnv,nvd->td", out, mixer.out.kernel[...])


registry.register(
    registry.Mechanism(
        name="latent",
        family="exact",
        paper="DeepSeek-AI 2024, DeepSeek-V2: A Strong, Economical, and Efficient "
        "Mixture-of-Experts Language Model",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.latent:LatentAttention",
        complexity="O(N^2 H), O(N r) a step and head",
        time_exponent=2.0,
    )
)
