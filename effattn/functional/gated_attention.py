"""Gated attention: softmax attention whose heads pass a sigmoid gate."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import masked_softmax, over_examples


def naive(mixer, x):
    """The equations of the paper: x `(T, D)`, n counts heads; the attention is softmax."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    layers = mixer.query, mixer.key, mixer.value, mixer.gate
    query, key, value, gate = (jnp.einsum("td,dnh->tnh", x, layer.kernel[...]) for layer in layers)
    key, value = (jnp.repeat(each, mixer.num_heads // each.shape[1], 1) for each in (key, value))
    place = jnp.arange(len(x))
    if mixer.rotary is not None:
        query, key = (mixer.rotary(each, place) for each in (query, key))
    allowed = jnp.logical_not(mixer.is_causal) | (place <= place[:, None])
    logits = jnp.einsum("tnh,snh->nts", query, key).astype(wide) / query.shape[-1] ** 0.5
    weights = jax.vmap(masked_softmax, (0, None))(logits, allowed)
    heads = jnp.einsum("nts,snh->tnh", weights, value).astype(x.dtype)
    return jnp.einsum("tnh,nhd->td", jax.nn.sigmoid(gate) * heads, mixer.out.kernel[...])


registry.register(
    registry.Mechanism(
        name="gated_attention",
        family="exact",
        paper="Qiu et al. 2025, Gated Attention for Large Language Models",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset(
            {"bidirectional", "causal", "lengths", "segments", "decode", "dropout"}
        ),
        builder="effattn.nn.gated_self_attention:GatedSelfAttention",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
