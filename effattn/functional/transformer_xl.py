"""Transformer-XL attention (Dai et al. 2019): segments, a memory of tokens, relative positions."""

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.naive import masked_softmax, over_examples


def naive(mixer, x, slots=None):
    """Over all pairs: tokens x `(T, D)`; the memory is the tokens before the query's segment.

    slots `(n, D)` are the compressed tokens of the Compressive Transformer.
    """
    wide, place = jnp.promote_types(x.dtype, jnp.float32), np.arange(len(x))
    start = place // mixer.segment_size * mixer.segment_size

    def heads(layer, tokens):
        return jnp.einsum("...d,dnh->...nh", tokens, layer.kernel[...]).astype(wide)

    in_memory = place < start[:, None]
    seen = (place <= place[:, None]) & (place >= start[:, None] - mixer.memory_size)
    steps = place[:, None] - place
    # Gradients of the memory stop at its tokens.
    remembered = jax.lax.stop_gradient(x) if mixer.stop_gradient else x

    def read(layer):
        """Keys or values `(T, S, N, H)` that each query reads."""
        near, far = (heads(layer, tokens)[None] for tokens in (x, remembered))
        return jnp.where(in_memory[..., None, None], far, near)

    key, value = read(mixer.key), read(mixer.value)
    if slots is not None:
        after = (start[:, None] - mixer.memory_size) // mixer.compression_rate
        after = after - np.arange(len(slots))
        seen = np.concatenate([seen, (after > 0) & (after <= mixer.num_slots)], 1)
        of_slots = (place - start)[:, None] + mixer.memory_size + after
        steps = np.concatenate([steps, of_slots], 1)
        more = [heads(layer, slots) for layer in (mixer.key, mixer.value)]
        more = [jnp.broadcast_to(x, (len(place), *x.shape)) for x in more]
        key, value = (jnp.concatenate(both, 1) for both in zip((key, value), more, strict=True))
    features = np.arange(len(mixer.distance.kernel[...]))
    angle = steps[..., None] / 10000 ** (features // 2 * 2 / len(features))
    wave = np.where(features % 2, np.cos(angle), np.sin(angle)).astype(x.dtype)
    query = heads(mixer.query, x)
    logits = jnp.einsum("tnh,tsnh->nts", query + mixer.content_bias[...], key)
    apart = heads(mixer.distance, wave)  # (T, S, N, H)
    logits = logits + jnp.einsum("tnh,tsnh->nts", query + mixer.position_bias[...], apart)
    logits = logits.astype(wide) / mixer.head_dim**0.5
    weights = jax.vmap(masked_softmax, (0, None))(logits, seen)
    out = jnp.einsum("nts,tsnh->tnh", weights, value).astype(x.dtype)
    return jnp.einsum("tnh,nhd->td", out, mixer.out.kernel[...])


registry.register(
    registry.Mechanism(
        name="transformer_xl",
        family="hybrid",
        paper="Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length "
        "Context",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        reasons={"bidirectional": "its memory holds tokens before the segment"},
        builder="effattn.nn.transformer_xl:TransformerXLAttention",
        complexity="O(N (L + M) D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
