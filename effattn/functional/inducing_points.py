"""Induced set attention (Lee et al. 2019): a bottleneck of learned vectors between all tokens."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import over_examples


def naive(mixer, x):
    """Tokens x `(T, D)`, learned vectors `(m, D)`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def attend(layers, tokens, keys):
        query, key, value = (
            jnp.einsum("td,dnh->tnh", x, layer.kernel[...])
            for x, layer in ((tokens, layers.query), (keys, layers.key), (keys, layers.value))
        )
        logits = jnp.einsum("tnh,snh->nts", query, key).astype(wide) / query.shape[-1] ** 0.5
        y = jnp.einsum("nts,snh->tnh", jax.nn.softmax(logits), value.astype(wide)).astype(x.dtype)
        return jnp.einsum("tnh,nhd->td", y, layers.out.kernel[...])

    def normalised(x, norm):
        x = x.astype(wide)
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon)
        return x * norm.scale[...] + norm.bias[...]

    induced = mixer.induced
    points = induced.points[...].astype(x.dtype)
    points = normalised(points + attend(induced, points, x), induced.norm)
    hidden = points @ induced.feed_forward.kernel[...] + induced.feed_forward.bias[...]
    points = normalised(points + jnp.maximum(hidden, 0), induced.last_norm)
    return attend(mixer, x, points.astype(x.dtype))


registry.register(
    registry.Mechanism(
        name="inducing_points",
        family="low rank",
        paper="Lee et al. 2019, Set Transformer: A Framework for Attention-based "
        "Permutation-Invariant Neural Networks",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "lengths"}),
        reasons={
            "causal": "its points attend to all tokens",
            "segments": "each document would need points of its own, and a row may have as many "
            "documents as tokens; pass one document a row, padded by the lengths",
        },
        builder="effattn.nn.inducing_points:InducedSelfAttention",
        complexity="O(N m D)",
        time_exponent=1.0,
    )
)
