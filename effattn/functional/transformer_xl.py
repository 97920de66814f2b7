"""Transformer-XL attention (Dai et al. 2019): segments, a memory of tokens, relative positions."""

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.naive import masked_softmax, over_examples


def naive(mixer, x):
    """Over all pairs: tokens x `(T, D)`; the memory is the tokens before the query's segment."""
    wide, place = jnp.promote_types(x.dtype, jnp.float32), np.arange(len(x))
    start = place // mixer.segment_size * mixer.segment_size

    def heads(layer, tokens):
        return jnp.einsum("...d,dnh->...nh", tokens, layer.kernel[...]).astype(wide)

    in_memory = place < start[:, None]
    seen = (place <= place[:, None]) & (place >= start[:, None] - mixer.memory_size)
    features = np.arange(len(mixer.distance.kernel[...]))
    angle = (place[:, None] - place)[..., None] / 10000 ** (features // 2 * 2 / len(features))
    wave = np.where(features % 2, np.cos(angle), np.sin(angle)).astype(x.dtype)
    apart = heads(mixer.distance, wave)  # (T, S, N, H)
    query = heads(mixer.query, x)
    by_distance = jnp.einsum("tnh,tsnh->nts", query + mixer.position_bias[...], apart)

    def of_pairs(form, other, layer):
        """Products with the keys or values; gradients of the memory stop at its tokens."""
        remembered = jax.lax.stop_gradient(x) if mixer.stop_gradient else x
        near, far = (heads(layer, tokens)[None] for tokens in (x, remembered))
        return jnp.einsum(form, other, jnp.where(in_memory[..., None, None], far, near))

    logits = of_pairs("tnh,tsnh->nts", query + mixer.content_bias[...], mixer.key) + by_distance
    logits = logits.astype(wide) / mixer.head_dim**0.5
    weights = jax.vmap(masked_softmax, (0, None))(logits, seen)
    out = of_pairs("nts,tsnh->tnh", weights, mixer.value).astype(x.dtype)
    return jnp.einsum("tnh,nhd->td", out, mixer.out.kernel[...])


registry.register(
    registry.Mechanism(
        name="transformer_xl",
        family="hybrid",
        paper="Dai et al. 2019, Transformer-XL",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        reasons={"bidirectional": "its memory holds tokens before the segment"},
        builder="effattn.nn.transformer_xl:TransformerXLAttention",
        complexity="O(N (S + M) D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
