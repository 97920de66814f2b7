"""Attention with a recurrent memory, a segment and a head after the other."""

import jax
import jax.numpy as jnp

from tests.references.recurrent_networks import gated
from tests.references.reference import MixerReference


def mix(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def heads(layer, tokens):
        return jnp.einsum("td,dnh->nth", tokens, layer.kernel[...])

    def attend(q, k, v, seen):
        logits = (q.astype(wide) @ jnp.swapaxes(k, 1, 2).astype(wide)) * mixer.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1).astype(x.dtype)
        return jnp.einsum("nth,nhd->td", weights @ v, mixer.out.kernel[...])

    memory, outputs = mixer.memory[...].astype(x.dtype), []
    for start in range(0, len(x), mixer.segment_size):
        part = x[start : start + mixer.segment_size]
        both = jnp.concatenate([part, memory])
        k, v = heads(mixer.key, both), heads(mixer.value, both)
        seen = jnp.concatenate(
            [jnp.tri(len(part), dtype=bool), jnp.ones((len(part), len(memory)), bool)], 1
        )
        outputs.append(attend(heads(mixer.query, part), k, v, seen))
        read = attend(
            heads(mixer.read, memory), k[:, : len(part)], v[:, : len(part)], jnp.array(True)
        )
        memory = gated(mixer.update, memory, read).astype(x.dtype)
    return jnp.concatenate(outputs)


RECURRENT_MEMORY = MixerReference(
    mix=mix,
    variants={
        "": {"segment_size": 5, "num_slots": 3},
        "short": {"segment_size": 2, "num_slots": 1},
    },
)
