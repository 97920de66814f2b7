"""Recurrent memory (after Bulatov et al. 2022): attention within segments and to memory slots."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import over_examples
from effattn.naive.cells import gated_unit


def naive(mixer, x):
    """Segment by segment: tokens x `(T, D)`; the memory m is `(M, D)`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def heads(layer, tokens, rotate=False):
        y = jnp.einsum("td,dnh->tnh", tokens, layer.kernel[...])
        if rotate and mixer.rotary is not None:
            y = mixer.rotary(y[None], jnp.arange(len(y))[None])[0]
        return y.astype(wide)

    def attend(logits, value):
        weights = jax.nn.softmax(logits * mixer.head_dim**-0.5)
        y = jnp.einsum("nts,snh->tnh", weights, value).astype(x.dtype)
        return jnp.einsum("tnh,nhd->td", y, mixer.out.kernel[...])

    memory, outputs = mixer.memory[...].astype(x.dtype), []
    for start in range(0, len(x), mixer.segment_size):
        tokens = x[start : start + mixer.segment_size]
        query, key = (heads(layer, tokens, rotate=True) for layer in (mixer.query, mixer.key))
        value = heads(mixer.value, tokens)
        near = jnp.einsum("tnh,snh->nts", query, key)
        near = jnp.where(jnp.tri(len(tokens), dtype=bool), near, -jnp.inf)
        far = jnp.einsum("tnh,snh->nts", heads(mixer.query, tokens), heads(mixer.key, memory))
        values = jnp.concatenate([value, heads(mixer.value, memory)])
        outputs.append(attend(jnp.concatenate([near, far], -1), values))
        read = attend(jnp.einsum("tnh,snh->nts", heads(mixer.read, memory), key), value)
        memory = gated_unit(mixer.update, memory, read).astype(x.dtype)
    return jnp.concatenate(outputs)


registry.register(
    registry.Mechanism(
        name="recurrent_memory",
        family="hybrid",
        paper="Bulatov et al. 2022, Recurrent Memory Transformer",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        reasons={"bidirectional": "its memory comes from earlier segments"},
        builder="effattn.nn.recurrent_memory:RecurrentMemoryAttention",
        complexity="O(N S D)",
        time_exponent=1.0,
    )
)
